//! Disks that are full for some time.

use std::time::{Duration, Instant};

use e2e::{Fleet, FullDisk, ReferenceResults, Sampling, SmallDisk, journal, wait_until};

const LIMIT: Duration = Duration::from_secs(240);

/// Longer than an agent retries a job by itself.
const FULL: Duration = Duration::from_secs(15);

const SAMPLING: Sampling = Sampling { prompts: 96, per_prompt: 8, max_new_tokens: 320, cycles: 2 };

/// Starts a fleet whose disk below one of its directories is full, after a run has begun to sample.
/// Returns `None` if mounts are not permitted.
fn start_with_full_disk(
    below: &str,
    size: &str,
    reference: &ReferenceResults,
) -> Option<(Fleet, SmallDisk, String, FullDisk)> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let disk = SmallDisk::mount(directory.path().join(below), size)?;
    let fleet = Fleet::start_in(directory, "trainer,generator=2,verifier,evaluator", &[], []);
    let run = fleet.submit(&reference.write_spec(&fleet, fleet.path()));
    fleet.await_samples(&run, 32, LIMIT);
    let full = disk.fill();
    Some((fleet, disk, run, full))
}

/// Returns true if a log, an agent or the run names the full disk.
fn is_noticed(fleet: &Fleet, run: &str) -> bool {
    let texts = [
        fleet.log_tails(),
        fleet.run(&["agents", "list", "--json"]).stdout,
        fleet.run(&["run", "show", run, "--json"]).stdout,
    ];
    texts.iter().any(|text| text.to_lowercase().contains("no space left"))
}

/// Runs a fleet while the disk below one of its directories is full for some time. The run must
/// wait for space.
fn check_results_with_full_disk(below: &str, size: &str) {
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let Some((fleet, _disk, run, full)) = start_with_full_disk(below, size, &reference) else {
        return;
    };
    let filled = Instant::now();
    wait_until("the full disk is noticed", LIMIT, || is_noticed(&fleet, &run).then_some(()));
    println!("{below} full: noticed after {:.1} s", filled.elapsed().as_secs_f64());
    std::thread::sleep(FULL.saturating_sub(filled.elapsed()));
    assert!(fleet.ended_run(&run).is_none(), "the run ended although the disk was full");
    drop(full);
    let freed = Instant::now();
    reference.assert_same_results(&fleet, &run, LIMIT);
    println!(
        "{below} full for {:.1} s; the run ended {:.1} s after",
        filled.elapsed().as_secs_f64() - freed.elapsed().as_secs_f64(),
        freed.elapsed().as_secs_f64()
    );
}

#[test]
fn agents_work_on_while_their_own_disk_is_full() {
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let Some((fleet, _disk, run, full)) = start_with_full_disk("agents", "32M", &reference) else {
        return;
    };
    // Logs, journals of leases and histories of evals cannot be written.
    fleet.await_samples(&run, 64, LIMIT);
    assert_eq!(journal::count_restarts(fleet.path()), 0, "no agent died of it");
    drop(full);
    reference.assert_same_results(&fleet, &run, LIMIT);
}

#[test]
fn the_cache_recovers_from_a_full_disk() {
    check_results_with_full_disk("cache", "32M");
}

#[test]
fn the_bus_recovers_from_a_full_disk() {
    check_results_with_full_disk("nats", "64M");
}
