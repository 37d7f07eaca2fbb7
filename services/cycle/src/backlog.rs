//! The remaining work of a cycle behind an order. Slow agents use it to decide when to decline an
//! order, because a job that a slow agent starts last delays the whole cycle.

use wire::v1;

use crate::{
    FleetSnapshot,
    state::{PlannedJob, job_index::PurposeIndex},
};

/// The samples planned behind the next order, and the speed of the fleet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SampleBacklog(v1::generate_order::Behind);

impl SampleBacklog {
    pub(crate) fn from_index(account: &PurposeIndex, fleet: &FleetSnapshot) -> Self {
        let rates = || fleet.generators.iter().map(|generator| generator.tokens_per_s);
        Self(v1::generate_order::Behind {
            samples: account.unordered_samples,
            tokens_per_s: rates().sum(),
            fastest_tokens_per_s: rates().fold(0.0, f64::max),
        })
    }

    /// Called for a job that is being ordered.
    pub(crate) fn remove_job(&mut self, job: &PlannedJob) {
        self.0.samples = self.0.samples.saturating_sub(u64::from(job.planned_samples()));
    }

    /// Sets the fastest rate to that of the agent which the order is meant for, so that this agent,
    /// or one as fast, does not decline it.
    pub(crate) fn with_fastest_rate(mut self, tokens_per_s: f64) -> Self {
        self.0.fastest_tokens_per_s = tokens_per_s;
        self
    }

    /// Returns `None` if no generator has reported its speed.
    pub(crate) fn to_proto(self) -> Option<v1::generate_order::Behind> {
        (self.0.fastest_tokens_per_s > 0.0).then_some(self.0)
    }
}
