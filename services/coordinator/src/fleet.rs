//! Which agents there are, as they say of themselves.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use cycle::{Fleet, Held, Member};
use wire::{
    WorkKind,
    v1::{self, agent_status::State},
};

/// An agent that has said nothing for so long does not count.
const SILENT: Duration = Duration::from_secs(10);

/// A job that nobody was seen to hold for so long is as one that nobody ever held.
const FORGOTTEN: Duration = Duration::from_secs(3600);

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
}

impl Present {
    pub(crate) fn note(&mut self, status: v1::AgentStatus) {
        self.agents.retain(|_, (heard, _)| heard.elapsed() < SILENT);
        self.held.retain(|_, seen| seen.elapsed() < FORGOTTEN);
        for (role, kind) in WORK {
            self.held.extend(holds(&status, role).map(|held| ((kind, held), Instant::now())));
        }
        self.agents.insert(status.agent.clone(), (Instant::now(), status));
    }

    /// Those of a pool that take work. Verifiers serve every pool.
    pub(crate) fn fleet(&self, pool: &str) -> Fleet {
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
    Member {
        agent: status.agent.clone(),
        tokens_per_s: status.tokens_per_s,
        holds: holds(status, role).collect(),
    }
}

fn holds(status: &v1::AgentStatus, role: &str) -> impl Iterator<Item = Held> {
    let held = |job: &v1::ActiveJob| {
        Some(Held { run: job.run.parse().ok()?, cycle: job.cycle, job: job.job.clone() })
    };
    status.jobs.iter().filter(move |job| job.role == role).filter_map(held)
}
