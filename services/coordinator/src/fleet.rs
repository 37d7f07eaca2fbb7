//! Which generators there are, as they say of themselves.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use cycle::{Fleet, Generator};
use wire::v1::{self, agent_status::State};

/// An agent that has said nothing for so long does not count.
const SILENT: Duration = Duration::from_secs(10);

/// The last word of each agent.
#[derive(Debug, Default)]
pub(crate) struct Present {
    agents: BTreeMap<String, (Instant, v1::AgentStatus)>,
}

impl Present {
    pub(crate) fn note(&mut self, status: v1::AgentStatus) {
        self.agents.retain(|_, (heard, _)| heard.elapsed() < SILENT);
        self.agents.insert(status.agent.clone(), (Instant::now(), status));
    }

    /// The generators of a pool.
    pub(crate) fn fleet(&self, pool: &str) -> Fleet {
        let generates = |status: &v1::AgentStatus| {
            status.pool == pool
                && status.state() == State::Ready
                && status.roles.iter().any(|role| role == "generator")
        };
        let generators = self
            .agents
            .values()
            .filter(|(heard, status)| heard.elapsed() < SILENT && generates(status))
            .map(|(_, status)| Generator { tokens_per_s: status.tokens_per_s });
        Fleet { generators: generators.collect() }
    }
}
