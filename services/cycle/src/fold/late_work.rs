//! Work that was ordered after the end of a run, by a coordinator that had not read the end yet, and
//! was done by agents that had not read it either. It counts for nothing and contradicts nothing.

use std::collections::BTreeSet;

use wire::{FactKey, JobId, TrainPart};

use crate::state::{Cycle, Run};

/// Jobs and trainings that were ordered after the end of a run and not before it, and their
/// results.
#[derive(Debug, Clone, Default)]
pub(crate) struct LateWork {
    jobs: BTreeSet<(u32, JobId)>,
    sampled: BTreeSet<(u32, JobId)>,
    /// Cycles.
    trainings: BTreeSet<u32>,
    /// Outer steps of trainings on several boxes, by cycle and number.
    outer_steps: BTreeSet<(u32, u32)>,
    /// Cycle and step.
    checkpoints: BTreeSet<(u32, u32)>,
}

impl Run {
    /// Returns true for the result of work that was ordered after the end of the run only.
    pub(crate) fn is_late_result(&self, place: &FactKey) -> bool {
        let late = &self.late_work;
        match place {
            FactKey::Samples { cycle, job } => late.jobs.contains(&(*cycle, job.clone())),
            FactKey::Verdicts { cycle, job } | FactKey::Scores { cycle, job } => {
                late.sampled.contains(&(*cycle, job.clone()))
            }
            FactKey::Delta { cycle, outer, .. } | FactKey::Merge { cycle, outer } => {
                late.outer_steps.contains(&(*cycle, *outer))
            }
            FactKey::Checkpoint { cycle, .. } => late.trainings.contains(cycle),
            FactKey::Eval { cycle, step, .. } => late.checkpoints.contains(&(*cycle, *step)),
            _ => false,
        }
    }

    /// Records an order after the end, or a late result.
    pub(super) fn record_late_work(&mut self, place: &FactKey) {
        let cycle = place.cycle_number().and_then(|number| self.cycles.get(&number));
        let late = &mut self.late_work;
        match place {
            FactKey::GenerateOrder { cycle: number, job, .. } => {
                let planned = cycle.and_then(|cycle: &Cycle| cycle.jobs.get(job));
                if planned.is_none_or(|job| job.orders.last_attempt == 0) {
                    late.jobs.insert((*number, job.clone()));
                }
            }
            FactKey::TrainOrder { cycle: number, .. }
                if cycle.is_none_or(|cycle| cycle.train_orders.last_attempt == 0) =>
            {
                late.trainings.insert(*number);
            }
            FactKey::SlicePlan { cycle, outer } | FactKey::SliceClose { cycle, outer } => {
                late.outer_steps.insert((*cycle, *outer));
            }
            FactKey::TrainPartOrder { cycle: number, outer, part, .. } => {
                let step = cycle.and_then(|cycle| cycle.across.outer_steps.get(outer));
                let is_known = step.is_some_and(|step| match part {
                    TrainPart::Slice(_) => step.plan.is_some(),
                    TrainPart::Merge => step.closed.is_some(),
                });
                if !is_known {
                    late.outer_steps.insert((*number, *outer));
                }
            }
            FactKey::Samples { cycle, job } => {
                late.sampled.insert((*cycle, job.clone()));
            }
            FactKey::Checkpoint { cycle, step } => {
                late.checkpoints.insert((*cycle, *step));
            }
            _ => {}
        }
    }
}
