//! Counts the instructions of fixed work with valgrind, so that a regression shows on a busy
//! machine too. `FLOTILLA_COUNT=1` rewrites `instructions.txt`.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

const TASKS: [&str; 5] = ["cores", "generate", "prepare", "train", "train-weighted"];

/// The allowed relative difference between runs and between compiler patch versions.
const TOLERANCE: f64 = 0.1;

fn count_instructions(valgrind: &Path, task: &str) -> u64 {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(valgrind);
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    command.arg(env!("CARGO_BIN_EXE_counts")).arg(task).env("TMPDIR", directory.path());
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{task}: {}\n{stderr}", output.status);
    let collected = stderr.lines().find_map(|line| line.split_once("Collected :"));
    collected.unwrap().1.trim().parse().unwrap()
}

/// The most that the weights of an objective may add to a step of training.
const WEIGHTED_MAX: f64 = 1.03;

#[test]
fn fixed_work_takes_no_more_instructions_than_before() {
    let Some(valgrind) = requirements::require_program("valgrind") else { return };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("instructions.txt");
    let counted: BTreeMap<&str, u64> =
        TASKS.into_iter().map(|task| (task, count_instructions(&valgrind, task))).collect();
    if std::env::var_os("FLOTILLA_COUNT").is_some() {
        let mut text = String::new();
        for (task, count) in &counted {
            writeln!(text, "{task} {count}").unwrap();
        }
        std::fs::write(&path, text).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let before: BTreeMap<&str, u64> = text
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(task, count)| (task, count.parse().unwrap()))
        .collect();
    let mut deviations = String::new();
    let step = |task: &str| counted[task] as f64 - counted["prepare"] as f64;
    let weighted = step("train-weighted") / step("train");
    println!("a training step with weights takes {weighted:.4} of one without");
    if weighted > WEIGHTED_MAX {
        writeln!(deviations, "weights take {weighted:.4} of a step without them").unwrap();
    }
    for (task, count) in &counted {
        let ratio = *count as f64 / before[task] as f64;
        println!("{task}: {count} instructions, {ratio:.3} of what they were");
        if (ratio - 1.0).abs() > TOLERANCE {
            writeln!(deviations, "{task} takes {ratio:.3} times its instructions").unwrap();
        }
    }
    assert!(
        deviations.is_empty(),
        "{deviations}if that is meant, write them anew: FLOTILLA_COUNT=1 cargo test"
    );
}
