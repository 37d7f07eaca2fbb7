//! Workers that go wrong in every way a worker can.

use std::{collections::BTreeSet, time::Duration};

use e2e::{Fate, Fleet, Misbehaving, Process, Sampling, Undisturbed, until};

const LIMIT: Duration = Duration::from_secs(180);

const SAMPLING: Sampling = Sampling { prompts: 24, per_prompt: 4, max_new_tokens: 64, cycles: 2 };

fn the_same_with_workers_that(fates: &[Fate], seed: u64) {
    let undisturbed = Undisturbed::of(SAMPLING);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let misbehaving = Misbehaving::create(directory.path(), fates, seed);
    let agents = "trainer,generator=2,verifier,evaluator";
    let silence = ("FLOTILLA_WORKER_SILENCE".to_owned(), "8".to_owned());
    let mut fleet = Fleet::up_with(agents, &[], [misbehaving.env(), silence]);
    let spec = undisturbed.spec(&fleet, fleet.path());
    let run = fleet.submit(&spec);
    undisturbed.assert_same(&fleet, &run, LIMIT);
    let met = misbehaving.met();
    println!("workers met {met:?}");
    let met: BTreeSet<String> = met.into_iter().collect();
    assert_eq!(met, fates.iter().map(|fate| format!("{fate:?}")).collect());

    let family = fleet.processes();
    fleet.terminate();
    until("flotilla up ends", Duration::from_secs(15), || fleet.ended());
    let left = || family.iter().filter(|one| one.is_alive()).cloned().collect::<Vec<Process>>();
    until("no worker is left", Duration::from_secs(2), || left().is_empty().then_some(()));
}

#[test]
fn workers_that_die_eat_memory_or_talk_nonsense_cost_nothing_but_time() {
    use Fate::{Babbles, Deaf, EatsMemory, Exits, Floods, HalfALine};
    the_same_with_workers_that(&[Babbles, Deaf, EatsMemory, Exits, Floods, HalfALine], 1);
}

#[test]
fn a_worker_that_hangs_is_found_and_replaced() {
    the_same_with_workers_that(&[Fate::Hangs], 1);
}
