//! Bad surroundings: each is one clear error with its remedy, or is lived with.

use std::{net::TcpListener, os::unix::fs::PermissionsExt, path::Path, time::Duration};

use async_nats::jetstream;
use e2e::{Files, Fleet, NatsServer, Output, Sampling, SmallDisk, flotilla, until};
use s3_server::S3Server;

const LIMIT: Duration = Duration::from_secs(120);

const SMALL: Sampling = Sampling { prompts: 8, per_prompt: 4, max_new_tokens: 16, cycles: 1 };

/// Enough to be met half done.
const LONG: Sampling = Sampling { prompts: 192, per_prompt: 8, max_new_tokens: 480, cycles: 1 };

fn alone(arguments: &[&str]) -> Output {
    flotilla(arguments, [])
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

fn taken_port() -> (TcpListener, String) {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("an address").port().to_string();
    (taken, port)
}

/// Nothing is left that a command would take for a fleet.
fn no_fleet_in(directory: &Path) {
    assert!(!directory.join("fleet.json").exists());
    alone(&["run", "list", "--dir", text(directory)]).refuses(&["flotilla up", text(directory)]);
}

#[test]
fn a_nats_server_that_will_not_do_is_refused_with_its_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let old = directory.path().join("old-server");
    std::fs::write(&old, "#!/bin/sh\necho 'nats-server: v2.9.1'\n").unwrap();
    std::fs::set_permissions(&old, std::fs::Permissions::from_mode(0o755)).unwrap();
    let fleet = directory.path().join("fleet");
    alone(&["up", "--dir", text(&fleet), "--nats-server", text(&old)]).refuses(&[
        text(&old),
        "2.9.1",
        "2.11",
        "deploy/fetch-nats-server.sh",
    ]);
    no_fleet_in(&fleet);

    let server = NatsServer::start(&[]);
    let store = directory.path().join("store");
    let url = format!("file://{}", store.display());
    let coordinator = ["coordinator", "--nats", &server.url(), "--gateway", "127.0.0.1:0"];
    alone(&[&coordinator[..], &["--store", &url]].concat()).refuses(&[
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
    alone(&["up", "--dir", fleet, "--port", &port]).refuses(&[&port, "taken", "another"]);
    alone(&["up", "--dir", fleet, "--gateway", &gateway]).refuses(&[&gateway, "another"]);
    no_fleet_in(directory.path());
    alone(&["coordinator", "--nats", "nats://127.0.0.1:1", "--gateway", &gateway])
        .refuses(&[&gateway, "another"]);
}

#[test]
fn a_second_fleet_in_a_directory_is_refused_and_the_first_goes_on() {
    let fleet = Fleet::up("trainer");
    let before = fleet.file();
    let directory = text(fleet.path());
    alone(&["up", "--dir", directory]).refuses(&[directory, "in use by", "another directory"]);
    assert_eq!(fleet.file(), before);
    assert_eq!(fleet.json(&["agents", "list"]).unwrap().as_array().unwrap().len(), 1);
}

#[test]
fn a_store_that_refuses_is_named_before_anything_starts() {
    let directory = tempfile::tempdir().unwrap();
    let fleet = text(directory.path());
    alone(&["up", "--dir", fleet, "--store", "file:///dev/null/x"]).refuses(&["/dev/null/x"]);
    let server = S3Server::start().unwrap();
    let mut environment = server.env();
    environment.insert("AWS_SECRET_ACCESS_KEY".into(), "wrong".into());
    flotilla(&["up", "--dir", fleet, "--store", &server.url()], environment).refuses(&[
        &server.url(),
        "refuses access",
        "AWS_ACCESS_KEY_ID",
    ]);
    flotilla(&["up", "--dir", fleet, "--store", &server.url()], [])
        .refuses(&[&server.url(), "AWS_ACCESS_KEY_ID"]);
    no_fleet_in(directory.path());
    assert!(std::fs::read_dir(server.dir()).is_err(), "nothing was written");
}

#[test]
fn a_full_store_is_said_at_once_and_the_run_goes_on_when_there_is_room() {
    let mounts = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(mounts.path().join("store"), "400k") else { return };
    let store = format!("file://{}", disk.path().display());
    let fleet = Fleet::up_with("trainer,evaluator", &["--store", &store], []);
    let files = Files::create(fleet.path());
    // A checkpoint takes 110 KiB: a few fit, and the training has twelve.
    let run = fleet.submit(&files.sft(120, 10));
    let shown = until("the failure is seen", LIMIT, || {
        let shown = fleet.json(&["run", "show", &run]).ok()?;
        (!shown["failures"].as_array()?.is_empty()).then_some(shown)
    });
    assert_eq!(shown["state"], "RUNNING", "there may be space again soon");
    let failure = &shown["failures"][0];
    let told = failure["message"].as_str().unwrap();
    assert!(told.contains(&store) && told.contains("no space left"), "{told}");
    assert_eq!(failure["cause"], "SURROUNDINGS");
    assert_ne!(failure["final"], true);
    until("the agent says what it waits for", LIMIT, || {
        let agents = fleet.json(&["agents", "list"]).ok()?;
        let troubles = agents.as_array()?.iter().filter_map(|agent| agent["trouble"].as_str());
        troubles.into_iter().any(|trouble| trouble.contains("no space left")).then_some(())
    });
    assert!(disk.resize("8m"));
    let ended = fleet.finish(&run, LIMIT);
    assert_eq!(ended["checkpoints"].as_array().unwrap().len(), 12);
    fleet.audit_clean(&run);
    let well = |agent: &serde_json::Value| agent["trouble"].as_str().unwrap_or_default().is_empty();
    until("no agent has any trouble", LIMIT, || {
        let agents = fleet.json(&["agents", "list"]).ok()?;
        agents.as_array()?.iter().all(well).then_some(())
    });
}

#[test]
fn a_damaged_base_fails_the_run_with_the_file_named() {
    let mut fleet = Fleet::up("trainer,generator,verifier");
    let files = Files::create(fleet.path());
    let spec = files.sft(5, 0);
    let lines = std::fs::read_to_string(&spec).unwrap();
    let unmeasured: Vec<&str> = lines.lines().filter(|line| !line.starts_with("evals")).collect();
    std::fs::write(&spec, unmeasured.join("\n")).unwrap();
    let base = fleet.submit(&spec);
    let ended = fleet.finish(&base, LIMIT);
    // Agents fetch what may be asked for next: none keeps a good copy.
    fleet.terminate();
    until("the fleet is down", LIMIT, || fleet.ended().map(|_| ()));
    std::fs::remove_dir_all(fleet.path().join("cache")).unwrap();
    let tree = ended["checkpoints"][0]["checkpoint"]["tree"]["path"].as_str().unwrap().to_owned();
    let weights = fleet.path().join("store").join(tree).join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    fleet.up_again();
    fleet.await_agents();

    let run = fleet.submit(&files.raft(&base, SMALL));
    let why = fleet.end(&run, "FAILED", LIMIT)["message"].as_str().unwrap().to_owned();
    assert!(why.contains(text(&weights)) && why.contains("is damaged"), "{why}");
    let export = fleet.path().join("export");
    fleet
        .run(&["checkpoint", "export", &base, "--out", text(&export)])
        .refuses(&[text(&weights), "is damaged"]);
    let left = std::fs::read_dir(&export).unwrap().flatten().map(|entry| entry.file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["config.json"], "only what was verified");
}

#[test]
fn a_model_that_cannot_be_used_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let files = Files::create(directory.path());
    let model = files.model();
    let measure = |more: &[&str]| {
        let (model, data) = (text(&model), files.path("heldout.txt"));
        let fixed = ["eval", "local", "--n-ctx", "64", "--model", model, "--text", text(&data)];
        alone(&[&fixed[..], more].concat())
    };
    let sample = |more: &[&str]| {
        let fixed = ["generate", "--max-new-tokens", "2", "--prompt", "1", "--model", text(&model)];
        alone(&[&fixed[..], more].concat())
    };
    assert_eq!((measure(&[]).code, sample(&[]).code), (0, 0), "{}", measure(&[]).stderr);
    for command in [&measure as &dyn Fn(&[&str]) -> Output, &sample] {
        command(&["--adapter", "no-adapter"]).refuses(&["no-adapter/adapter_config.json"]);
    }
    let adapter = directory.path().join("adapter");
    std::fs::create_dir(&adapter).unwrap();
    let config = r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}"#;
    std::fs::write(adapter.join("adapter_config.json"), config).unwrap();
    sample(&["--adapter", text(&adapter)]).refuses(&["adapter/adapter_model.safetensors"]);

    let huge_header: &[u8] = b"\xff\xff\xff\xff\xff\xff\xff\x7f{}";
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let file = model.join(name);
        let good = std::fs::read(&file).unwrap();
        let cases = [huge_header, &good[..good.len() / 2], &[0xfe; 5000], b"", b"{}", b"null"];
        for bad in cases {
            std::fs::write(&file, bad).unwrap();
            measure(&[]).refuses(&[text(&file)]);
        }
        std::fs::remove_file(&file).unwrap();
        measure(&[]).refuses(&[text(&file)]);
        sample(&[]).refuses(&[text(&file)]);
        std::fs::write(&file, good).unwrap();
    }
}

/// The log, as any program has it that speaks NATS.
struct RawLog {
    runtime: tokio::runtime::Runtime,
    context: jetstream::Context,
}

impl RawLog {
    fn open(fleet: &Fleet) -> Self {
        let url = fleet.file()["nats"].as_str().expect("a URL").to_owned();
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let connect = async { jetstream::new(async_nats::connect(url).await.expect("the bus")) };
        let context = runtime.block_on(connect);
        Self { runtime, context }
    }

    fn write(&self, subject: String, payload: &'static str) {
        self.runtime.block_on(async {
            let sent = self.context.publish(subject, payload.into()).await.expect("it is sent");
            sent.await.expect("it is stored");
        });
    }

    fn read(&self, subject: &str) -> Option<serde_json::Value> {
        self.runtime.block_on(async {
            let log = self.context.get_stream("FLOTILLA").await.expect("the log");
            let message = log.get_last_raw_message_by_subject(subject).await.ok()?;
            serde_json::from_slice(&message.payload).ok()
        })
    }
}

#[test]
fn entries_that_are_no_facts_disturb_nobody_but_the_run_they_are_in() {
    let fleet = Fleet::open("trainer,generator,verifier,evaluator");
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(5, 0));
    fleet.finish(&base, LIMIT);
    let log = RawLog::open(&fleet);
    log.write("flotilla.x-1.spec".into(), "{ garbage");
    log.write("flotilla.x-1.samples.1.j1".into(), "\u{0}");
    log.write("flotilla.raft-1.spec".into(), "[]");
    fleet.run(&["run", "show", "x-1"]).refuses(&["there is no run x-1"]);

    let broken = fleet.submit(&files.raft(&base, LONG));
    assert_eq!(broken, "raft-2", "the first number is taken, by whatever");
    let plan = until("the cycle is planned", LIMIT, || {
        log.read(&format!("flotilla.{broken}.cycle.1.plan"))
    });
    // Some are being worked on, some are not yet.
    let subject = |job: &str| format!("flotilla.{broken}.samples.1.{job}");
    for job in plan["jobs"].as_array().unwrap() {
        log.write(subject(job["job"].as_str().unwrap()), "{ garbage");
    }
    let ended = fleet.end(&broken, "FAILED", LIMIT);
    let why = ended["message"].as_str().unwrap();
    assert!(why.contains(&subject("")), "{why}");

    let sound = fleet.submit(&files.raft(&base, SMALL));
    fleet.finish(&sound, LIMIT);
    fleet.audit_clean(&sound);
    let listed = fleet.json(&["run", "list"]).unwrap();
    let runs: Vec<&str> =
        listed.as_array().unwrap().iter().filter_map(|run| run["run"].as_str()).collect();
    assert_eq!(runs, [&*base, &*broken, &*sound]);
}

#[test]
fn what_is_not_there_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let nothing = alone(&["down", "--dir", text(directory.path())]);
    assert_eq!(nothing.code, 0, "down is what it is: {}", nothing.stderr);
    assert!(nothing.stderr.contains("no fleet is running"), "{}", nothing.stderr);
    alone(&["up", "--dir", text(directory.path()), "--agents", "cook"])
        .refuses(&["cook", "trainer, generator, verifier, evaluator"]);
    no_fleet_in(directory.path());

    let fleet = Fleet::up("trainer");
    let agent = directory.path().join("agent");
    fleet
        .run(&["agent", "--roles", "cook", "--agent-dir", text(&agent)])
        .refuses(&["cook", "trainer, generator, verifier, evaluator"]);
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
        fleet.run(&[command, &["nobody-1"]].concat()).refuses(&["there is no", "nobody-1", "list"]);
        fleet.run(&[command, &["No/Name/At/All"]].concat()).refuses(&["No"]);
    }
    assert_eq!(fleet.json(&["run", "list"]).unwrap(), serde_json::json!([]));
}

#[test]
fn a_sigterm_ends_a_fleet_in_mid_work_and_leaves_no_process() {
    let mut fleet = Fleet::up("trainer,generator,verifier,evaluator");
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(5, 0));
    fleet.finish(&base, LIMIT);
    fleet.submit(&files.raft(&base, LONG));
    let family = until("a generator works", LIMIT, || {
        let family = fleet.processes();
        let at_work = |word: &str| family.iter().any(|one| one.arguments.iter().any(|a| a == word));
        (at_work("worker") && at_work("generate")).then_some(family)
    });
    assert!(family.len() >= 8, "up, nats-server, coordinator, four agents, a worker: {family:#?}");
    fleet.terminate();
    let ended = until("flotilla up ends", Duration::from_secs(10), || fleet.ended());
    assert!(ended.success(), "{}", fleet.logs());
    // A kill is only asked for; the kernel takes a moment.
    for process in family {
        let ends = || (!process.is_alive()).then_some(());
        until(&format!("{process:?} ends"), Duration::from_secs(1), ends);
    }
}
