//! The `queue` section: when a run works that waits for its turn.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1;

use crate::field_checks::{FieldResult, check_range, ensure_field};

/// Largest priority, and the negative of the lowest.
const PRIORITY_MAX: i32 = 1000;

/// The times of the day that [`parse_minute`] reads.
const TIME_PATTERN: &str = r"^\s*([01]?[0-9]|2[0-3]):[0-5][0-9]\s*$";

/// A place in the queue of the run's pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(extend("dependentRequired" = { "from": ["until"], "until": ["from"] }))]
pub struct QueueSpec {
    /// Runs of a higher priority go first.
    #[schemars(range(min = -1000, max = 1000))]
    pub priority: i32,
    /// Beginning of the daily window in which the run may work, such as `22:00`.
    #[schemars(regex(pattern = TIME_PATTERN), example = "22:00")]
    pub from: Option<String>,
    /// End of the window. An end before the beginning is on the next day.
    #[schemars(regex(pattern = TIME_PATTERN), example = "07:00")]
    pub until: Option<String>,
}

impl QueueSpec {
    pub(crate) fn check_fields(&self) -> FieldResult {
        let high = f64::from(PRIORITY_MAX);
        check_range("queue.priority", f64::from(self.priority), -high, high)?;
        for (field, time) in [("queue.from", &self.from), ("queue.until", &self.until)] {
            let is_time = time.as_ref().is_none_or(|time| parse_minute(time).is_some());
            ensure_field(is_time, field, "must be a time of the day, such as \"22:00\"")?;
        }
        let both = self.from.is_some() == self.until.is_some();
        ensure_field(both, "queue", "needs both from and until, or neither")?;
        let differ = self.from.is_none() || self.from != self.until;
        ensure_field(differ, "queue.until", "must differ from queue.from")
    }

    /// Converts the section to its form in the `spec` fact.
    pub fn to_proto(&self) -> v1::spec::Queue {
        let minute = |time: &Option<String>| time.as_deref().and_then(parse_minute);
        v1::spec::Queue {
            priority: self.priority,
            from_minute: minute(&self.from),
            until_minute: minute(&self.until),
        }
    }
}

/// Returns the minute of the day of a time such as `7:30`; `None` for any other text.
fn parse_minute(time: &str) -> Option<u32> {
    let (hour, minute) = time.trim().split_once(':')?;
    let number = |digits: &str, length: std::ops::RangeInclusive<usize>| {
        let legal = length.contains(&digits.len()) && digits.bytes().all(|it| it.is_ascii_digit());
        legal.then(|| digits.parse::<u32>().ok()).flatten()
    };
    let (hour, minute) = (number(hour, 1..=2)?, number(minute, 2..=2)?);
    (hour < 24 && minute < 60).then_some(hour * 60 + minute)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_gives_a_priority_and_a_window() {
        let values = |text: &str| {
            let spec = serde_saphyr::from_str::<QueueSpec>(text).unwrap();
            spec.check_fields().map_err(|error| error.field)?;
            let v1::spec::Queue { priority, from_minute, until_minute } = spec.to_proto();
            Ok::<_, String>((priority, from_minute.zip(until_minute)))
        };
        assert_eq!(values("{}"), Ok((0, None)));
        assert_eq!(values("priority: -5"), Ok((-5, None)));
        let night = Ok((0, Some((1320, 450))));
        assert_eq!(values("{ from: \"22:00\", until: \"7:30\" }"), night);
        for (text, field) in [
            ("priority: 1001", "queue.priority"),
            ("{ from: \"22\", until: \"7:30\" }", "queue.from"),
            ("{ from: \"22:00\", until: \"24:00\" }", "queue.until"),
            ("{ from: \"22:00\", until: \"7:3\" }", "queue.until"),
            ("from: \"22:00\"", "queue"),
            ("{ from: \"22:00\", until: \"22:00\" }", "queue.until"),
        ] {
            assert_eq!(values(text), Err(field.to_owned()), "{text}");
        }
    }
}
