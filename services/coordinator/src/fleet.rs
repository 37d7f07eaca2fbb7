//! Which agents there are, as they say of themselves.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use cycle::{Fleet, Held, Member};
use wire::{
    Place, Record, RunId, Subject, WorkKind,
    v1::{self, agent_status::State},
};

/// An agent that has said nothing for so long does not count.
const SILENT: Duration = Duration::from_secs(5);

/// A job that nobody was seen to hold for so long is as one that nobody ever held.
const FORGOTTEN: Duration = Duration::from_secs(3600);

/// How old what is known of a fleet may be: it is put together anew no more often than this,
/// however many agents speak.
const FRESH: Duration = Duration::from_millis(250);

const WORK: [(&str, WorkKind); 3] = [
    ("generator", WorkKind::Generate),
    ("verifier", WorkKind::Verify),
    ("trainer", WorkKind::Train),
];

/// The last word of each agent, and when each job was last in somebody's hands.
#[derive(Debug, Default)]
pub(crate) struct Present {
    agents: BTreeMap<String, (Instant, v1::AgentStatus)>,
    held: BTreeMap<(WorkKind, Held), Instant>,
    /// By pool.
    fleets: BTreeMap<String, (Instant, Fleet)>,
}

impl Present {
    /// Whether a box has nothing to do from now on, as far as this tells.
    pub(crate) fn note(&mut self, status: v1::AgentStatus) -> bool {
        let now = Instant::now();
        for (role, kind) in WORK {
            self.held.extend(holds(&status, role).map(|held| ((kind, held), now)));
        }
        let is_idle = status.jobs.is_empty();
        let before = self.agents.insert(status.agent.clone(), (now, status));
        is_idle && before.is_some_and(|(_, before)| !before.jobs.is_empty())
    }

    /// Lets go of agents that are gone, and of jobs that nobody waits for.
    pub(crate) fn tidy(&mut self, is_open: impl Fn(&RunId) -> bool) {
        self.agents.retain(|_, (heard, _)| heard.elapsed() < SILENT);
        self.held.retain(|(_, held), seen| seen.elapsed() < FORGOTTEN && is_open(&held.run));
        self.fleets.retain(|_, (made, _)| made.elapsed() < SILENT);
    }

    /// How many agents are in each state.
    pub(crate) fn states(&self) -> BTreeMap<String, u64> {
        let mut states = BTreeMap::new();
        for (_, status) in self.agents.values().filter(|(heard, _)| heard.elapsed() < SILENT) {
            *states.entry(status.state().as_str_name().to_lowercase()).or_default() += 1;
        }
        states
    }

    /// Forgets who held a job that is done.
    pub(crate) fn settle(&mut self, record: &Record) {
        let Subject { run, place } = &record.fact.subject;
        let (kind, cycle, job) = match place {
            Place::Samples { cycle, job } => (WorkKind::Generate, cycle, job),
            Place::Verdicts { cycle, job } => (WorkKind::Verify, cycle, job),
            _ => return,
        };
        if !self.held.is_empty() {
            let held = Held { run: run.clone(), cycle: *cycle, job: job.to_string() };
            self.held.remove(&(kind, held));
        }
    }

    /// Those of a pool that take work. Verifiers serve every pool.
    pub(crate) fn fleet(&mut self, pool: &str) -> &Fleet {
        let known = self.fleets.get(pool).is_some_and(|(made, _)| made.elapsed() < FRESH);
        if !known {
            let fleet = self.look(pool);
            self.fleets.insert(pool.to_owned(), (Instant::now(), fleet));
        }
        &self.fleets[pool].1
    }

    fn look(&self, pool: &str) -> Fleet {
        let there = || {
            self.agents
                .values()
                .filter(|(heard, _)| heard.elapsed() < SILENT)
                .map(|(_, status)| status)
        };
        let takes_work =
            |status: &&v1::AgentStatus| matches!(status.state(), State::Ready | State::Quarantined);
        let with = |role: &'static str, any_pool: bool| {
            there()
                .filter(takes_work)
                .filter(move |status| any_pool || status.pool == pool)
                .filter(move |status| status.roles.iter().any(|has| has == role))
                .map(move |status| member(status, role))
                .collect()
        };
        Fleet {
            generators: with("generator", false),
            verifiers: with("verifier", true),
            trainers: with("trainer", false),
            held_ago_ms: self
                .held
                .iter()
                .map(|(job, seen)| {
                    let ago = seen.elapsed().as_millis();
                    (job.clone(), u64::try_from(ago).unwrap_or(u64::MAX))
                })
                .collect(),
        }
    }
}

fn member(status: &v1::AgentStatus, role: &str) -> Member {
    let jobs = status.jobs.iter().filter(|job| job.role == role);
    Member {
        agent: status.agent.clone(),
        tokens_per_s: status.tokens_per_s,
        sample_s: status.sample_s,
        holds: holds(status, role).collect(),
        left: jobs.fold(0, |left, job| {
            let of_job = job.total.saturating_sub(job.done);
            of_job.saturating_add(left)
        }),
    }
}

fn holds(status: &v1::AgentStatus, role: &str) -> impl Iterator<Item = Held> {
    let held = |job: &v1::ActiveJob| {
        Some(Held { run: job.run.parse().ok()?, cycle: job.cycle, job: job.job.clone() })
    };
    status.jobs.iter().filter(move |job| job.role == role).filter_map(held)
}
