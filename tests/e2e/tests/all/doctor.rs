//! `flotilla doctor`: its report, its exit code, and its captures.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::path::Path;

use e2e::{Output, run_flotilla};
use serde_json::Value;

fn doctor(arguments: &[&str]) -> Output {
    let environment = [("HOME".to_owned(), "/nonexistent".to_owned())];
    run_flotilla(&[&["doctor"], arguments].concat(), environment)
}

fn document(output: &Output) -> Value {
    serde_json::from_str(&output.stdout).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_capture_gives_the_same_findings_elsewhere() {
    let directory = tempfile::tempdir().unwrap();
    let capture = directory.path().join("box.tar.gz");
    let here = doctor(&["--json", "--capture", text(&capture)]);
    assert!(matches!(here.code, 0 | 3), "{}", here.stderr);
    let there = doctor(&["--json", "--from", text(&capture)]);
    let (here, there) = (document(&here), document(&there));
    assert_eq!(here["findings"], there["findings"]);
    assert_eq!(here["snapshot"]["kernel"], there["snapshot"]["kernel"]);
    let whole = std::fs::read(&capture).unwrap();
    std::fs::write(&capture, &whole[..whole.len() / 2]).unwrap();
    doctor(&["--from", text(&capture)]).assert_refused(&["box.tar.gz"]);
}

#[test]
fn a_base_that_is_no_checkpoint_of_the_fleet_is_an_error() {
    let fleet = e2e::Fleet::start_open("evaluator");
    let spec = fleet.path().join("spec.yaml");
    std::fs::write(&spec, "base: { checkpoint: none-1 }\nsft: { data: data.jsonl }\n").unwrap();
    std::fs::write(fleet.path().join("data.jsonl"), "{}\n").unwrap();
    let run = ["doctor", "--profile", "gfx1201", "--run", text(&spec)];
    fleet.run(&run).assert_refused(&["spec.yaml", "base.checkpoint", "none-1"]);
}

#[test]
fn a_training_that_would_save_no_checkpoint_is_a_named_failure() {
    let directory = tempfile::tempdir().unwrap();
    let arguments = directory.path().join("training_args.json");
    let settings = r#"{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8,
        "num_train_epochs": 3, "save_steps": 100, "hub_token": null}"#;
    std::fs::write(&arguments, settings).unwrap();
    let run = ["--profile", "gfx1201", "--run", text(&arguments), "--examples", "300"];
    let failed = doctor(&[&["--json"], &run[..]].concat());
    assert_eq!(failed.code, 3, "{}", failed.stderr);
    let findings = document(&failed)["findings"].clone();
    let lost = findings.as_array().unwrap().iter().find(|finding| finding["id"] == "C-60");
    assert_eq!(lost.unwrap()["severity"], "fail");
    let report = doctor(&run).stdout;
    assert!(report.contains("FAIL C-60: a checkpoint every 100 steps of 57"), "{report}");
    std::fs::write(&arguments, settings.replace("100", "19")).unwrap();
    let fine = doctor(&run);
    assert!(!fine.stdout.contains("C-60"), "{}", fine.stdout);
    std::fs::write(&arguments, settings.replace("100", "[100]")).unwrap();
    doctor(&run).assert_refused(&["training_args.json", "save_steps"]);
}

#[test]
fn a_box_without_a_gpu_has_nothing_to_fix_and_nothing_to_undo() {
    let home = tempfile::tempdir().unwrap();
    let state = home.path().join("state");
    let environment = [("HOME", home.path()), ("XDG_STATE_HOME", &state)];
    let environment = environment.map(|(name, path)| (name.to_owned(), path.display().to_string()));
    let fixed = run_flotilla(&["doctor", "--fix"], environment.clone());
    if Path::new("/sys/class/kfd").exists() {
        // A box with a GPU may have findings, and nothing is changed without a yes.
        assert!(matches!(fixed.code, 0 | 1), "{fixed:?}");
    } else {
        assert!(fixed.stdout.contains("nothing to fix"), "{fixed:?}");
    }
    let both = run_flotilla(&["doctor", "--fix", "--undo"], environment);
    assert_eq!(both.code, 2, "{both:?}");
}
