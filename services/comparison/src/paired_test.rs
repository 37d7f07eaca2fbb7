//! The sequential test.

use serde::Serialize;

use crate::bets::{BetsOnLarger, Moments, refuted_up_to};

/// The scores of two models for one prompt and seed, each from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    /// Score of the first model.
    pub a: f64,
    /// Score of the second model.
    pub b: f64,
}

/// Which model is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// The first.
    A,
    /// The second.
    B,
    /// The pairs do not show it.
    Undecided,
}

impl Decision {
    /// Returns `a`, `b` or `undecided`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::A => "a",
            Self::B => "b",
            Self::Undecided => "undecided",
        }
    }
}

/// An `alpha` that is not a probability between 0 and 1.
#[derive(Debug, thiserror::Error)]
#[error("alpha is {0}; it must lie between 0.000001 and 0.5, such as 0.05 (A101)")]
pub struct AlphaError(pub f64);

/// The result of comparing some pairs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The better model.
    pub decision: Decision,
    /// Number of pairs at the decision, or of all pairs without one.
    pub at: usize,
    /// Anytime-valid p-value of "both are equally good", two-sided.
    pub p: f64,
    /// Mean of `b - a`.
    pub difference: f64,
    /// Confidence sequence of that mean at `1 - alpha`, as `[low, high]`.
    pub interval: [f64; 2],
    /// Mean score of the first model.
    pub mean_a: f64,
    /// Mean score of the second model.
    pub mean_b: f64,
}

/// A sequential test that decides which of two models has the higher mean score.
///
/// Two gamblers start with a wealth of 1. One bets that `b - a` has a mean above 0, the other that
/// it has one below 0. The first whose wealth reaches `2 / alpha` decides. If the models are equally
/// good, that ever happens with probability `alpha` at most, however often one looks; if one is
/// better, the other is named with probability `alpha / 2` at most. Prompts may differ in
/// difficulty, but their order must not depend on the scores, and several samples of one prompt are
/// one pair of means: after the first, the next would be predictable.
///
/// Source: Waudby-Smith and Ramdas (2024), "Estimating means of bounded random variables by
/// betting", arXiv:2010.09686.
#[derive(Debug, Clone)]
pub struct PairedTest {
    limit: f64,
    pairs: Vec<Pair>,
    b_better: BetsOnLarger,
    a_better: BetsOnLarger,
    largest_wealth: f64,
    decided: Option<DecidedAt>,
}

/// The moment of a decision.
#[derive(Debug, Clone, Copy)]
struct DecidedAt {
    decision: Decision,
    /// Number of pairs.
    at: usize,
    p: f64,
}

impl PairedTest {
    /// Starts a test whose decisions are wrong with probability `alpha` at most.
    ///
    /// # Errors
    /// `alpha` is not between 0.000001 and 0.5.
    pub fn new(alpha: f64) -> Result<Self, AlphaError> {
        if !(1e-6..=0.5).contains(&alpha) {
            return Err(AlphaError(alpha));
        }
        Ok(Self {
            limit: 2.0 / alpha,
            pairs: Vec::new(),
            b_better: BetsOnLarger::new(0.0),
            a_better: BetsOnLarger::new(0.0),
            largest_wealth: 1.0,
            decided: None,
        })
    }

    /// Takes the next pair and returns the decision so far. Pairs after a decision do not change it.
    pub fn add_pair(&mut self, pair: Pair) -> Decision {
        let difference = pair.b - pair.a;
        self.pairs.push(pair);
        let b_better = self.b_better.add(difference);
        let a_better = self.a_better.add(-difference);
        self.largest_wealth = self.largest_wealth.max(b_better).max(a_better);
        let decision = if b_better >= self.limit {
            Some(Decision::B)
        } else if a_better >= self.limit {
            Some(Decision::A)
        } else {
            None
        };
        let (at, p) = (self.pairs.len(), self.p_value());
        if let Some(decision) = decision {
            self.decided.get_or_insert(DecidedAt { decision, at, p });
        }
        self.decision()
    }

    /// Returns the decision so far.
    #[must_use]
    pub fn decision(&self) -> Decision {
        self.decided.map_or(Decision::Undecided, |decided| decided.decision)
    }

    fn p_value(&self) -> f64 {
        (2.0 / self.largest_wealth).min(1.0)
    }

    /// Returns what the pairs up to the decision show, or all of them if there is none. Without
    /// pairs, the interval is `[-1, 1]`.
    #[must_use]
    pub fn comparison(&self) -> Comparison {
        let undecided =
            DecidedAt { decision: Decision::Undecided, at: self.pairs.len(), p: self.p_value() };
        let DecidedAt { decision, at, p } = self.decided.unwrap_or(undecided);
        Comparison { decision, at, p, ..self.summarize(&self.pairs[..at]) }
    }

    /// Returns the decision and its pairs, with means, interval and p-value of all pairs.
    #[must_use]
    pub fn overall(&self) -> Comparison {
        let at = self.decided.map_or(self.pairs.len(), |decided| decided.at);
        let (decision, p) = (self.decision(), self.p_value());
        Comparison { decision, at, p, ..self.summarize(&self.pairs) }
    }

    /// Returns the means and the interval of some pairs.
    fn summarize(&self, pairs: &[Pair]) -> Comparison {
        let differences: Vec<f64> = pairs.iter().map(|pair| pair.b - pair.a).collect();
        let negated: Vec<f64> = differences.iter().map(|difference| -difference).collect();
        let interval = |moments| {
            let low = refuted_up_to(&differences, self.limit, moments);
            [low, -refuted_up_to(&negated, self.limit, moments)]
        };
        // If the differences change over time, no mean fits all moments.
        let fits_all = Some(interval(Moments::Any)).filter(|[low, high]| low <= high);
        let interval = fits_all.unwrap_or_else(|| interval(Moments::Last));
        let count = pairs.len().max(1) as f64;
        let mean_a = pairs.iter().map(|pair| pair.a).sum::<f64>() / count;
        let mean_b = pairs.iter().map(|pair| pair.b).sum::<f64>() / count;
        Comparison {
            decision: Decision::Undecided,
            at: pairs.len(),
            p: 1.0,
            difference: mean_b - mean_a,
            interval,
            mean_a,
            mean_b,
        }
    }
}
