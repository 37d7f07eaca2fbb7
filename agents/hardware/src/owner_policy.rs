//! The owner's limits on a host: decides whether an agent may take new work. Jobs that the agent
//! already holds are finished in any case.

use std::{fmt, str::FromStr};

use crate::host_files::{HostFiles, read_text};
use crate::telemetry::HostTelemetry;

/// The distance below the temperature limit at which an overheated host may work again, in °C.
const HEAT_HYSTERESIS_C: f64 = 5.0;

/// The fraction of the power limit below which a host may work again.
const POWER_HYSTERESIS_FACTOR: f64 = 0.9;

/// The time for which a reading must exceed its limit.
const CEILING_HOLD_MS: u64 = 10_000;

/// The minimum time without new work after a limit was exceeded.
const REST_MIN_MS: u64 = 60_000;

/// The GPU load that counts as foreign work while the agent holds no job.
const FOREIGN_BUSY_PERCENT: f64 = 50.0;

/// The time for which all readings must show that load.
const FOREIGN_BUSY_MS: u64 = 10_000;

const ANCESTORS_MAX: usize = 16;

const PROCESSES_MAX: usize = 256;

/// The limits that the host's owner configured.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OwnerLimits {
    /// Times of the day without new work, by the host's own clock.
    pub quiet: Vec<QuietHours>,
    /// True if the agent takes no work while another program uses a GPU.
    pub yield_to_owner: bool,
    /// The limit of the hottest GPU sensor.
    pub max_celsius: Option<f64>,
    pub max_watts: Option<f64>,
}

/// A range of minutes of the day; it may span midnight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuietHours {
    from_minute: u16,
    to_minute: u16,
}

/// The error of an unreadable range of hours.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a range of hours; write it as 22:00-07:00 (A101)")]
pub struct QuietHoursError(String);

impl FromStr for QuietHours {
    type Err = QuietHoursError;

    fn from_str(hours: &str) -> Result<Self, QuietHoursError> {
        let minute = |time: &str| {
            let (hour, minute) = time.trim().split_once(':')?;
            let digits = |part: &str| part.len() == 2 && part.bytes().all(|b| b.is_ascii_digit());
            if !digits(hour) || !digits(minute) {
                return None;
            }
            let (hour, minute): (u16, u16) = (hour.parse().ok()?, minute.parse().ok()?);
            (hour < 24 && minute < 60).then_some(hour * 60 + minute)
        };
        let parsed =
            hours.split_once('-').and_then(|(from, to)| Some((minute(from)?, minute(to)?)));
        let parsed = parsed.filter(|(from, to)| from != to);
        let (from, to) = parsed.ok_or_else(|| QuietHoursError(hours.to_owned()))?;
        Ok(Self { from_minute: from, to_minute: to })
    }
}

impl QuietHours {
    fn contains_minute(self, minute: u16) -> bool {
        if self.from_minute < self.to_minute {
            (self.from_minute..self.to_minute).contains(&minute)
        } else {
            minute >= self.from_minute || minute < self.to_minute
        }
    }
}

impl fmt::Display for QuietHours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from_minute: from, to_minute: to } = self;
        write!(f, "{:02}:{:02}-{:02}:{:02}", from / 60, from % 60, to / 60, to % 60)
    }
}

/// A process of another program with a compute context on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignProcess {
    pub pid: u32,
    pub name: String,
}

/// Finds the processes of other programs on the GPUs: those that are neither called `own` nor have
/// an ancestor of that name. Process ids that cannot be resolved, as in a container, are omitted.
pub fn find_foreign_processes(files: &dyn HostFiles, own: &str) -> Vec<ForeignProcess> {
    let pids = files.list_names("/sys/class/kfd/kfd/proc");
    let pids = pids.into_iter().filter_map(|name| name.parse::<u32>().ok());
    let found = pids.take(PROCESSES_MAX).filter_map(|pid| {
        let (name, mut parent) = name_and_parent(files, pid)?;
        let mut ancestor = name.clone();
        for _ in 0..ANCESTORS_MAX {
            if ancestor == own {
                return None;
            }
            let Some((name, next)) = name_and_parent(files, parent) else { break };
            (ancestor, parent) = (name, next);
        }
        Some(ForeignProcess { pid, name })
    });
    found.collect()
}

fn name_and_parent(files: &dyn HostFiles, pid: u32) -> Option<(String, u32)> {
    let stat = read_text(files, &format!("/proc/{pid}/stat"))?;
    // The name in parentheses may contain any characters, including parentheses.
    let (open, close) = (stat.find('(')?, stat.rfind(')')?);
    let name = stat.get(open + 1..close)?.to_owned();
    let parent = stat.get(close + 1..)?.split_whitespace().nth(1)?.parse().ok()?;
    Some((name, parent))
}

/// Returns this program's name as the kernel reports it, for `find_foreign_processes`.
pub fn own_process_name(files: &dyn HostFiles) -> String {
    let own = read_text(files, "/proc/self/comm").filter(|name| !name.is_empty());
    own.unwrap_or_else(|| "flotilla".into())
}

/// The inputs of one decision.
#[derive(Debug, Clone, Copy)]
pub struct OwnerPolicyInput<'a> {
    pub telemetry: &'a HostTelemetry,
    /// The minute of the host's day.
    pub minute: u16,
    pub foreign_processes: &'a [ForeignProcess],
    /// True if the agent holds no job.
    pub idle: bool,
}

/// The policy that blocks new work for the owner's sake.
///
/// It is called with every telemetry sample and blocks new work, in this order of precedence,
///
/// 1. during quiet hours,
/// 2. while another process uses a GPU, or a GPU was at least 50 % busy for 10 s although the agent
///    holds no job,
/// 3. after the temperature limit was exceeded for 10 s,
/// 4. after the power limit was exceeded for 10 s.
///
/// A block of kind 3 or 4 lasts at least 60 s and until the reading is 5 °C, or 10 % of the power,
/// below the limit.
#[derive(Debug, Clone, Default)]
pub struct OwnerPolicy {
    limits: OwnerLimits,
    heat: SensorCeiling,
    power: SensorCeiling,
    /// The time since which a GPU is busy although the agent holds no job, and the time of the last
    /// reading.
    foreign_busy: Option<(u64, u64)>,
}

impl OwnerPolicy {
    /// Creates a policy that blocks nothing yet.
    pub fn new(limits: OwnerLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// Returns the reason why no new work may be taken, or `None`.
    pub fn blocked_reason(&mut self, input: &OwnerPolicyInput<'_>) -> Option<String> {
        let HostTelemetry { at_ms, watts, .. } = *input.telemetry;
        let OwnerLimits { max_celsius, max_watts, .. } = self.limits;
        let hottest = input.telemetry.max_celsius();
        let hot = max_celsius
            .is_some_and(|max| self.heat.update_rest(at_ms, hottest, max, max - HEAT_HYSTERESIS_C));
        let thirsty = max_watts.is_some_and(|max| {
            self.power.update_rest(at_ms, watts, max, max * POWER_HYSTERESIS_FACTOR)
        });
        let owner = if self.limits.yield_to_owner { self.foreign_use_reason(input) } else { None };
        let quiet = self.limits.quiet.iter().find(|hours| hours.contains_minute(input.minute));
        let quiet = quiet.map(|hours| format!("quiet hours {hours}"));
        let ceiling = |reached: bool, now: Option<f64>, unit: &str, max: Option<f64>| {
            let max = max.filter(|_| reached)?;
            let now = now.map_or("unknown".to_owned(), |now| format!("{now:.0} {unit}"));
            Some(format!("{now}, above the owner's limit of {max:.0} {unit}"))
        };
        let hot = ceiling(hot, hottest, "°C", max_celsius);
        let thirsty = ceiling(thirsty, watts, "W", max_watts);
        quiet.or(owner).or(hot).or(thirsty)
    }

    fn foreign_use_reason(&mut self, input: &OwnerPolicyInput<'_>) -> Option<String> {
        if let Some(first) = input.foreign_processes.first() {
            return Some(format!("{} ({}) uses the GPU", first.name, first.pid));
        }
        if !input.idle {
            self.foreign_busy = None;
        } else if input.telemetry.sensors_at_ms == input.telemetry.at_ms {
            let busy =
                input.telemetry.max_gpu_busy().is_some_and(|busy| busy >= FOREIGN_BUSY_PERCENT);
            let since = self.foreign_busy.map_or(input.telemetry.at_ms, |(since, _)| since);
            self.foreign_busy = busy.then_some((since, input.telemetry.at_ms));
        }
        let (since, last) = self.foreign_busy?;
        (last.saturating_sub(since) >= FOREIGN_BUSY_MS)
            .then(|| "the GPU is busy with other work".to_owned())
    }
}

/// A limit with hysteresis in value and time.
#[derive(Debug, Clone, Copy, Default)]
struct SensorCeiling {
    above_since: Option<u64>,
    resting_since: Option<u64>,
}

impl SensorCeiling {
    /// Returns true while work must rest. Without a reading the state does not change.
    fn update_rest(&mut self, at_ms: u64, reading: Option<f64>, max: f64, low: f64) -> bool {
        let Some(reading) = reading else { return self.resting_since.is_some() };
        if let Some(since) = self.resting_since {
            if reading <= low && at_ms.saturating_sub(since) >= REST_MIN_MS {
                *self = Self::default();
            }
        } else if reading > max {
            let since = *self.above_since.get_or_insert(at_ms);
            if at_ms.saturating_sub(since) >= CEILING_HOLD_MS {
                self.resting_since = Some(at_ms);
            }
        } else {
            self.above_since = None;
        }
        self.resting_since.is_some()
    }
}

#[cfg(test)]
mod tests;
