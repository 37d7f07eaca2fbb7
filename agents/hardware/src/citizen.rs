//! A box belongs to somebody. Whether an agent may take work just now, by its owner's wishes and
//! what else goes on there; what it holds it finishes.

use std::{fmt, str::FromStr};

use crate::files::{Files, text};
use crate::telemetry::Telemetry;

/// Once too hot, a box rests until it is so much cooler.
const COOLER_C: f64 = 5.0;

/// Once it takes too much power, until it takes so much less of it.
const LESS_POWER: f64 = 0.9;

/// A ceiling is reached when it is for so long, …
const ABOVE_MS: u64 = 10_000;

/// … and a rest for a ceiling's sake lasts at least so long.
const REST_MIN_MS: u64 = 60_000;

/// A GPU so busy while we hold no job works for somebody else, …
const BUSY_PERCENT: f64 = 50.0;

/// … once it was so in all readings for so long.
const BUSY_MS: u64 = 10_000;

/// Parents of a process that are looked at.
const ANCESTORS_MAX: usize = 16;

/// Processes that are looked at.
const PROCESSES_MAX: usize = 256;

/// What the owner wishes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Wishes {
    /// By the box's own clock.
    pub quiet: Vec<QuietHours>,
    /// Rest while somebody else uses a GPU.
    pub yield_to_owner: bool,
    pub max_celsius: Option<f64>,
    pub max_watts: Option<f64>,
}

/// From one minute of the day to another, over midnight if need be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuietHours {
    from: u16,
    to: u16,
}

#[derive(Debug, thiserror::Error)]
#[error("{0:?} are no hours: write them as 22:00-07:00 (A101)")]
pub struct BadHours(String);

impl FromStr for QuietHours {
    type Err = BadHours;

    fn from_str(hours: &str) -> Result<Self, BadHours> {
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
        let (from, to) = parsed.ok_or_else(|| BadHours(hours.to_owned()))?;
        Ok(Self { from, to })
    }
}

impl QuietHours {
    fn holds(self, minute: u16) -> bool {
        if self.from < self.to {
            (self.from..self.to).contains(&minute)
        } else {
            minute >= self.from || minute < self.to
        }
    }
}

impl fmt::Display for QuietHours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to } = self;
        write!(f, "{:02}:{:02}-{:02}:{:02}", from / 60, from % 60, to / 60, to % 60)
    }
}

/// A process with a compute context on a GPU that is not Flotilla's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Foreign {
    pub pid: u32,
    pub name: String,
}

/// Who else computes on the GPUs: neither `own` nor below a program of that name. In a container
/// the driver's process numbers are not ours to look up; those are left out.
pub fn foreign(files: &dyn Files, own: &str) -> Vec<Foreign> {
    let pids = files.list("/sys/class/kfd/kfd/proc");
    let pids = pids.into_iter().filter_map(|name| name.parse::<u32>().ok());
    let found = pids.take(PROCESSES_MAX).filter_map(|pid| {
        let (name, mut parent) = process(files, pid)?;
        let mut ancestor = name.clone();
        for _ in 0..ANCESTORS_MAX {
            if ancestor == own {
                return None;
            }
            let Some((name, next)) = process(files, parent) else { break };
            (ancestor, parent) = (name, next);
        }
        Some(Foreign { pid, name })
    });
    found.collect()
}

/// Its name and its parent.
fn process(files: &dyn Files, pid: u32) -> Option<(String, u32)> {
    let stat = text(files, &format!("/proc/{pid}/stat"))?;
    // The name in parentheses may hold anything, parentheses too.
    let (open, close) = (stat.find('(')?, stat.rfind(')')?);
    let name = stat.get(open + 1..close)?.to_owned();
    let parent = stat.get(close + 1..)?.split_whitespace().nth(1)?.parse().ok()?;
    Some((name, parent))
}

/// What `foreign` must be told: this program's name as the kernel has it.
pub fn own_name(files: &dyn Files) -> String {
    let own = text(files, "/proc/self/comm").filter(|name| !name.is_empty());
    own.unwrap_or_else(|| "flotilla".into())
}

/// What a decision is made on.
#[derive(Debug, Clone, Copy)]
pub struct Look<'a> {
    pub now: &'a Telemetry,
    /// Of the box's day.
    pub minute: u16,
    pub foreign: &'a [Foreign],
    /// We hold no job.
    pub idle: bool,
}

/// Decides, look by look.
#[derive(Debug, Clone, Default)]
pub struct Citizen {
    wishes: Wishes,
    heat: Ceiling,
    power: Ceiling,
    /// Since when a GPU is busy though we hold nothing, and when that was last read.
    others: Option<(u64, u64)>,
}

impl Citizen {
    pub fn new(wishes: Wishes) -> Self {
        Self { wishes, ..Self::default() }
    }

    /// Why nothing new should be taken; `None` when there is no reason.
    pub fn consider(&mut self, look: &Look<'_>) -> Option<String> {
        let Telemetry { at_ms, watts, .. } = *look.now;
        let Wishes { max_celsius, max_watts, .. } = self.wishes;
        let hottest = look.now.hottest();
        let hot =
            max_celsius.is_some_and(|max| self.heat.hear(at_ms, hottest, max, max - COOLER_C));
        let thirsty =
            max_watts.is_some_and(|max| self.power.hear(at_ms, watts, max, max * LESS_POWER));
        let owner = if self.wishes.yield_to_owner { self.owner(look) } else { None };
        let quiet = self.wishes.quiet.iter().find(|hours| hours.holds(look.minute));
        let quiet = quiet.map(|hours| format!("quiet hours {hours}"));
        let ceiling = |reached: bool, now: Option<f64>, unit: &str, max: Option<f64>| {
            let max = max.filter(|_| reached)?;
            let now = now.map_or("unknown".to_owned(), |now| format!("{now:.0} {unit}"));
            Some(format!("{now}, and at most {max:.0} {unit} are wished for"))
        };
        let hot = ceiling(hot, hottest, "°C", max_celsius);
        let thirsty = ceiling(thirsty, watts, "W", max_watts);
        quiet.or(owner).or(hot).or(thirsty)
    }

    fn owner(&mut self, look: &Look<'_>) -> Option<String> {
        if let Some(first) = look.foreign.first() {
            return Some(format!("{} ({}) uses the GPU", first.name, first.pid));
        }
        if !look.idle {
            self.others = None;
        } else if look.now.sensors_at_ms == look.now.at_ms {
            let busy = look.now.gpu_busy().is_some_and(|busy| busy >= BUSY_PERCENT);
            let since = self.others.map_or(look.now.at_ms, |(since, _)| since);
            self.others = busy.then_some((since, look.now.at_ms));
        }
        let (since, last) = self.others?;
        (last.saturating_sub(since) >= BUSY_MS)
            .then(|| "the GPU is busy, and not with work of ours".to_owned())
    }
}

/// A limit with hysteresis in height and time.
#[derive(Debug, Clone, Copy, Default)]
struct Ceiling {
    above_since: Option<u64>,
    resting_since: Option<u64>,
}

impl Ceiling {
    /// Whether to rest. Without a reading it stays as it is.
    fn hear(&mut self, at_ms: u64, reading: Option<f64>, max: f64, low: f64) -> bool {
        let Some(reading) = reading else { return self.resting_since.is_some() };
        if let Some(since) = self.resting_since {
            if reading <= low && at_ms.saturating_sub(since) >= REST_MIN_MS {
                *self = Self::default();
            }
        } else if reading > max {
            let since = *self.above_since.get_or_insert(at_ms);
            if at_ms.saturating_sub(since) >= ABOVE_MS {
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
