//! Disks that are full for a while.

use std::time::{Duration, Instant};

use e2e::{Fleet, Sampling, SmallDisk, Undisturbed};

const LIMIT: Duration = Duration::from_secs(240);

/// Longer than a job is tried again and again by itself.
const FULL: Duration = Duration::from_secs(15);

const SAMPLING: Sampling = Sampling { prompts: 96, per_prompt: 8, max_new_tokens: 320, cycles: 2 };

/// A run that meets a full disk below one of the fleet's directories.
fn the_same_when_full(below: &str, size: &str) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let Some(disk) = SmallDisk::mount(directory.path().join(below), size) else { return };
    let undisturbed = Undisturbed::of(SAMPLING);
    let agents = "trainer,generator=2,verifier,evaluator";
    let fleet = Fleet::up_in(directory, agents, &[], []);
    let run = fleet.submit(&undisturbed.spec(&fleet, fleet.path()));
    fleet.await_samples(&run, 32, LIMIT);
    disk.fill();
    std::thread::sleep(FULL);
    assert!(fleet.outcome(&run).is_none_or(|run| run["state"] == "SUCCEEDED"));
    disk.free();
    let freed = Instant::now();
    undisturbed.assert_same(&fleet, &run, LIMIT);
    println!(
        "{below} full for {FULL:?}; the run ended {:.1} s after",
        freed.elapsed().as_secs_f64()
    );
}

#[test]
fn agents_whose_disk_is_full_for_a_while_go_on_when_it_is_not() {
    the_same_when_full("agents", "32M");
}

#[test]
fn a_cache_whose_disk_is_full_for_a_while_is_filled_when_it_is_not() {
    the_same_when_full("cache", "32M");
}

#[test]
fn a_bus_whose_disk_is_full_for_a_while_goes_on_when_it_is_not() {
    the_same_when_full("nats", "64M");
}
