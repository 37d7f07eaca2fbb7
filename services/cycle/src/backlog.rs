//! The remaining work of a cycle behind an order. Slow agents use it to decide when to decline an
//! order, because a job that a slow agent starts last delays the whole cycle.

use wire::v1;

use crate::{
    FleetMember, FleetSnapshot,
    state::{PlannedJob, job_index::PurposeIndex},
};

/// The samples planned behind the next order, the speed of the fleet, and its fastest agent.
#[derive(Debug, Clone)]
pub(crate) struct SampleBacklog(v1::generate_order::Behind);

impl SampleBacklog {
    pub(crate) fn from_index(account: &PurposeIndex, fleet: &FleetSnapshot) -> Self {
        let known = || fleet.generators.iter().filter(|it| it.tokens_per_s.is_finite());
        let rates = known().map(|generator| generator.tokens_per_s);
        let by_rate =
            |a: &&FleetMember, b: &&FleetMember| a.tokens_per_s.total_cmp(&b.tokens_per_s);
        let backlog = Self(v1::generate_order::Behind {
            samples: account.unordered_samples,
            tokens_per_s: rates.sum(),
            ..Default::default()
        });
        match known().max_by(by_rate) {
            Some(fastest) => backlog.with_fastest(fastest),
            None => backlog,
        }
    }

    /// Takes the samples of a job that is being ordered out of the backlog.
    pub(crate) fn remove_job(&mut self, job: &PlannedJob) {
        self.0.samples = self.0.samples.saturating_sub(u64::from(job.planned_samples()));
    }

    /// Names the agent that the order is meant for as the fastest, so that neither this agent nor an
    /// equally fast one declines the order.
    pub(crate) fn with_fastest(mut self, fastest: &FleetMember) -> Self {
        self.0.fastest_tokens_per_s = fastest.tokens_per_s;
        self.0.fastest.clone_from(&fastest.agent);
        self.0.fastest_samples = fastest.remaining_samples;
        self
    }

    /// Returns the message for orders; `None` if no generator has reported its speed.
    pub(crate) fn to_proto(&self) -> Option<v1::generate_order::Behind> {
        (self.0.fastest_tokens_per_s > 0.0).then(|| self.0.clone())
    }
}
