//! Workers that go wrong in every way a worker can.

use std::{collections::BTreeSet, os::unix::fs::PermissionsExt, time::Duration};

use e2e::{Fate, Files, Fleet, Misbehaving, Process, Sampling, Undisturbed, until};

const LIMIT: Duration = Duration::from_secs(180);

const SAMPLING: Sampling = Sampling { prompts: 24, per_prompt: 4, max_new_tokens: 64, cycles: 2 };

fn the_same_with_workers_that(fates: &[Fate], seed: u64) {
    let undisturbed = Undisturbed::of(SAMPLING);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let misbehaving = Misbehaving::create(directory.path(), fates, seed);
    let agents = "trainer,generator=2,verifier,evaluator";
    let silence = ("FLOTILLA_WORKER_SILENCE".to_owned(), "4".to_owned());
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

/// Ends a generator's worker, and itself, when it is handed a certain prompt.
const POISONED: &str = r#"#!/bin/sh
case "$*" in *"worker generate"*) ;; *) exec "$@" ;; esac
while IFS= read -r line; do
    case "$line" in *POISON*) kill -9 0 ;; esac
    printf '%s\n' "$line"
done | "$@"
"#;

#[test]
fn a_prompt_that_kills_every_worker_is_set_aside_with_its_job_and_no_other() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let wrapper = directory.path().join("poisoned");
    std::fs::write(&wrapper, POISONED).expect("a script");
    std::fs::set_permissions(&wrapper, std::fs::Permissions::from_mode(0o755)).expect("its mode");
    let wrapper = ("FLOTILLA_WORKER_WRAPPER".to_owned(), wrapper.display().to_string());
    let fleet = Fleet::up_with("trainer,generator=2,verifier,evaluator", &[], [wrapper]);
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(5, 0));
    fleet.finish(&base, LIMIT);
    let sampling = Sampling { prompts: 64, per_prompt: 4, max_new_tokens: 24, cycles: 1 };
    let spec = files.raft(&base, sampling);
    let prompts = std::fs::read_to_string(files.path("prompts.jsonl")).expect("prompts");
    let poisoned = prompts.replace("\"prompt\":\"37+1=\"", "\"prompt\":\"POISON\"");
    assert_ne!(poisoned, prompts);
    std::fs::write(files.path("prompts.jsonl"), poisoned).expect("prompts");

    let run = fleet.submit(&spec);
    let ended = fleet.finish(&run, LIMIT);
    let said = ended["message"].as_str().unwrap_or_default();
    assert!(said.contains("samples were set aside"), "{ended:#}");
    let audit = fleet.json(&["audit", &run]).expect("a clean audit");
    let count = |key: &str| audit[key].as_u64().expect("a count");
    let aside = count("set_aside_samples");
    assert!(aside > 0 && aside <= 64, "one job: {audit:#}");
    assert_eq!(count("planned_samples"), count("accepted_samples") + aside, "{audit:#}");
    let last = |failure: &&serde_json::Value| failure["final"] == true;
    let failures = ended["failures"].as_array().expect("failures");
    let blamed: Vec<&str> =
        failures.iter().filter(last).filter_map(|failure| failure["id"].as_str()).collect();
    assert_eq!(blamed.len(), 1, "{failures:#?}");
}
