//! Flags by which the owner of a box, or of a log, limits what the fleet takes.

use std::{path::Path, time::Duration};

use e2e::{FakeBox, Fleet, Member, SpecFiles, wait_until};
use s3_server::S3Server;
use serde_json::Value;

use crate::raw_log::{QueueState, RawLog};

const LIMIT: Duration = Duration::from_secs(120);

/// The smallest limit of a cache, 0.01 GiB, in bytes.
const CACHE_BYTES: u64 = 10_737_418;

fn start_agent(
    fleet: &Fleet,
    name: &str,
    arguments: &[&str],
    environment: impl IntoIterator<Item = (String, String)>,
) -> Member {
    let (nats, home) = (fleet.nats_url(), fleet.path().join(name).display().to_string());
    let fixed = ["agent", "--nats", &nats, "--name", name, "--agent-dir", &home];
    Member::start(name, &[], &[&fixed[..], arguments].concat(), environment, fleet.path())
}

/// Waits until the status of an agent matches, and returns it.
fn await_status(fleet: &Fleet, name: &str, matches: impl Fn(&Value) -> bool) -> Value {
    wait_until(&format!("the status of {name}"), LIMIT, || {
        let agents = fleet.run_json(&["agents", "list"]).ok()?;
        let mut agents = agents.as_array()?.iter();
        agents.find(|agent| agent["agent"] == name && matches(agent)).cloned()
    })
}

#[test]
fn agents_at_a_limit_of_their_owner_say_so_and_take_no_work() {
    let fleet = Fleet::start_open("evaluator");
    let host = FakeBox::create(fleet.path().join("root"));
    let start = |name: &str, limit: &[&str]| {
        let environment = [
            ("FLOTILLA_SYSROOT".to_owned(), host.root().display().to_string()),
            ("FLOTILLA_PROFILE".to_owned(), "cpu".to_owned()),
        ];
        start_agent(&fleet, name, &[&["--roles", "trainer"][..], limit].concat(), environment)
    };
    let _limited = [
        start("quiet", &["--quiet-hours", "00:00-12:00,12:00-00:00"]),
        start("hot", &["--max-temperature", "60"]),
        start("thirsty", &["--max-power", "100"]),
    ];
    for (name, words) in [
        ("quiet", "quiet hours"),
        ("hot", "71 °C, above the owner's limit of 60 °C"),
        ("thirsty", "212 W, above the owner's limit of 100 W"),
    ] {
        let status = await_status(&fleet, name, |agent| {
            agent["trouble"].as_str().is_some_and(|trouble| trouble.contains(words))
        });
        assert_eq!(status["state"], "DRAINING", "{status:#}");
    }
    let run = fleet.submit(&SpecFiles::create(fleet.path()).write_sft_spec(5, 0));
    let log = RawLog::open(&fleet);
    wait_until("the order waits and nobody asks for it", LIMIT, || {
        let wanted = QueueState { pending: 1, waiting: 0, acknowledged: 0 };
        (log.queue_state("train-default")? == wanted).then_some(())
    });
    let _unlimited = start("unlimited", &[]);
    fleet.await_success(&run, LIMIT);
    let checkpoints = fleet.run_json(&["checkpoint", "list", &run]).expect("checkpoints");
    assert_eq!(checkpoints[0]["checkpoint"]["agent"], "unlimited", "{checkpoints:#}");
}

/// Returns the size of all files below a directory.
fn directory_bytes(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(about) if about.is_dir() => directory_bytes(&entry.path()),
        about => about.map_or(0, |about| about.len()),
    };
    entries.map(size).sum()
}

#[test]
fn a_cache_stays_below_its_limit() {
    let fleet = Fleet::start_open("trainer");
    let _agent = start_agent(&fleet, "small", &["--roles", "evaluator", "--cache-gib", "0.01"], []);
    let files = SpecFiles::create(fleet.path());
    files.enlarge_model();
    // Checkpoints of 3 MB each.
    let run = fleet.submit(&files.write_sft_spec(6, 1));
    let ended = fleet.await_success(&run, LIMIT);
    assert_eq!(ended["evals"].as_array().map(Vec::len), Some(6), "{ended:#}");
    let stored = directory_bytes(&fleet.path().join("store"));
    assert!(stored > CACHE_BYTES * 3 / 2, "the store has only {stored} bytes");
    let cached = directory_bytes(&fleet.path().join("small/cache/b3"));
    assert!(cached > 0 && cached <= CACHE_BYTES, "{cached} bytes in the cache");
}

#[test]
fn an_agent_without_peers_announces_no_exchange() {
    let server = S3Server::start().unwrap();
    let fleet = Fleet::start_with("trainer", &["--open", "--store", &server.url()], server.env());
    let _sharing = start_agent(&fleet, "sharing", &["--roles", "evaluator"], server.env());
    let alone = ["--roles", "evaluator", "--no-peers"];
    let _alone = start_agent(&fleet, "alone", &alone, server.env());
    let sharing = await_status(&fleet, "sharing", |_| true);
    assert!(sharing["exchange"].is_object(), "{sharing:#}");
    let alone = await_status(&fleet, "alone", |_| true);
    assert!(alone["exchange"].is_null(), "{alone:#}");
}

#[test]
fn the_log_has_the_size_limit_of_its_last_start() {
    let mut fleet = Fleet::start_with("verifier", &["--open", "--log-max-gib", "0.0625"], []);
    assert_eq!(RawLog::open(&fleet).size_limit(), 1 << 26);
    fleet.terminate();
    wait_until("the fleet is down", LIMIT, || fleet.exit_status());
    fleet.restart_with(&["--open", "--log-max-gib", "0.125"]);
    fleet.await_agents();
    assert_eq!(RawLog::open(&fleet).size_limit(), 1 << 27);
}
