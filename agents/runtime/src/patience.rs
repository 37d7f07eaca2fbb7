//! How long a worker may say nothing: a pure policy that learns the worker's own rhythm.

use std::time::{Duration, Instant};

/// Intervals that make a rhythm; before, anything may still be starting up.
const INTERVALS_MIN: u32 = 3;

/// A worker that takes so many times its longest interval so far is hung.
const TIMES_LONGEST: u32 = 20;

/// How much silence is borne.
#[derive(Debug, Clone)]
pub struct Patience {
    first: Duration,
    floor: Duration,
    heard_at: Option<Instant>,
    intervals: u32,
    longest: Duration,
}

impl Patience {
    /// At most `first`, and that for as long as there is no rhythm yet; never less than `floor`.
    pub fn new(first: Duration, floor: Duration) -> Self {
        Self { first, floor, heard_at: None, intervals: 0, longest: Duration::ZERO }
    }

    /// The worker said something.
    pub fn heard(&mut self, now: Instant) {
        // What came before the first word was the start, which says nothing of the rhythm.
        if let Some(before) = self.heard_at.replace(now) {
            self.intervals = self.intervals.saturating_add(1);
            self.longest = self.longest.max(now.saturating_duration_since(before));
        }
    }

    /// How long the next silence may last.
    pub fn limit(&self) -> Duration {
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

    /// The limit after words at these seconds.
    fn limit(words: &[u64]) -> Duration {
        let (mut patience, start) = (Patience::new(FIRST, FLOOR), Instant::now());
        for word in words {
            patience.heard(start + Duration::from_secs(*word));
        }
        patience.limit()
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
        let mut patience = Patience::new(FLOOR, FLOOR);
        let start = Instant::now();
        for word in 0..9 {
            patience.heard(start + Duration::from_secs(word * 50));
            assert_eq!(patience.limit(), FLOOR);
        }
    }
}
