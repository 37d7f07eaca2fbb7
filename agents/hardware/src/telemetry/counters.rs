//! The kernel's counters and their rates. A counter that decreased, for example because a core went
//! offline, has no rate.

use serde::Serialize;

use super::CpuUsage;
use crate::host_files::{HostFiles, read_number, read_text};

const PACKAGES_MAX: usize = 8;

/// All counters since boot, at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct KernelCounters {
    pub(super) at_ms: u64,
    pub(super) cpu: Option<CpuTimes>,
    pub(super) tlb: Option<u64>,
    pub(super) stalls: Option<u64>,
    pub(super) scanned: Option<u64>,
    pub(super) swapped_in: Option<u64>,
    pub(super) swapped_out: Option<u64>,
    /// The energy of the processor packages in microjoules, if this user may read it.
    pub(super) package_uj: Option<u64>,
}

/// In ticks.
#[derive(Debug, Clone, Copy)]
pub(super) struct CpuTimes {
    total: u64,
    idle: u64,
    system: u64,
}

impl KernelCounters {
    pub(super) fn read_counters(files: &dyn HostFiles, at_ms: u64) -> Self {
        let paging = read_text(files, "/proc/vmstat").unwrap_or_default();
        let sum = |prefix: &str| sum_lines(&paging, prefix);
        Self {
            at_ms,
            cpu: parse_cpu_times(&read_text(files, "/proc/stat").unwrap_or_default()),
            tlb: read_tlb_shootdowns(files),
            stalls: sum("allocstall"),
            scanned: sum("pgscan_direct "),
            swapped_in: sum("pswpin "),
            swapped_out: sum("pswpout "),
            package_uj: read_package_energy(files),
        }
    }
}

/// `None` if no line has this prefix.
fn sum_lines(lines: &str, prefix: &str) -> Option<u64> {
    let values = lines.lines().filter(|line| line.starts_with(prefix));
    let values = values.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    values.reduce(u64::saturating_add)
}

/// Reads the line `TLB:       9452       9671   TLB shootdowns`, which has a column for each core.
pub(super) fn read_tlb_shootdowns(files: &dyn HostFiles) -> Option<u64> {
    let interrupts = read_text(files, "/proc/interrupts")?;
    // The line is one of the last.
    let line = interrupts.lines().rev().find_map(|line| line.trim_start().strip_prefix("TLB:"))?;
    let columns = line.split_whitespace().map_while(|column| column.parse::<u64>().ok());
    columns.reduce(u64::saturating_add)
}

/// The columns are user, nice, system, idle, iowait, irq, softirq, steal, …
fn parse_cpu_times(stat: &str) -> Option<CpuTimes> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let columns: Vec<u64> =
        line.split_whitespace().take(8).map_while(|column| column.parse().ok()).collect();
    let [_, _, system, idle, iowait, irq, softirq, ..] = columns[..] else { return None };
    let add = u64::saturating_add;
    Some(CpuTimes {
        total: columns.iter().copied().fold(0, add),
        idle: add(idle, iowait),
        system: add(add(system, irq), softirq),
    })
}

impl CpuTimes {
    /// `None` if cores were added or removed in between.
    pub(super) fn usage_since(self, before: Self) -> Option<CpuUsage> {
        let total = self.total.checked_sub(before.total).filter(|ticks| *ticks > 0)?;
        let idle = self.idle.checked_sub(before.idle).filter(|idle| *idle <= total)?;
        let system = self.system.checked_sub(before.system).filter(|system| *system <= total)?;
        let share = |ticks: u64| to_float(ticks) / to_float(total);
        Some(CpuUsage { busy: share(total - idle), system: share(system) })
    }
}

/// Reads the energy of `intel-rapl:0` and following, which also exist for AMD processors; most
/// kernels allow only root to read it.
fn read_package_energy(files: &dyn HostFiles) -> Option<u64> {
    let packages = (0..PACKAGES_MAX).map_while(|n| {
        read_number(files, &format!("/sys/class/powercap/intel-rapl:{n}/energy_uj"))
    });
    packages.reduce(u64::saturating_add)
}

pub(super) fn rate_per_second(before: u64, now: u64, gap_ms: u64) -> Option<f64> {
    let more = now.checked_sub(before)?;
    (gap_ms > 0).then(|| to_float(more) / to_seconds(gap_ms))
}

pub(super) fn to_seconds(ms: u64) -> f64 {
    to_float(ms) / 1000.0
}

#[expect(clippy::cast_precision_loss, reason = "rates need no sixteen digits")]
fn to_float(count: u64) -> f64 {
    count as f64
}

/// The memory and swap, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    pub total: Option<u64>,
    pub available: Option<u64>,
    pub swap_total: Option<u64>,
    pub swap_free: Option<u64>,
}

impl MemoryUsage {
    pub(super) fn read_memory(files: &dyn HostFiles) -> Self {
        let info = read_text(files, "/proc/meminfo").unwrap_or_default();
        let bytes = |name: &str| sum_lines(&info, name).map(|kib| kib.saturating_mul(1024));
        Self {
            total: bytes("MemTotal:"),
            available: bytes("MemAvailable:"),
            swap_total: bytes("SwapTotal:"),
            swap_free: bytes("SwapFree:"),
        }
    }
}

/// The time for which work waited for a resource (PSI).
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct StallPressure {
    /// The percentage of the last ten seconds in which some task waited.
    pub some_avg10: f64,
    /// The microseconds since boot in which some task waited.
    pub some_us: u64,
    /// The microseconds since boot in which all tasks waited.
    pub full_us: Option<u64>,
}

/// The pressure on each resource.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct PressureStats {
    pub cpu: Option<StallPressure>,
    pub io: Option<StallPressure>,
    pub memory: Option<StallPressure>,
}

impl PressureStats {
    pub(super) fn read_pressures(files: &dyn HostFiles) -> Self {
        let of = |what: &str| {
            StallPressure::parse(&read_text(files, &format!("/proc/pressure/{what}"))?)
        };
        Self { cpu: of("cpu"), io: of("io"), memory: of("memory") }
    }
}

impl StallPressure {
    /// Parses `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, and the same for `full`.
    fn parse(text: &str) -> Option<Self> {
        let field = |kind: &str, name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
            line.split_whitespace().find_map(|word| word.strip_prefix(name))
        };
        let some_avg10: f64 = field("some ", "avg10=")?.parse().ok()?;
        (0.0..=100.0).contains(&some_avg10).then_some(())?;
        Some(Self {
            some_avg10,
            some_us: field("some ", "total=")?.parse().ok()?,
            full_us: field("full ", "total=").and_then(|total| total.parse().ok()),
        })
    }
}
