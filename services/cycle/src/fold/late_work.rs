//! Work that was ordered after the end of a run, by a coordinator that had not read the end yet, and
//! was done by agents that had not read it either. It counts for nothing and contradicts nothing.

use std::collections::BTreeSet;

use wire::{FactBody, FactKey, JobId, TrainPart, v1};

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
    /// Merges of outer steps, by cycle and number, and the checkpoints that they publish, by cycle and
    /// step.
    merges: BTreeSet<(u32, u32)>,
    merged_checkpoints: BTreeSet<(u32, u32)>,
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
            FactKey::Delta { cycle, outer, .. } => late.outer_steps.contains(&(*cycle, *outer)),
            FactKey::Merge { cycle, outer } => {
                let step = (*cycle, *outer);
                late.outer_steps.contains(&step) || late.merges.contains(&step)
            }
            FactKey::Checkpoint { cycle, step } => {
                late.trainings.contains(cycle) || late.merged_checkpoints.contains(&(*cycle, *step))
            }
            FactKey::Eval { cycle, step, .. } => late.checkpoints.contains(&(*cycle, *step)),
            _ => false,
        }
    }

    /// Records an order after the end, or a late result.
    pub(super) fn record_late_work(&mut self, place: &FactKey, body: &FactBody) {
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
                let step = cycle.and_then(|cycle| cycle.split_training.outer_steps.get(outer));
                match part {
                    TrainPart::Slice(_) if step.is_none_or(|step| step.plan.is_none()) => {
                        late.outer_steps.insert((*number, *outer));
                    }
                    TrainPart::Merge
                        if step.is_none_or(|step| step.merge_orders.last_attempt == 0) =>
                    {
                        late.merges.insert((*number, *outer));
                        let step = checkpoint_step(body).map(|step| (*number, step));
                        late.merged_checkpoints.extend(step);
                    }
                    TrainPart::Slice(_) | TrainPart::Merge => {}
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

/// Returns the step of the checkpoint that an order of a merge asks for.
fn checkpoint_step(body: &FactBody) -> Option<u32> {
    let FactBody::TrainOrder(order) = body else { return None };
    match order.part.as_ref()? {
        v1::train_order::Part::Merge(merge) => Some(merge.checkpoint.as_ref()?.step),
        v1::train_order::Part::Slice(_) => None,
    }
}
