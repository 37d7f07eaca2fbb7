//! Plants mistakes in the cores and in the model, one at a time, and checks that the simulator
//! finds each.

use mistaken_sim::{Bug, Faults};

include!("../mistaken/mistakes.rs");

/// Each mistake must be found within this many seeds.
const SEEDS: u64 = 500;

/// Returns the first seed that fails, and its error.
fn find_failure(bug: Option<Bug>) -> Option<(u64, String)> {
    (1..=SEEDS).find_map(|seed| {
        let faults = Faults { bug, ..Faults::from_seed(seed) };
        mistaken_sim::try_faults(seed, &faults).err().map(|error| (seed, error))
    })
}

#[test]
fn each_mistake_in_a_core_is_found() {
    std::thread::scope(|scope| {
        for CoreMistake { name, file, right, wrong } in CORE_MISTAKES {
            scope.spawn(move || {
                mistaken_cycle::planted::plant_mistake(name);
                mistaken_agent_core::planted::plant_mistake(name);
                let (seed, error) = find_failure(None)
                    .unwrap_or_else(|| panic!("missed: {name}; {wrong} for {right} in {file}"));
                println!("{name}: seed {seed}: {error}");
            });
        }
    });
}

#[test]
fn each_bug_of_the_model_is_found() {
    for bug in Bug::ALL {
        let (seed, error) = find_failure(Some(bug)).unwrap_or_else(|| panic!("missed: {bug:?}"));
        println!("{bug:?}: seed {seed}: {error}");
    }
}

#[test]
fn the_cores_are_the_shipped_ones_without_a_mistake() {
    for seed in 1..=8 {
        let (planted, shipped) = (mistaken_sim::try_seed(seed), sim::try_seed(seed));
        assert_eq!(planted.map(|outcome| outcome.trace), shipped.map(|outcome| outcome.trace));
    }
}
