//! The facts of trainings on several boxes.

use wire::{FactBody, FactKey};

use crate::state::Run;

impl Run {
    /// Fails also for a fact that is not of a training on several boxes.
    pub(super) fn apply_outer_step(
        &mut self,
        place: &FactKey,
        body: &FactBody,
        at: u64,
    ) -> Result<(), String> {
        let number = place.cycle_number().unwrap_or_default();
        let adapter = || self.training_policy(number).and_then(|policy| policy.adapter);
        match (place, body) {
            (FactKey::TrainPartOrder { outer, part, attempt, .. }, FactBody::TrainOrder(order)) => {
                let cycle = self.cycles.entry(number).or_default();
                cycle.split_training.record_order(*outer, *part, (*attempt, order.round, at));
                cycle.record_training_order(order, at);
                Ok(())
            }
            (FactKey::SlicePlan { outer, .. }, FactBody::SlicePlan(plan)) => {
                self.cycles.entry(number).or_default().split_training.apply_plan(*outer, plan, at)
            }
            (FactKey::Delta { outer, slice, .. }, FactBody::Delta(delta)) => {
                let adapter = adapter();
                let training = &mut self.require_cycle(number)?.split_training;
                training.apply_delta((*outer, *slice), adapter.as_ref(), delta, at)
            }
            (FactKey::SliceClose { outer, .. }, FactBody::SliceClose(closed)) => {
                self.require_cycle(number)?.split_training.apply_close(*outer, closed)
            }
            (FactKey::Merge { outer, .. }, FactBody::Merge(merge)) => {
                let adapter = adapter();
                if number <= self.last_cycle() {
                    // A merge before its cycle takes the place of the one that the cycle will need.
                    self.cycles.entry(number).or_default();
                }
                let training = &mut self.require_cycle(number)?.split_training;
                training.apply_merge(*outer, adapter.as_ref(), merge, at)
            }
            _ => Err("the message does not belong under this subject".into()),
        }
    }
}
