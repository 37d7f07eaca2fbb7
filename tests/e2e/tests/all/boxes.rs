//! Agents report telemetry of their host, react to storms of TLB shootdowns, and yield to the
//! owner.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use e2e::{FakeBox, Fleet, Member, Process, Sampling, SpecFiles, wait_until};
use serde_json::Value;

use crate::raw_log::{QueueState, RawLog};

const LIMIT: Duration = Duration::from_secs(300);

/// Thresholds and durations below the defaults.
const QUICK: [&str; 6] = ["--storm-at", "200000:1", "--warn-at", "50000:2", "--calm-at", "10000:1"];

/// Starts an agent called `box` that reads its telemetry from `host`.
fn start_agent(fleet: &Fleet, host: &FakeBox, arguments: &[&str]) -> Member {
    let (nats, home) = (fleet.nats_url(), fleet.path().join("box").display().to_string());
    let fixed = ["agent", "--nats", &nats, "--name", "box", "--agent-dir", &home];
    let arguments = [&fixed[..], &QUICK, arguments].concat();
    let root = ("FLOTILLA_SYSROOT".to_owned(), host.root().display().to_string());
    let profile = ("FLOTILLA_PROFILE".to_owned(), "cpu".to_owned());
    Member::start("box", &[], &arguments, [root, profile], fleet.path())
}

/// Waits until the status of the agent matches, and returns it.
fn await_status(fleet: &Fleet, what: &str, matches: impl Fn(&Value) -> bool) -> Value {
    wait_until(what, LIMIT, || {
        let agents = fleet.run_json(&["agents", "list"]).ok()?;
        let mut agents = agents.as_array()?.iter();
        agents.find(|agent| agent["agent"] == "box" && matches(agent)).cloned()
    })
}

/// Waits for a checkpoint of a run after a step, and returns the step of the newest.
fn await_checkpoint(fleet: &Fleet, run: &str, after: u64) -> u64 {
    wait_until("it trains", LIMIT, || {
        let shown = fleet.run_json(&["run", "show", run]).ok()?;
        let newest = shown["checkpoints"].as_array()?.last()?["checkpoint"]["step"].as_u64()?;
        (newest > after).then_some(newest)
    })
}

/// Waits until a run trains on, and cancels it.
fn assert_trains_on(fleet: &Fleet, run: &str) {
    let newest = await_checkpoint(fleet, run, 0);
    await_checkpoint(fleet, run, newest);
    fleet.run(&["run", "cancel", run]).assert_success();
}

fn has_trouble(status: &Value, words: &str) -> bool {
    status["trouble"].as_str().is_some_and(|trouble| trouble.contains(words))
}

/// Sends a GET request to the metrics address.
fn http_get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: box\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn metrics_address(agent: &Member) -> String {
    wait_until("metrics are served", LIMIT, || {
        let log = std::fs::read_to_string(agent.log()).ok()?;
        let line = log.lines().find(|line| line.contains("metrics are served"))?;
        Some(line.split("address=").nth(1)?.split_whitespace().next()?.to_owned())
    })
}

#[test]
fn telemetry_is_reported_and_served_and_a_suspended_gpu_is_not_touched() {
    let fleet = Fleet::start_open("verifier");
    let host = FakeBox::create(fleet.path().join("root"));
    let agent = start_agent(&fleet, &host, &["--roles", "evaluator", "--metrics", "127.0.0.1:0"]);
    let address = metrics_address(&agent);
    let reported = await_status(&fleet, "its telemetry is reported", |agent| {
        agent["telemetry"]["tlbShootdownsPerS"].is_f64()
    });
    let gpus = &reported["telemetry"]["gpus"];
    assert_eq!((&gpus[0]["gfx"], &gpus[0]["busyPercent"]), (&"gfx1201".into(), &97.0.into()));
    assert_eq!((&gpus[1]["asleep"], &gpus[1]["busyPercent"]), (&true.into(), &Value::Null));
    assert_eq!(reported["telemetry"]["storm"]["level"], "CALM");
    let listed = fleet.run(&["agents", "list"]).stdout;
    assert!(listed.contains("GPU 97 % 71 °C 212 W, GPU asleep"), "{listed}");

    let served = wait_until("metrics contain the host", LIMIT, || {
        let served = http_get(&address, "/metrics");
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
    assert!(http_get(&address, "/").starts_with("HTTP/1.1 404"));
    let home = fleet.path().join("other").display().to_string();
    let other = ["agent", "--roles", "verifier", "--name", "other", "--agent-dir", &home];
    let taken = fleet.run(&[&other[..], &["--metrics", &address]].concat());
    taken.assert_refused(&["--metrics", &address]);
}

#[test]
fn an_eval_contains_its_shootdown_rates_and_names_a_storm() {
    let fleet = Fleet::start_open("trainer");
    let host = FakeBox::create(fleet.path().join("root"));
    let _agent = start_agent(&fleet, &host, &["--roles", "evaluator"]);
    let files = SpecFiles::create(fleet.path());
    let eval = |run: &str| fleet.await_success(run, LIMIT)["evals"][0]["shootdowns"].clone();
    await_status(&fleet, "it is ready", |agent| agent["telemetry"].is_object());
    let calm = eval(&fleet.submit(&files.write_sft_spec(5, 0)));
    assert!(
        calm["stormed"].is_null() && calm["meanPerS"].as_f64().unwrap_or(0.0) < 10_000.0,
        "{calm}"
    );

    host.set_shootdown_rate(400_000);
    let stormy = await_status(&fleet, "the storm is reported", |agent| {
        has_trouble(agent, "a storm of TLB shootdowns")
    });
    assert_eq!(stormy["telemetry"]["storm"]["level"], "STORM", "{stormy:#}");
    let storm = eval(&fleet.submit(&files.write_sft_spec(5, 0)));
    assert_eq!(storm["stormed"], true, "{storm}");
    let [mean, peak] = ["meanPerS", "peakPerS"].map(|name| storm[name].as_f64().unwrap());
    assert!(mean > 50_000.0 && peak >= mean, "{storm}");
    let history = fleet.run(&["eval", "history"]).stdout;
    assert!(history.contains("TLB shootdowns/s (peak)") && history.contains(" STORM"), "{history}");

    host.set_shootdown_rate(110);
    await_status(&fleet, "it is calm", |agent| agent["trouble"].is_null());
}

#[test]
fn an_owners_process_on_the_gpu_stops_new_jobs_but_not_the_current_one() {
    let fleet = Fleet::start_open("evaluator");
    let host = FakeBox::create(fleet.path().join("root"));
    let add_owner_process = || {
        host.write("/proc/4242/stat", "4242 (game) S 1 4242 4242 0 -1");
        host.write("/sys/class/kfd/kfd/proc/4242/vram_8716", "1073741824");
    };
    add_owner_process();
    let _agent = start_agent(&fleet, &host, &["--roles", "trainer", "--yield-to-owner"]);
    let files = SpecFiles::create(fleet.path());
    await_status(&fleet, "it yields", |agent| {
        agent["state"] == "DRAINING" && has_trouble(agent, "game (4242) uses the GPU")
    });
    let run = fleet.submit(&files.write_sft_spec(4000, 500));
    let log = RawLog::open(&fleet);
    wait_until("the order waits and nobody asks for it", LIMIT, || {
        let wanted = QueueState { pending: 1, waiting: 0, acknowledged: 0 };
        (log.queue_state("train-default")? == wanted).then_some(())
    });

    host.remove("/sys/class/kfd/kfd/proc/4242");
    await_checkpoint(&fleet, &run, 0);
    add_owner_process();
    await_status(&fleet, "it yields again", |agent| has_trouble(agent, "game (4242) uses the GPU"));
    fleet.await_success(&run, LIMIT);
}

/// Starts a training on the fake host, and then a storm.
fn start_training_in_storm(reaction: &str) -> (Fleet, FakeBox, Member, String) {
    let fleet = Fleet::start_open("evaluator");
    let host = FakeBox::create(fleet.path().join("root"));
    let agent = start_agent(&fleet, &host, &["--roles", "trainer", "--on-storm", reaction]);
    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(15_000, 1000));
    await_checkpoint(&fleet, &run, 0);
    host.set_shootdown_rate(400_000);
    (fleet, host, agent, run)
}

#[test]
fn a_storm_pauses_the_workers_until_it_is_over() {
    let (fleet, host, agent, run) = start_training_in_storm("pause");
    let is_stopped = |process: &Process| {
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", process.id)).unwrap_or_default();
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
    };
    wait_until("the worker is stopped", LIMIT, || {
        agent.processes().iter().any(is_stopped).then_some(())
    });
    host.set_shootdown_rate(110);
    wait_until("it continues", LIMIT, || (!agent.processes().iter().any(is_stopped)).then_some(()));
    assert_trains_on(&fleet, &run);
    let shown = fleet.run_json(&["run", "show", &run]).unwrap();
    assert_eq!(shown["failures"], Value::Null, "{shown:#}");
}

#[test]
fn a_storm_ends_the_workers_and_their_job_is_retried_later() {
    let (fleet, host, _agent, run) = start_training_in_storm("kill");
    let failure = wait_until("the failure is written", LIMIT, || {
        fleet.run_json(&["run", "show", &run]).ok()?["failures"].as_array()?.first().cloned()
    });
    let message = failure["message"].as_str().unwrap();
    assert!(message.contains("ended because of a storm of TLB shootdowns"), "{failure}");
    assert_eq!((&failure["cause"], &failure["agents"]), (&"SURROUNDINGS".into(), &Value::Null));
    host.set_shootdown_rate(110);
    assert_trains_on(&fleet, &run);
}

#[test]
fn a_training_is_ended_before_unified_memory_runs_out_and_retried_when_some_is_free() {
    let fleet = Fleet::start_open("evaluator");
    let host = FakeBox::create(fleet.path().join("root"));
    host.become_strix_halo();
    let _agent = start_agent(&fleet, &host, &["--roles", "trainer"]);
    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(15_000, 1000));
    await_checkpoint(&fleet, &run, 0);
    let set_available_memory = |kib: u64| {
        let text = format!("MemTotal: 131072000 kB\nMemAvailable: {kib} kB\n");
        host.write("/proc/meminfo", &text);
    };
    set_available_memory(2 << 20);
    let failure = wait_until("the failure is written", LIMIT, || {
        fleet.run_json(&["run", "show", &run]).ok()?["failures"].as_array()?.first().cloned()
    });
    let message = failure["message"].as_str().unwrap();
    assert!(message.contains("2.0 GiB of memory were free (--keep-free)"), "{failure}");
    assert_eq!(failure["final"], Value::Null, "{failure}");
    set_available_memory(64 << 20);
    assert_trains_on(&fleet, &run);
}

#[test]
fn the_energy_per_kept_sample_is_known_if_the_host_reports_its_power() {
    let fleet = Fleet::start_open("trainer,verifier,evaluator");
    let host = FakeBox::create(fleet.path().join("root"));
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(10, 0));
    fleet.await_success(&base, LIMIT);
    let _agent = start_agent(&fleet, &host, &["--roles", "generator"]);
    await_status(&fleet, "its telemetry is reported", |agent| agent["telemetry"]["watts"].is_f64());
    let sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 24, cycles: 1 };
    let run = fleet.submit(&files.write_raft_spec(&base, sampling));
    let ended = fleet.await_success(&run, LIMIT);
    let done = &ended["cyclesDone"][1];
    assert_eq!(done["metered"], 64, "{done:#}");
    let (joules, seconds) = (done["joules"].as_f64().unwrap(), done["generateS"].as_f64().unwrap());
    assert!(joules > 0.0 && joules < 212.0 * (seconds + 2.0), "{joules} J in {seconds} s");
    let shown = fleet.run(&["run", "show", &run]).stdout;
    assert!(shown.contains("J per kept sample"), "{shown}");
    fleet.assert_clean_audit(&run);
}
