//! A histogram of rewards for verifiers with any range of rewards: bins are as narrow as their
//! maximum number allows.

use std::collections::BTreeMap;

use wire::v1;

const BINS_MAX: i64 = 33;
/// 1/32 of the usual range 0 to 1. Narrower bins carry no information.
const BIN_WIDTH_MIN: f64 = 1.0 / 32.0;

/// Counts of samples by reward. If a reward does not fit into 33 bins, all bins are doubled in
/// width.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RewardHistogram {
    /// The narrowest width times a power of two.
    width: f64,
    /// Samples by bin index; a bin begins at its index times the width.
    counts: BTreeMap<i64, u32>,
}

impl Default for RewardHistogram {
    fn default() -> Self {
        Self { width: BIN_WIDTH_MIN, counts: BTreeMap::new() }
    }
}

impl RewardHistogram {
    /// Ignores a reward that is not finite.
    pub(crate) fn add_reward(&mut self, reward: f64) {
        if !reward.is_finite() {
            return;
        }
        // Larger rewards do not occur; their bin index would overflow.
        let reward = reward.clamp(-1e12, 1e12);
        loop {
            let place = self.bin_index(reward);
            let ends = (self.counts.first_key_value(), self.counts.last_key_value());
            let (first, last) = match ends {
                (Some((first, _)), Some((last, _))) => (place.min(*first), place.max(*last)),
                _ => (place, place),
            };
            if last - first < BINS_MAX {
                *self.counts.entry(place).or_default() += 1;
                return;
            }
            self.double_width();
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most 1e12 by the narrowest")]
    fn bin_index(&self, reward: f64) -> i64 {
        (reward / self.width).floor() as i64
    }

    /// Merges the bins in pairs.
    fn double_width(&mut self) {
        self.width *= 2.0;
        let narrow = std::mem::take(&mut self.counts);
        for (place, count) in narrow {
            *self.counts.entry(place.div_euclid(2)).or_default() += count;
        }
    }

    /// Returns the bins from the first to the last used one, or `None` without rewards.
    pub(crate) fn to_proto(&self) -> Option<v1::board::Histogram> {
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

    fn of(rewards: &[f64]) -> RewardHistogram {
        let mut histogram = RewardHistogram::default();
        rewards.iter().for_each(|reward| histogram.add_reward(*reward));
        histogram
    }

    #[test]
    fn whole_passes_and_failures_stand_at_the_ends() {
        let shown = of(&[0.0, 1.0, 1.0, 0.5]).to_proto().unwrap();
        assert_eq!((shown.low, shown.width, shown.counts.len()), (0.0, 1.0 / 32.0, 33));
        assert_eq!((shown.counts[0], shown.counts[16], shown.counts[32]), (1, 1, 2));
    }

    #[test]
    fn bins_widen_and_lose_nothing_whatever_comes_first() {
        let mut rewards: Vec<f64> = (0..500).map(|n| f64::from(n) * 0.37 - 60.0).collect();
        let forward = of(&rewards);
        rewards.reverse();
        assert_eq!(forward, of(&rewards), "the order of facts shows nowhere");
        let shown = forward.to_proto().unwrap();
        assert!(shown.counts.len() <= 33);
        assert_eq!(shown.counts.iter().sum::<u32>(), 500);
        assert!(shown.low <= -60.0 && shown.low + shown.width > -60.0);
    }

    #[test]
    fn what_is_no_reward_is_not_counted_and_none_is_too_large() {
        assert_eq!(of(&[f64::NAN, f64::INFINITY]).to_proto(), None);
        let shown = of(&[-f64::MAX, f64::MAX, 0.0]).to_proto().unwrap();
        assert_eq!(shown.counts.iter().sum::<u32>(), 3);
    }
}
