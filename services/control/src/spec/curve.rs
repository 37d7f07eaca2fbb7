//! A setting that may change from cycle to cycle.

use serde::Deserialize;

use crate::check::{Checked, within};

/// A number, or how one goes from cycle to cycle.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a number, a list with a number for each cycle, {linear: [FIRST, LAST]} \
                 or {decay: {from: FIRST, factor: F, floor: LEAST}}"
)]
pub enum Curve {
    Constant(f64),
    /// One for each cycle; the last one stays.
    Each(Vec<f64>),
    Linear(Linear),
    Decay(Decays),
}

/// In equal steps from the first cycle's to the last one's.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Linear {
    linear: [f64; 2],
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decays {
    decay: Decay,
}

/// Each cycle's is `factor` times the one before, but no less than `floor`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Decay {
    from: f64,
    factor: f64,
    #[serde(default)]
    floor: f64,
}

impl Curve {
    /// The first cycle's.
    pub(crate) fn first(&self) -> f64 {
        match self {
            Self::Constant(value) => *value,
            Self::Each(values) => values.first().copied().unwrap_or(f64::NAN),
            Self::Linear(Linear { linear: [first, _] }) => *first,
            Self::Decay(Decays { decay }) => decay.from.max(decay.floor),
        }
    }

    /// The value of each cycle; none where it never changes.
    pub(crate) fn values(&self, cycles: u32) -> Vec<f64> {
        match self {
            Self::Constant(_) => Vec::new(),
            Self::Each(values) => values.clone(),
            Self::Linear(Linear { linear: [first, last] }) => {
                let steps = f64::from(cycles.saturating_sub(1).max(1));
                // At its end exactly there: a reward of 1 does not reach 1.0000000000000002.
                let at = |t: f64| {
                    (first * (1.0 - t) + last * t).min(first.max(*last)).max(first.min(*last))
                };
                (0..cycles).map(|n| at(f64::from(n) / steps)).collect()
            }
            Self::Decay(Decays { decay: Decay { from, factor, floor } }) => {
                let next = |value: &f64| Some(value * factor);
                let values = std::iter::successors(Some(*from), next);
                values.map(|value| value.max(*floor)).take(cycles as usize).collect()
            }
        }
    }

    /// The value of one cycle of so many.
    pub(crate) fn at(&self, cycle: u32, cycles: u32) -> f64 {
        cycle::scheduled(&self.values(cycles), cycle).unwrap_or_else(|| self.first())
    }

    /// Whether all of its values are within bounds.
    pub(crate) fn check(&self, field: &str, cycles: u32, low: f64, high: f64) -> Checked {
        let values = self.values(cycles);
        within(field, self.first(), low, high)?;
        values.into_iter().try_for_each(|value| within(field, value, low, high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(yaml: &str) -> Curve {
        serde_saphyr::from_str(yaml).unwrap()
    }

    #[test]
    fn a_number_is_the_same_in_every_cycle() {
        for yaml in ["5e-5", "0.00005"] {
            assert_eq!(curve(yaml), Curve::Constant(5e-5), "{yaml}");
        }
        assert_eq!(curve("0"), Curve::Constant(0.0));
        assert_eq!(curve("2").values(9), Vec::<f64>::new());
    }

    #[test]
    fn a_line_ends_where_it_says_and_a_decay_at_its_floor() {
        assert_eq!(curve("{linear: [1.0, 0.5]}").values(3), [1.0, 0.75, 0.5]);
        assert_eq!(curve("{linear: [1.0, 0.5]}").values(1), [1.0]);
        for cycles in 2..40 {
            let values = curve("{linear: [0.2, 1.0]}").values(cycles);
            assert_eq!(values.last(), Some(&1.0), "{cycles} cycles");
            assert!(values.iter().all(|value| (0.2..=1.0).contains(value)), "{values:?}");
        }
        let decay = curve("{decay: {from: 8, factor: 0.5, floor: 1.5}}");
        assert_eq!(decay.values(4), [8.0, 4.0, 2.0, 1.5]);
        assert_eq!((decay.first(), decay.at(2, 4)), (8.0, 4.0));
    }

    #[test]
    fn a_list_keeps_its_last_number() {
        let list = curve("[3, 2.5]");
        assert_eq!([1, 2, 3].map(|cycle| list.at(cycle, 5)), [3.0, 2.5, 2.5]);
        assert!(curve("[]").check("f", 3, 0.0, 1.0).is_err());
        assert!(list.check("f", 3, 2.6, 3.0).is_err());
    }

    #[test]
    fn anything_else_is_refused_by_what_is_expected() {
        for yaml in ["{lineal: [1, 2]}", "yes please", "{decay: {from: 1, factor: 1, flor: 1}}"] {
            let error = serde_saphyr::from_str::<Curve>(yaml).unwrap_err().to_string();
            assert!(error.contains("linear: [FIRST, LAST]"), "{error}");
        }
    }
}
