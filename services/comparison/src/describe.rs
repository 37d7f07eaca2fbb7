//! A comparison in words.

use crate::{Comparison, Decision};

impl Comparison {
    /// Returns `b is better: b scores +5.0 points (95 % interval +0.8 to +9.1), p = 0.012; decided
    /// after 812 of 1500 pairs`, with the names of both models.
    #[must_use]
    pub fn describe(&self, pairs: usize, alpha: f64, names: [&str; 2]) -> String {
        let [a, b] = names;
        let (decision, how) = match self.decision {
            Decision::A => (format!("{a} is better"), "decided after"),
            Decision::B => (format!("{b} is better"), "decided after"),
            Decision::Undecided => ("undecided".to_owned(), "with"),
        };
        let Self { at, p, difference, interval: [low, high], .. } = self;
        // Without the errors of binary fractions.
        let level = ((1.0 - alpha) * 1e6).round() / 1e4;
        let p = if *p < 0.001 { "p < 0.001".to_owned() } else { format!("p = {p:.3}") };
        format!(
            "{decision}: {b} scores {} points ({level} % interval {} to {}), {p}; {how} {at} of \
             {pairs} pairs",
            in_points(*difference),
            in_points(*low),
            in_points(*high),
        )
    }
}

fn in_points(difference: f64) -> String {
    format!("{:+.1}", difference * 100.0)
}
