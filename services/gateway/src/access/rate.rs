//! How often one may ask: a pure count of requests by who sends them, in bounded memory. Each
//! has so many at once and so many a second after that (the generic cell rate algorithm).

use std::{collections::HashMap, hash::Hash, time::Duration};

/// So many may come at once, and then one in every `interval`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rate {
    pub(crate) burst: u32,
    pub(crate) interval: Duration,
}

/// Times are since some fixed moment.
#[derive(Debug)]
pub(crate) struct Rates<K> {
    rate: Rate,
    /// When each will have been silent for long enough to have its whole burst again.
    full_at: HashMap<K, Duration>,
    entries_max: usize,
    /// Of all for whom there is no room.
    others_full_at: Duration,
}

impl<K: Eq + Hash> Rates<K> {
    pub(crate) fn new(rate: Rate, entries_max: usize) -> Self {
        Self { rate, full_at: HashMap::new(), entries_max, others_full_at: Duration::ZERO }
    }

    /// Counts a request.
    ///
    /// # Errors
    /// When it comes too soon: how long to wait.
    pub(crate) fn take(&mut self, who: K, now: Duration) -> Result<(), Duration> {
        if !self.full_at.contains_key(&who) && self.full_at.len() >= self.entries_max {
            // Those who have their whole burst are as good as unknown.
            self.full_at.retain(|_, full_at| *full_at > now);
        }
        if !self.full_at.contains_key(&who) && self.full_at.len() >= self.entries_max {
            return count(self.rate, &mut self.others_full_at, now);
        }
        count(self.rate, self.full_at.entry(who).or_default(), now)
    }
}

fn count(rate: Rate, full_at: &mut Duration, now: Duration) -> Result<(), Duration> {
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
    const RATE: Rate = Rate { burst: 3, interval: SECOND };

    #[test]
    fn a_burst_passes_and_then_one_an_interval() {
        let mut rates = Rates::new(RATE, 10);
        for _ in 0..3 {
            rates.take("a", SECOND).unwrap();
        }
        assert_eq!(rates.take("a", SECOND), Err(SECOND));
        rates.take("b", SECOND).unwrap();
        rates.take("a", 2 * SECOND).unwrap();
        assert_eq!(rates.take("a", 2 * SECOND + SECOND / 4), Err(SECOND * 3 / 4));
        for _ in 0..3 {
            rates.take("a", 60 * SECOND).unwrap();
        }
        assert!(rates.take("a", 60 * SECOND).is_err());
    }

    #[test]
    fn many_strangers_take_no_more_memory_and_share_one_rate() {
        let mut rates = Rates::new(RATE, 100);
        let passed = (0..10_000).filter(|who| rates.take(*who, SECOND).is_ok()).count();
        assert_eq!((passed, rates.full_at.len()), (103, 100));
        rates.take(20_000, 5 * SECOND).unwrap();
        assert_eq!(rates.full_at.len(), 1);
    }
}
