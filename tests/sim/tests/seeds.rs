//! Thousands of worlds, and the mistakes they must find.

use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use sim::{Bug, Faults, simulate, try_faults, try_seed};

/// Of each run of the tests. `make sim` tries more.
const SEEDS: u64 = 5_000;

/// Of the seeds that fail in one go, so many are told and kept.
const KEPT_MAX: usize = 8;

/// Each of so many is played twice.
const TWICE_EVERY: u64 = 16;

/// A mistake must show in one of so many seeds.
const BUG_SEEDS: u64 = 300;

/// Seeds that failed once, one a line; they are tried first for ever.
fn kept_seeds() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds.txt")
}

fn keep(seed: u64) -> String {
    let path = kept_seeds();
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    if kept.lines().any(|line| line == seed.to_string()) {
        return String::new();
    }
    std::fs::write(&path, format!("{kept}{seed}\n")).expect("the seeds can be kept");
    format!("; kept in {}", path.display())
}

/// Tries seeds on all cores. What failed, by seed.
fn try_all(seeds: &[u64]) -> Vec<(u64, String)> {
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = try_twice(*seed) {
                        failed.lock().expect("nobody panicked with it").push((*seed, error));
                    }
                }
            });
        }
    });
    failed.into_inner().expect("as above")
}

fn try_twice(seed: u64) -> Result<(), String> {
    let outcome = try_seed(seed)?;
    if seed.is_multiple_of(TWICE_EVERY) {
        let again = try_seed(seed)?;
        if (again.trace, again.steps) != (outcome.trace, outcome.steps) {
            return Err("the same seed went otherwise the second time".into());
        }
    }
    Ok(())
}

#[test]
fn every_world_comes_to_the_end_of_an_undisturbed_one() {
    let kept = std::fs::read_to_string(kept_seeds()).unwrap_or_default();
    let kept = kept.lines().map(|line| line.parse().expect("a seed a line"));
    let seeds: Vec<u64> = kept.chain(1..=SEEDS).collect();
    let failed = try_all(&seeds);
    // When all fail, a few tell as much.
    let told: Vec<String> = failed
        .iter()
        .take(KEPT_MAX)
        .map(|(seed, error)| format!("make sim SEED={seed}: {error}{}", keep(*seed)))
        .collect();
    assert!(failed.is_empty(), "{}", told.join("\n"));
}

#[test]
fn each_kind_of_trouble_is_met() {
    let faults: Vec<Faults> = (1..=200).map(Faults::of).collect();
    let met = |meets: fn(&Faults) -> bool| faults.iter().filter(|one| meets(one)).count() > 5;
    assert!(met(|f| f.lost > 0) && met(|f| f.doubled > 0) && met(|f| f.late > 0));
    assert!(met(|f| f.crash_every > 0) && met(|f| f.freeze_every > 0) && met(|f| f.cut_every > 0));
    assert!(met(|f| f.server_every > 0) && met(|f| f.store_every > 0));
    assert!(met(|f| f.pause_every > 0) && met(|f| f.cancel) && met(|f| f.dies > 0));
    assert!(
        met(|f| f.broken)
            && met(|f| f.stale)
            && met(|f| f.flaky)
            && met(|f| f.liar)
            && met(|f| f.slow)
            && met(|f| f.poison)
    );
    let outcomes = (1..=40).map(|seed| simulate(seed, &Faults::of(seed), false).unwrap());
    let kills: u64 = outcomes.map(|outcome| outcome.kills).sum();
    assert!(kills > 200, "{kills}");
}

#[test]
fn mistakes_are_found() {
    for bug in Bug::ALL {
        let found = (1..=BUG_SEEDS).find_map(|seed| {
            let faults = Faults { bug: Some(bug), ..Faults::of(seed) };
            try_faults(seed, &faults).err().map(|error| (seed, error))
        });
        let (seed, error) = found.unwrap_or_else(|| panic!("{bug:?} was never found"));
        println!("{bug:?} shows in seed {seed}: {error}");
    }
}
