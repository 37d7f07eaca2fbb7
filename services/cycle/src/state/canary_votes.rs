//! The canary values that agents reported, and the quarantines of agents. The rules of the vote are
//! in `canary_vote`.

use std::collections::BTreeMap;

use wire::v1;

/// Manifest digests of base and adapter.
pub(crate) type PolicyManifests = (String, String);

/// The reported canary values of each policy, and the quarantines of each agent.
#[derive(Debug, Clone, Default)]
pub struct CanaryVotes {
    /// Newest report of each agent, by policy.
    pub(crate) reports: BTreeMap<PolicyManifests, BTreeMap<String, CanaryReading>>,
    quarantines: BTreeMap<String, QuarantineCount>,
}

#[derive(Debug, Clone)]
pub(crate) struct CanaryReading {
    /// Cycle of the samples that the report came with.
    pub(crate) cycle: u32,
    /// Sequence of the samples fact.
    pub(crate) sequence: u64,
    /// False if the agent could not verify its policy; such a report has no vote.
    pub(crate) verified: bool,
    /// Log-probabilities in nats.
    pub(crate) canary: Vec<f32>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct QuarantineCount {
    pub(crate) count: u32,
    /// Sequence of the latest quarantine.
    pub(crate) last_sequence: u64,
}

impl CanaryVotes {
    pub(crate) fn record_report(&mut self, cycle: u32, sequence: u64, samples: &v1::Samples) {
        let key = (samples.base.clone(), samples.adapter.clone());
        let shown = CanaryReading {
            cycle,
            sequence,
            verified: samples.caveat.is_empty(),
            canary: samples.canary.clone(),
        };
        self.reports.entry(key).or_default().insert(samples.agent.clone(), shown);
    }

    /// Drops older reports, which the log may purge.
    pub(crate) fn drop_before(&mut self, cycle: u32) {
        for agents in self.reports.values_mut() {
            agents.retain(|_, shown| shown.cycle >= cycle);
        }
        self.reports.retain(|_, agents| !agents.is_empty());
    }

    /// Fails if the number is not the agent's next one.
    pub(crate) fn record_quarantine(
        &mut self,
        agent: &str,
        number: u32,
        sequence: u64,
    ) -> Result<(), String> {
        let known = self.quarantines.entry(agent.to_owned()).or_default();
        let next = known.count.saturating_add(1);
        *known = QuarantineCount { count: known.count.max(number), last_sequence: sequence };
        if number == next { Ok(()) } else { Err(format!("the agent's next would be {next}")) }
    }

    pub(crate) fn quarantine_count(&self, agent: &str) -> QuarantineCount {
        self.quarantines.get(agent).copied().unwrap_or_default()
    }
}
