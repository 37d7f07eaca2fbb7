//! Samples from llama.cpp and from endpoints: the same policy, in the same fleet.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use e2e::{
    Files, Fleet, Member, Output, Process, Sampling, flotilla, llama_cpp, llama_generator, until,
};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(240);

/// Paths from the workspace's root: tests run in their own directory.
fn from_root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn golden(path: &str) -> Option<String> {
    let path = from_root("../shared/data/golden").join(path);
    if !path.exists() {
        println!("skipped: no {}", path.display());
    }
    path.exists().then(|| path.canonicalize().unwrap().display().to_string())
}

/// `flotilla generate`, in a home of its own.
fn generate(home: &Path, arguments: &[&str]) -> Output {
    let home = ("HOME".to_owned(), home.display().to_string());
    flotilla(&[&["generate", "--json"], arguments].concat(), [home])
}

fn made(home: &Path, arguments: &[&str]) -> Value {
    let output = generate(home, arguments);
    assert_eq!(output.code, 0, "{arguments:?}: {}", output.stderr);
    serde_json::from_str(&output.stdout).unwrap()
}

const GREEDY: [&str; 6] = ["--temperature", "0", "--max-new-tokens", "32", "--n", "2"];

const PROMPTS: [&str; 3] = ["The file is", "def main(", "Copyright (C) <|im_end|> 2"];

#[test]
fn llama_cpp_and_candle_generate_the_same_greedily() {
    let Some(directory) = llama_cpp() else { return };
    let home = tempfile::tempdir().unwrap();
    let mut told = false;
    for (model, adapter) in [
        ("hf/qwen2-tiny", None),
        ("hf/qwen2-tiny", Some("peft/qwen2-r8-qv")),
        ("hf/llama-tiny", Some("peft/llama-r8-qv")),
    ] {
        let Some(model) = golden(model) else { return };
        let adapter = adapter.and_then(golden);
        let adapter: Vec<&str> = adapter.iter().flat_map(|path| ["--adapter", path]).collect();
        for prompt in PROMPTS {
            let policy = [&["--model", &model, "--prompt", prompt], &adapter[..], &GREEDY].concat();
            let ours = made(home.path(), &policy);
            let llama = ["--engine", "llama.cpp", "--llama-cpp", &directory, "--dtype", "f32"];
            let theirs = made(home.path(), &[&policy[..], &llama, &["--threads", "2"]].concat());
            told |= assert_same(&ours["samples"], &theirs["samples"]);
            assert_eq!(ours["engine"], "candle-0.11.1");
            assert!(theirs["engine"].as_str().unwrap().starts_with("llama.cpp "), "{theirs:#}");
        }
    }
    assert!(told, "llama.cpp says how likely its samples are");
}

#[test]
fn a_seed_repeats_its_sample_and_what_cannot_be_drawn_is_refused() {
    let (Some(directory), Some(model)) = (llama_cpp(), golden("hf/qwen2-tiny")) else { return };
    let home = tempfile::tempdir().unwrap();
    let llama = ["--engine", "llama.cpp", "--llama-cpp", &directory, "--threads", "2"];
    let sampled = |more: &[&str]| {
        made(home.path(), &[&llama[..], &["--model", &model, "--prompt", "The"], more].concat())
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
    refused(&long).refuses(&["2048 positions"]);
    refused("").refuses(&["no tokens"]);
}

/// The same texts, and as likely where both tell; the answer is whether any does.
fn assert_same(ours: &Value, theirs: &Value) -> bool {
    let texts = |samples: &Value| {
        let mut samples = samples.as_array().unwrap().clone();
        samples
            .iter_mut()
            .for_each(|sample| drop(sample.as_object_mut().unwrap().remove("logprob")));
        samples
    };
    assert_eq!(texts(ours), texts(theirs));
    for (ours, theirs) in ours.as_array().unwrap().iter().zip(theirs.as_array().unwrap()) {
        let Some(theirs) = theirs["logprob"].as_f64() else { continue };
        let ours = ours["logprob"].as_f64().expect("candle tells each");
        assert!((ours - theirs).abs() < 0.01, "{ours} {theirs}");
    }
    theirs.as_array().unwrap().iter().any(|sample| sample["logprob"].is_number())
}

/// A `llama-server` that somebody else runs, with an open port.
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

/// The one model that was converted for `flotilla generate`.
fn converted(home: &Path) -> PathBuf {
    let found = std::fs::read_dir(home.join(".cache/flotilla/gguf")).unwrap().flatten();
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "gguf");
    found.map(|entry| entry.path()).find(is_gguf).unwrap()
}

#[test]
fn an_endpoint_generates_the_same_and_says_that_nobody_can_check_it() {
    let (Some(directory), Some(model)) = (llama_cpp(), golden("hf/qwen2-tiny")) else { return };
    let home = tempfile::tempdir().unwrap();
    let policy = [&["--model", &model, "--prompt", PROMPTS[0]], &GREEDY[..]].concat();
    let llama = ["--engine", "llama.cpp", "--llama-cpp", &directory, "--dtype", "f32"];
    let ours = made(home.path(), &[&policy[..], &llama, &["--threads", "2"]].concat());
    let endpoint = Endpoint::start(&directory, &converted(home.path()));
    let url = endpoint.url.clone();
    let by_endpoint = [&policy[..], &["--engine", &url]].concat();
    let theirs = until("the endpoint answers", LIMIT, || {
        let output = generate(home.path(), &by_endpoint);
        (output.code == 0).then(|| serde_json::from_str::<Value>(&output.stdout).unwrap())
    });
    assert!(
        !assert_same(&ours["samples"], &theirs["samples"]),
        "an endpoint's are of who knows what"
    );
    assert!(theirs["caveat"].as_str().unwrap().contains("cannot be verified"), "{theirs:#}");
    assert!(theirs["engine"].as_str().unwrap().starts_with("openai "), "{theirs:#}");

    let Some(adapter) = golden("peft/qwen2-r8-qv") else { return };
    let refused = |more: &[&str]| generate(home.path(), &[&by_endpoint[..], more].concat());
    refused(&["--adapter", &adapter]).refuses(&["serves its own weights and no adapters"]);
    refused(&["--endpoint-model", "other"]).refuses(&["it does not serve \"other\""]);
    drop(endpoint);
    let gone = refused(&[]);
    assert!(gone.code == 1 && gone.stderr.contains("does not answer"), "{gone:?}");
}

#[test]
fn a_llama_cpp_that_fails_or_hangs_is_told_with_its_last_words() {
    let Some(model) = golden("hf/qwen2-tiny") else { return };
    let home = tempfile::tempdir().unwrap();
    let fakes = home.path().join("bin");
    std::fs::create_dir_all(&fakes).unwrap();
    let script = |name: &str, server: &str| {
        let path = fakes.join(name);
        let answers = "--version) echo 'version: 0 (fake)'; exit 0 ;; --help) exit 0 ;;";
        std::fs::write(&path, format!("#!/bin/sh\ncase $1 in {answers} esac\n{server}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    script("llama-perplexity", "exit 1");
    let fakes = fakes.display().to_string();
    let ask = || {
        let llama = ["--engine", "llama.cpp", "--llama-cpp", &fakes, "--model", &model];
        generate(home.path(), &[&llama, &["--prompt", "a"][..]].concat())
    };
    script("llama-server", "echo 'unable to load model' >&2; exit 1");
    ask().refuses(&["exit status: 1", "unable to load model"]);
    script("llama-server", "kill -9 $$");
    ask().refuses(&["SIGKILL", "before it was ready"]);
}

fn ready(fleet: &Fleet, name: &str) -> Value {
    until("the agent is ready", Duration::from_secs(60), || {
        let agents = fleet.json(&["agents", "list"]).ok()?;
        let found = |agent: &&Value| agent["agent"] == name && agent["state"] == "READY";
        agents.as_array()?.iter().find(found).cloned()
    })
}

/// The servers among a process's descendants.
fn servers(member: &Member) -> Vec<Process> {
    let is_server =
        |one: &Process| one.arguments.iter().any(|argument| argument.contains("--api-key-file"));
    member.processes().into_iter().filter(is_server).collect()
}

#[test]
fn two_engines_share_a_run_and_a_server_that_is_killed_costs_nothing() {
    let Some(directory) = llama_cpp() else { return };
    // One at a time, so that there is something left for the other.
    let slow = ("FLOTILLA_SLOTS".to_owned(), "1".to_owned());
    let fleet = Fleet::up_with("trainer,generator,verifier,evaluator", &["--open"], [slow]);
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(20, 0));
    fleet.finish(&base, LIMIT);
    let llama = llama_generator(&fleet, &directory, "llama");
    let engines = &ready(&fleet, "llama")["engines"];
    assert!(engines[0].as_str().unwrap().starts_with("generator: llama.cpp "), "{engines}");

    let sampling = Sampling { prompts: 128, per_prompt: 8, max_new_tokens: 96, cycles: 2 };
    let spec = files.raft(&base, sampling);
    let text = std::fs::read_to_string(&spec).unwrap();
    std::fs::write(&spec, format!("{text}  entropy: true\n")).unwrap();
    let run = fleet.submit(&spec);
    let mut killed = 0;
    let ended = until("the run ends", LIMIT, || {
        if killed < 2
            && let Some(server) = servers(&llama).first()
            && fleet.samples(&run).is_some_and(|(accepted, _)| accepted > 60 * killed)
        {
            // It may have ended by itself.
            killed += u64::from(kill_process(server.pid().unwrap(), Signal::KILL).is_ok());
        }
        fleet.outcome(&run)
    });
    assert_eq!(ended["state"], "SUCCEEDED", "{ended:#}\n{}", fleet.logs());
    assert!(killed > 0, "no server was there to be killed");
    let audit = fleet.audit_clean(&run);
    assert_eq!(audit["caveats"], serde_json::json!([]));
    let facts = fleet.facts(&run);
    let tells = |engine: &str, purpose: &str| -> Vec<bool> {
        let of = |fact: &&Value| {
            let fact = &fact["fact"];
            fact["purpose"] == purpose
                && fact["engine"].as_str().is_some_and(|name| name.starts_with(engine))
        };
        let all = facts.iter().filter(of).filter_map(|fact| fact["fact"]["samples"].as_array());
        all.flatten().map(|sample| sample["logprob"].is_number()).collect()
    };
    let candle = tells("candle", "TRAIN");
    assert!(candle.iter().all(|told| *told), "candle tells each");
    let (asked, unasked) = (tells("llama.cpp", "TRAIN"), tells("llama.cpp", "HELDOUT"));
    let told = asked.iter().filter(|told| **told).count();
    assert!(told > 0, "llama.cpp tells where it is asked, but not of {} samples", asked.len());
    assert!(!unasked.contains(&true), "it takes time that nobody asked it to take");
    let engines: std::collections::BTreeSet<String> = facts
        .iter()
        .filter(|fact| fact["subject"].as_str().unwrap().contains(".samples."))
        .map(|fact| {
            let engine = fact["fact"]["engine"].as_str().unwrap();
            engine.split([' ', '-']).next().unwrap().to_owned()
        })
        .collect();
    assert_eq!(engines, ["candle", "llama.cpp"].map(String::from).into());
    let left = llama.processes();
    drop(llama);
    until("no server is left", Duration::from_secs(10), || {
        left.iter().all(|one| !one.is_alive()).then_some(())
    });
}

#[test]
fn an_endpoint_leaves_runs_that_do_not_accept_it_to_others() {
    let (Some(directory), Some(model)) = (llama_cpp(), golden("hf/qwen2-tiny")) else { return };
    let home = tempfile::tempdir().unwrap();
    let llama = ["--engine", "llama.cpp", "--llama-cpp", &directory, "--threads", "2"];
    made(home.path(), &[&llama[..], &["--model", &model, "--prompt", "a", "--n", "1"]].concat());
    let endpoint = Endpoint::start(&directory, &converted(home.path()));
    let fleet = Fleet::open("trainer,generator,verifier,evaluator");
    let agent_dir = fleet.path().join("agents/foreign").display().to_string();
    let nats = fleet.nats();
    let arguments = ["agent", "--nats", &nats, "--roles", "generator", "--name", "foreign"];
    let engine = ["--agent-dir", &agent_dir, "--generator-engine", &endpoint.url];
    let arguments = [&arguments[..], &engine].concat();
    let _foreign = Member::start("foreign", &[], &arguments, [], &fleet.path().join("agents"));
    let agent = ready(&fleet, "foreign");
    assert!(agent["engines"][0].as_str().unwrap().contains("policy unverified"), "{agent:#}");

    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(5, 0));
    fleet.finish(&base, LIMIT);
    let sampling = Sampling { prompts: 24, per_prompt: 4, max_new_tokens: 24, cycles: 1 };
    let run = fleet.submit(&files.raft(&base, sampling));
    fleet.finish(&run, LIMIT);
    let audit = fleet.audit_clean(&run);
    assert_eq!(audit["caveats"], serde_json::json!([]), "none of its samples count");

    assert_eq!(fleet.run(&["agents", "drain", "generator-1"]).code, 0);
    let spec = files.raft(&base, sampling);
    let text = std::fs::read_to_string(&spec).unwrap();
    std::fs::write(&spec, format!("{text}  accept_unverified_policy: true\n")).unwrap();
    let run = fleet.submit(&spec);
    let said = until("it samples, and says so", LIMIT, || {
        let audit = fleet.json(&["audit", &run, "--no-store"]).ok()?;
        audit["caveats"].as_array().is_some_and(|all| !all.is_empty()).then_some(audit)
    });
    assert_eq!(said["findings"], serde_json::json!([]));
    let caveat = said["caveats"][0].as_str().unwrap_or_default();
    assert!(caveat.contains("foreign") && caveat.contains("cannot be verified"), "{said:#}");
}
