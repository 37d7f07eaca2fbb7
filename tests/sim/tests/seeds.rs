//! Simulates thousands of seeds, and checks that deliberate bugs are found.

use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use sim::{Bug, Faults, simulate, try_faults, try_seed};

/// Seeds per test run. `make sim` tries more.
const SEEDS: u64 = 5_000;

/// The number of failed seeds that one run reports and saves.
const REPORTED_MAX: usize = 8;

/// One of this many seeds is simulated twice.
const REPEAT_EVERY: u64 = 16;

/// Each bug must be found within this many seeds.
const BUG_SEEDS: u64 = 300;

/// Seeds that once failed, one per line. Every run tries them first.
fn seeds_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds.txt")
}

fn save_seed(seed: u64) -> String {
    let path = seeds_path();
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    if kept.lines().any(|line| line == seed.to_string()) {
        return String::new();
    }
    std::fs::write(&path, format!("{kept}{seed}\n")).expect("the seeds can be kept");
    format!("; kept in {}", path.display())
}

/// Tries seeds on all cores and returns the errors by seed.
fn try_all(seeds: &[u64]) -> Vec<(u64, String)> {
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = try_twice(*seed) {
                        failed.lock().expect("no thread has panicked").push((*seed, error));
                    }
                }
            });
        }
    });
    failed.into_inner().expect("no thread has panicked")
}

fn try_twice(seed: u64) -> Result<(), String> {
    let outcome = try_seed(seed)?;
    if seed.is_multiple_of(REPEAT_EVERY) {
        let second = try_seed(seed)?;
        if (second.trace, second.steps) != (outcome.trace, outcome.steps) {
            return Err("the same seed went otherwise the second time".into());
        }
    }
    Ok(())
}

#[test]
fn every_seed_has_the_results_of_a_run_without_faults() {
    let kept = std::fs::read_to_string(seeds_path()).unwrap_or_default();
    let kept = kept.lines().map(|line| line.parse().expect("a seed a line"));
    let seeds: Vec<u64> = kept.chain(1..=SEEDS).collect();
    let failed = try_all(&seeds);
    // A few reports are enough if all seeds fail.
    let reports: Vec<String> = failed
        .iter()
        .take(REPORTED_MAX)
        .map(|(seed, error)| format!("make sim SEED={seed}: {error}{}", save_seed(*seed)))
        .collect();
    assert!(failed.is_empty(), "{}", reports.join("\n"));
}

#[test]
fn each_kind_of_fault_occurs() {
    let faults: Vec<Faults> = (1..=200).map(Faults::from_seed).collect();
    let occurs = |is_set: fn(&Faults) -> bool| faults.iter().filter(|one| is_set(one)).count() > 5;
    assert!(occurs(|f| f.lost > 0) && occurs(|f| f.duplicated > 0) && occurs(|f| f.late > 0));
    assert!(
        occurs(|f| f.crash_every > 0)
            && occurs(|f| f.freeze_every > 0)
            && occurs(|f| f.cut_every > 0)
    );
    assert!(occurs(|f| f.server_every > 0) && occurs(|f| f.store_every > 0));
    assert!(
        occurs(|f| f.pause_every > 0) && occurs(|f| f.cancel) && occurs(|f| f.death_permille > 0)
    );
    assert!(
        occurs(|f| f.broken)
            && occurs(|f| f.stale)
            && occurs(|f| f.flaky)
            && occurs(|f| f.liar)
            && occurs(|f| f.slow)
            && occurs(|f| f.poison)
    );
    let outcomes = (1..=40).map(|seed| simulate(seed, &Faults::from_seed(seed), false).unwrap());
    let kills: u64 = outcomes.map(|outcome| outcome.kills).sum();
    assert!(kills > 200, "{kills}");
}

#[test]
fn deliberate_bugs_are_found() {
    for bug in Bug::ALL {
        let found = (1..=BUG_SEEDS).find_map(|seed| {
            let faults = Faults { bug: Some(bug), ..Faults::from_seed(seed) };
            try_faults(seed, &faults).err().map(|error| (seed, error))
        });
        let (seed, error) = found.unwrap_or_else(|| panic!("{bug:?} was never found"));
        println!("{bug:?} shows in seed {seed}: {error}");
    }
}
