//! `sim`: simulates one seed with its trace, or many seeds.

use std::{
    process::ExitCode,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use clap::Parser;
use sim::{Faults, simulate, try_seed};

/// Simulates fleets in trouble.
#[derive(Parser)]
struct Args {
    /// One seed, told step by step.
    #[arg(long)]
    seed: Option<u64>,
    /// Seeds from 1 to this.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    #[arg(long, default_value_t = 1)]
    first: u64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match args.seed {
        Some(seed) => simulate_one(seed),
        None => simulate_many(args.first, args.seeds),
    }
}

fn simulate_one(seed: u64) -> ExitCode {
    let faults = Faults::from_seed(seed);
    println!("seed {seed}: {faults:?}");
    let result = simulate(seed, &faults, true);
    match result.and_then(|_| try_seed(seed)) {
        Ok(outcome) => {
            println!("seed {seed} holds: {outcome:?}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("seed {seed} FAILS: {error}");
            ExitCode::FAILURE
        }
    }
}

fn simulate_many(first: u64, count: u64) -> ExitCode {
    let began = Instant::now();
    let next = AtomicU64::new(first);
    let [steps, kills, failed, comparable, damaged] = [0; 5].map(AtomicU64::new);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        return;
                    }
                    match try_seed(seed) {
                        Ok(outcome) => {
                            steps.fetch_add(outcome.steps, Ordering::Relaxed);
                            kills.fetch_add(outcome.kills, Ordering::Relaxed);
                            comparable.fetch_add(u64::from(outcome.comparable), Ordering::Relaxed);
                            damaged.fetch_add(u64::from(outcome.damaged), Ordering::Relaxed);
                        }
                        Err(error) => {
                            failed.fetch_add(1, Ordering::Relaxed);
                            println!("seed {seed} FAILS: {error}");
                        }
                    }
                }
            });
        }
    });
    let [steps, kills, failed, comparable, damaged] =
        [steps, kills, failed, comparable, damaged].map(AtomicU64::into_inner);
    println!(
        "{count} seeds, {steps} steps, {kills} kills, {failed} failed, {comparable} comparable \
         with a run without faults, {damaged} with a log that lost facts and shows it, {:.1} s",
        began.elapsed().as_secs_f64()
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
