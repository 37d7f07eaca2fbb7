//! The kernel's counters and what they come to. A counter that went back (a core went offline
//! and took its share along) makes no rate.

use serde::Serialize;

use super::CpuNow;
use crate::files::{Files, number, text};

/// Processors a box may have.
const PACKAGES_MAX: usize = 8;

/// Everything that is counted since boot, at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Counters {
    pub(super) at_ms: u64,
    pub(super) cpu: Option<CpuTimes>,
    pub(super) tlb: Option<u64>,
    pub(super) stalls: Option<u64>,
    pub(super) scanned: Option<u64>,
    pub(super) swapped_in: Option<u64>,
    pub(super) swapped_out: Option<u64>,
    /// Energy of the processors' packages, where this user may read it.
    pub(super) package_uj: Option<u64>,
}

/// Ticks.
#[derive(Debug, Clone, Copy)]
pub(super) struct CpuTimes {
    total: u64,
    idle: u64,
    system: u64,
}

impl Counters {
    pub(super) fn read(files: &dyn Files, at_ms: u64) -> Self {
        let paging = text(files, "/proc/vmstat").unwrap_or_default();
        let sum = |prefix: &str| sum_of(&paging, prefix);
        Self {
            at_ms,
            cpu: cpu_times(&text(files, "/proc/stat").unwrap_or_default()),
            tlb: tlb(files),
            stalls: sum("allocstall"),
            scanned: sum("pgscan_direct "),
            swapped_in: sum("pswpin "),
            swapped_out: sum("pswpout "),
            package_uj: package_uj(files),
        }
    }
}

/// Of all lines whose name begins so; `None` where there are none.
fn sum_of(lines: &str, prefix: &str) -> Option<u64> {
    let values = lines.lines().filter(|line| line.starts_with(prefix));
    let values = values.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    values.reduce(u64::saturating_add)
}

/// `TLB:       9452       9671   TLB shootdowns`, a column a core.
pub(super) fn tlb(files: &dyn Files) -> Option<u64> {
    let interrupts = text(files, "/proc/interrupts")?;
    // It is one of the last.
    let line = interrupts.lines().rev().find_map(|line| line.trim_start().strip_prefix("TLB:"))?;
    let columns = line.split_whitespace().map_while(|column| column.parse::<u64>().ok());
    columns.reduce(u64::saturating_add)
}

/// user nice system idle iowait irq softirq steal …
fn cpu_times(stat: &str) -> Option<CpuTimes> {
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
    /// Cores that came or went leave no sane difference.
    pub(super) fn since(self, before: Self) -> Option<CpuNow> {
        let total = self.total.checked_sub(before.total).filter(|ticks| *ticks > 0)?;
        let idle = self.idle.checked_sub(before.idle).filter(|idle| *idle <= total)?;
        let system = self.system.checked_sub(before.system).filter(|system| *system <= total)?;
        let share = |ticks: u64| float(ticks) / float(total);
        Some(CpuNow { busy: share(total - idle), system: share(system) })
    }
}

/// `intel-rapl:0` and so on, by whoever made the processor; most kernels show it to root alone.
fn package_uj(files: &dyn Files) -> Option<u64> {
    let packages = (0..PACKAGES_MAX)
        .map_while(|n| number(files, &format!("/sys/class/powercap/intel-rapl:{n}/energy_uj")));
    packages.reduce(u64::saturating_add)
}

/// A second, from two readings so far apart.
pub(super) fn rate(before: u64, now: u64, gap_ms: u64) -> Option<f64> {
    let more = now.checked_sub(before)?;
    (gap_ms > 0).then(|| float(more) / seconds(gap_ms))
}

pub(super) fn seconds(ms: u64) -> f64 {
    float(ms) / 1000.0
}

#[expect(clippy::cast_precision_loss, reason = "rates need no sixteen digits")]
fn float(count: u64) -> f64 {
    count as f64
}

/// Bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct MemoryNow {
    pub total: Option<u64>,
    pub available: Option<u64>,
    pub swap_total: Option<u64>,
    pub swap_free: Option<u64>,
}

impl MemoryNow {
    pub(super) fn read(files: &dyn Files) -> Self {
        let info = text(files, "/proc/meminfo").unwrap_or_default();
        let bytes = |name: &str| sum_of(&info, name).map(|kib| kib.saturating_mul(1024));
        Self {
            total: bytes("MemTotal:"),
            available: bytes("MemAvailable:"),
            swap_total: bytes("SwapTotal:"),
            swap_free: bytes("SwapFree:"),
        }
    }
}

/// How long work waited for something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Pressure {
    /// Percent of the last ten seconds in which somebody waited.
    pub some_avg10: f64,
    /// Microseconds since boot in which somebody waited, …
    pub some_us: u64,
    /// … and in which everybody did.
    pub full_us: Option<u64>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Pressures {
    pub cpu: Option<Pressure>,
    pub io: Option<Pressure>,
    pub memory: Option<Pressure>,
}

impl Pressures {
    pub(super) fn read(files: &dyn Files) -> Self {
        let of = |what: &str| Pressure::parse(&text(files, &format!("/proc/pressure/{what}"))?);
        Self { cpu: of("cpu"), io: of("io"), memory: of("memory") }
    }
}

impl Pressure {
    /// `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, and the same of `full`.
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
