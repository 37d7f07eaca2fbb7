//! Channels: models that agents serve, asked with OpenAI's own client.

use std::{process::Stdio, time::Duration};

use e2e::{Fleet, Process, PythonEnv, SpecFiles, find_llama_cpp, wait_until};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(60);

/// A fleet with two agents that serve models, and a trained run with checkpoints at steps 10 and 20.
struct ServingFleet {
    fleet: Fleet,
    run: String,
    url: String,
}

impl ServingFleet {
    fn start(llama_cpp: String) -> Self {
        let environment = [("FLOTILLA_LLAMA_CPP".to_owned(), llama_cpp)];
        let fleet = Fleet::start_with("server=2,trainer,evaluator", &["--open"], environment);
        let files = SpecFiles::create(fleet.path());
        let run = fleet.submit(&files.write_sft_spec(20, 10));
        fleet.await_success(&run, LIMIT);
        let gateway = fleet.read_fleet_file()["gateway"].as_str().expect("an address").to_owned();
        Self { fleet, run, url: format!("http://{gateway}/v1") }
    }

    /// Points a channel to the checkpoint of a step, and returns without waiting.
    fn serve(&self, channel: &str, step: u32) {
        let checkpoint = format!("{}/0/{step}", self.run);
        self.fleet.run(&["serve", channel, "--checkpoint", &checkpoint]).assert_success();
    }

    /// Waits until so many agents serve the channel's newest model.
    fn await_serving(&self, channel: &str, agents: usize) {
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
    let serving = ServingFleet::start(llama);
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
}

#[test]
fn channels_of_one_base_are_one_process_with_an_adapter_each() {
    let (Some(python), Some(llama)) = (PythonEnv::with_client_packages(), find_llama_cpp()) else {
        return;
    };
    let environment = [("FLOTILLA_LLAMA_CPP".to_owned(), llama)];
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
        let is_server = |it: &&Process| {
            it.uses_directory(fleet.path()) && it.arguments.iter().any(|it| it == "--lora")
        };
        (processes.iter().filter(is_server).count() == 1).then_some(())
    });

    let gateway = fleet.read_fleet_file()["gateway"].as_str().expect("an address").to_owned();
    let url = format!("http://{gateway}/v1");
    let asked = ["early", "late", "plain"];
    let printed = python.run_script("model_logprobs.py", &[&[&*url], &asked[..]].concat());
    let found: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(found["models"], serde_json::json!(asked));
    let logprobs = asked.map(|name| found["logprobs"][name].clone());
    assert!(logprobs[0] != logprobs[2] && logprobs[0] != logprobs[1], "{found}");
}
