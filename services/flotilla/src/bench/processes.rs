//! What procfs says of processes.

use std::{
    collections::BTreeSet,
    fs,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};

/// Between two looks at an agent's children.
const LOOK_EVERY: Duration = Duration::from_micros(500);

/// Bytes of one line of `/proc/<pid>/status`, such as `VmRSS`.
pub(super) fn status_bytes(pid: u32, field: &str) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kilobytes.with_context(|| format!("{path} has no {field}"))? * 1024)
}

/// What a process has had of the processors so far.
pub(super) fn cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    // Its name may hold blanks: what follows it is counted from the end of that.
    let after = text.rsplit(')').next().unwrap_or_default();
    let ticks = after.split_whitespace().skip(11).take(2).map(str::parse::<f64>);
    let ticks = ticks.sum::<Result<f64, _>>().with_context(|| format!("{path} has no times"))?;
    #[expect(clippy::cast_precision_loss, reason = "a hundred, or a thousand")]
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    Ok(ticks / per_second)
}

/// What all processors have done so far, whoever for, and what they could have, in seconds.
pub(super) fn machine_seconds() -> anyhow::Result<(f64, f64)> {
    let path = "/proc/stat";
    let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    let times = text.lines().next().unwrap_or_default().split_whitespace().skip(1);
    // User, nice, system, idle, waiting for a disk, interrupts (2), stolen; guests are in user.
    let times: Vec<f64> = times.take(8).filter_map(|time| time.parse().ok()).collect();
    let [.., idle, waiting, _, _, _] = times[..] else { bail!("{path} has no times") };
    #[expect(clippy::cast_precision_loss, reason = "a hundred, or a thousand")]
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    let all: f64 = times.iter().sum();
    Ok(((all - idle - waiting) / per_second, all / per_second))
}

/// Looks for a new worker of an agent, from now on, on a thread of its own. Yields when
/// it was first seen, running this program and no longer its parent's image.
pub(super) fn next_worker(pid: u32, limit: Duration) -> JoinHandle<anyhow::Result<Instant>> {
    let before = children(pid);
    let began = Instant::now();
    std::thread::spawn(move || {
        while began.elapsed() < limit {
            let seen = children(pid);
            let at = Instant::now();
            if seen.difference(&before).any(|child| is_worker(*child)) {
                return Ok(at);
            }
            std::thread::sleep(LOOK_EVERY);
        }
        bail!("the agent started no worker within {limit:?}")
    })
}

/// The children of each of a process's threads.
fn children(pid: u32) -> BTreeSet<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of_thread = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children")).ok();
    threads
        .filter_map(of_thread)
        .flat_map(|text| {
            text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()
        })
        .collect()
}

fn is_worker(pid: u32) -> bool {
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    command.split(|byte| *byte == 0).nth(1) == Some(b"worker")
}
