//! Samples from llama.cpp and from endpoints, compared with those of candle.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use e2e::{
    Fleet, Member, Output, Process, Sampling, SpecFiles, find_llama_cpp, run_flotilla,
    start_llama_generator, wait_until, write_script,
};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(240);

fn golden_model(name: &str) -> String {
    golden::small_set().model_path(name).display().to_string()
}

fn golden_adapter(name: &str) -> String {
    golden::small_set().adapter_path(name).display().to_string()
}

/// Runs `flotilla generate` with its own home directory.
fn generate(home: &Path, arguments: &[&str]) -> Output {
    let home = ("HOME".to_owned(), home.display().to_string());
    run_flotilla(&[&["generate", "--json"], arguments].concat(), [home])
}

fn generate_json(home: &Path, arguments: &[&str]) -> Value {
    let output = generate(home, arguments);
    assert_eq!(output.code, 0, "{arguments:?}: {}", output.stderr);
    serde_json::from_str(&output.stdout).unwrap()
}

const GREEDY: [&str; 6] = ["--temperature", "0", "--max-new-tokens", "32", "--n", "2"];

const PROMPTS: [&str; 3] = ["The file is", "def main(", "Copyright (C) <|im_end|> 2"];

#[test]
fn llama_cpp_and_candle_generate_the_same_greedily() {
    let Some(directory) = find_llama_cpp() else { return };
    let home = tempfile::tempdir().unwrap();
    let mut has_logprobs = false;
    for (model, adapter) in [
        ("qwen2-tiny", None),
        ("qwen2-tiny", Some("qwen2-r8-qv")),
        ("qwen3-tiny", Some("qwen3-r4-all")),
        ("llama-tiny", Some("llama-r8-qv")),
    ] {
        let model = golden_model(model);
        let adapter = adapter.map(golden_adapter);
        let adapter: Vec<&str> = adapter.iter().flat_map(|path| ["--adapter", path]).collect();
        for prompt in PROMPTS {
            let policy = [&["--model", &model, "--prompt", prompt], &adapter[..], &GREEDY].concat();
            let candle_output = generate_json(home.path(), &policy);
            let llama = ["--engine", "llama.cpp", "--llama-cpp", &directory, "--dtype", "f32"];
            let other_output =
                generate_json(home.path(), &[&policy[..], &llama, &["--threads", "2"]].concat());
            has_logprobs |=
                assert_same_samples(&candle_output["samples"], &other_output["samples"]);
            assert_eq!(candle_output["engine"], "candle-0.11.1");
            assert!(
                other_output["engine"].as_str().unwrap().starts_with("llama.cpp "),
                "{other_output:#}"
            );
        }
    }
    assert!(has_logprobs, "llama.cpp says how likely its samples are");
}

#[test]
fn a_seed_repeats_its_sample_and_invalid_prompts_are_refused() {
    let Some(directory) = find_llama_cpp() else { return };
    let model = golden_model("qwen2-tiny");
    let home = tempfile::tempdir().unwrap();
    let llama = ["--engine", "llama.cpp", "--llama-cpp", &directory, "--threads", "2"];
    let sampled = |more: &[&str]| {
        generate_json(
            home.path(),
            &[&llama[..], &["--model", &model, "--prompt", "The"], more].concat(),
        )
    };
    let options = ["--temperature", "1.0", "--top-k", "50", "--top-p", "0.95"];
    let short = ["--max-new-tokens", "16", "--n", "1", "--seed", "7"];
    let once = sampled(&[options, short].concat());
    assert_eq!(once["samples"], sampled(&[options, short].concat())["samples"]);
    let four = sampled(&[&options[..], &["--max-new-tokens", "16", "--n", "4"]].concat());
    let texts: std::collections::BTreeSet<&str> =
        (0..4).filter_map(|n| four["samples"][n]["text"].as_str()).collect();
    assert!(texts.len() > 1, "each sample has a seed of its own: {four:#}");

    let long = "word ".repeat(4000);
    let refused = |prompt: &str| {
        generate(home.path(), &[&llama, &["--model", &model, "--prompt", prompt][..]].concat())
    };
    refused(&long).assert_refused(&["2048 positions"]);
    refused("").assert_refused(&["no tokens"]);
}

/// Checks that texts, and log-probabilities where both exist, are equal. Returns true if there are
/// any log-probabilities.
fn assert_same_samples(candle_output: &Value, other_output: &Value) -> bool {
    let texts = |samples: &Value| {
        let mut samples = samples.as_array().unwrap().clone();
        samples
            .iter_mut()
            .for_each(|sample| drop(sample.as_object_mut().unwrap().remove("logprob")));
        samples
    };
    assert_eq!(texts(candle_output), texts(other_output));
    for (candle_output, other_output) in
        candle_output.as_array().unwrap().iter().zip(other_output.as_array().unwrap())
    {
        let Some(other_output) = other_output["logprob"].as_f64() else { continue };
        let candle_output = candle_output["logprob"].as_f64().expect("candle reports each");
        assert!((candle_output - other_output).abs() < 0.01, "{candle_output} {other_output}");
    }
    other_output.as_array().unwrap().iter().any(|sample| sample["logprob"].is_number())
}

/// A `llama-server` that is not started by Flotilla.
struct Endpoint {
    child: Child,
    url: String,
}

impl Endpoint {
    fn start(directory: &str, model: &Path) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = Command::new(Path::new(directory).join("llama-server"))
            .args(["--host", "127.0.0.1", "--port", &port.to_string(), "-t", "2", "-np", "4"])
            .args(["-c", "2048", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-m"])
            .arg(model)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, url: format!("http://127.0.0.1:{port}/v1") }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the GGUF file that `flotilla generate` wrote.
fn converted_model(home: &Path) -> PathBuf {
    let found = std::fs::read_dir(home.join(".cache/flotilla/gguf")).unwrap().flatten();
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "gguf");
    found.map(|entry| entry.path()).find(is_gguf).unwrap()
}

#[test]
fn an_endpoint_generates_the_same_and_warns_that_it_cannot_be_verified() {
    let Some(directory) = find_llama_cpp() else { return };
    let model = golden_model("qwen2-tiny");
    let home = tempfile::tempdir().unwrap();
    let policy = [&["--model", &model, "--prompt", PROMPTS[0]], &GREEDY[..]].concat();
    let llama = ["--engine", "llama.cpp", "--llama-cpp", &directory, "--dtype", "f32"];
    let candle_output =
        generate_json(home.path(), &[&policy[..], &llama, &["--threads", "2"]].concat());
    let endpoint = Endpoint::start(&directory, &converted_model(home.path()));
    let url = endpoint.url.clone();
    let by_endpoint = [&policy[..], &["--engine", &url]].concat();
    let other_output = wait_until("the endpoint answers", LIMIT, || {
        let output = generate(home.path(), &by_endpoint);
        (output.code == 0).then(|| serde_json::from_str::<Value>(&output.stdout).unwrap())
    });
    assert!(
        !assert_same_samples(&candle_output["samples"], &other_output["samples"]),
        "an endpoint's are of who knows what"
    );
    assert!(
        other_output["caveat"].as_str().unwrap().contains("cannot be verified"),
        "{other_output:#}"
    );
    assert!(other_output["engine"].as_str().unwrap().starts_with("openai "), "{other_output:#}");

    let adapter = golden_adapter("qwen2-r8-qv");
    let refused = |more: &[&str]| generate(home.path(), &[&by_endpoint[..], more].concat());
    refused(&["--adapter", &adapter]).assert_refused(&["serves its own weights and no adapters"]);
    refused(&["--endpoint-model", "other"]).assert_refused(&["it does not serve \"other\""]);
    drop(endpoint);
    let stopped = refused(&[]);
    assert!(stopped.code == 1 && stopped.stderr.contains("does not answer"), "{stopped:?}");
}

#[test]
fn a_failing_llama_cpp_is_reported_with_its_last_output() {
    let model = golden_model("qwen2-tiny");
    let home = tempfile::tempdir().unwrap();
    let fakes = home.path().join("bin");
    std::fs::create_dir_all(&fakes).unwrap();
    let script = |name: &str, server: &str| {
        let answers = "--version) echo 'version: 0 (fake)'; exit 0 ;; --help) exit 0 ;;";
        write_script(&fakes.join(name), &format!("case $1 in {answers} esac\n{server}"));
    };
    script("llama-perplexity", "exit 1");
    let fakes = fakes.display().to_string();
    let run_generate = || {
        let llama = ["--engine", "llama.cpp", "--llama-cpp", &fakes, "--model", &model];
        generate(home.path(), &[&llama, &["--prompt", "a"][..]].concat())
    };
    script("llama-server", "echo 'unable to load model' >&2; exit 1");
    run_generate().assert_refused(&["exit status: 1", "unable to load model"]);
    script("llama-server", "kill -9 $$");
    run_generate().assert_refused(&["SIGKILL", "before it was ready"]);
}

fn await_ready(fleet: &Fleet, name: &str) -> Value {
    wait_until("the agent is ready", Duration::from_secs(60), || {
        let agents = fleet.run_json(&["agents", "list"]).ok()?;
        let found = |agent: &&Value| agent["agent"] == name && agent["state"] == "READY";
        agents.as_array()?.iter().find(found).cloned()
    })
}

/// Returns the `llama-server` processes of an agent.
fn server_processes(member: &Member) -> Vec<Process> {
    let is_server =
        |one: &Process| one.arguments.iter().any(|argument| argument.contains("--api-key-file"));
    member.processes().into_iter().filter(is_server).collect()
}

#[test]
fn two_engines_share_a_run_and_a_killed_server_changes_no_result() {
    let Some(directory) = find_llama_cpp() else { return };
    // One sample at a time, so that the other generator gets jobs too.
    let slow = ("FLOTILLA_SLOTS".to_owned(), "1".to_owned());
    let fleet = Fleet::start_with("trainer,generator,verifier,evaluator", &["--open"], [slow]);
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 0));
    fleet.await_success(&base, LIMIT);
    let llama = start_llama_generator(&fleet, &directory, "llama");
    let engines = &await_ready(&fleet, "llama")["engines"];
    assert!(engines[0].as_str().unwrap().starts_with("generator: llama.cpp "), "{engines}");

    let sampling = Sampling { prompts: 128, per_prompt: 8, max_new_tokens: 96, cycles: 2 };
    let spec = files.write_raft_spec(&base, sampling);
    let text = std::fs::read_to_string(&spec).unwrap();
    std::fs::write(&spec, format!("{text}  entropy: true\n")).unwrap();
    let run = fleet.submit(&spec);
    let mut killed = 0;
    let ended = wait_until("the run ends", LIMIT, || {
        if killed < 2
            && let Some(server) = server_processes(&llama).first()
            && fleet.sample_counts(&run).is_some_and(|(accepted, _)| accepted > 60 * killed)
        {
            // It may have ended already.
            killed += u64::from(kill_process(server.pid().unwrap(), Signal::KILL).is_ok());
        }
        fleet.ended_run(&run)
    });
    assert_eq!(ended["state"], "SUCCEEDED", "{ended:#}\n{}", fleet.log_tails());
    assert!(killed > 0, "no server was there to be killed");
    let audit = fleet.assert_clean_audit(&run);
    assert_eq!(audit["caveats"], serde_json::json!([]));
    let facts = fleet.read_facts(&run);
    let has_logprobs = |engine: &str, purpose: &str| -> Vec<bool> {
        let of = |fact: &&Value| {
            let fact = &fact["fact"];
            fact["purpose"] == purpose
                && fact["engine"].as_str().is_some_and(|name| name.starts_with(engine))
        };
        let all = facts.iter().filter(of).filter_map(|fact| fact["fact"]["samples"].as_array());
        all.flatten().map(|sample| sample["logprob"].is_number()).collect()
    };
    let candle = has_logprobs("candle", "TRAIN");
    assert!(candle.iter().all(|reported| *reported), "candle tells each");
    let (train, heldout) =
        (has_logprobs("llama.cpp", "TRAIN"), has_logprobs("llama.cpp", "HELDOUT"));
    let reported = train.iter().filter(|reported| **reported).count();
    assert!(reported > 0, "llama.cpp tells where it is asked, but not of {} samples", train.len());
    assert!(!heldout.contains(&true), "it takes time that nobody asked it to take");
    let engines: std::collections::BTreeSet<String> = facts
        .iter()
        .filter(|fact| fact["subject"].as_str().unwrap().contains(".samples."))
        .map(|fact| {
            let engine = fact["fact"]["engine"].as_str().unwrap();
            engine.split([' ', '-']).next().unwrap().to_owned()
        })
        .collect();
    assert_eq!(engines, ["candle", "llama.cpp"].map(String::from).into());
    let processes = llama.processes();
    drop(llama);
    wait_until("no server remains", Duration::from_secs(10), || {
        processes.iter().all(|one| !one.is_alive()).then_some(())
    });
}

#[test]
fn an_endpoint_only_works_for_runs_that_accept_it() {
    let Some(directory) = find_llama_cpp() else { return };
    let model = golden_model("qwen2-tiny");
    let home = tempfile::tempdir().unwrap();
    let llama = ["--engine", "llama.cpp", "--llama-cpp", &directory, "--threads", "2"];
    generate_json(
        home.path(),
        &[&llama[..], &["--model", &model, "--prompt", "a", "--n", "1"]].concat(),
    );
    let endpoint = Endpoint::start(&directory, &converted_model(home.path()));
    let fleet = Fleet::start_open("trainer,generator,verifier,evaluator");
    let agent_dir = fleet.path().join("agents/foreign").display().to_string();
    let nats = fleet.nats_url();
    let arguments = ["agent", "--nats", &nats, "--roles", "generator", "--name", "foreign"];
    let engine = ["--agent-dir", &agent_dir, "--generator-engine", &endpoint.url];
    let arguments = [&arguments[..], &engine].concat();
    let _foreign = Member::start("foreign", &[], &arguments, [], &fleet.path().join("agents"));
    let agent = await_ready(&fleet, "foreign");
    assert!(agent["engines"][0].as_str().unwrap().contains("policy unverified"), "{agent:#}");

    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(5, 0));
    fleet.await_success(&base, LIMIT);
    let sampling = Sampling { prompts: 24, per_prompt: 4, max_new_tokens: 24, cycles: 1 };
    let run = fleet.submit(&files.write_raft_spec(&base, sampling));
    fleet.await_success(&run, LIMIT);
    let audit = fleet.assert_clean_audit(&run);
    assert_eq!(audit["caveats"], serde_json::json!([]), "none of its samples count");

    assert_eq!(fleet.run(&["agents", "drain", "generator-1"]).code, 0);
    let spec = files.write_raft_spec(&base, sampling);
    let text = std::fs::read_to_string(&spec).unwrap();
    std::fs::write(&spec, format!("{text}  accept_unverified_policy: true\n")).unwrap();
    let run = fleet.submit(&spec);
    let audit = wait_until("it samples, with a caveat", LIMIT, || {
        let audit = fleet.run_json(&["audit", &run, "--no-store"]).ok()?;
        audit["caveats"].as_array().is_some_and(|all| !all.is_empty()).then_some(audit)
    });
    assert_eq!(audit["findings"], serde_json::json!([]));
    let caveat = audit["caveats"][0].as_str().unwrap_or_default();
    assert!(caveat.contains("foreign") && caveat.contains("cannot be verified"), "{audit:#}");
}
