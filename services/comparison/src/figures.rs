//! Checks the recorded values of a decision.

use crate::bets::LARGEST_BET;

/// The default of the highest probability of a wrong decision.
pub const DEFAULT_ALPHA: f64 = 0.05;

/// The relative difference by which values may differ from exact ones.
const ROUNDING: f64 = 1e-6;

/// The values of a test that decided for a model, as they are recorded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecisionFigures<'a> {
    /// Number of pairs at the decision.
    pub pairs: u32,
    /// The p-value at the decision.
    pub p: f64,
    /// Mean score of the better model minus the other model's.
    pub difference: f64,
    /// Confidence sequence of that mean.
    pub interval: &'a [f64],
}

impl DecisionFigures<'_> {
    /// Returns the reason why no test with this `alpha` can decide with these values; `None` if one
    /// can.
    #[must_use]
    pub fn find_contradiction(&self, alpha: f64) -> Option<String> {
        let Self { pairs, p, difference, interval } = *self;
        let &[low, high] = interval else {
            return Some(format!("its interval has {} ends", interval.len()));
        };
        // A bet grows by its share at most, if all pairs are for the model.
        let least_p = 2.0 / (1.0 + LARGEST_BET).powf(f64::from(pairs));
        if p.is_nan() || p <= 0.0 || p > alpha * (1.0 + ROUNDING) {
            return Some(format!("p is {p}, which does not decide at {alpha}"));
        }
        if p < least_p * (1.0 - ROUNDING) {
            return Some(format!("p is {p}, which {pairs} pairs cannot show"));
        }
        if !(difference > 0.0 && difference <= 1.0) {
            return Some(format!("the difference is {difference}, which is no improvement"));
        }
        // The decision refutes that the models are equally good.
        if !(low >= -ROUNDING && low <= high) {
            return Some(format!("the interval is {low} to {high}, which is no improvement"));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Decision, Pair, PairedTest};

    #[test]
    fn the_figures_of_each_decision_are_possible_ones() {
        let mut random = fastrand::Rng::with_seed(11);
        let mut decided = 0;
        for round in 0..200 {
            let alpha = [0.2, 0.05, 0.001][round % 3];
            let mut test = PairedTest::new(alpha).unwrap();
            let share = random.f64();
            for _ in 0..300 {
                let b = f64::from(u8::from(random.f64() < 0.5 + share / 2.0));
                test.add_pair(Pair { a: f64::from(u8::from(random.bool())), b });
            }
            let found = test.comparison();
            if found.decision == Decision::B {
                decided += 1;
                let pairs = u32::try_from(found.at).unwrap();
                let (p, difference, interval) = (found.p, found.difference, &found.interval[..]);
                let figures = DecisionFigures { pairs, p, difference, interval };
                assert_eq!(figures.find_contradiction(alpha), None, "{found:?}");
            }
        }
        assert!(decided > 50, "{decided}");
    }

    #[test]
    fn impossible_figures_are_named() {
        let interval = [0.05, 0.4];
        let good = DecisionFigures { pairs: 40, p: 0.01, difference: 0.2, interval: &interval };
        assert_eq!(good.find_contradiction(0.05), None);
        let wrong = |figures: DecisionFigures<'_>| figures.find_contradiction(0.05).unwrap();
        assert!(wrong(DecisionFigures { p: 0.06, ..good }).contains("decide at 0.05"));
        assert!(wrong(DecisionFigures { p: f64::NAN, ..good }).contains("NaN"));
        assert!(wrong(DecisionFigures { pairs: 3, ..good }).contains("3 pairs cannot"));
        assert!(wrong(DecisionFigures { difference: -0.1, ..good }).contains("no improvement"));
        let interval = [-0.1, 0.4];
        assert!(wrong(DecisionFigures { interval: &interval, ..good }).contains("-0.1 to 0.4"));
        assert!(wrong(DecisionFigures { interval: &[], ..good }).contains("0 ends"));
    }
}
