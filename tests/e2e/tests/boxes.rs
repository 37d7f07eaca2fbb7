//! Boxes that are watched: what they do is told, a storm is named, an owner comes first.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use e2e::{FakeBox, Files, Fleet, Member, Process, Sampling, until};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);

/// Quicker than by default.
const QUICK: [&str; 6] = ["--storm-at", "200000:1", "--warn-at", "50000:2", "--calm-at", "10000:1"];

/// An agent called `box` that takes `there` for its own box, but for what runs models.
fn agent(fleet: &Fleet, there: &FakeBox, arguments: &[&str]) -> Member {
    let (nats, home) = (fleet.nats(), fleet.path().join("box").display().to_string());
    let fixed = ["agent", "--nats", &nats, "--name", "box", "--agent-dir", &home];
    let arguments = [&fixed[..], &QUICK, arguments].concat();
    let root = ("FLOTILLA_SYSROOT".to_owned(), there.root().display().to_string());
    let profile = ("FLOTILLA_PROFILE".to_owned(), "cpu".to_owned());
    Member::start("box", &[], &arguments, [root, profile], fleet.path())
}

/// What the agent says of itself, once it is so.
fn status(fleet: &Fleet, what: &str, so: impl Fn(&Value) -> bool) -> Value {
    until(what, LIMIT, || {
        let agents = fleet.json(&["agents", "list"]).ok()?;
        let mut agents = agents.as_array()?.iter();
        agents.find(|agent| agent["agent"] == "box" && so(agent)).cloned()
    })
}

/// Waits for a run's first checkpoint.
fn trains(fleet: &Fleet, run: &str) {
    until("it trains", LIMIT, || {
        let shown = fleet.json(&["run", "show", run]).ok()?;
        shown["checkpoints"].as_array().map(|_| ())
    });
}

fn says(status: &Value, words: &str) -> bool {
    status["trouble"].as_str().is_some_and(|trouble| trouble.contains(words))
}

/// What the metrics' address answers.
fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: box\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn metrics_address(agent: &Member) -> String {
    until("metrics are served", LIMIT, || {
        let log = std::fs::read_to_string(agent.log()).ok()?;
        let line = log.lines().find(|line| line.contains("metrics are served"))?;
        Some(line.split("address=").nth(1)?.split_whitespace().next()?.to_owned())
    })
}

#[test]
fn what_a_box_does_is_told_and_served_and_a_sleeping_card_is_not_touched() {
    let fleet = Fleet::open("verifier");
    let there = FakeBox::create(fleet.path().join("root"));
    let agent = agent(&fleet, &there, &["--roles", "evaluator", "--metrics", "127.0.0.1:0"]);
    let address = metrics_address(&agent);
    let told =
        status(&fleet, "it is told", |agent| agent["telemetry"]["tlbShootdownsPerS"].is_f64());
    let gpus = &told["telemetry"]["gpus"];
    assert_eq!((&gpus[0]["gfx"], &gpus[0]["busyPercent"]), (&"gfx1201".into(), &97.0.into()));
    assert_eq!((&gpus[1]["asleep"], &gpus[1]["busyPercent"]), (&true.into(), &Value::Null));
    assert_eq!(told["telemetry"]["storm"]["level"], "CALM");
    let listed = fleet.run(&["agents", "list"]).stdout;
    assert!(listed.contains("GPU 97 % 71 °C 212 W, GPU asleep"), "{listed}");

    let served = until("metrics have the box", LIMIT, || {
        let served = get(&address, "/metrics");
        served.contains("node_drm_gpu_busy_percent{card=\"card1\"} 97.0").then_some(served)
    });
    assert!(served.starts_with("HTTP/1.1 200 OK\r\n"), "{served}");
    assert!(served.contains("content-type: application/openmetrics-text"), "{served}");
    for line in [
        "flotilla_agent_state{state=\"ready\"} 1.0",
        "flotilla_gpu_asleep{card=\"card2\"} 1.0",
        "node_memory_MemAvailable_bytes 16835588096.0",
        "flotilla_power_watts 212.0",
        "# EOF",
    ] {
        assert!(served.lines().any(|one| one == line), "no {line} in {served}");
    }
    assert!(get(&address, "/").starts_with("HTTP/1.1 404"));
    let home = fleet.path().join("other").display().to_string();
    let other = ["agent", "--roles", "verifier", "--name", "other", "--agent-dir", &home];
    let taken = fleet.run(&[&other[..], &["--metrics", &address]].concat());
    taken.refuses(&["--metrics", &address]);
}

#[test]
fn an_eval_in_a_storm_says_so_and_one_in_a_calm_carries_its_figures() {
    let fleet = Fleet::open("trainer");
    let there = FakeBox::create(fleet.path().join("root"));
    let _agent = agent(&fleet, &there, &["--roles", "evaluator"]);
    let files = Files::create(fleet.path());
    let eval = |run: &str| fleet.finish(run, LIMIT)["evals"][0]["shootdowns"].clone();
    status(&fleet, "it is there", |agent| agent["telemetry"].is_object());
    let calm = eval(&fleet.submit(&files.sft(5, 0)));
    assert!(
        calm["stormed"].is_null() && calm["meanPerS"].as_f64().unwrap_or(0.0) < 10_000.0,
        "{calm}"
    );

    there.shoot_down(400_000);
    let stormy =
        status(&fleet, "the storm is told", |agent| says(agent, "a storm of TLB shootdowns"));
    assert_eq!(stormy["telemetry"]["storm"]["level"], "STORM", "{stormy:#}");
    let storm = eval(&fleet.submit(&files.sft(5, 0)));
    assert_eq!(storm["stormed"], true, "{storm}");
    let [mean, peak] = ["meanPerS", "peakPerS"].map(|name| storm[name].as_f64().unwrap());
    assert!(mean > 50_000.0 && peak >= mean, "{storm}");
    let history = fleet.run(&["eval", "history"]).stdout;
    assert!(history.contains("TLB/s, peak") && history.contains(" STORM"), "{history}");

    there.shoot_down(110);
    status(&fleet, "it is calm", |agent| agent["trouble"].is_null());
}

#[test]
fn an_owner_s_process_on_the_card_keeps_new_work_away_and_not_what_is_held() {
    let fleet = Fleet::open("evaluator");
    let there = FakeBox::create(fleet.path().join("root"));
    let owner = || {
        there.write("/proc/4242/stat", "4242 (game) S 1 4242 4242 0 -1");
        there.write("/sys/class/kfd/kfd/proc/4242/vram_8716", "1073741824");
    };
    owner();
    let _agent = agent(&fleet, &there, &["--roles", "trainer", "--yield-to-owner"]);
    let files = Files::create(fleet.path());
    let resting = status(&fleet, "it rests", |agent| says(agent, "game (4242) uses the GPU"));
    assert_eq!(resting["state"], "DRAINING");
    let run = fleet.submit(&files.sft(4000, 500));
    std::thread::sleep(Duration::from_secs(2));
    let shown = fleet.json(&["run", "show", &run]).unwrap();
    assert_eq!(shown["checkpoints"], Value::Null, "{shown:#}");

    there.remove("/sys/class/kfd/kfd/proc/4242");
    trains(&fleet, &run);
    owner();
    status(&fleet, "it rests again", |agent| says(agent, "game (4242) uses the GPU"));
    fleet.finish(&run, LIMIT);
}

/// A training on the box, under way, and then a storm.
fn storm_over_training(reaction: &str) -> (Fleet, FakeBox, Member, String) {
    let fleet = Fleet::open("evaluator");
    let there = FakeBox::create(fleet.path().join("root"));
    let agent = agent(&fleet, &there, &["--roles", "trainer", "--on-storm", reaction]);
    let files = Files::create(fleet.path());
    let run = fleet.submit(&files.sft(15_000, 1000));
    trains(&fleet, &run);
    there.shoot_down(400_000);
    (fleet, there, agent, run)
}

#[test]
fn a_storm_pauses_the_workers_until_it_is_over() {
    let (fleet, there, agent, run) = storm_over_training("pause");
    let is_stopped = |process: &Process| {
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", process.id)).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    };
    until("the worker is stopped", LIMIT, || {
        agent.processes().iter().any(is_stopped).then_some(())
    });
    there.shoot_down(110);
    until("it goes on", LIMIT, || (!agent.processes().iter().any(is_stopped)).then_some(()));
    let ended = fleet.finish(&run, LIMIT);
    assert_eq!(ended["failures"], Value::Null, "{ended:#}");
}

#[test]
fn a_storm_ends_the_workers_and_their_job_is_done_later() {
    let (fleet, there, _agent, run) = storm_over_training("kill");
    let failure = until("the failure is written", LIMIT, || {
        fleet.json(&["run", "show", &run]).ok()?["failures"].as_array()?.first().cloned()
    });
    let message = failure["message"].as_str().unwrap();
    assert!(message.contains("ended because of a storm of TLB shootdowns"), "{failure}");
    assert_eq!((&failure["cause"], &failure["agents"]), (&"SURROUNDINGS".into(), &Value::Null));
    there.shoot_down(110);
    fleet.finish(&run, LIMIT);
}

#[test]
fn a_training_is_ended_before_unified_memory_runs_out_and_goes_on_when_there_is_some() {
    let fleet = Fleet::open("evaluator");
    let there = FakeBox::create(fleet.path().join("root"));
    there.become_strix_halo();
    let _agent = agent(&fleet, &there, &["--roles", "trainer"]);
    let files = Files::create(fleet.path());
    let run = fleet.submit(&files.sft(15_000, 1000));
    trains(&fleet, &run);
    let available = |kib: u64| {
        let text = format!("MemTotal: 131072000 kB\nMemAvailable: {kib} kB\n");
        there.write("/proc/meminfo", &text);
    };
    available(2 << 20);
    let failure = until("the failure is written", LIMIT, || {
        fleet.json(&["run", "show", &run]).ok()?["failures"].as_array()?.first().cloned()
    });
    let message = failure["message"].as_str().unwrap();
    assert!(message.contains("2.0 GiB of memory were free (--keep-free)"), "{failure}");
    assert_eq!(failure["final"], Value::Null, "{failure}");
    available(64 << 20);
    fleet.finish(&run, LIMIT);
}

#[test]
fn a_kept_sample_s_energy_is_known_where_the_box_tells_its_power() {
    let fleet = Fleet::open("trainer,verifier,evaluator");
    let there = FakeBox::create(fleet.path().join("root"));
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(10, 0));
    fleet.finish(&base, LIMIT);
    let _agent = agent(&fleet, &there, &["--roles", "generator"]);
    status(&fleet, "it is told", |agent| agent["telemetry"]["watts"].is_f64());
    let sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 24, cycles: 1 };
    let run = fleet.submit(&files.raft(&base, sampling));
    let ended = fleet.finish(&run, LIMIT);
    let done = &ended["cyclesDone"][1];
    assert_eq!(done["metered"], 64, "{done:#}");
    let (joules, seconds) = (done["joules"].as_f64().unwrap(), done["generateS"].as_f64().unwrap());
    assert!(joules > 0.0 && joules < 212.0 * (seconds + 2.0), "{joules} J in {seconds} s");
    let shown = fleet.run(&["run", "show", &run]).stdout;
    assert!(shown.contains("J per kept sample"), "{shown}");
    fleet.audit_clean(&run);
}
