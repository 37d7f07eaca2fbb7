//! Work after the end of a run. A coordinator that has not read the end yet may order it, and agents
//! may do it. Nobody uses it, and it contradicts nothing.

use std::collections::BTreeSet;

use wire::{FactKey, JobId};

/// Orders after the end of a run, and their results.
#[derive(Debug, Default)]
pub(super) struct LateWork {
    jobs: BTreeSet<(u32, JobId)>,
    sampled: BTreeSet<(u32, JobId)>,
    /// Cycles.
    trainings: BTreeSet<u32>,
    /// Cycle and step.
    checkpoints: BTreeSet<(u32, u32)>,
}

impl LateWork {
    /// Records an order, or a result of work that was ordered after the end. Returns true for such
    /// a result: nothing else needs to be checked. `unordered` tells that the run contains no order
    /// for it.
    pub(super) fn accept_record(&mut self, place: &FactKey, unordered: bool) -> bool {
        match place {
            FactKey::GenerateOrder { cycle, job, .. } => {
                self.jobs.insert((*cycle, job.clone()));
                return false;
            }
            FactKey::TrainOrder { cycle, .. } => {
                self.trainings.insert(*cycle);
                return false;
            }
            _ if !unordered => return false,
            _ => {}
        }
        match place {
            FactKey::Samples { cycle, job } => {
                let job = (*cycle, job.clone());
                self.jobs.contains(&job) && self.sampled.insert(job)
            }
            FactKey::Verdicts { cycle, job } => self.sampled.contains(&(*cycle, job.clone())),
            FactKey::Checkpoint { cycle, step } => {
                self.trainings.contains(cycle) && self.checkpoints.insert((*cycle, *step))
            }
            FactKey::Eval { cycle, step, .. } => self.checkpoints.contains(&(*cycle, *step)),
            _ => false,
        }
    }
}
