//! Verifying short Python programs, contained, against running them bare: the same programs, as
//! many at a time.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use serde_json::json;
use verifier::{Item, Kit, Once};
use wire::v1::{
    Verifier,
    verdicts::Outcome,
    verifier::{How, Python},
};

use super::Figure;
use crate::{cli::ToolArgs, commands::verify::kit, output};

const PROGRAMS: usize = 164;

/// Turns of each, one after the other; the best counts, as the machine may be busy.
const TURNS: usize = 5;

/// Nine tenths of what a bare loop does.
const LIMIT: f64 = 1.0 / 0.9;

/// `None` on a box that has no python, or cannot contain it; it is said why.
pub(super) fn measure() -> anyhow::Result<Option<Figure>> {
    let jobs = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    output::say(&format!("verify: {PROGRAMS} programs, {jobs} at a time, {TURNS} times …"));
    let (kit, contained) = kit(&ToolArgs { verifier_python: None }, Vec::new())?.tested();
    let python = kit.tools.0.get("python").and_then(|python| python.argv.first());
    let (layers, python) = match (contained, python) {
        (Ok(layers), Some(python)) => (layers, PathBuf::from(python)),
        (Ok(_), None) => return Ok(skipped("there is no python3 on PATH")),
        (Err(problem), _) => return Ok(skipped(&problem)),
    };
    let directory = tempfile::tempdir().context("create a scratch directory")?;
    let files = write_programs(directory.path())?;
    let (mut bare, mut contained) = (Duration::MAX, Duration::MAX);
    for turn in 0..TURNS {
        bare = bare.min(run_bare(&python, &files, jobs)?);
        contained = contained.min(verify(kit.clone(), turn, jobs)?);
    }
    let rate = |time: Duration| PROGRAMS as f64 / time.as_secs_f64();
    Ok(Some(Figure {
        name: "verify: time of bare python",
        measured: contained.as_secs_f64() / bare.as_secs_f64(),
        unit: "x",
        limit: Some(LIMIT),
        how: format!(
            "{:.0} programs a second contained, {:.0} bare; {layers}",
            rate(contained),
            rate(bare)
        ),
    }))
}

fn skipped(why: &str) -> Option<Figure> {
    output::say(&format!("verify: skipped: {why}"));
    None
}

/// A function of the size of HumanEval's; the number makes it another.
fn solution(number: usize) -> String {
    format!(
        "from typing import List\n\n\ndef pick(values: List[int]) -> List[int]:\n    \
         \"\"\"The values above {number}, sorted, without the ones that come twice.\"\"\"\n    \
         seen = set()\n    for value in values:\n        if value > {number}:\n            \
         seen.add(value)\n    return sorted(seen)\n"
    )
}

fn test(number: usize) -> String {
    let case = |n: usize| {
        let (low, high) = (number.saturating_sub(n), number + n + 1);
        format!("    assert candidate([{high}, {low}, {high}]) == [{high}]\n")
    };
    format!("def check(candidate):\n{}", (0..8).map(case).collect::<String>())
}

fn write_programs(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let write = |number| {
        let path = directory.join(format!("{number}.py"));
        let text = format!("{}\n\n{}\n\ncheck(pick)\n", solution(number), test(number));
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        Ok(path)
    };
    (0..PROGRAMS).map(write).collect()
}

/// As a shell would: `python FILE`, for each.
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

/// A new one each turn, that remembers nothing; its cells are started before the clock is.
fn verify(kit: Kit, turn: usize, jobs: usize) -> anyhow::Result<Duration> {
    let settings = Verifier { how: Some(How::Python(Python::default())) };
    let once = Once::new(settings, kit, jobs)?;
    let warm: Vec<Item> = (0..jobs).map(|n| item(PROGRAMS + turn * jobs + n)).collect();
    let items: Vec<Item> = (0..PROGRAMS).map(item).collect();
    once.judge(&warm);
    let began = Instant::now();
    let judged = once.judge(&items);
    let took = began.elapsed();
    match judged.iter().find(|one| one.verdict.outcome() != Outcome::Pass) {
        None => Ok(took),
        Some(one) => bail!("a program failed contained: {}", one.verdict.detail),
    }
}

fn item(number: usize) -> Item {
    let fields = json!({ "test": test(number), "entry_point": "pick" });
    Item {
        prompt_id: number.to_string(),
        index: 0,
        prompt: String::new(),
        completion: solution(number),
        answer: None,
        fields: fields.as_object().cloned().unwrap_or_default(),
    }
}
