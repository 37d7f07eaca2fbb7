//! Problems of the environment. Each is one clear error with a remedy, or the fleet recovers from
//! it.

use std::{net::TcpListener, path::Path, time::Duration};

use e2e::{
    Fleet, NatsServer, Output, Sampling, SmallDisk, SpecFiles, run_flotilla, wait_until,
    write_script,
};
use s3_server::S3Server;

use crate::raw_log::RawLog;

const LIMIT: Duration = Duration::from_secs(120);

const SMALL: Sampling = Sampling { prompts: 8, per_prompt: 4, max_new_tokens: 16, cycles: 1 };

/// Long enough to be interrupted.
const LONG: Sampling = Sampling { prompts: 192, per_prompt: 8, max_new_tokens: 480, cycles: 1 };

fn run_without_fleet(arguments: &[&str]) -> Output {
    run_flotilla(arguments, [])
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

fn taken_port() -> (TcpListener, String) {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("an address").port().to_string();
    (taken, port)
}

/// Checks that no command finds a fleet in the directory.
fn assert_no_fleet(directory: &Path) {
    assert!(!directory.join("fleet.json").exists());
    run_without_fleet(&["run", "list", "--dir", text(directory)])
        .assert_refused(&["flotilla up", text(directory)]);
}

#[test]
fn an_unsuitable_nats_server_is_refused_with_a_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let old = write_script(&directory.path().join("old-server"), "echo 'nats-server: v2.9.1'");
    let fleet = directory.path().join("fleet");
    run_without_fleet(&["up", "--dir", text(&fleet), "--nats-server", &old]).assert_refused(&[
        &old,
        "2.9.1",
        "2.11",
        "deploy/fetch-nats-server.sh",
    ]);
    assert_no_fleet(&fleet);

    let server = NatsServer::start(&[]);
    let store = directory.path().join("store");
    let url = format!("file://{}", store.display());
    let coordinator = ["coordinator", "--nats", &server.url(), "--gateway", "127.0.0.1:0"];
    run_without_fleet(&[&coordinator[..], &["--store", &url]].concat()).assert_refused(&[
        &server.url(),
        "without JetStream",
        "-js",
    ]);
    assert!(!store.exists());
}

#[test]
fn a_taken_port_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let fleet = text(directory.path());
    let (_taken, port) = taken_port();
    let gateway = format!("127.0.0.1:{port}");
    run_without_fleet(&["up", "--dir", fleet, "--port", &port])
        .assert_refused(&[&port, "taken", "another"]);
    run_without_fleet(&["up", "--dir", fleet, "--gateway", &gateway])
        .assert_refused(&[&gateway, "another"]);
    assert_no_fleet(directory.path());
    run_without_fleet(&["coordinator", "--nats", "nats://127.0.0.1:1", "--gateway", &gateway])
        .assert_refused(&[&gateway, "another"]);
}

#[test]
fn a_second_fleet_in_a_directory_is_refused_and_the_first_keeps_running() {
    let fleet = Fleet::start("trainer");
    let before = fleet.read_fleet_file();
    let directory = text(fleet.path());
    run_without_fleet(&["up", "--dir", directory]).assert_refused(&[
        directory,
        "in use by",
        "another directory",
    ]);
    assert_eq!(fleet.read_fleet_file(), before);
    assert_eq!(fleet.run_json(&["agents", "list"]).unwrap().as_array().unwrap().len(), 1);
}

#[test]
fn a_store_that_refuses_is_named_before_anything_starts() {
    let directory = tempfile::tempdir().unwrap();
    let fleet = text(directory.path());
    run_without_fleet(&["up", "--dir", fleet, "--store", "file:///dev/null/x"])
        .assert_refused(&["/dev/null/x"]);
    let server = S3Server::start().unwrap();
    let mut environment = server.env();
    environment.insert("AWS_SECRET_ACCESS_KEY".into(), "wrong".into());
    run_flotilla(&["up", "--dir", fleet, "--store", &server.url()], environment).assert_refused(&[
        &server.url(),
        "refuses access",
        "AWS_ACCESS_KEY_ID",
    ]);
    run_flotilla(&["up", "--dir", fleet, "--store", &server.url()], [])
        .assert_refused(&[&server.url(), "AWS_ACCESS_KEY_ID"]);
    assert_no_fleet(directory.path());
    assert!(std::fs::read_dir(server.dir()).is_err(), "nothing was written");
}

#[test]
fn a_full_store_is_reported_at_once_and_the_run_continues_when_there_is_space() {
    let mounts = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(mounts.path().join("store"), "400k") else { return };
    let store = format!("file://{}", disk.path().display());
    let fleet = Fleet::start_with("trainer,evaluator", &["--store", &store], []);
    let files = SpecFiles::create(fleet.path());
    // A checkpoint has 110 KiB. A few fit, and the training writes twelve.
    let run = fleet.submit(&files.write_sft_spec(120, 10));
    let shown = wait_until("the failure is seen", LIMIT, || {
        let shown = fleet.run_json(&["run", "show", &run]).ok()?;
        (!shown["failures"].as_array()?.is_empty()).then_some(shown)
    });
    assert_eq!(shown["state"], "RUNNING", "there may be space again soon");
    let failure = &shown["failures"][0];
    let message = failure["message"].as_str().unwrap();
    assert!(message.contains(&store) && message.contains("no space left"), "{message}");
    assert_eq!(failure["cause"], "SURROUNDINGS");
    assert_ne!(failure["final"], true);
    wait_until("the agent reports what it waits for", LIMIT, || {
        let agents = fleet.run_json(&["agents", "list"]).ok()?;
        let troubles = agents.as_array()?.iter().filter_map(|agent| agent["trouble"].as_str());
        troubles.into_iter().any(|trouble| trouble.contains("no space left")).then_some(())
    });
    assert!(disk.resize("8m"));
    let ended = fleet.await_success(&run, LIMIT);
    assert_eq!(ended["checkpoints"].as_array().unwrap().len(), 12);
    fleet.assert_clean_audit(&run);
    let well = |agent: &serde_json::Value| agent["trouble"].as_str().unwrap_or_default().is_empty();
    wait_until("all agents are well", LIMIT, || {
        let agents = fleet.run_json(&["agents", "list"]).ok()?;
        agents.as_array()?.iter().all(well).then_some(())
    });
}

#[test]
fn a_damaged_base_fails_the_run_with_the_file_named() {
    let mut fleet = Fleet::start("trainer,generator,verifier");
    let files = SpecFiles::create(fleet.path());
    let spec = files.write_sft_spec(5, 0);
    let lines = std::fs::read_to_string(&spec).unwrap();
    let unmeasured: Vec<&str> = lines.lines().filter(|line| !line.starts_with("evals")).collect();
    std::fs::write(&spec, unmeasured.join("\n")).unwrap();
    let base = fleet.submit(&spec);
    let ended = fleet.await_success(&base, LIMIT);
    // Agents prefetch checkpoints, so their cache must not contain an intact copy.
    fleet.terminate();
    wait_until("the fleet is down", LIMIT, || fleet.exit_status().map(|_| ()));
    std::fs::remove_dir_all(fleet.path().join("cache")).unwrap();
    let tree = ended["checkpoints"][0]["checkpoint"]["tree"]["path"].as_str().unwrap().to_owned();
    let weights = fleet.path().join("store").join(tree).join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    fleet.restart();
    fleet.await_agents();

    let run = fleet.submit(&files.write_raft_spec(&base, SMALL));
    let why = fleet.await_state(&run, "FAILED", LIMIT)["message"].as_str().unwrap().to_owned();
    assert!(why.contains(text(&weights)) && why.contains("is damaged"), "{why}");
    let export = fleet.path().join("export");
    fleet
        .run(&["checkpoint", "export", &base, "--out", text(&export)])
        .assert_refused(&[text(&weights), "is damaged"]);
    let left = std::fs::read_dir(&export).unwrap().flatten().map(|entry| entry.file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["config.json"], "only what was verified");
}

#[test]
fn a_model_that_cannot_be_used_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let files = SpecFiles::create(directory.path());
    let model = files.write_model();
    let measure = |more: &[&str]| {
        let (model, data) = (text(&model), files.path("heldout.txt"));
        let fixed = ["eval", "local", "--n-ctx", "64", "--model", model, "--text", text(&data)];
        run_without_fleet(&[&fixed[..], more].concat())
    };
    let sample = |more: &[&str]| {
        let fixed = ["generate", "--max-new-tokens", "2", "--prompt", "1", "--model", text(&model)];
        run_without_fleet(&[&fixed[..], more].concat())
    };
    assert_eq!((measure(&[]).code, sample(&[]).code), (0, 0), "{}", measure(&[]).stderr);
    for command in [&measure as &dyn Fn(&[&str]) -> Output, &sample] {
        command(&["--adapter", "no-adapter"]).assert_refused(&["no-adapter/adapter_config.json"]);
    }
    let adapter = directory.path().join("adapter");
    std::fs::create_dir(&adapter).unwrap();
    let config = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}"#;
    std::fs::write(adapter.join("adapter_config.json"), config).unwrap();
    sample(&["--adapter", text(&adapter)]).assert_refused(&["adapter/adapter_model.safetensors"]);

    let huge_header: &[u8] = b"\xff\xff\xff\xff\xff\xff\xff\x7f{}";
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let file = model.join(name);
        let good = std::fs::read(&file).unwrap();
        let cases = [huge_header, &good[..good.len() / 2], &[0xfe; 5000], b"", b"{}", b"null"];
        for bad in cases {
            std::fs::write(&file, bad).unwrap();
            measure(&[]).assert_refused(&[text(&file)]);
        }
        std::fs::remove_file(&file).unwrap();
        measure(&[]).assert_refused(&[text(&file)]);
        sample(&[]).assert_refused(&[text(&file)]);
        std::fs::write(&file, good).unwrap();
    }
}

#[test]
fn invalid_entries_only_affect_the_run_that_they_are_in() {
    let fleet = Fleet::start_open("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(5, 0));
    fleet.await_success(&base, LIMIT);
    let log = RawLog::open(&fleet);
    log.publish_raw("flotilla.x-1.spec".into(), "{ garbage");
    log.publish_raw("flotilla.x-1.samples.1.j1".into(), "\u{0}");
    log.publish_raw("flotilla.raft-1.spec".into(), "[]");
    fleet.run(&["run", "show", "x-1"]).assert_refused(&["there is no run x-1"]);

    let broken = fleet.submit(&files.write_raft_spec(&base, LONG));
    assert_eq!(broken, "raft-2", "the first number is taken, by whatever");
    let plan = wait_until("the cycle is planned", LIMIT, || {
        log.read(&format!("flotilla.{broken}.cycle.1.plan"))
    });
    // Some jobs are in progress, others have not started.
    let subject = |job: &str| format!("flotilla.{broken}.samples.1.{job}");
    for job in plan["jobs"].as_array().unwrap() {
        log.publish_raw(subject(job["job"].as_str().unwrap()), "{ garbage");
    }
    let ended = fleet.await_state(&broken, "FAILED", LIMIT);
    let why = ended["message"].as_str().unwrap();
    assert!(why.contains(&subject("")), "{why}");

    let sound = fleet.submit(&files.write_raft_spec(&base, SMALL));
    fleet.await_success(&sound, LIMIT);
    fleet.assert_clean_audit(&sound);
    let listed = fleet.run_json(&["run", "list"]).unwrap();
    let runs: Vec<&str> =
        listed.as_array().unwrap().iter().filter_map(|run| run["run"].as_str()).collect();
    assert_eq!(runs, [&*base, &*broken, &*sound]);
}

#[test]
fn missing_objects_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let nothing = run_without_fleet(&["down", "--dir", text(directory.path())]);
    assert_eq!(nothing.code, 0, "down is what it is: {}", nothing.stderr);
    assert!(nothing.stderr.contains("no fleet is running"), "{}", nothing.stderr);
    run_without_fleet(&["up", "--dir", text(directory.path()), "--agents", "cook"])
        .assert_refused(&["cook", "trainer, generator, verifier, scorer, evaluator"]);
    assert_no_fleet(directory.path());

    let fleet = Fleet::start("trainer");
    let agent = directory.path().join("agent");
    fleet
        .run(&["agent", "--roles", "cook", "--agent-dir", text(&agent)])
        .assert_refused(&["cook", "trainer, generator, verifier, scorer, evaluator"]);
    for command in [
        &["run", "show"][..],
        &["run", "watch"],
        &["run", "watch", "--json"],
        &["run", "cancel"],
        &["run", "pause"],
        &["audit"],
        &["eval", "history"],
        &["checkpoint", "list"],
        &["checkpoint", "get"],
    ] {
        fleet.run(&[command, &["nobody-1"]].concat()).assert_refused(&[
            "there is no",
            "nobody-1",
            "list",
        ]);
        fleet.run(&[command, &["No/Name/At/All"]].concat()).assert_refused(&["No"]);
    }
    assert_eq!(fleet.run_json(&["run", "list"]).unwrap(), serde_json::json!([]));
}

#[test]
fn a_sigterm_ends_a_busy_fleet_and_leaves_no_process() {
    let mut fleet = Fleet::start("trainer,generator,verifier,evaluator");
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(5, 0));
    fleet.await_success(&base, LIMIT);
    fleet.submit(&files.write_raft_spec(&base, LONG));
    let processes = wait_until("a generator works", LIMIT, || {
        let processes = fleet.processes();
        let at_work =
            |word: &str| processes.iter().any(|one| one.arguments.iter().any(|a| a == word));
        (at_work("worker") && at_work("generate")).then_some(processes)
    });
    assert!(
        processes.len() >= 8,
        "up, nats-server, coordinator, four agents, a worker: {processes:#?}"
    );
    fleet.terminate();
    let ended = wait_until("flotilla up ends", Duration::from_secs(10), || fleet.exit_status());
    assert!(ended.success(), "{}", fleet.log_tails());
    // The kernel needs a moment to end killed processes.
    for process in processes {
        let ends = || (!process.is_alive()).then_some(());
        wait_until(&format!("{process:?} ends"), Duration::from_secs(1), ends);
    }
}
