//! Measures the cost of the sandbox: short programs inside and outside of it, on all cores at once.

use std::{
    num::NonZero,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use ::sandbox::{
    CellLaunch, PathVisibility, ProgramEnd, ProgramLimits, Sandbox, SandboxCell, SandboxProgram,
};
use anyhow::{Context, bail};
use cli::output;

use super::BenchFigure;
use crate::flotilla_program::find_flotilla;

/// Rounds of each method; the medians count.
const ROUNDS: usize = 11;
/// Programs of one round and one thread.
const PROGRAMS: u32 = 30;

/// Accepted extra time of the smallest program, in milliseconds.
const ADDED_MS: f64 = 1.5;
/// Accepted time of Python in the sandbox, relative to Python alone: 0.9 of the throughput.
const PYTHON_RATIO: f64 = 1.0 / 0.9;

/// The smallest program.
const TRUE: [&str; 1] = ["/usr/bin/true"];
/// An empty Python program.
const PYTHON: [&str; 5] = ["/usr/bin/python3", "-I", "-B", "-c", "pass"];

/// Returns no figures on a host that cannot run a sandbox, and prints the reason.
pub(super) fn measure_sandbox() -> anyhow::Result<Vec<BenchFigure>> {
    let program = find_flotilla()?;
    let arguments = ["worker", "cell"].map(Into::into).to_vec();
    let sandbox = match Sandbox::open(CellLaunch { program, arguments }, PathVisibility::default())
    {
        Ok(sandbox) => sandbox,
        Err(unfit) => {
            output::print_message(&unfit.to_string());
            return Ok(Vec::new());
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    let cells: Result<Vec<SandboxCell>, _> = (0..threads).map(|_| sandbox.start_cell()).collect();
    let mut cells = cells?;
    let [bare, contained] = time_both(&mut cells, &TRUE)?;
    let how = format!("an empty program, {bare:.3} ms alone, a room for each, {threads} at once");
    let (name, limit) = ("sandbox", Some(ADDED_MS));
    let mut figures =
        vec![BenchFigure { name, measured: contained - bare, unit: "ms more", limit, how }];
    if Path::new(PYTHON[0]).exists() {
        let [bare, contained] = time_both(&mut cells, &PYTHON)?;
        let how = format!("an empty Python program, {bare:.2} ms alone, likewise");
        let (name, limit) = ("sandboxed Python", Some(PYTHON_RATIO));
        figures.push(BenchFigure { name, measured: contained / bare, unit: "times", limit, how });
    }
    Ok(figures)
}

/// Returns the milliseconds per program alone and in the sandbox.
///
/// Rounds alternate, so that other load of the host affects both.
fn time_both(cells: &mut [SandboxCell], argv: &[&str]) -> anyhow::Result<[f64; 2]> {
    let (mut bare, mut contained) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        bare.push(time_round(cells, |_| run_alone(argv))?);
        contained.push(time_round(cells, |cell| run_contained(cell, argv))?);
    }
    Ok([bare, contained].map(|mut times| {
        times.sort();
        times[ROUNDS / 2].as_secs_f64() * 1e3 / f64::from(PROGRAMS)
    }))
}

fn time_round(
    cells: &mut [SandboxCell],
    run: impl Fn(&mut SandboxCell) -> anyhow::Result<()> + Sync,
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

fn run_contained(cell: &mut SandboxCell, argv: &[&str]) -> anyhow::Result<()> {
    let argv = argv.iter().map(|&part| part.to_owned()).collect();
    let program = SandboxProgram { argv, ..SandboxProgram::default() };
    let ended =
        cell.create_room(&[("file", "content")])?.run(&program, &ProgramLimits::default())?;
    if ended.how != ProgramEnd::Exited(0) {
        bail!("{} ended {:?}", program.argv[0], ended.how);
    }
    Ok(())
}
