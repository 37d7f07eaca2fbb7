//! A number that may change from cycle to cycle.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::field_checks::{FieldResult, check_range};

/// A number, or how one goes from cycle to cycle.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(
    untagged,
    expecting = "expected a number, a list with a number for each cycle, {linear: [FIRST, LAST]} \
                 or {decay: {from: FIRST, factor: F, floor: LEAST}}"
)]
#[schemars(title = "Schedule")]
pub enum CycleSchedule {
    /// The same number in every cycle.
    Constant(f64),
    /// One number for each cycle. The last one applies to all further cycles.
    Each(#[schemars(length(min = 1))] Vec<f64>),
    /// Equal steps from the first cycle's number to the last one's.
    Linear(LinearSchedule),
    /// A constant factor from cycle to cycle.
    Decay(DecaySchedule),
}

/// A schedule with equal steps from the first cycle's number to the last one's.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Linear schedule")]
pub struct LinearSchedule {
    /// The numbers of the first and of the last cycle.
    #[schemars(example = [1.0, 0.5])]
    linear: [f64; 2],
}

/// A schedule with a constant factor.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "Decaying schedule")]
pub struct DecaySchedule {
    /// The first number, the factor and the least number.
    decay: DecayParameters,
}

/// Each cycle's number is `factor` times the previous one, but at least `floor`.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DecayParameters {
    /// The number of the first cycle.
    from: f64,
    /// The factor from each cycle to the next one.
    factor: f64,
    /// The least number.
    #[serde(default)]
    floor: f64,
}

impl CycleSchedule {
    /// Returns the scheduled value in the first cycle; for a constant, that in every cycle.
    pub fn first_value(&self) -> f64 {
        match self {
            Self::Constant(value) => *value,
            Self::Each(values) => values.first().copied().unwrap_or(f64::NAN),
            Self::Linear(LinearSchedule { linear: [first, _] }) => *first,
            Self::Decay(DecaySchedule { decay }) => decay.from.max(decay.floor),
        }
    }

    /// Returns the scheduled values from the first cycle on, for [`cycle::scheduled_value`]: one
    /// for each of `cycles` cycles; a list in the spec as it is, which may be shorter. Empty for a
    /// constant, whose value is [`CycleSchedule::first_value`].
    pub fn cycle_values(&self, cycles: u32) -> Vec<f64> {
        match self {
            Self::Constant(_) => Vec::new(),
            Self::Each(values) => values.clone(),
            Self::Linear(LinearSchedule { linear: [first, last] }) => {
                let steps = f64::from(cycles.saturating_sub(1).max(1));
                // Keep rounding errors out of the end points: a reward of 1 does not reach a
                // threshold of 1.0000000000000002.
                let at = |t: f64| {
                    (first * (1.0 - t) + last * t).min(first.max(*last)).max(first.min(*last))
                };
                (0..cycles).map(|n| at(f64::from(n) / steps)).collect()
            }
            Self::Decay(DecaySchedule { decay: DecayParameters { from, factor, floor } }) => {
                let next = |value: &f64| Some(value * factor);
                let values = std::iter::successors(Some(*from), next);
                values.map(|value| value.max(*floor)).take(cycles as usize).collect()
            }
        }
    }

    /// Returns the scheduled value in a cycle (counted from 1) of a run of `cycles` cycles. Later
    /// cycles have the value of the last one.
    pub(crate) fn value_at(&self, cycle: u32, cycles: u32) -> f64 {
        cycle::scheduled_value(&self.cycle_values(cycles), cycle)
            .unwrap_or_else(|| self.first_value())
    }

    /// Returns the lowest of the values of all cycles.
    pub(crate) fn lowest_value(&self, cycles: u32) -> f64 {
        self.cycle_values(cycles).into_iter().fold(self.first_value(), f64::min)
    }

    pub(crate) fn check_range(&self, field: &str, cycles: u32, low: f64, high: f64) -> FieldResult {
        let values = self.cycle_values(cycles);
        check_range(field, self.first_value(), low, high)?;
        values.into_iter().try_for_each(|value| check_range(field, value, low, high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(yaml: &str) -> CycleSchedule {
        serde_saphyr::from_str(yaml).unwrap()
    }

    #[test]
    fn a_number_is_the_same_in_every_cycle() {
        for yaml in ["5e-5", "0.00005"] {
            assert_eq!(curve(yaml), CycleSchedule::Constant(5e-5), "{yaml}");
        }
        assert_eq!(curve("0"), CycleSchedule::Constant(0.0));
        assert_eq!(curve("2").cycle_values(9), Vec::<f64>::new());
    }

    #[test]
    fn a_line_ends_where_it_says_and_a_decay_at_its_floor() {
        assert_eq!(curve("{linear: [1.0, 0.5]}").cycle_values(3), [1.0, 0.75, 0.5]);
        assert_eq!(curve("{linear: [1.0, 0.5]}").cycle_values(1), [1.0]);
        for cycles in 2..40 {
            let values = curve("{linear: [0.2, 1.0]}").cycle_values(cycles);
            assert_eq!(values.last(), Some(&1.0), "{cycles} cycles");
            assert!(values.iter().all(|value| (0.2..=1.0).contains(value)), "{values:?}");
        }
        let decay = curve("{decay: {from: 8, factor: 0.5, floor: 1.5}}");
        assert_eq!(decay.cycle_values(4), [8.0, 4.0, 2.0, 1.5]);
        assert_eq!((decay.first_value(), decay.value_at(2, 4)), (8.0, 4.0));
    }

    #[test]
    fn a_list_keeps_its_last_number() {
        let list = curve("[3, 2.5]");
        assert_eq!([1, 2, 3].map(|cycle| list.value_at(cycle, 5)), [3.0, 2.5, 2.5]);
        assert!(curve("[]").check_range("f", 3, 0.0, 1.0).is_err());
        assert!(list.check_range("f", 3, 2.6, 3.0).is_err());
    }

    #[test]
    fn anything_else_is_refused_by_what_is_expected() {
        for yaml in ["{lineal: [1, 2]}", "yes please", "{decay: {from: 1, factor: 1, flor: 1}}"] {
            let error = serde_saphyr::from_str::<CycleSchedule>(yaml).unwrap_err().to_string();
            assert!(error.contains("linear: [FIRST, LAST]"), "{error}");
        }
    }
}
