//! Measures the verifier on short Python programs in the sandbox, against the same programs without
//! it.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use cli::output;
use sandbox::CellLaunch;
use serde_json::json;
use verifier::{OfflineVerifier, OwnerGrants, Toolchain, VerifierTools, VerifyItem};
use wire::v1::{
    Verifier,
    verdicts::Outcome,
    verifier::{How, Python},
};

use super::BenchFigure;
use crate::flotilla_program::find_flotilla;

/// Programs of a round, as many as in HumanEval.
const PROGRAMS: usize = 164;

/// Rounds of each method, which alternate; the best one counts, because the machine may be busy.
const TURNS: usize = 5;

/// Accepted time relative to a bare loop: nine tenths of its throughput.
const LIMIT: f64 = 1.0 / 0.9;

/// Measures the verifier. Returns `None` on a host without Python or without a sandbox, and prints
/// the reason.
pub(super) fn measure_verifier() -> anyhow::Result<Option<BenchFigure>> {
    let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    output::print_message(&format!(
        "verify: {PROGRAMS} programs, {jobs} at a time, {TURNS} times …"
    ));
    let (toolchain, tested) = open_toolchain()?.test_host();
    let python = toolchain.tools.0.get("python").and_then(|python| python.argv.first());
    let (layers, python) = match (tested.contained, python) {
        (Ok(layers), Some(python)) => (layers, PathBuf::from(python)),
        (Ok(_), None) => return Ok(report_skip("there is no python3 on PATH")),
        (Err(problem), _) => return Ok(report_skip(&problem)),
    };
    let directory = tempfile::tempdir().context("create a scratch directory")?;
    let files = write_programs(directory.path())?;
    let (mut bare, mut contained) = (Duration::MAX, Duration::MAX);
    for turn in 0..TURNS {
        bare = bare.min(run_bare(&python, &files, jobs)?);
        contained = contained.min(time_verifier(toolchain.clone(), turn, jobs)?);
    }
    let rate = |time: Duration| PROGRAMS as f64 / time.as_secs_f64();
    Ok(Some(BenchFigure {
        name: "verify: time of bare python",
        measured: contained.as_secs_f64() / bare.as_secs_f64(),
        unit: "x",
        limit: Some(LIMIT),
        how: format!(
            "{:.0} programs/s contained, {:.0} bare; {layers}",
            rate(contained),
            rate(bare)
        ),
    }))
}

pub(super) fn open_toolchain() -> anyhow::Result<Toolchain> {
    let program = find_flotilla()?;
    let launch_worker = |worker: &str| CellLaunch {
        program: program.clone(),
        arguments: ["worker", worker].map(Into::into).to_vec(),
    };
    Ok(Toolchain {
        tools: VerifierTools::detect_tools(None),
        cell_launch: launch_worker("cell"),
        masked_launch: launch_worker("masked"),
        hidden: Vec::new(),
        grants: OwnerGrants::default(),
        contains: true,
    })
}

/// Prints why the measurement is skipped, and returns `None`.
fn report_skip(why: &str) -> Option<BenchFigure> {
    output::print_message(&format!("verify: skipped: {why}"));
    None
}

fn make_solution(number: usize) -> String {
    format!(
        "from typing import List\n\n\ndef pick(values: List[int]) -> List[int]:\n    \
         \"\"\"The values above {number}, sorted, without the ones that come twice.\"\"\"\n    \
         seen = set()\n    for value in values:\n        if value > {number}:\n            \
         seen.add(value)\n    return sorted(seen)\n"
    )
}

fn make_test(number: usize) -> String {
    let case = |n: usize| {
        let (low, high) = (number.saturating_sub(n), number + n + 1);
        format!("    assert candidate([{high}, {low}, {high}]) == [{high}]\n")
    };
    format!("def check(candidate):\n{}", (0..8).map(case).collect::<String>())
}

fn write_programs(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let write = |number| {
        let path = directory.join(format!("{number}.py"));
        let text = format!("{}\n\n{}\n\ncheck(pick)\n", make_solution(number), make_test(number));
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        Ok(path)
    };
    (0..PROGRAMS).map(write).collect()
}

fn run_bare(python: &Path, files: &[PathBuf], jobs: usize) -> anyhow::Result<Duration> {
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let run = || {
        while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut command = Command::new(python);
            command.arg(file).stdin(Stdio::null()).stdout(Stdio::null());
            if !command.status().is_ok_and(|status| status.success()) {
                failed.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    let began = Instant::now();
    std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(run))));
    match failed.into_inner() {
        0 => Ok(began.elapsed()),
        failed => bail!("{failed} programs failed bare"),
    }
}

fn time_verifier(toolchain: Toolchain, turn: usize, jobs: usize) -> anyhow::Result<Duration> {
    let settings = Verifier { how: Some(How::Python(Python::default())) };
    let once = OfflineVerifier::new(settings, toolchain, jobs)?;
    let warm: Vec<VerifyItem> = (0..jobs).map(|n| make_item(PROGRAMS + turn * jobs + n)).collect();
    let items: Vec<VerifyItem> = (0..PROGRAMS).map(make_item).collect();
    once.judge_items(&warm);
    let began = Instant::now();
    let judged = once.judge_items(&items);
    let took = began.elapsed();
    match judged.iter().find(|one| one.verdict.outcome() != Outcome::Pass) {
        None => Ok(took),
        Some(one) => bail!("a program failed contained: {}", one.verdict.detail),
    }
}

fn make_item(number: usize) -> VerifyItem {
    let fields = json!({ "test": make_test(number), "entry_point": "pick" });
    VerifyItem {
        prompt_id: number.to_string(),
        index: 0,
        prompt: String::new(),
        completion: make_solution(number),
        answer: None,
        episode: None,
        fields: fields.as_object().cloned().unwrap_or_default(),
    }
}
