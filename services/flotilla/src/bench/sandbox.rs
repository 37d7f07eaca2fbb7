//! What containment costs: short programs in the sandbox beside the same without it, as many at
//! once as there are cores.

use std::{
    num::NonZero,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use ::sandbox::{Cell, How, Launch, Limits, Policy, Program, Sandbox};
use anyhow::{Context, bail};

use super::Figure;
use crate::output;

/// Each is measured both ways; the medians count.
const ROUNDS: usize = 11;
/// Of one round and one thread.
const PROGRAMS: u32 = 30;

/// The smallest of programs may take so much longer.
const ADDED_MS: f64 = 1.5;
/// Verification is to reach 0.9 of the programs alone.
const PYTHON_RATIO: f64 = 1.0 / 0.9;

const TRUE: [&str; 1] = ["/usr/bin/true"];
const PYTHON: [&str; 5] = ["/usr/bin/python3", "-I", "-B", "-c", "pass"];

/// Nothing on a box that cannot contain programs.
pub(super) fn measure() -> anyhow::Result<Vec<Figure>> {
    let program = std::env::current_exe().context("find this program")?;
    let arguments = ["worker", "cell"].map(Into::into).to_vec();
    let sandbox = match Sandbox::open(Launch { program, arguments }, Policy::default()) {
        Ok(sandbox) => sandbox,
        Err(unfit) => {
            output::say(&unfit.to_string());
            return Ok(Vec::new());
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let cells: Result<Vec<Cell>, _> = (0..threads).map(|_| sandbox.cell()).collect();
    let mut cells = cells?;
    let [bare, contained] = both(&mut cells, &TRUE)?;
    let how = format!("an empty program, {bare:.3} ms alone, a room for each, {threads} at once");
    let (name, limit) = ("sandbox", Some(ADDED_MS));
    let mut figures =
        vec![Figure { name, measured: contained - bare, unit: "ms more", limit, how }];
    if Path::new(PYTHON[0]).exists() {
        let [bare, contained] = both(&mut cells, &PYTHON)?;
        let how = format!("an empty Python program, {bare:.2} ms alone, likewise");
        let (name, limit) = ("sandboxed Python", Some(PYTHON_RATIO));
        figures.push(Figure { name, measured: contained / bare, unit: "times", limit, how });
    }
    Ok(figures)
}

/// Milliseconds of one thread's programs alone and contained, by turns, lest the box's other work
/// falls on one of them.
fn both(cells: &mut [Cell], argv: &[&str]) -> anyhow::Result<[f64; 2]> {
    let (mut bare, mut contained) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        bare.push(round(cells, |_| run_alone(argv))?);
        contained.push(round(cells, |cell| run_contained(cell, argv))?);
    }
    Ok([bare, contained].map(|mut times| {
        times.sort();
        times[ROUNDS / 2].as_secs_f64() * 1e3 / f64::from(PROGRAMS)
    }))
}

/// Each thread runs its programs one after another, beside its cell or in it.
fn round(
    cells: &mut [Cell],
    run: impl Fn(&mut Cell) -> anyhow::Result<()> + Sync,
) -> anyhow::Result<Duration> {
    let began = Instant::now();
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = cells
            .iter_mut()
            .map(|cell| scope.spawn(move || (0..PROGRAMS).try_for_each(|_| run(cell))))
            .collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(done) => done,
            Err(_) => bail!("a measuring thread ended"),
        })
    })?;
    Ok(began.elapsed())
}

fn run_alone(argv: &[&str]) -> anyhow::Result<()> {
    let output = Command::new(argv[0]).args(&argv[1..]).env_clear().output();
    let output = output.with_context(|| format!("start {}", argv[0]))?;
    if !output.status.success() {
        bail!("{} ended with {}", argv[0], output.status);
    }
    Ok(())
}

fn run_contained(cell: &mut Cell, argv: &[&str]) -> anyhow::Result<()> {
    let argv = argv.iter().map(|&part| part.to_owned()).collect();
    let program = Program { argv, ..Program::default() };
    let ended = cell.room(&[("file", "content")])?.run(&program, &Limits::default())?;
    if ended.how != How::Exited(0) {
        bail!("{} ended {:?}", program.argv[0], ended.how);
    }
    Ok(())
}
