//! The registry of live agents, from their status reports.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use cycle::{FleetMember, FleetSnapshot, HeldJob};
use wire::{
    FactKey, NAME_BYTES_MAX, Record, RunId, Subject, WorkKind,
    v1::{self, agent_status::State},
};

/// Time without a status report; then the agent counts as offline.
const AGENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time for which the registry remembers that a job was held.
const HELD_JOB_TTL: Duration = Duration::from_secs(3600);

/// The held jobs that the registry remembers, because agents may report any. Further ones only
/// count while an agent reports them.
const HELD_JOBS_MAX: usize = 100_000;

/// Limits the cost with many status reports.
const SNAPSHOT_TTL: Duration = Duration::from_millis(250);

const ROLES: [(&str, WorkKind); 4] = [
    ("generator", WorkKind::Generate),
    ("verifier", WorkKind::Verify),
    ("scorer", WorkKind::Score),
    ("trainer", WorkKind::Train),
];

/// The latest status report of each agent, and the time each job was last held. An agent is live
/// for [`AGENT_TIMEOUT`] after its last report. The planner receives a [`FleetSnapshot`] per pool,
/// cached for [`SNAPSHOT_TTL`].
#[derive(Debug, Default)]
pub(crate) struct AgentRegistry {
    agents: BTreeMap<String, (Instant, v1::AgentStatus)>,
    /// Time of the last report that named the job.
    last_held: BTreeMap<(WorkKind, HeldJob), Instant>,
    snapshots: BTreeMap<String, (Instant, FleetSnapshot)>,
}

impl AgentRegistry {
    /// Returns true if the agent just became idle.
    pub(crate) fn record_status(&mut self, status: v1::AgentStatus) -> bool {
        let now = Instant::now();
        for (role, kind) in ROLES {
            held_jobs(&status, role).for_each(|held| self.remember_held((kind, held), now));
        }
        let is_idle = status.jobs.is_empty();
        let before = self.agents.insert(status.agent.clone(), (now, status));
        is_idle && before.is_some_and(|(_, before)| !before.jobs.is_empty())
    }

    fn remember_held(&mut self, held: (WorkKind, HeldJob), now: Instant) {
        if self.last_held.len() < HELD_JOBS_MAX || self.last_held.contains_key(&held) {
            self.last_held.insert(held, now);
        }
    }

    /// Removes agents without recent reports, and held jobs that are old or whose run is not open.
    pub(crate) fn evict_stale(&mut self, is_open: impl Fn(&RunId) -> bool) {
        self.agents.retain(|_, (received_at, _)| received_at.elapsed() < AGENT_TIMEOUT);
        self.last_held
            .retain(|(_, held), seen| seen.elapsed() < HELD_JOB_TTL && is_open(&held.run));
        self.snapshots.retain(|_, (made, _)| made.elapsed() < AGENT_TIMEOUT);
    }

    pub(crate) fn count_states(&self) -> BTreeMap<String, u64> {
        let mut states = BTreeMap::new();
        for (_, status) in
            self.agents.values().filter(|(received_at, _)| received_at.elapsed() < AGENT_TIMEOUT)
        {
            *states.entry(status.state().as_str_name().to_lowercase()).or_default() += 1;
        }
        states
    }

    /// Removes a held job once its result is in the log.
    pub(crate) fn apply_fact(&mut self, record: &Record) {
        let Subject { run, key: place } = &record.fact.subject;
        let (kind, cycle, job) = match place {
            FactKey::Samples { cycle, job } => (WorkKind::Generate, cycle, job),
            FactKey::Verdicts { cycle, job } => (WorkKind::Verify, cycle, job),
            FactKey::Scores { cycle, job } => (WorkKind::Score, cycle, job),
            _ => return,
        };
        if !self.last_held.is_empty() {
            let held = HeldJob { run: run.clone(), cycle: *cycle, job: job.to_string() };
            self.last_held.remove(&(kind, held));
        }
    }

    /// Returns a snapshot at most [`SNAPSHOT_TTL`] old. Verifiers and scorers serve all
    /// pools.
    pub(crate) fn fleet_snapshot(&mut self, pool: &str) -> &FleetSnapshot {
        let known = self.snapshots.get(pool).is_some_and(|(made, _)| made.elapsed() < SNAPSHOT_TTL);
        if !known {
            let fleet = self.build_snapshot(pool);
            self.snapshots.insert(pool.to_owned(), (Instant::now(), fleet));
        }
        &self.snapshots[pool].1
    }

    fn build_snapshot(&self, pool: &str) -> FleetSnapshot {
        let there = || {
            self.agents
                .values()
                .filter(|(received_at, _)| received_at.elapsed() < AGENT_TIMEOUT)
                .map(|(_, status)| status)
        };
        let takes_work =
            |status: &&v1::AgentStatus| matches!(status.state(), State::Ready | State::Quarantined);
        let with = |role: &'static str, any_pool: bool| {
            there()
                .filter(takes_work)
                .filter(move |status| any_pool || status.pool == pool)
                .filter(move |status| status.roles.iter().any(|has| has == role))
                .map(move |status| to_fleet_member(status, role))
                .collect()
        };
        FleetSnapshot {
            generators: with("generator", false),
            verifiers: with("verifier", true),
            scorers: with("scorer", true),
            trainers: with("trainer", false),
            last_held_ago_ms: self
                .last_held
                .iter()
                .map(|(job, seen)| {
                    let ago = seen.elapsed().as_millis();
                    (job.clone(), u64::try_from(ago).unwrap_or(u64::MAX))
                })
                .collect(),
        }
    }
}

fn to_fleet_member(status: &v1::AgentStatus, role: &str) -> FleetMember {
    let jobs = status.jobs.iter().filter(|job| job.role == role);
    FleetMember {
        agent: status.agent.clone(),
        tokens_per_s: status.tokens_per_s,
        seconds_per_sample: status.sample_s,
        training_speed: status.training_speed.clone(),
        held_jobs: held_jobs(status, role).collect(),
        remaining_samples: jobs.fold(0, |left, job| {
            let of_job = job.total.saturating_sub(job.done);
            of_job.saturating_add(left)
        }),
    }
}

fn held_jobs(status: &v1::AgentStatus, role: &str) -> impl Iterator<Item = HeldJob> {
    let held = |job: &v1::ActiveJob| {
        Some(HeldJob { run: job.run.parse().ok()?, cycle: job.cycle, job: job.job.clone() })
    };
    let own = move |job: &&v1::ActiveJob| job.role == role && job.job.len() <= NAME_BYTES_MAX;
    status.jobs.iter().filter(own).filter_map(held)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invented_jobs_of_an_agent_have_a_limit() {
        let mut registry = AgentRegistry::default();
        let status = |names: Vec<String>| v1::AgentStatus {
            agent: "a1".into(),
            jobs: names
                .into_iter()
                .map(|job| v1::ActiveJob {
                    role: "verifier".into(),
                    run: "r1".into(),
                    job,
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        };
        registry.record_status(status(vec!["x".repeat(1 << 16)]));
        assert!(registry.last_held.is_empty(), "no job has such a name");
        registry.record_status(status((0..HELD_JOBS_MAX).map(|job| format!("j{job}")).collect()));
        let first = registry.last_held.values().min().copied().unwrap();
        registry.record_status(status(vec!["j0".into(), "one-more".into()]));
        assert_eq!(registry.last_held.len(), HELD_JOBS_MAX);
        let run: RunId = "r1".parse().unwrap();
        let held = HeldJob { run, cycle: 0, job: "j0".into() };
        assert!(registry.last_held[&(WorkKind::Verify, held)] > first, "a known one is updated");
    }
}
