//! A rate limiter: counts requests by sender with the generic cell rate algorithm (GCRA), in
//! bounded memory and without a clock. Each sender has a burst and then a steady rate.

use std::{collections::HashMap, hash::Hash, time::Duration};

/// A limit of `burst` requests at once and then one per `interval`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RateLimit {
    pub(crate) burst: u32,
    pub(crate) interval: Duration,
}

/// The request counters of all senders of type `K`. Times are durations since a fixed moment.
///
/// A sender beyond `entries_max` shares one counter with all others for which there is no entry.
/// Entries with their whole burst available are removed when space is needed.
#[derive(Debug)]
pub(crate) struct RateLimiter<K> {
    rate: RateLimit,
    /// The time at which each sender has its whole burst available again.
    full_at: HashMap<K, Duration>,
    entries_max: usize,
    /// Shared by all senders without an entry.
    others_full_at: Duration,
}

impl<K: Eq + Hash> RateLimiter<K> {
    pub(crate) fn new(rate: RateLimit, entries_max: usize) -> Self {
        Self { rate, full_at: HashMap::new(), entries_max, others_full_at: Duration::ZERO }
    }

    /// Counts a request, or returns the time to wait if it exceeds the limit.
    pub(crate) fn count_request(&mut self, who: K, now: Duration) -> Result<(), Duration> {
        if !self.full_at.contains_key(&who) && self.full_at.len() >= self.entries_max {
            // Senders with their whole burst available need no entry.
            self.full_at.retain(|_, full_at| *full_at > now);
        }
        if !self.full_at.contains_key(&who) && self.full_at.len() >= self.entries_max {
            return apply_limit(self.rate, &mut self.others_full_at, now);
        }
        apply_limit(self.rate, self.full_at.entry(who).or_default(), now)
    }
}

/// Advances one counter, or returns the time to wait if the burst is used up.
fn apply_limit(rate: RateLimit, full_at: &mut Duration, now: Duration) -> Result<(), Duration> {
    let next = (*full_at).max(now) + rate.interval;
    let earliest = next.saturating_sub(rate.interval * rate.burst);
    if earliest > now {
        return Err(earliest - now);
    }
    *full_at = next;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const RATE: RateLimit = RateLimit { burst: 3, interval: SECOND };

    #[test]
    fn a_burst_passes_and_then_one_an_interval() {
        let mut rates = RateLimiter::new(RATE, 10);
        for _ in 0..3 {
            rates.count_request("a", SECOND).unwrap();
        }
        assert_eq!(rates.count_request("a", SECOND), Err(SECOND));
        rates.count_request("b", SECOND).unwrap();
        rates.count_request("a", 2 * SECOND).unwrap();
        assert_eq!(rates.count_request("a", 2 * SECOND + SECOND / 4), Err(SECOND * 3 / 4));
        for _ in 0..3 {
            rates.count_request("a", 60 * SECOND).unwrap();
        }
        assert!(rates.count_request("a", 60 * SECOND).is_err());
    }

    #[test]
    fn many_strangers_take_no_more_memory_and_share_one_rate() {
        let mut rates = RateLimiter::new(RATE, 100);
        let passed = (0..10_000).filter(|who| rates.count_request(*who, SECOND).is_ok()).count();
        assert_eq!((passed, rates.full_at.len()), (103, 100));
        rates.count_request(20_000, 5 * SECOND).unwrap();
        assert_eq!(rates.full_at.len(), 1);
    }
}
