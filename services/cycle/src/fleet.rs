//! A snapshot of the agents of a pool, from their own status reports. It is only a hint, seconds
//! old or empty; a decision based on it costs at most one unnecessary order.

use std::collections::{BTreeMap, BTreeSet};

use wire::{RunId, WorkKind, v1::agent_status::TrainingSpeed};

use crate::cost_probe::count_visit;

/// The agents of one pool that are online and accept work, by role.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FleetSnapshot {
    pub generators: Vec<FleetMember>,
    /// Verifiers of all pools.
    pub verifiers: Vec<FleetMember>,
    /// Scorers of all pools.
    pub scorers: Vec<FleetMember>,
    pub trainers: Vec<FleetMember>,
    /// Milliseconds since each job was last reported as held by an agent.
    pub last_held_ago_ms: BTreeMap<(WorkKind, HeldJob), u64>,
}

/// An agent in one role.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FleetMember {
    pub agent: String,
    /// Generation speed; 0 if not yet known.
    pub tokens_per_s: f64,
    /// Seconds per sample while all slots of the agent are in use; 0 if not yet known.
    pub seconds_per_sample: f64,
    /// Speed of the agent's last training; `None` if not yet known.
    pub training_speed: Option<TrainingSpeed>,
    /// Jobs that the agent works on.
    pub held_jobs: BTreeSet<HeldJob>,
    /// Samples of the held jobs that are not drawn yet.
    pub remaining_samples: u32,
}

/// A job that an agent works on. The job of a training is called `train`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HeldJob {
    pub run: RunId,
    pub cycle: u32,
    pub job: String,
}

/// Minimum share of `seconds_per_sample` that any sample takes. The last samples share the GPU with
/// fewer others and are therefore faster than average.
const LAST_SAMPLES_FACTOR: f64 = 0.5;

impl FleetMember {
    /// Estimates when the agent finishes the jobs it holds; `None` if its speed is unknown.
    pub(crate) fn remaining_s(&self, tokens_per_sample: f64) -> Option<f64> {
        (self.tokens_per_s > 0.0)
            .then(|| self.duration_s(f64::from(self.remaining_samples) * tokens_per_sample))
    }

    pub(crate) fn duration_s(&self, tokens: f64) -> f64 {
        (tokens / self.tokens_per_s).max(LAST_SAMPLES_FACTOR * self.seconds_per_sample)
    }
}

impl FleetSnapshot {
    /// Returns the agents that do a kind of work; empty for evals, which the snapshot does not
    /// cover.
    pub(crate) fn members_for(&self, kind: WorkKind) -> &[FleetMember] {
        match kind {
            WorkKind::Generate => &self.generators,
            WorkKind::Verify => &self.verifiers,
            WorkKind::Score => &self.scorers,
            WorkKind::Train => &self.trainers,
            WorkKind::Eval => &[],
        }
    }

    pub(crate) fn is_held(&self, kind: WorkKind, held: &HeldJob) -> bool {
        self.members_for(kind)
            .iter()
            .inspect(|_| count_visit())
            .any(|member| member.held_jobs.contains(held))
    }

    /// Returns the time since the job was last held, at most the age of its order.
    pub(crate) fn unclaimed_ms(&self, kind: WorkKind, held: &HeldJob, ordered_ago_ms: u64) -> u64 {
        let seen = self.last_held_ago_ms.get(&(kind, held.clone())).copied();
        seen.map_or(ordered_ago_ms, |ago| ago.min(ordered_ago_ms))
    }

    pub(crate) fn idle_count(&self, kind: WorkKind) -> usize {
        self.members_for(kind)
            .iter()
            .inspect(|_| count_visit())
            .filter(|member| member.held_jobs.is_empty())
            .count()
    }
}
