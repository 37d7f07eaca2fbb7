//! Workers that fail in many ways.

use std::{collections::BTreeSet, time::Duration};

use e2e::{
    FaultyWorkers, Fleet, Process, ReferenceResults, Sampling, SpecFiles, WorkerFault, wait_until,
    write_script,
};

const LIMIT: Duration = Duration::from_secs(180);

const SAMPLING: Sampling = Sampling { prompts: 24, per_prompt: 4, max_new_tokens: 64, cycles: 2 };

fn check_results_with_faulty_workers(faults: &[WorkerFault], seed: u64) {
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let faulty = FaultyWorkers::create(directory.path(), faults, seed);
    let agents = "trainer,generator=2,verifier,evaluator";
    let silence = ("FLOTILLA_WORKER_SILENCE".to_owned(), "4".to_owned());
    let mut fleet = Fleet::start_with(agents, &[], [faulty.env(), silence]);
    let spec = reference.write_spec(&fleet, fleet.path());
    let run = fleet.submit(&spec);
    reference.assert_same_results(&fleet, &run, LIMIT);
    let applied = faulty.applied();
    println!("workers met {applied:?}");
    let applied: BTreeSet<String> = applied.into_iter().collect();
    assert_eq!(applied, faults.iter().map(|fault| format!("{fault:?}")).collect());

    let processes = fleet.processes();
    fleet.terminate();
    wait_until("flotilla up ends", Duration::from_secs(15), || fleet.exit_status());
    let alive = || processes.iter().filter(|one| one.is_alive()).cloned().collect::<Vec<Process>>();
    wait_until("no worker remains", Duration::from_secs(2), || alive().is_empty().then_some(()));
}

#[test]
fn workers_that_die_eat_memory_or_write_garbage_cost_nothing_but_time() {
    use WorkerFault::{Babbles, Deaf, EatsMemory, Exits, Floods, HalfALine};
    check_results_with_faulty_workers(&[Babbles, Deaf, EatsMemory, Exits, Floods, HalfALine], 1);
}

#[test]
fn a_worker_that_hangs_is_found_and_replaced() {
    check_results_with_faulty_workers(&[WorkerFault::Hangs], 1);
}

/// Kills a generator's worker, and itself, at a certain prompt.
const POISONED: &str = r#"case "$*" in *"worker generate"*) ;; *) exec "$@" ;; esac
while IFS= read -r line; do
    case "$line" in *POISON*) kill -9 0 ;; esac
    printf '%s\n' "$line"
done | "$@""#;

#[test]
fn a_prompt_that_kills_every_worker_is_set_aside_with_its_job_and_no_other() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let wrapper = write_script(&directory.path().join("poisoned"), POISONED);
    let wrapper = ("FLOTILLA_WORKER_WRAPPER".to_owned(), wrapper);
    let fleet = Fleet::start_with("trainer,generator=2,verifier,evaluator", &[], [wrapper]);
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(5, 0));
    fleet.await_success(&base, LIMIT);
    let sampling = Sampling { prompts: 64, per_prompt: 4, max_new_tokens: 24, cycles: 1 };
    let spec = files.write_raft_spec(&base, sampling);
    let prompts = std::fs::read_to_string(files.path("prompts.jsonl")).expect("prompts");
    let poisoned = prompts.replace("\"prompt\":\"37+1=\"", "\"prompt\":\"POISON\"");
    assert_ne!(poisoned, prompts);
    std::fs::write(files.path("prompts.jsonl"), poisoned).expect("prompts");

    let run = fleet.submit(&spec);
    let ended = fleet.await_success(&run, LIMIT);
    let message = ended["message"].as_str().unwrap_or_default();
    assert!(message.contains("samples were set aside"), "{ended:#}");
    let audit = fleet.run_json(&["audit", &run]).expect("a clean audit");
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
