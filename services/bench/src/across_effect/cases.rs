//! The trainings that are compared with one box.

use std::path::Path;

use engine::TrainSpec;
use serde_json::{Value, json};

use super::{
    fleet_figures::{SLOW_INTERVALS, scale_speeds},
    shared_training::{SharedTraining, SharingMethod, TrainedShare},
    virtual_fleet::VirtualTraining,
};

/// Steps of an adapter on one box.
pub(super) const STEPS: u32 = 400;

/// Steps of a box between two merges.
const INTERVAL: u32 = 20;

const TWO: &[f64] = &[1.0; 2];
const FOUR: &[f64] = &[1.0; 4];

/// Boxes of different speeds.
pub(super) const MIXED: [&[f64]; 3] = [&[1.0, 2.0], &[1.0, 2.0, 4.0], &[1.0, 2.0, 4.0, 8.0]];

const AVERAGE: SharingMethod = SharingMethod::AVERAGE;

/// A training on several boxes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct SharingCase {
    /// Relative speeds of the boxes.
    pub speeds: &'static [f64],
    pub every: u32,
    pub method: SharingMethod,
    pub steps: u32,
}

/// The training of all comparisons. Its likelihood is measured as often as that of others.
pub(super) const ONE_BOX: SharingCase = sharing_case(&[1.0], INTERVAL, AVERAGE, STEPS);

/// The trainings of the goals: as many steps as on one box, and more on four.
pub(super) const GOAL_CASES: [SharingCase; 4] = [
    sharing_case(TWO, INTERVAL, AVERAGE, STEPS),
    sharing_case(FOUR, INTERVAL, AVERAGE, STEPS),
    sharing_case(FOUR, INTERVAL, AVERAGE, STEPS + STEPS / 10),
    sharing_case(FOUR, INTERVAL, AVERAGE, STEPS + STEPS / 4),
];

/// A short training of which one box is cut off in each outer step.
pub(super) const REPLAYED: SharingCase = sharing_case(FOUR, 2, AVERAGE, 100);

const fn sharing_case(
    speeds: &'static [f64],
    every: u32,
    method: SharingMethod,
    steps: u32,
) -> SharingCase {
    SharingCase { speeds, every, method, steps }
}

/// Returns the trainings by which methods are compared, on equal boxes and then on mixed ones.
pub(super) fn method_cases() -> Vec<SharingCase> {
    let on_four = |method| sharing_case(FOUR, INTERVAL, method, STEPS);
    let intervals = [5, 100].map(|every| sharing_case(FOUR, every, AVERAGE, STEPS));
    let methods = [
        SharingMethod::STACK,
        SharingMethod::NESTEROV,
        SharingMethod::SOUP,
        SharingMethod::FROZEN_A,
        SharingMethod::TENTH_SENT,
        SharingMethod::ALL_SENT,
    ];
    let slow =
        SLOW_INTERVALS.map(|every| sharing_case(FOUR, every, SharingMethod::HUNDREDTH_SENT, STEPS));
    let mixed = MIXED.into_iter().flat_map(|speeds| {
        SharingMethod::MERGES.map(|method| sharing_case(speeds, INTERVAL, method, STEPS))
    });
    intervals.into_iter().chain(methods.map(on_four)).chain(slow).chain(mixed).collect()
}

impl SharingCase {
    /// Returns true if boxes have different speeds.
    pub(super) fn is_mixed(&self) -> bool {
        MIXED.contains(&self.speeds)
    }

    /// Returns what distinguishes the training from others.
    pub(super) fn to_json(self) -> Value {
        let Self { speeds, every, method, steps } = self;
        json!({ "speeds": speeds, "every": every, "merge": method.name, "steps": steps })
    }

    /// Returns the training in virtual time; of mixed boxes, the fastest is as fast as one box
    /// alone.
    pub(super) fn virtual_training(&self, exchange_s: f64) -> VirtualTraining {
        VirtualTraining {
            speeds: scale_speeds(self.speeds),
            steps: self.steps,
            every: self.every,
            method: self.method.planner_method(),
            exchange_s,
            deaths: None,
        }
    }

    /// Trains with the data of another training, in a directory that is removed.
    pub(super) fn train_case(
        &self,
        data: &SharedTraining<'_>,
        scratch: &Path,
    ) -> anyhow::Result<TrainedShare> {
        let schedule = self.virtual_training(0.0).split_steps()?;
        let trained = self.adapt_data(data).train_schedule(scratch, &schedule, self.method)?;
        std::fs::remove_dir_all(scratch)?;
        Ok(trained)
    }

    /// Returns the training of this case with the data of another one.
    pub(super) fn adapt_data<'a>(&self, data: &SharedTraining<'a>) -> SharedTraining<'a> {
        let spec = TrainSpec {
            freezes_a: self.method.freezes_a,
            max_steps: Some(self.steps as usize),
            ..data.spec.clone()
        };
        SharedTraining { spec, ..data.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_training_is_compared_once() {
        let cases: Vec<SharingCase> = GOAL_CASES.into_iter().chain(method_cases()).collect();
        for (number, case) in cases.iter().enumerate() {
            assert!(!cases[..number].contains(case), "{case:?}");
        }
        let mixed = cases.iter().filter(|case| case.is_mixed()).count();
        assert_eq!(mixed, MIXED.len() * SharingMethod::MERGES.len());
    }
}
