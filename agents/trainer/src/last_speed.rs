//! The speed of the last training, by which coordinators split one training among boxes.

use std::sync::Mutex;

use wire::v1::{self, agent_status::TrainingSpeed};

use crate::training_check::StepStats;

/// The base and the speed of the last training; none at first.
#[derive(Debug, Default)]
pub(crate) struct LastSpeed(Mutex<Option<TrainingSpeed>>);

impl LastSpeed {
    /// Records the speed of the steps so far, if there were at least two.
    pub(crate) fn record_speed(&self, order: &v1::TrainOrder, stats: &StepStats) {
        let base = order.base.as_ref().and_then(|base| base.tree.as_ref());
        let (Some(base), Some(tokens_per_s)) = (base, stats.tokens_per_s()) else { return };
        if let Ok(mut last) = self.0.lock() {
            *last = Some(TrainingSpeed { base: base.manifest.clone(), tokens_per_s });
        }
    }

    pub(crate) fn last_speed(&self) -> Option<TrainingSpeed> {
        self.0.lock().ok()?.clone()
    }
}
