//! Disks that are full for some time.

use std::time::{Duration, Instant};

use e2e::{Fleet, ReferenceResults, Sampling, SmallDisk};

const LIMIT: Duration = Duration::from_secs(240);

/// Longer than an agent retries a job by itself.
const FULL: Duration = Duration::from_secs(15);

const SAMPLING: Sampling = Sampling { prompts: 96, per_prompt: 8, max_new_tokens: 320, cycles: 2 };

/// Runs a fleet while the disk below one of its directories is full for some time.
fn check_results_with_full_disk(below: &str, size: &str) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let Some(disk) = SmallDisk::mount(directory.path().join(below), size) else { return };
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let agents = "trainer,generator=2,verifier,evaluator";
    let fleet = Fleet::start_in(directory, agents, &[], []);
    let run = fleet.submit(&reference.write_spec(&fleet, fleet.path()));
    fleet.await_samples(&run, 32, LIMIT);
    disk.fill();
    std::thread::sleep(FULL);
    assert!(fleet.ended_run(&run).is_none_or(|run| run["state"] == "SUCCEEDED"));
    disk.free_space();
    let freed = Instant::now();
    reference.assert_same_results(&fleet, &run, LIMIT);
    println!(
        "{below} full for {FULL:?}; the run ended {:.1} s after",
        freed.elapsed().as_secs_f64()
    );
}

#[test]
fn agents_recover_from_a_full_disk() {
    check_results_with_full_disk("agents", "32M");
}

#[test]
fn the_cache_recovers_from_a_full_disk() {
    check_results_with_full_disk("cache", "32M");
}

#[test]
fn the_bus_recovers_from_a_full_disk() {
    check_results_with_full_disk("nats", "64M");
}
