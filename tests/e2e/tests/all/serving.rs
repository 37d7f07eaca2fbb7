//! Channels: models that agents serve, asked with OpenAI's own client.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use e2e::{
    Fleet, Member, Process, PythonEnv, SpecFiles, find_llama_cpp, program_path, wait_until,
    write_script,
};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

/// A chat template that no engine would use without being told.
const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<' + message['role'] + '>' \
                             + message['content'] + '\\n' }}{% endfor %}\
                             {% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}";

/// Returns the environment of agents that serve with llama.cpp of a directory.
pub(crate) fn with_llama_cpp(directory: String) -> Vec<(String, String)> {
    vec![("FLOTILLA_LLAMA_CPP".to_owned(), directory)]
}

/// Returns the environment of agents that serve as if there were no llama.cpp.
pub(crate) fn without_llama_cpp() -> Vec<(String, String)> {
    vec![("FLOTILLA_SERVER_ENGINE".to_owned(), "candle".to_owned())]
}

/// A fleet with two agents that serve models, and a trained run with checkpoints at steps 10 and 20.
pub(crate) struct ServingFleet {
    pub fleet: Fleet,
    pub run: String,
    /// The beginning of the URLs of OpenAI's API.
    pub url: String,
}

impl ServingFleet {
    pub(crate) fn start(environment: Vec<(String, String)>) -> Self {
        let fleet = Fleet::start_with("server=2,trainer,evaluator", &["--open"], environment);
        let files = SpecFiles::create(fleet.path());
        let run = fleet.submit(&write_chat_spec(&files));
        fleet.await_success(&run, LIMIT);
        let gateway = fleet.read_fleet_file()["gateway"].as_str().expect("an address").to_owned();
        Self { fleet, run, url: format!("http://{gateway}/v1") }
    }

    /// Asks in a conversation, and for a completion of the same text, as the model's template
    /// writes it.
    fn assert_conversations_use_the_template(&self, python: &PythonEnv) {
        let prompt = "<user>12+1=\n<assistant>";
        let asked = [&*self.url, "stable", "12+1=", prompt];
        let printed = python.run_script("ask_chat.py", &asked);
        let found: Value = serde_json::from_str(&printed).expect("JSON");
        let (conversation, completion) = (&found["conversation"], &found["completion"]);
        assert_eq!(conversation, completion, "{found}");
        assert_eq!(completion["streamed"], completion["text"], "{found}");
        // One token per byte.
        assert_eq!(completion["prompt_tokens"], prompt.len(), "{found}");
    }

    /// Points a channel to the checkpoint of a step, and returns without waiting.
    pub(crate) fn serve(&self, channel: &str, step: u32) {
        let checkpoint = format!("{}/0/{step}", self.run);
        self.fleet.run(&["serve", channel, "--checkpoint", &checkpoint]).assert_success();
    }

    /// Waits until so many agents serve the channel's newest model.
    pub(crate) fn await_serving(&self, channel: &str, agents: usize) {
        wait_until("agents serve the channel", LIMIT, || {
            let listed = self.fleet.run_json(&["channel", "list"]).ok()?;
            let found = listed.as_array()?.iter().find(|it| it["channel"] == channel)?.clone();
            let count = found["agents"].as_array().map_or(0, Vec::len);
            (count == agents).then_some(())
        });
    }
}

#[test]
fn openai_s_client_misses_no_answer_while_models_are_moved_and_servers_killed() {
    let (Some(python), Some(llama)) = (PythonEnv::with_client_packages(), find_llama_cpp()) else {
        return;
    };
    let serving = ServingFleet::start(with_llama_cpp(llama));
    serving.serve("stable", 10);
    serving.await_serving("stable", 2);
    let requests = std::env::var("FLOTILLA_SERVING_REQUESTS").unwrap_or_else(|_| "400".into());
    let mut asking = python
        .script_command("ask_models.py")
        .args([&serving.url, "stable", &requests, "6"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("Python starts");
    let mut round = 0;
    while asking.try_wait().expect("it can be asked").is_none() {
        round += 1;
        serving.serve("stable", if round % 2 == 0 { 20 } else { 10 });
        serving.await_serving("stable", 2);
        let killed = format!("server-{}", 1 + round % 2);
        serving.fleet.kill(&killed);
        serving.await_serving("stable", 2);
    }
    let output = asking.wait_with_output().expect("it ends");
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    eprintln!("{found}");
    let none: [&str; 0] = [];
    assert_eq!(found["early"], serde_json::json!(none), "{found}");
    let (ok, late) = (found["ok"].as_u64().unwrap(), found["late"].as_array().unwrap().len());
    // A kill breaks the streams of one agent: at most one of each thread.
    assert!(round >= 3, "{round} rounds");
    assert!(late <= 6 * round && ok + late as u64 == requests.parse::<u64>().unwrap(), "{found}");
    serving.assert_conversations_use_the_template(&python);
}

#[test]
fn a_box_without_llama_cpp_serves_channels_with_the_embedded_engine() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let serving = ServingFleet::start(without_llama_cpp());
    serving.serve("stable", 10);
    serving.await_serving("stable", 2);
    let requests = 200;
    let mut asking = python
        .script_command("ask_models.py")
        .args([&serving.url, "stable", &requests.to_string(), "4"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("Python starts");
    let mut round = 0;
    while round < 2 || asking.try_wait().expect("it can be asked").is_none() {
        round += 1;
        serving.serve("stable", if round % 2 == 0 { 10 } else { 20 });
        serving.await_serving("stable", 2);
    }
    let output = asking.wait_with_output().expect("it ends");
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(found["ok"], requests, "{found}");

    serving.serve("stable", 20);
    serving.await_serving("stable", 2);
    let model = serving.fleet.path().join("exported").display().to_string();
    let checkpoint = format!("{}/0/20", serving.run);
    serving.fleet.run(&["checkpoint", "export", &checkpoint, "--out", &model]).assert_success();
    let greedy = ["--prompt", "12+34=", "--temperature", "0", "--max-new-tokens", "12"];
    let generated =
        serving.fleet.run_json(&[&["generate", "--model", &model], &greedy[..]].concat());
    let generated = generated.expect("a sample")["samples"][0].clone();
    let asked = [&*serving.url, "stable", "12+34=", "12"];
    let found: Value =
        serde_json::from_str(&python.run_script("score_prompt.py", &asked)).expect("JSON");
    assert_eq!(found["text"], generated["text"], "{found}");
    assert_eq!(found["streamed"], generated["text"], "{found}");
    let sum: f64 = numbers(&found["logprobs"]).iter().sum();
    let expected = generated["logprob"].as_f64().expect("a number");
    assert!((sum - expected).abs() < 1e-6, "{sum} {expected}");
    // The prompt's tokens but the first, and the one that was drawn.
    let scores = found["prompt_logprobs"].as_array().expect("a list");
    assert!(scores[0].is_null() && scores[1..].iter().all(Value::is_f64), "{found}");
    assert!(found["scored"].as_str().expect("a text").starts_with("12+34="), "{found}");
    serving.assert_conversations_use_the_template(&python);
}

/// Writes the spec of a run with random weights, whose model has the template.
fn write_chat_spec(files: &SpecFiles) -> PathBuf {
    let settings = serde_json::json!({ "chat_template": CHAT_TEMPLATE }).to_string();
    std::fs::write(files.path("tokenizer_config.json"), settings).expect("a file");
    let spec = files.write_sft_spec(20, 10);
    let text = std::fs::read_to_string(&spec).expect("the spec");
    let tokenizer = "tokenizer: tokenizer.json";
    let with_template = format!("{tokenizer}, tokenizer_config: tokenizer_config.json");
    std::fs::write(&spec, text.replace(tokenizer, &with_template)).expect("the spec");
    spec
}

fn numbers(list: &Value) -> Vec<f64> {
    let list = list.as_array().expect("a list").iter();
    list.map(|it| it.as_f64().expect("a number")).collect()
}

#[test]
fn channels_of_one_base_are_one_process_with_an_adapter_each() {
    let (Some(python), Some(llama)) = (PythonEnv::with_client_packages(), find_llama_cpp()) else {
        return;
    };
    let fleet = serve_adapters(&python, with_llama_cpp(llama), |process| {
        process.arguments.iter().any(|it| it == "--lora")
    });
    let url = gateway_url(&fleet);
    let asked = [&*url, "plain", "1+2=", "4"];
    let found: Value =
        serde_json::from_str(&python.run_script("score_prompt.py", &asked)).expect("JSON");
    assert!(
        found["refused"].as_str().expect("a reason").contains("--server-engine candle"),
        "{found}"
    );
    assert_channel_is_asked_for_data(&fleet, "plain");
}

#[test]
fn channels_of_one_base_are_one_process_of_the_embedded_engine() {
    let Some(python) = PythonEnv::with_client_packages() else { return };
    let fleet = serve_adapters(&python, without_llama_cpp(), |process| {
        process.arguments.get(1..3).is_some_and(|words| words == ["worker", "serve"])
    });
    assert_a_lost_adapter_takes_no_other_channel_down(&fleet);
}

/// Removes an adapter from the store and the cache, and starts the agent again.
fn assert_a_lost_adapter_takes_no_other_channel_down(fleet: &Fleet) {
    let channels = fleet.run_json(&["channel", "list"]).expect("the channels");
    let early = channels.as_array().expect("a list").iter().find(|it| it["channel"] == "early");
    let adapter = &early.expect("a channel")["move"]["adapter"];
    let [path, digest] = ["path", "manifest"].map(|name| adapter[name].as_str().expect("a text"));
    std::fs::remove_dir_all(fleet.path().join("store").join(path)).expect("it was there");
    let tree = fleet.path().join("cache/trees").join(digest.rsplit(':').next().expect("hex"));
    std::fs::remove_dir_all(tree).expect("it was there");
    fleet.kill("server-1");
    wait_until("the others are served", LIMIT, || {
        let agents = fleet.run_json(&["agents", "list"]).ok()?;
        let served = agents.as_array()?.iter().find_map(|it| it["served"].as_array())?.clone();
        let error_of = |name: &str| {
            let found = served.iter().find(|it| it["channel"] == name)?;
            Some(found["error"].as_str().unwrap_or_default().to_owned())
        };
        let is_reason = error_of("early")?.contains("its adapter cannot be loaded");
        let served = ["late", "plain"].map(|name| error_of(name).is_some_and(|it| it.is_empty()));
        (is_reason && served == [true, true]).then_some(())
    });
}

#[test]
fn a_channel_stays_at_its_agent_until_the_one_that_is_to_serve_it_has_loaded_it() {
    let fleet = Fleet::start_with("server", &["--open"], without_llama_cpp());
    let base = SpecFiles::create(fleet.path()).write_model().display().to_string();
    let channels = ["a", "b", "c", "d"];
    for channel in channels {
        fleet.run(&["serve", channel, "--base", &base, "--replicas", "1"]).assert_success();
    }
    // The first agent that serves each channel, or an empty name.
    let list_servers = || -> Vec<String> {
        let listed = fleet.run_json(&["channel", "list"]).expect("the channels");
        let name_server = |it: &Value| it["agents"][0].as_str().unwrap_or_default().to_owned();
        listed.as_array().expect("a list").iter().map(name_server).collect()
    };
    wait_until("all are served", LIMIT, || {
        list_servers().iter().all(|it| it == "server-1").then_some(())
    });

    let directory = fleet.path().join("late");
    let late = start_held_server(&fleet, &directory);
    wait_until("it loads a model", LIMIT, || directory.join("loads").exists().then_some(()));
    // The other agent looks at the channels each second.
    for _ in 0..30 {
        std::thread::sleep(Duration::from_millis(100));
        let servers = list_servers();
        assert!(servers.iter().all(|it| it == "server-1"), "{servers:?}\n{}", fleet.log_tails());
    }
    std::fs::write(directory.join("go"), "").expect("a file");
    wait_until("each agent serves its channels", LIMIT, || {
        let servers = list_servers();
        assert!(!servers.contains(&String::new()), "{servers:?}\n{}", fleet.log_tails());
        let count = servers.iter().filter(|it| **it == late.name).count();
        (count > 0 && count < 4).then_some(())
    });
}

/// Starts an agent that serves models, whose process waits for the file `go` before it loads them.
fn start_held_server(fleet: &Fleet, directory: &Path) -> Member {
    std::fs::create_dir_all(directory).expect("a directory");
    let here = directory.display();
    let script = format!(
        "case \"$*\" in *\"worker serve\"*) ;; *) exec \"$@\" ;; esac\n\
         echo >{here}/loads\n\
         until [ -e {here}/go ]; do sleep 0.1; done\n\
         exec \"$@\""
    );
    let wrapper = write_script(&directory.join("wrapper"), &script);
    let (nats, home) = (fleet.nats_url(), directory.display().to_string());
    let arguments =
        ["agent", "--nats", &nats, "--roles", "server", "--name", "late", "--agent-dir", &home];
    let mut environment = without_llama_cpp();
    environment.push(("FLOTILLA_WORKER_WRAPPER".to_owned(), wrapper));
    Member::start("late", &[], &arguments, environment, &fleet.path().join("agents"))
}

fn gateway_url(fleet: &Fleet) -> String {
    let gateway = fleet.read_fleet_file()["gateway"].as_str().expect("an address").to_owned();
    format!("http://{gateway}/v1")
}

/// Serves a base and two adapters of it, each on a channel, and checks that one process gives the
/// answers of each.
fn serve_adapters(
    python: &PythonEnv,
    environment: Vec<(String, String)>,
    is_server: impl Fn(&Process) -> bool,
) -> Fleet {
    let fleet = Fleet::start_with("server,trainer,evaluator", &["--open"], environment);
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model();
    let run = fleet.submit(&files.write_adapter_spec(&model, 40, 20));
    fleet.await_success(&run, LIMIT);
    let base = model.display().to_string();
    for (channel, which) in
        [("early", ["--checkpoint", &format!("{run}/0/20")]), ("late", ["--checkpoint", &run])]
    {
        fleet.run(&[&["serve", channel], &which[..]].concat()).assert_success();
    }
    fleet.run(&["serve", "plain", "--base", &base]).assert_success();
    wait_until("all are served", LIMIT, || {
        let listed = fleet.run_json(&["channel", "list"]).ok()?;
        let served = |it: &&Value| it["agents"].as_array().is_some_and(|agents| agents.len() == 1);
        (listed.as_array()?.iter().filter(served).count() == 3).then_some(())
    });
    wait_until("the processes of older moves have ended", LIMIT, || {
        let processes = Process::all();
        let is_server = |it: &&Process| it.uses_directory(fleet.path()) && is_server(it);
        (processes.iter().filter(is_server).count() == 1).then_some(())
    });

    let url = gateway_url(&fleet);
    let asked = ["early", "late", "plain"];
    let printed = python.run_script("model_logprobs.py", &[&[&*url], &asked[..]].concat());
    let found: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(found["models"], serde_json::json!(asked));
    let logprobs = asked.map(|name| found["logprobs"][name].clone());
    assert!(logprobs[0] != logprobs[2] && logprobs[0] != logprobs[1], "{found}");
    fleet
}

/// Generates data with a channel. Its small model writes no list of prompts.
fn assert_channel_is_asked_for_data(fleet: &Fleet, channel: &str) {
    let (spec, out) = (fleet.path().join("generate.yaml"), fleet.path().join("generated"));
    let text = "count: 1\nprompts: { template: 'x{count}', sampling: { max_new_tokens: 8 } }\n\
                limits: { attempts: 2 }\ncategories: [{ name: a }]\n";
    std::fs::write(&spec, text).expect("a file");
    let (spec, directory) = (spec.display().to_string(), out.display().to_string());
    let generate = ["data", "generate", &spec, "--out", &directory, "--model", channel];
    fleet.run(&generate).assert_refused(&["D121", "limits.attempts (2) is reached in a"]);
    let report = std::fs::read(out.join("report.json")).expect("a report");
    let report: Value = serde_json::from_slice(&report).expect("JSON");
    assert!(report["requests"] == 2 && report["tokens"].as_u64() > Some(2), "{report}");
}

#[test]
fn requests_are_kept_if_asked_and_a_model_that_users_rate_lower_is_replaced() {
    let (Some(python), Some(llama)) = (PythonEnv::with_client_packages(), find_llama_cpp()) else {
        return;
    };
    let scripts = tempfile::tempdir().expect("a directory");
    let redaction = write_script(&scripts.path().join("redact"), "exec sed s/secret/removed/g");
    let redaction = ("FLOTILLA_REDACT".to_owned(), redaction);
    let serving = ServingFleet::start([with_llama_cpp(llama), vec![redaction]].concat());
    serving.serve("stable", 10);
    serving.await_serving("stable", 2);
    let rate = |rating: &str, prompts: &[String]| -> Value {
        let words = prompts.iter().map(String::as_str);
        let arguments: Vec<&str> =
            [&*serving.url, "stable", rating].into_iter().chain(words).collect();
        serde_json::from_str(&python.run_script("give_feedback.py", &arguments)).expect("JSON")
    };
    let prompts = |name: &str, count: u32| -> Vec<String> {
        (0..count).map(|number| format!("{name} {number}")).collect()
    };
    let unasked = rate("up", &prompts("not kept", 1));
    assert_eq!(unasked, serde_json::json!({ "days": null, "statuses": [404] }));

    let keep = ["serve", "stable", "--keep-days", "2", "--auto-roll-back"];
    serving.fleet.run(&keep).assert_success();
    serving.await_serving("stable", 2);
    let liked = rate("up", &prompts("secret", 30));
    // A model without much training may answer with nothing, which is not kept.
    let statuses = liked["statuses"].as_array().expect("a list");
    let kept = statuses.iter().filter(|status| **status == 200).count();
    assert!(liked["days"] == "2" && kept >= 15, "{liked}");
    assert_eq!(rate("the right answer", &prompts("wrong", 1))["statuses"][0], 200);

    serving.serve("stable", 20);
    serving.await_serving("stable", 2);
    rate("down", &prompts("disliked", 30));
    let history = || serving.fleet.run_json(&["channel", "history", "stable"]).ok();
    let moves = wait_until("the channel returns", LIMIT, || {
        let moves = history()?;
        let last = moves.as_array()?.last()?.clone();
        (last["move"]["evidence"]["live"] == true).then_some(last)
    });
    assert_eq!(moves["move"]["step"], 10, "{moves}");

    let out = scripts.path().join("feedback.jsonl");
    let out = out.display().to_string();
    serving.fleet.run(&["data", "from-feedback", "stable", "--out", &out]).assert_success();
    let lines = std::fs::read_to_string(&out).expect("a file");
    assert_eq!(lines.lines().count(), kept + 1, "{lines}");
    assert!(lines.contains("removed 1") && !lines.contains("secret"), "{lines}");
    let corrected = lines.lines().find(|line| line.contains("the right answer")).expect("a line");
    assert!(corrected.contains("\"rejected\""), "{corrected}");
}

#[test]
fn a_served_model_learns_from_feedback_until_it_is_better() {
    let mut demo = std::process::Command::new(program_path());
    demo.args(["demo", "--loop", "--json", "--seed", "2", "--cycles", "2"]);
    let output = demo.env("FLOTILLA_SERVER_ENGINE", "candle").output().expect("the demo starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    let found: Value = serde_json::from_slice(&output.stdout).expect(&errors);
    let share = |name: &str| found[name].as_f64().expect("a share");
    assert!(share("right_after") > share("right_before") + 0.1, "{found}");
    assert!(found["evidence"]["p"].as_f64().expect("a probability") < 0.05, "{found}");
}
