//! Betting against the hypothesis that a mean is at most some value.

use std::sync::LazyLock;

/// Sizes of the bets, each a share of the largest one that cannot lose everything.
const BETS: usize = 40;
const SMALLEST_BET: f64 = 0.02;
pub(crate) const LARGEST_BET: f64 = 0.95;
/// The bet sizes; they grow by equal factors.
static BET_SIZES: LazyLock<[f64; BETS]> = LazyLock::new(|| {
    let growth: f64 = LARGEST_BET / SMALLEST_BET;
    std::array::from_fn(|index| SMALLEST_BET * growth.powf(index as f64 / (BETS - 1) as f64))
});

/// The wealth of a gambler who bets that differences in [-1, 1] have a mean above `mean`.
///
/// It starts at 1, split over bets of several sizes. While the mean is not above `mean`, the
/// expected wealth never grows, so it reaches `1/a` at any time with probability `a` at most
/// (Ville's inequality). A mixture over bet sizes is the universal portfolio of Orabona and Jun
/// (2021), arXiv:2110.14099, on a grid.
#[derive(Debug, Clone)]
pub(crate) struct BetsOnLarger {
    mean: f64,
    wealth: [f64; BETS],
}

impl BetsOnLarger {
    /// Starts with a wealth of 1. `mean` is above -1.
    pub(crate) fn new(mean: f64) -> Self {
        Self { mean, wealth: [1.0 / BETS as f64; BETS] }
    }

    /// Takes the next difference and returns the wealth after it.
    pub(crate) fn add(&mut self, difference: f64) -> f64 {
        let gain = (difference - self.mean) / (1.0 + self.mean);
        for (wealth, size) in self.wealth.iter_mut().zip(BET_SIZES.iter()) {
            *wealth *= 1.0 + gain * size;
        }
        self.wealth.iter().sum()
    }
}

/// The moments at which a mean may be refuted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moments {
    /// After any difference.
    Any,
    /// After the last one.
    Last,
}

/// Returns the largest mean that the differences refute as too small: every mean up to it gives a
/// wealth of at least `limit`.
pub(crate) fn refuted_up_to(differences: &[f64], limit: f64, moments: Moments) -> f64 {
    const STEPS: usize = 24;
    let is_refuted = |mean: f64| {
        let mut bets = BetsOnLarger::new(mean);
        let mut wealth = differences.iter().map(|difference| bets.add(*difference));
        match moments {
            Moments::Any => wealth.any(|wealth| wealth >= limit),
            Moments::Last => wealth.last().is_some_and(|wealth| wealth >= limit),
        }
    };
    // The wealth of each bet falls as the mean rises, so there is one border.
    let (mut refuted, mut open) = (-1.0, 1.0);
    for _ in 0..STEPS {
        let middle = f64::midpoint(refuted, open);
        if is_refuted(middle) {
            refuted = middle;
        } else {
            open = middle;
        }
    }
    refuted
}
