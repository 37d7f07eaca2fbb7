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

/// The held jobs of an agent that the registry remembers, because agents may report any. Further ones
/// only count while the agent reports them.
const HELD_JOBS_PER_AGENT_MAX: usize = 2048;

/// The same for all agents, because anyone may report as any agent in an open fleet.
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
    held_jobs: HeldJobs,
    snapshots: BTreeMap<String, (Instant, FleetSnapshot)>,
}

/// The time of the last report of each agent that named a job.
#[derive(Debug, Default)]
struct HeldJobs {
    jobs: BTreeMap<(WorkKind, HeldJob), BTreeMap<String, Instant>>,
    counts: HeldJobCounts,
}

#[derive(Debug, Default)]
struct HeldJobCounts {
    of_agents: BTreeMap<String, usize>,
    all: usize,
}

impl HeldJobCounts {
    /// Returns false if a limit is reached.
    fn add(&mut self, agent: &str) -> bool {
        let of_agent = self.of_agents.get(agent).copied().unwrap_or(0);
        let has_room = of_agent < HELD_JOBS_PER_AGENT_MAX && self.all < HELD_JOBS_MAX;
        if has_room {
            self.of_agents.insert(agent.to_owned(), of_agent + 1);
            self.all += 1;
        }
        has_room
    }

    fn remove(&mut self, agent: &str) {
        self.all -= 1;
        if let Some(of_agent) = self.of_agents.get_mut(agent) {
            *of_agent -= 1;
            if *of_agent == 0 {
                self.of_agents.remove(agent);
            }
        }
    }
}

impl HeldJobs {
    fn remember_job(&mut self, agent: &str, job: (WorkKind, HeldJob), now: Instant) {
        if let Some(seen) = self.jobs.get_mut(&job).and_then(|agents| agents.get_mut(agent)) {
            *seen = now;
        } else if self.counts.add(agent) {
            self.jobs.entry(job).or_default().insert(agent.to_owned(), now);
        }
    }

    fn forget_job(&mut self, job: &(WorkKind, HeldJob)) {
        for agent in self.jobs.remove(job).unwrap_or_default().keys() {
            self.counts.remove(agent);
        }
    }

    fn retain_jobs(&mut self, is_kept: impl Fn(&HeldJob, Instant) -> bool) {
        let Self { jobs, counts } = self;
        jobs.retain(|(_, held), agents| {
            agents.retain(|agent, seen| {
                let is_kept = is_kept(held, *seen);
                if !is_kept {
                    counts.remove(agent);
                }
                is_kept
            });
            !agents.is_empty()
        });
    }

    /// Returns for each job the milliseconds since any agent named it.
    fn last_held_ago_ms(&self) -> BTreeMap<(WorkKind, HeldJob), u64> {
        let ago = |seen: &Instant| u64::try_from(seen.elapsed().as_millis()).unwrap_or(u64::MAX);
        let last = |agents: &BTreeMap<String, Instant>| agents.values().max().map(ago);
        self.jobs.iter().filter_map(|(job, agents)| Some((job.clone(), last(agents)?))).collect()
    }
}

impl AgentRegistry {
    /// Returns true if the agent just became idle.
    pub(crate) fn record_status(&mut self, status: v1::AgentStatus) -> bool {
        let now = Instant::now();
        for (role, kind) in ROLES {
            for held in held_jobs(&status, role) {
                self.held_jobs.remember_job(&status.agent, (kind, held), now);
            }
        }
        let is_idle = status.jobs.is_empty();
        let before = self.agents.insert(status.agent.clone(), (now, status));
        is_idle && before.is_some_and(|(_, before)| !before.jobs.is_empty())
    }

    /// Removes agents without recent reports, and held jobs that are old or whose run is not open.
    pub(crate) fn evict_stale(&mut self, is_open: impl Fn(&RunId) -> bool) {
        self.agents.retain(|_, (received_at, _)| received_at.elapsed() < AGENT_TIMEOUT);
        self.held_jobs
            .retain_jobs(|held, seen| seen.elapsed() < HELD_JOB_TTL && is_open(&held.run));
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
        if !self.held_jobs.jobs.is_empty() {
            let held = HeldJob { run: run.clone(), cycle: *cycle, job: job.to_string() };
            self.held_jobs.forget_job(&(kind, held));
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
            last_held_ago_ms: self.held_jobs.last_held_ago_ms(),
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

    fn status(agent: &str, jobs: impl IntoIterator<Item = String>) -> v1::AgentStatus {
        let job = |job| v1::ActiveJob {
            role: "verifier".into(),
            run: "r1".into(),
            job,
            ..Default::default()
        };
        let jobs = jobs.into_iter().map(job).collect();
        v1::AgentStatus { agent: agent.into(), jobs, ..Default::default() }
    }

    fn held(job: &str) -> (WorkKind, HeldJob) {
        (WorkKind::Verify, HeldJob { run: "r1".parse().unwrap(), cycle: 0, job: job.into() })
    }

    #[test]
    fn invented_jobs_of_an_agent_take_no_room_of_others() {
        let mut registry = AgentRegistry::default();
        registry.record_status(status("a1", ["x".repeat(1 << 16)]));
        assert_eq!(registry.held_jobs.counts.all, 0, "no job has such a name");
        let invented = (0..2 * HELD_JOBS_PER_AGENT_MAX).map(|job| format!("j{job}"));
        registry.record_status(status("a1", invented));
        assert_eq!(registry.held_jobs.counts.all, HELD_JOBS_PER_AGENT_MAX);
        let first = registry.held_jobs.jobs[&held("j0")]["a1"];
        registry.record_status(status("a1", ["j0".into(), "one-more".into()]));
        assert!(registry.held_jobs.jobs[&held("j0")]["a1"] > first, "a known one is updated");
        assert!(!registry.held_jobs.jobs.contains_key(&held("one-more")));
        registry.record_status(status("a2", ["j0".into(), "own".into()]));
        assert!(registry.fleet_snapshot("").last_held_ago_ms.contains_key(&held("own")));
        for agent in 0..HELD_JOBS_MAX / HELD_JOBS_PER_AGENT_MAX + 1 {
            let jobs = (0..HELD_JOBS_PER_AGENT_MAX).map(|job| format!("b{job}"));
            registry.record_status(status(&format!("b{agent}"), jobs));
        }
        assert_eq!(registry.held_jobs.counts.all, HELD_JOBS_MAX);
    }

    #[test]
    fn forgotten_jobs_make_room() {
        let mut registry = AgentRegistry::default();
        let jobs = || (0..HELD_JOBS_PER_AGENT_MAX).map(|job| format!("j{job}"));
        registry.record_status(status("a1", jobs()));
        registry.record_status(status("a2", ["j0".into()]));
        registry.held_jobs.forget_job(&held("j0"));
        assert_eq!(registry.held_jobs.counts.of_agents.get("a2"), None);
        registry.record_status(status("a1", ["new".into()]));
        assert!(registry.held_jobs.jobs.contains_key(&held("new")));
        registry.evict_stale(|_| false);
        assert_eq!(registry.held_jobs.counts.all, 0);
        assert!(
            registry.held_jobs.jobs.is_empty() && registry.held_jobs.counts.of_agents.is_empty()
        );
    }
}
