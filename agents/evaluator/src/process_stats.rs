//! The cost of this process and of the children it waited for; zero where a counter is missing.

use std::{fs, time::Instant};

use nix::sys::resource::{UsageWho, getrusage};
use wire::v1;

/// The counters at the start of a measurement.
pub(crate) struct ProcessMeter {
    started_at: Instant,
    shootdowns: u64,
}

impl ProcessMeter {
    pub(crate) fn start() -> Self {
        Self { started_at: Instant::now(), shootdowns: count_tlb_shootdowns() }
    }

    /// Returns wall time and shootdowns since the start of the measurement; CPU time, peak memory
    /// and page faults since the start of the process, with the children it waited for.
    pub(crate) fn read(&self) -> v1::eval::Process {
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // The name in parentheses may contain spaces, so fields are counted from its end.
        let fields: Vec<u64> = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .map(|field| field.parse().unwrap_or(0))
            .collect();
        let field = |number: usize| fields.get(number - 3).copied().unwrap_or(0);
        let ticks = rustix::param::clock_ticks_per_second().max(1);
        #[expect(clippy::cast_precision_loss, reason = "seconds of one process")]
        let cpu_s = (14..=17).map(field).sum::<u64>() as f64 / ticks as f64;
        v1::eval::Process {
            wall_s: self.started_at.elapsed().as_secs_f64(),
            cpu_s,
            peak_rss_bytes: largest_peak_rss(),
            minor_faults: field(10) + field(11),
            major_faults: field(12) + field(13),
            tlb_shootdowns: count_tlb_shootdowns().saturating_sub(self.shootdowns),
        }
    }
}

/// The peaks of this process and of a child do not add up, because they occur at different times.
fn largest_peak_rss() -> u64 {
    let children = getrusage(UsageWho::RUSAGE_CHILDREN).map_or(0, |usage| usage.max_rss());
    hardware::peak_memory_bytes().max(u64::try_from(children).unwrap_or(0) * 1024)
}

fn count_tlb_shootdowns() -> u64 {
    let interrupts = fs::read_to_string("/proc/interrupts").unwrap_or_default();
    let line = interrupts.lines().find_map(|line| line.trim_start().strip_prefix("TLB:"));
    line.map_or(0, |line| line.split_whitespace().map_while(|n| n.parse::<u64>().ok()).sum())
}
