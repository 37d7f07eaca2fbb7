//! Simulates hundreds of seeds.

use std::{
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use sim::{Faults, Outcome, simulate, try_seed};

/// Seeds per test run. `make sim` tries more.
const SEEDS: u64 = 600;

/// The number of failed seeds that one run reports and saves.
const REPORTED_MAX: usize = 8;

/// One of this many seeds is simulated twice.
const REPEAT_EVERY: u64 = 16;

/// The least share of seeds whose runs all have the results of a simulation without faults. Trainings
/// on several boxes depend on faults: on which slices count.
const COMPARABLE_SHARE: f64 = 0.5;

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

/// Tries seeds on all cores. Returns the number of comparable seeds, and the errors by seed.
fn try_all(seeds: &[u64]) -> (usize, Vec<(u64, String)>) {
    let [next, comparable] = [0; 2].map(AtomicUsize::new);
    let failed = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match try_twice(*seed) {
                        Ok(outcome) => {
                            comparable.fetch_add(outcome.comparable.into(), Ordering::Relaxed);
                        }
                        Err(error) => {
                            failed.lock().expect("no thread has panicked").push((*seed, error));
                        }
                    }
                }
            });
        }
    });
    (comparable.into_inner(), failed.into_inner().expect("no thread has panicked"))
}

fn try_twice(seed: u64) -> Result<Outcome, String> {
    let outcome = try_seed(seed)?;
    if seed.is_multiple_of(REPEAT_EVERY) {
        let second = try_seed(seed)?;
        if (second.trace, second.steps) != (outcome.trace, outcome.steps) {
            return Err("the same seed went otherwise the second time".into());
        }
    }
    Ok(outcome)
}

#[test]
fn every_seed_has_the_results_of_a_run_without_faults() {
    let kept = std::fs::read_to_string(seeds_path()).unwrap_or_default();
    let kept = kept.lines().map(|line| line.parse().expect("a seed a line"));
    let seeds: Vec<u64> = kept.chain(1..=SEEDS).collect();
    let (comparable, failed) = try_all(&seeds);
    // A few reports are enough if all seeds fail.
    let reports: Vec<String> = failed
        .iter()
        .take(REPORTED_MAX)
        .map(|(seed, error)| format!("make sim SEED={seed}: {error}{}", save_seed(*seed)))
        .collect();
    assert!(failed.is_empty(), "{}", reports.join("\n"));
    #[expect(clippy::cast_precision_loss, reason = "hundreds of seeds")]
    let share = comparable as f64 / seeds.len() as f64;
    assert!(share >= COMPARABLE_SHARE, "the results of {share:.3} of all seeds were compared");
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
    assert!(
        occurs(|f| f.full_every > 0)
            && occurs(|f| f.damage_every > 0)
            && occurs(|f| f.loses_tail)
            && occurs(|f| f.skewed_clocks)
            && occurs(|f| f.unbatched)
            && occurs(|f| f.revokes)
            && occurs(|f| f.keep_cycles == Some(0))
            && occurs(|f| f.keep_cycles == Some(1))
    );
    let outcomes = (1..=40).map(|seed| simulate(seed, &Faults::from_seed(seed), false).unwrap());
    let kills: u64 = outcomes.map(|outcome| outcome.kills).sum();
    assert!(kills > 200, "{kills}");
}
