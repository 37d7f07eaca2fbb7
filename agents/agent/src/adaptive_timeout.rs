//! A silence timeout for workers that learns the worker's own reporting interval.

use std::time::{Duration, Instant};

/// With fewer known intervals the worker may still be starting.
const INTERVALS_MIN: u32 = 3;

/// A worker that is silent for this many times its longest interval is hung.
const TIMES_LONGEST: u32 = 20;

/// The silence timeout of one worker.
///
/// It starts at `first`. Once three intervals between messages are known, it is 20 times the
/// longest interval, clamped between `floor` and `first`.
///
/// ```text
/// first 1800 s, floor 60 s; messages at 900, 910, 920, 930 s -> timeout 200 s
/// ```
#[derive(Debug, Clone)]
pub struct AdaptiveTimeout {
    first: Duration,
    floor: Duration,
    last_message: Option<Instant>,
    intervals: u32,
    longest: Duration,
}

impl AdaptiveTimeout {
    /// Creates a timeout of `first`, which is also its upper bound; it never falls below `floor`.
    /// Equal bounds give a fixed timeout.
    pub fn new(first: Duration, floor: Duration) -> Self {
        Self { first, floor, last_message: None, intervals: 0, longest: Duration::ZERO }
    }

    /// Records that the worker sent a message at `now`.
    pub(crate) fn record_message(&mut self, now: Instant) {
        // The time before the first message is the start-up, not an interval.
        if let Some(before) = self.last_message.replace(now) {
            self.intervals = self.intervals.saturating_add(1);
            self.longest = self.longest.max(now.saturating_duration_since(before));
        }
    }

    /// Returns the time for which the worker may be silent now before it counts as hung.
    pub(crate) fn current_limit(&self) -> Duration {
        if self.intervals < INTERVALS_MIN {
            return self.first;
        }
        self.longest.saturating_mul(TIMES_LONGEST).max(self.floor).min(self.first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_secs(1800);
    const FLOOR: Duration = Duration::from_secs(60);

    fn limit(words: &[u64]) -> Duration {
        let (mut patience, start) = (AdaptiveTimeout::new(FIRST, FLOOR), Instant::now());
        for word in words {
            patience.record_message(start + Duration::from_secs(*word));
        }
        patience.current_limit()
    }

    #[test]
    fn before_there_is_a_rhythm_the_first_limit_holds() {
        assert_eq!(limit(&[]), FIRST);
        assert_eq!(limit(&[1700, 1701, 1702]), FIRST);
    }

    #[test]
    fn a_known_rhythm_is_overstayed_by_twenty_of_its_longest_intervals() {
        assert_eq!(limit(&[900, 910, 920, 930]), Duration::from_secs(200));
        assert_eq!(limit(&[900, 910, 940, 950, 951]), Duration::from_secs(600));
    }

    #[test]
    fn the_limit_is_never_below_the_floor_nor_above_the_first() {
        assert_eq!(limit(&[1, 1, 1, 1]), FLOOR);
        assert_eq!(limit(&[0, 500, 1000, 1500]), FIRST);
    }

    #[test]
    fn equal_bounds_are_a_fixed_limit() {
        let mut patience = AdaptiveTimeout::new(FLOOR, FLOOR);
        let start = Instant::now();
        for word in 0..9 {
            patience.record_message(start + Duration::from_secs(word * 50));
            assert_eq!(patience.current_limit(), FLOOR);
        }
    }
}
