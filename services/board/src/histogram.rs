//! How many samples had which reward, whatever verifiers pay: the bins are as narrow as their
//! number allows.

use std::collections::BTreeMap;

use wire::v1;

const BINS_MAX: i64 = 33;
/// Narrower ones tell nobody anything: 1/32 of a verifier's 0 to 1.
const NARROWEST: f64 = 1.0 / 32.0;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Histogram {
    /// A power of two times the narrowest.
    width: f64,
    /// By the bin's place: it begins at place times width.
    counts: BTreeMap<i64, u32>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { width: NARROWEST, counts: BTreeMap::new() }
    }
}

impl Histogram {
    /// What is no number is left out.
    pub(crate) fn add(&mut self, reward: f64) {
        if !reward.is_finite() {
            return;
        }
        // Beyond, places could not be counted; nobody pays so much.
        let reward = reward.clamp(-1e12, 1e12);
        loop {
            let place = self.place(reward);
            let ends = (self.counts.first_key_value(), self.counts.last_key_value());
            let (first, last) = match ends {
                (Some((first, _)), Some((last, _))) => (place.min(*first), place.max(*last)),
                _ => (place, place),
            };
            if last - first < BINS_MAX {
                *self.counts.entry(place).or_default() += 1;
                return;
            }
            self.widen();
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most 1e12 by the narrowest")]
    fn place(&self, reward: f64) -> i64 {
        (reward / self.width).floor() as i64
    }

    fn widen(&mut self) {
        self.width *= 2.0;
        let narrow = std::mem::take(&mut self.counts);
        for (place, count) in narrow {
            *self.counts.entry(place.div_euclid(2)).or_default() += count;
        }
    }

    /// `None` where there is nothing to show.
    pub(crate) fn shown(&self) -> Option<v1::board::Histogram> {
        let (first, _) = self.counts.first_key_value()?;
        let (last, _) = self.counts.last_key_value()?;
        let count = |place| self.counts.get(&place).copied().unwrap_or_default();
        #[expect(clippy::cast_precision_loss, reason = "at most 1e12 by the narrowest")]
        let low = *first as f64 * self.width;
        let counts = (*first..=*last).map(count).collect();
        Some(v1::board::Histogram { low, width: self.width, counts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(rewards: &[f64]) -> Histogram {
        let mut histogram = Histogram::default();
        rewards.iter().for_each(|reward| histogram.add(*reward));
        histogram
    }

    #[test]
    fn whole_passes_and_failures_stand_at_the_ends() {
        let shown = of(&[0.0, 1.0, 1.0, 0.5]).shown().unwrap();
        assert_eq!((shown.low, shown.width, shown.counts.len()), (0.0, 1.0 / 32.0, 33));
        assert_eq!((shown.counts[0], shown.counts[16], shown.counts[32]), (1, 1, 2));
    }

    #[test]
    fn bins_widen_and_lose_nothing_whatever_comes_first() {
        let mut rewards: Vec<f64> = (0..500).map(|n| f64::from(n) * 0.37 - 60.0).collect();
        let forward = of(&rewards);
        rewards.reverse();
        assert_eq!(forward, of(&rewards), "the order of facts shows nowhere");
        let shown = forward.shown().unwrap();
        assert!(shown.counts.len() <= 33);
        assert_eq!(shown.counts.iter().sum::<u32>(), 500);
        assert!(shown.low <= -60.0 && shown.low + shown.width > -60.0);
    }

    #[test]
    fn what_is_no_reward_is_not_counted_and_none_is_too_large() {
        assert_eq!(of(&[f64::NAN, f64::INFINITY]).shown(), None);
        let shown = of(&[-f64::MAX, f64::MAX, 0.0]).shown().unwrap();
        assert_eq!(shown.counts.iter().sum::<u32>(), 3);
    }
}
