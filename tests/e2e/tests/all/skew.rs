//! Compatibility with the fleet of the previous version: its log is read and its unfinished run is
//! completed. `recordings/VERSION` contains the interrupted fleet's directory and the answers of
//! that version.
//!
//! Each release records itself: `cargo nextest run -p e2e --run-ignored only -E 'test(=record)'`
//! writes `recordings/VERSION`. The recording contains the name of the machine. Keep the recording
//! of the previous version.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use async_nats::jetstream;
use e2e::{Fleet, Sampling, SpecFiles, wait_until};
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(180);
const PREVIOUS: &str = "0.2.0";
const AGENTS: &str = "trainer,generator=2,verifier,evaluator";
/// Runs of the recording that have ended and are archived.
const DONE: [&str; 3] = ["base-1", "raft-1", "doomed-1"];
const CUT: &str = "raft-2";
const RECORDING_BYTES_MAX: u64 = 500 << 10;

fn recordings() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("recordings")
}

/// Questions about an ended run that every version answers.
fn questions(run: &str) -> [Vec<&str>; 3] {
    [vec!["run", "show", run], vec!["eval", "history", run], vec!["checkpoint", "list", run]]
}

/// Checks that `now` contains everything that is in `then`.
fn assert_includes(now: &Value, then: &Value, at: &str) {
    match (now, then) {
        (Value::Object(now), Value::Object(then)) => {
            for (key, then) in then {
                let now = now.get(key).unwrap_or_else(|| panic!("{at}.{key} is missing"));
                assert_includes(now, then, &format!("{at}.{key}"));
            }
        }
        (Value::Array(now), Value::Array(then)) => {
            assert_eq!(now.len(), then.len(), "{at}");
            for (index, (now, then)) in now.iter().zip(then).enumerate() {
                assert_includes(now, then, &format!("{at}[{index}]"));
            }
        }
        _ => assert_eq!(now, then, "{at}"),
    }
}

#[test]
fn the_log_of_the_previous_version_is_read_and_its_open_run_is_completed() {
    let directory = tempfile::tempdir().unwrap();
    let recording = recordings().join(PREVIOUS);
    let packed = File::open(recording.join("fleet.tar.gz")).unwrap();
    tar::Archive::new(GzDecoder::new(packed)).unpack(directory.path()).unwrap();
    let then: Value =
        serde_json::from_slice(&fs::read(directory.path().join("answers.json")).unwrap()).unwrap();
    let fleet = Fleet::start_in(directory, AGENTS, &["--open", "--keep-cycles", "1"], []);

    let finished = fleet.await_success(CUT, LIMIT);
    assert_eq!(finished["cyclesDone"].as_array().unwrap().len(), 2, "{finished:#}");
    fleet.assert_clean_audit(CUT);
    let submitted = |facts: &[Value], kind: &str| {
        let of = |fact: &&Value| fact["subject"].as_str().unwrap().contains(kind);
        facts.iter().filter(of).count()
    };
    let facts = fleet.read_facts(CUT);
    assert_eq!(submitted(&facts, ".spec"), 1);
    assert!(submitted(&facts, ".checkpoint.") > 0);

    for run in DONE {
        for question in questions(run) {
            let now = fleet.run_json(&question).unwrap();
            assert_includes(&now, &then[question.join(" ")], &question.join(" "));
        }
        let audit = fleet.run(&["audit", run, "--deep"]);
        assert_eq!(audit.code, 0, "{audit:?}");
        let explained = fleet.run(&["run", "explain", run]);
        assert_eq!(explained.code, 0, "{explained:?}");
    }
    let listed = fleet.run_json(&["run", "list"]).unwrap();
    let state = |run: &str| {
        let runs = listed.as_array().unwrap().iter();
        runs.clone().find(|shown| shown["run"] == run).map(|shown| shown["state"].clone())
    };
    assert_eq!(state("doomed-1"), Some(json!("FAILED")), "{listed:#}");
    assert_eq!(state("raft-1"), Some(json!("SUCCEEDED")), "{listed:#}");
    assert_eq!(state("spared-1"), Some(json!("CANCELLED")), "{listed:#}");
    let exported = fleet.path().join("exported").display().to_string();
    let export = fleet.run(&["checkpoint", "export", "raft-1", "--out", &exported]);
    assert_eq!(export.code, 0, "{export:?}");
}

/// Writes `recordings/VERSION` with the current build.
#[test]
#[ignore = "writes the recording that later versions are tested with"]
fn record() {
    let version = env!("CARGO_PKG_VERSION");
    let mut fleet = Fleet::start_with(AGENTS, &["--open", "--keep-cycles", "1"], []);
    let files = SpecFiles::create(fleet.path());
    let sampling = Sampling { prompts: 8, per_prompt: 2, max_new_tokens: 24, cycles: 3 };
    let base = fleet.submit(&files.write_sft_spec(20, 10));
    fleet.await_success(&base, LIMIT);
    let run = fleet.submit(&files.write_raft_spec(&base, sampling));
    fleet.await_success(&run, LIMIT);
    let variant = |spec: PathBuf, name: &str, changes: &[(&str, &str)]| {
        let mut text = fs::read_to_string(spec).unwrap();
        for (from, to) in changes {
            assert!(text.contains(from), "{from}");
            text = text.replace(from, to);
        }
        let path = files.path(&format!("{name}.yaml"));
        fs::write(&path, text).unwrap();
        path
    };
    // No example fits, which fails on every host.
    let changes = [("name: base", "name: doomed"), ("max_tokens: 64", "max_tokens: 3")];
    let doomed = fleet.submit(&variant(files.write_sft_spec(20, 10), "doomed", &changes));
    fleet.await_state(&doomed, "FAILED", LIMIT);
    let changes = [
        ("name: base", "name: spared"),
        ("max_steps: 20", "max_steps: 100000"),
        ("save_every: 10", "save_every: 100000"),
    ];
    let spared = fleet.submit(&variant(files.write_sft_spec(20, 10), "spared", &changes));
    fleet.run(&["run", "pause", &spared]);
    fleet.run(&["run", "cancel", &spared, "--reason", "for a recording"]);
    wait_until("the cancelled run has ended", LIMIT, || fleet.ended_run(&spared));
    await_archives(&fleet);
    let answers: serde_json::Map<String, Value> = DONE
        .iter()
        .flat_map(|run| questions(run))
        .map(|question| (question.join(" "), fleet.run_json(&question).unwrap()))
        .collect();
    let heavy = Sampling { prompts: 96, per_prompt: 8, max_new_tokens: 160, cycles: 1 };
    let cut = fleet.submit(&files.write_raft_spec(&base, heavy));
    assert_eq!(cut, CUT);
    fleet.await_samples(&cut, 16, LIMIT);
    let facts = facts_of(&fleet.nats_url());
    assert!(fleet.ended_run(&cut).is_none(), "too fast to be cut off");
    fleet.terminate();
    wait_until("the fleet is down", LIMIT, || fleet.exit_status());

    let recording = recordings().join(version);
    fs::create_dir_all(&recording).unwrap();
    let lines: String = facts.iter().map(|fact| format!("{fact}\n")).collect();
    let create = |name: &str| {
        GzEncoder::new(File::create(recording.join(name)).unwrap(), Compression::best())
    };
    let mut packed = create("facts.jsonl.gz");
    packed.write_all(lines.as_bytes()).unwrap();
    packed.finish().unwrap();
    let mut tar = tar::Builder::new(create("fleet.tar.gz"));
    let text = serde_json::to_vec_pretty(&answers).unwrap();
    fs::write(fleet.path().join("answers.json"), text).unwrap();
    tar.append_path_with_name(fleet.path().join("answers.json"), "answers.json").unwrap();
    tar.append_dir_all("nats/store", fleet.path().join("nats/store")).unwrap();
    for part in ["blobs", "models", "runs"] {
        tar.append_dir_all(format!("store/{part}"), fleet.path().join("store").join(part)).unwrap();
    }
    tar.into_inner().unwrap().finish().unwrap().flush().unwrap();
    let sizes = fs::read_dir(&recording).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
    let bytes: u64 = sizes.map(|meta| meta.len()).sum();
    assert!(bytes < RECORDING_BYTES_MAX, "{bytes} bytes");
}

fn await_archives(fleet: &Fleet) {
    let nats = fleet.nats_url();
    wait_until("done cycles are archived", LIMIT, || {
        let facts = facts_of(&nats);
        facts.iter().any(|fact| fact["message"] == "Archived").then_some(())
    });
}

/// Returns every entry of the log with its sequence, time, subject and content.
fn facts_of(nats: &str) -> Vec<Value> {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let client = async_nats::connect(nats).await.unwrap();
        let stream = jetstream::new(client).get_stream("FLOTILLA").await.unwrap();
        let state = &stream.cached_info().state;
        let mut facts = Vec::new();
        for sequence in state.first_sequence..=state.last_sequence {
            let Ok(entry) = stream.get_raw_message(sequence).await else { continue };
            let headers: Vec<(String, String)> = entry
                .headers
                .iter()
                .flat_map(|(name, values)| {
                    values.iter().map(|value| (name.to_string(), value.to_string()))
                })
                .collect();
            let header = |wanted: &str| headers.iter().find(|(name, _)| name == wanted);
            let message = header("Flotilla-Type").map(|(_, value)| value.clone());
            facts.push(json!({
                "sequence": sequence,
                "time": entry.time.to_string(),
                "subject": entry.subject.as_str(),
                "message": message,
                "headers": headers,
                "fact": serde_json::from_slice::<Value>(&entry.payload).unwrap(),
            }));
        }
        facts
    })
}
