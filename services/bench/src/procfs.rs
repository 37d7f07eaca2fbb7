//! Reads memory and CPU times of processes from procfs.

use std::{
    collections::BTreeSet,
    fs,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};

/// Interval between two scans of an agent's children.
const SCAN_INTERVAL: Duration = Duration::from_micros(500);

pub(super) fn read_status_bytes(pid: u32, field: &str) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kilobytes.with_context(|| format!("{path} has no {field}"))? * 1024)
}

/// Returns the CPU time that a process has used, in seconds.
pub(super) fn read_cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    // The process name may contain spaces: count fields after its closing parenthesis.
    let after = text.rsplit(')').next().unwrap_or_default();
    let ticks = after.split_whitespace().skip(11).take(2).map(str::parse::<f64>);
    let ticks = ticks.sum::<Result<f64, _>>().with_context(|| format!("{path} has no times"))?;
    #[expect(clippy::cast_precision_loss, reason = "a hundred, or a thousand")]
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    Ok(ticks / per_second)
}

/// Returns the CPU time that was used and that was available on all cores since boot, in seconds.
pub(super) fn read_machine_seconds() -> anyhow::Result<(f64, f64)> {
    let path = "/proc/stat";
    let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    let times = text.lines().next().unwrap_or_default().split_whitespace().skip(1);
    // The fields are user, nice, system, idle, iowait, irq, softirq and steal. Guest time is part
    // of user time.
    let times: Vec<f64> = times.take(8).filter_map(|time| time.parse().ok()).collect();
    let [.., idle, waiting, _, _, _] = times[..] else { bail!("{path} has no times") };
    #[expect(clippy::cast_precision_loss, reason = "a hundred, or a thousand")]
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    let all: f64 = times.iter().sum();
    Ok(((all - idle - waiting) / per_second, all / per_second))
}

pub(super) fn watch_next_worker(pid: u32, limit: Duration) -> JoinHandle<anyhow::Result<Instant>> {
    let before = read_children(pid);
    let began = Instant::now();
    std::thread::spawn(move || {
        while began.elapsed() < limit {
            let seen = read_children(pid);
            let at = Instant::now();
            if seen.difference(&before).any(|child| is_worker_process(*child)) {
                return Ok(at);
            }
            std::thread::sleep(SCAN_INTERVAL);
        }
        bail!("the agent started no worker within {limit:?}")
    })
}

fn read_children(pid: u32) -> BTreeSet<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of_thread = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children")).ok();
    threads
        .filter_map(of_thread)
        .flat_map(|text| {
            text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()
        })
        .collect()
}

fn is_worker_process(pid: u32) -> bool {
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    command.split(|byte| *byte == 0).nth(1) == Some(b"worker")
}
