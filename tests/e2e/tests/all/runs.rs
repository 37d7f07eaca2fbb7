//! Runs on a real fleet without faults.

use std::{collections::BTreeSet, path::Path, time::Duration};

use e2e::{Fleet, Process, Sampling, SpecFiles, wait_until};
use serde_json::Value;

use crate::raw_log::RawLog;

const LIMIT: Duration = Duration::from_secs(180);

const SMALL: Sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 24, cycles: 2 };

#[test]
fn an_sft_run_publishes_checkpoints_and_each_is_evaluated() {
    let fleet = Fleet::start("trainer,evaluator=2");
    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(40, 10));
    let ended = fleet.await_success(&run, LIMIT);
    let steps = |list: &str| -> Vec<u64> {
        let items = ended[list].as_array().unwrap();
        let step = |item: &Value| item["checkpoint"]["step"].as_u64().or(item["step"].as_u64());
        items.iter().filter_map(step).collect()
    };
    assert_eq!(steps("checkpoints"), [10, 20, 30, 40]);
    assert_eq!(steps("evals"), [10, 20, 30, 40]);
    let perplexity = |place: usize| ended["evals"][place]["perplexity"].as_f64().unwrap();
    assert!(perplexity(3) < perplexity(0), "{:#}", ended["evals"]);

    let histories: String = ["evaluator-1", "evaluator-2"]
        .iter()
        .filter_map(|agent| {
            let path = fleet.path().join("agents").join(agent).join("eval_history.jsonl");
            std::fs::read_to_string(path).ok()
        })
        .collect();
    assert_eq!(histories.lines().count(), 4, "{histories}");
    fleet.assert_clean_audit(&run);

    let spec = files.write_sft_spec(30_000, 0);
    check_forecast(&fleet, &spec, &run, &["trainingS", "evaluationS"]);
    let long = fleet.submit(&spec);
    wait_until("what is left is forecast from the first run", LIMIT, || {
        fleet.run(&["run", "show", &long]).stdout.contains(" left [").then_some(())
    });
    fleet.run(&["run", "cancel", &long]).assert_success();
    fleet.await_state(&long, "CANCELLED", LIMIT);
    check_compared_forecast(&fleet, &long, &run);
}

/// Checks the forecast of a spec from the facts of an earlier run. Only a box that measures its
/// power has energy and price.
fn check_forecast(fleet: &Fleet, spec: &Path, earlier: &str, phases: &[&str]) {
    let spec = spec.to_str().expect("a path in UTF-8");
    let arguments = ["run", "check", spec, "--forecast", "--price", "0.3", "--by", "10000h"];
    let checked = fleet.run_json(&arguments).expect("a forecast");
    let forecast = &checked["forecast"];
    check_range(&forecast["seconds"]);
    for phase in phases {
        assert!(forecast[phase].as_f64() > Some(0.0), "{phase}: {forecast:#}");
    }
    assert_eq!(forecast["wattHours"].is_object(), forecast["price"].is_object(), "{forecast:#}");
    assert_eq!(forecast["probability"], 1.0, "{forecast:#}");
    assert_eq!(forecast["runs"][0], earlier, "{forecast:#}");
    let mut plain = fleet.command(&["run", "check", spec]);
    let plain = plain.env("FLOTILLA_PRICE_PER_KWH", "0.3").output().expect("the program starts");
    assert!(plain.status.success(), "the price may stay set: {plain:?}");
}

/// Checks that an ended run has its forecast from an earlier run beside its duration.
fn check_compared_forecast(fleet: &Fleet, run: &str, earlier: &str) {
    let story = fleet.run_json(&["run", "explain", run, "--forecast"]).expect("a story");
    let compared = &story["forecast"];
    check_range(&compared["forecast"]["seconds"]);
    assert_eq!(compared["forecast"]["runs"][0], earlier, "{compared:#}");
    assert!(compared["actual_s"].as_f64() > Some(0.0), "{compared:#}");
    let shown = fleet.run(&["run", "explain", run, "--forecast"]).stdout;
    for text in ["\nforecast from the log before", "\n  takes ", "\n  took "] {
        assert!(shown.contains(text), "no {text:?} in: {shown}");
    }
}

fn check_range(range: &Value) {
    let figures = ["low", "median", "high"].map(|name| range[name].as_f64().unwrap_or(-1.0));
    assert!(figures[0] > 0.0 && figures.is_sorted(), "{range:#}");
}

#[test]
fn two_generators_share_a_raft_run_and_its_adapter_is_peft() {
    let fleet = Fleet::start("trainer,generator=2,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(20, 0));
    fleet.await_success(&base, LIMIT);
    let heavy = Sampling { prompts: 64, per_prompt: 8, max_new_tokens: 96, ..SMALL };
    let run = fleet.submit(&files.write_raft_spec(&base, heavy));
    let ended = fleet.await_success(&run, LIMIT);
    let cycles = ended["cyclesDone"].as_array().unwrap();
    assert_eq!(cycles.len(), 3, "the base's measure and two cycles");
    let makers: BTreeSet<&String> = cycles
        .iter()
        .filter_map(|cycle| cycle["samplesByAgent"].as_object())
        .flat_map(|agents| agents.keys())
        .collect();
    assert_eq!(makers.len(), 2, "{cycles:#?}");
    let audit = fleet.assert_clean_audit(&run);
    assert_eq!(audit["planned_samples"], 2 * 64 * 8 + 3 * 8);

    check_generators_kept_their_workers(&fleet);
    check_other_selections(&fleet, &run);
    check_explanations(&fleet, &run, &base);
    check_forecast(&fleet, &files.write_raft_spec(&base, heavy), &run, &["samplingS", "trainingS"]);
    check_compared_forecast(&fleet, &run, &base);
    let story = fleet.run_json(&["run", "explain", &run, "--forecast"]).expect("a story");
    let memory = &story["forecast"]["forecast"]["memory"][0];
    let bytes = |name: &str| memory[name].as_str().and_then(|text| text.parse::<u64>().ok());
    println!("peak memory of the training: {memory}");
    assert!(bytes("usedBytes") > Some(1 << 20) && bytes("neededBytes") > Some(0), "{memory:#}");
    let out = fleet.path().join("adapter");
    let exported =
        fleet.run(&["checkpoint", "export", &format!("{run}/2"), "--out", out.to_str().unwrap()]);
    assert_eq!(exported.code, 0, "{}", exported.stderr);
    assert!(exported.stdout.contains("flotilla convert merge --model base"), "{exported:?}");
    check_peft(&out);
    let again = fleet.run(&["checkpoint", "export", &run, "--out", out.to_str().unwrap()]);
    assert!(again.code == 1 && again.stderr.contains("is not empty"), "{again:?}");
    let samples = fleet.run(&["run", "samples", &run, "--cycle", "2", "--outcome", "kept"]);
    assert!(samples.stdout.contains("reward 1, pass, kept"), "{samples:?}");
    assert!(samples.stderr.contains("--skip 5 continues"), "{samples:?}");
}

/// A worker's arguments show how it was started. It was started with the base, before there was an
/// adapter.
fn check_generators_kept_their_workers(fleet: &Fleet) {
    let processes = fleet.processes();
    let draws = |process: &&Process| {
        process.arguments.get(1..3).is_some_and(|words| words == ["worker", "generate"])
    };
    let workers: Vec<&Process> = processes.iter().filter(draws).collect();
    let began_with = |worker: &&Process| {
        let mut pairs = worker.arguments.windows(2);
        pairs.find(|pair| pair[0] == "--adapter-key").map(|pair| pair[1].clone())
    };
    let began: Vec<Option<String>> = workers.iter().map(began_with).collect();
    assert_eq!(began, [Some(String::new()), Some(String::new())], "{workers:#?}");
}

fn check_other_selections(fleet: &Fleet, run: &str) {
    let select = |cycle: &str, policy: &str| {
        fleet.run_json(&["select", "--run", run, "--cycle", cycle, "--policy", policy])
    };
    let same = select("1", "raft").expect("a comparison");
    assert!(same["was"]["kept"].as_u64() > Some(0), "{same:#}");
    assert_eq!(same["was"], same["would"], "the run's own policy keeps what it kept");
    let more = select("2", "{policy: rest_em, similarity: 0.99}").expect("a comparison");
    let kept = |side: &str| more[side]["kept"].as_u64().expect("a number");
    assert!(kept("would") > kept("was"), "{more:#}");
    assert_eq!(more["both"], more["was"]["kept"], "the best are among the ten best");
    let dropped = more["would"]["dropped"].as_object().expect("counts").values();
    let dropped: u64 = dropped.filter_map(Value::as_u64).sum();
    assert_eq!(kept("would") + dropped, more["considered"].as_u64().expect("a number"), "{more:#}");
    for (cycle, policy) in [("9", "raft"), ("1", "grpo"), ("1", "{keep_share: 7}")] {
        assert!(select(cycle, policy).is_err(), "cycle {cycle}, {policy}");
    }
}

fn check_explanations(fleet: &Fleet, run: &str, base: &str) {
    let story = fleet.run_json(&["run", "explain", run]).expect("a story");
    let cycles = story["cycles"].as_array().expect("a list");
    assert_eq!(cycles[1]["sampled_with"], "the base");
    assert!(
        cycles[2]["sampled_with"].as_str().expect("a name").starts_with("cycle 1 step "),
        "{story:#}"
    );
    assert_eq!(cycles[2]["trained_from"], cycles[2]["sampled_with"]);
    let yields = &story["yield"];
    assert_eq!(yields["cycle"], 2, "the last that selected");
    assert_eq!(yields["judged"], 64 * 8, "{yields:#}");
    assert_eq!(yields["kept"], cycles[2]["done"]["kept"]);
    let failures = yields["failures"].as_array().expect("a list");
    let unmatched = failures.iter().find(|it| it["message"] == "the pattern is not found");
    let unmatched = unmatched.unwrap_or_else(|| panic!("{yields:#}"));
    assert!(unmatched["count"].as_u64() > Some(0), "{unmatched:#}");
    assert!(unmatched["prompt_id"].as_str().is_some_and(|id| !id.is_empty()), "{unmatched:#}");
    let read = fleet.run(&["run", "explain", run]).stdout;
    assert!(read.contains("like: the pattern is not found\n    prompt "), "{read}");

    let newest = format!("{run}/newest");
    let lineage = fleet.run_json(&["checkpoint", "explain", &newest]).expect("a lineage");
    let links = lineage["links"].as_array().expect("a list");
    let of = |place: usize| links[place]["checkpoint"]["cycle"].as_u64();
    assert_eq!((links.len(), of(0), of(1)), (2, Some(2), Some(1)), "{lineage:#}");
    assert_eq!(links[1]["from"], "the base");
    let samples = lineage["samples"].as_array().expect("a list");
    assert_eq!(Some(samples.len() as u64), yields["kept"].as_u64());
    let makers: BTreeSet<&str> = samples.iter().filter_map(|s| s["generator"].as_str()).collect();
    assert!(makers.iter().all(|maker| maker.starts_with("generator-")), "{makers:?}");
    let explained = fleet.run(&["checkpoint", "explain", &newest]);
    assert!(explained.stdout.contains("started from"), "{}", explained.stdout);

    let diff = fleet.run_json(&["run", "diff", run, base]).expect("a difference");
    let settings = diff["settings"].as_array().expect("a list");
    assert!(settings.iter().any(|one| one["setting"] == "raft.cycles"), "{diff:#}");
    let same = fleet.run_json(&["run", "diff", run, run]).expect("a difference");
    assert_eq!(same["settings"].as_array().map(Vec::len), Some(0));
}

/// Checks what PEFT's loader needs: the keys of the configuration, and names and shapes of tensors.
fn check_peft(directory: &Path) {
    let read = |name: &str| std::fs::read(directory.join(name)).expect(name);
    let config: Value = serde_json::from_slice(&read("adapter_config.json")).expect("JSON");
    assert_eq!(config["peft_type"], "LORA");
    assert_eq!(config["task_type"], "CAUSAL_LM");
    assert_eq!((config["r"].as_u64(), config["lora_alpha"].as_f64()), (Some(4), Some(8.0)));
    let bytes = read("adapter_model.safetensors");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    assert_eq!(tensors.len(), 2 * 7 * 2, "A and B of seven modules in two layers");
    let shape = |half: &str| {
        let name = format!("base_model.model.model.layers.1.mlp.down_proj.lora_{half}.weight");
        tensors.tensor(&name).expect("a tensor of this name").shape().to_vec()
    };
    assert_eq!((shape("A"), shape("B")), (vec![4, 64], vec![32, 4]));
}

/// Writes the spec of a run of two cycles whose trainings take long enough to pause in them.
fn write_long_training_spec(files: &SpecFiles, base: &str) -> std::path::PathBuf {
    let path = files.write_raft_spec(base, SMALL);
    let spec = std::fs::read_to_string(&path).expect("a spec");
    let long = spec.replace("epochs: 1,", "epochs: 100,");
    assert_ne!(long, spec);
    std::fs::write(&path, long).expect("a file");
    path
}

#[test]
fn a_paused_run_waits_and_a_cancelled_one_ends() {
    let fleet = Fleet::start_open("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(10, 0));
    fleet.await_success(&base, LIMIT);
    let run = fleet.submit(&write_long_training_spec(&files, &base));
    let log = RawLog::open(&fleet);
    let await_fact = |kind: &str| {
        e2e::wait_until(kind, LIMIT, || {
            log.read(log.subjects(&format!("flotilla.{run}.{kind}")).last()?)
        })
    };
    await_fact("order.train.*.1.*");
    assert_eq!(fleet.run(&["run", "pause", &run, "--reason", "lunch"]).code, 0);
    let shown = fleet.run_json(&["run", "show", &run]).unwrap();
    assert_eq!(shown["state"], "PAUSED");
    // Without the pause, the next cycle would begin with this checkpoint.
    await_fact("checkpoint.1.*");
    // The coordinator that orders this run's work has read the pause and the checkpoint.
    let other = fleet.submit(&files.write_sft_spec(10, 0));
    fleet.await_success(&other, LIMIT);
    assert_eq!(fleet.run(&["run", "resume", &run]).code, 0);
    fleet.await_success(&run, LIMIT);
    fleet.assert_clean_audit(&run);
    let facts = fleet.read_facts(&run);
    let place = |matches: &dyn Fn(&Value) -> bool| facts.iter().position(matches).unwrap();
    let paused = place(&|fact| fact["fact"]["action"] == "PAUSE");
    let resumed = place(&|fact| fact["fact"]["action"] == "RESUME");
    let is_kind = |fact: &Value, kind: &str| fact["subject"].as_str().unwrap().contains(kind);
    let trained = place(&|fact| is_kind(fact, ".checkpoint.1."));
    assert!(paused < trained && trained < resumed, "{paused} {trained} {resumed}");
    assert!(!facts[trained..resumed].iter().any(|fact| is_kind(fact, ".order.")), "{facts:#?}");
    assert!(facts[resumed..].iter().any(|fact| is_kind(fact, ".order.generate.")), "{facts:#?}");

    let second = fleet.submit(&files.write_raft_spec(&base, SMALL));
    assert_eq!(second, "raft-2");
    assert_eq!(fleet.run(&["run", "cancel", &second]).code, 0);
    e2e::wait_until("the run is cancelled", LIMIT, || {
        let shown = fleet.run_json(&["run", "show", &second]).ok()?;
        (shown["state"] == "CANCELLED").then_some(())
    });
    let resumed = fleet.run(&["run", "resume", &second]);
    assert_eq!(resumed.code, 1);
    assert!(resumed.stderr.contains("has ended"), "{}", resumed.stderr);
}

#[test]
fn an_ordinary_nats_client_reads_the_log() {
    let fleet = Fleet::start_open("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let url = fleet.read_fleet_file()["nats"].as_str().unwrap().to_owned();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let payload = runtime.block_on(async {
        use futures::StreamExt;
        let client = async_nats::connect(url).await.unwrap();
        let mut evals = client.subscribe("flotilla.*.eval.>").await.unwrap();
        client.flush().await.unwrap();
        let run = fleet.submit(&files.write_sft_spec(5, 0));
        let message = tokio::time::timeout(LIMIT, evals.next()).await.unwrap().unwrap();
        assert_eq!(message.subject.as_str(), format!("flotilla.{run}.eval.0.5.heldout"));
        message.payload
    });
    let eval: Value = serde_json::from_slice(&payload).unwrap();
    assert!(eval["perplexity"].as_f64().unwrap() > 1.0, "{eval}");
}

#[test]
fn the_nats_credentials_of_a_user_read_the_log_of_a_closed_fleet() {
    let fleet = Fleet::start("trainer,evaluator");
    let files = SpecFiles::create(fleet.path());
    let credentials = fleet.path().join("eve");
    let out = credentials.display().to_string();
    fleet.run(&["user", "create", "eve", "--scope", "reader", "--out", &out]).assert_success();
    let url = fleet.read_fleet_file()["nats"].as_str().unwrap().to_owned();
    let run = fleet.submit(&files.write_sft_spec(5, 0));
    fleet.await_success(&run, LIMIT);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let message = runtime.block_on(async {
        let options =
            async_nats::ConnectOptions::with_credentials_file(credentials.join("nats.creds"));
        let options = options.await.unwrap().add_root_certificates(credentials.join("ca.pem"));
        let client = options.require_tls(true).connect(url).await.unwrap();
        // The answers come to the client's usual inbox.
        let log = async_nats::jetstream::new(client);
        let stream = log.get_stream("FLOTILLA").await.unwrap();
        stream.get_last_raw_message_by_subject("flotilla.*.eval.>").await.unwrap()
    });
    assert_eq!(message.subject.as_str(), format!("flotilla.{run}.eval.0.5.heldout.evaluator-1"));
    let eval: Value = serde_json::from_slice(&message.payload).unwrap();
    assert!(eval["perplexity"].as_f64().unwrap() > 1.0, "{eval}");
}
