//! Which agents serve which channels, and the choice of one for a request.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bus::Bus;
use control::MembershipView;
use futures::StreamExt;
use identity::MemberRole;
use tokio::{sync::watch, time::Instant};
use wire::{AgentId, v1};

use super::channel_moves::ChannelMoves;

/// Agents announce their status each second.
const STATUS_AGE_MAX: Duration = Duration::from_secs(10);
/// An agent that did not answer gets no requests for this long.
const SUSPECT_TIME: Duration = Duration::from_secs(5);
/// Between two attempts to follow the agents, while the bus is unreachable.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The agents that serve channels, by name. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct ServingAgents {
    agents: Arc<Mutex<BTreeMap<AgentId, ServingAgent>>>,
    /// What agents announce counts only as far as these allow it.
    moves: ChannelMoves,
}

#[derive(Debug)]
struct ServingAgent {
    pool: String,
    served: Vec<v1::ServedChannel>,
    seen: Instant,
    /// Requests of this gateway that the agent works on.
    active: u32,
    suspect_until: Option<Instant>,
}

impl ServingAgent {
    fn is_fresh(&self, now: Instant) -> bool {
        now.duration_since(self.seen) < STATUS_AGE_MAX
    }
}

/// A request that counts for its agent's load until it is dropped.
#[derive(Debug)]
pub(super) struct AgentRequest {
    agent: AgentId,
    /// The channel's move whose model the agent has.
    number: u64,
    agents: ServingAgents,
}

impl AgentRequest {
    pub(super) fn agent(&self) -> &AgentId {
        &self.agent
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for AgentRequest {
    fn drop(&mut self) {
        if let Some(agent) = self.agents.lock_agents().get_mut(&self.agent) {
            agent.active = agent.active.saturating_sub(1);
        }
    }
}

impl ServingAgents {
    pub(super) fn new(moves: ChannelMoves) -> Self {
        Self { agents: Arc::default(), moves }
    }

    /// Follows the statuses of all agents. Those of members without the role do not count: requests
    /// would not reach them. Nor do those of members that name another pool than their own.
    pub(super) async fn follow_statuses(
        &self,
        bus: &Bus,
        members: &watch::Receiver<MembershipView>,
    ) -> Infallible {
        let may_serve = |status: &v1::AgentStatus| {
            let view = members.borrow();
            view.revocations.may_have_role(&status.agent, MemberRole::Server, &status.pool)
        };
        loop {
            match bus.watch_statuses().await {
                Ok(mut statuses) => {
                    while let Some(status) = statuses.next().await {
                        if may_serve(&status) {
                            self.note_status(status);
                        }
                    }
                }
                Err(error) => tracing::debug!(%error, "following the agents that serve models"),
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    fn note_status(&self, status: v1::AgentStatus) {
        let Ok(name) = AgentId::new(status.agent.as_str()) else { return };
        let has_role = status.roles.iter().any(|role| role == "server");
        let is_gone = status.state() == v1::agent_status::State::Stopped || !has_role;
        let served = if is_gone { Vec::new() } else { status.served };
        let now = Instant::now();
        let mut agents = self.lock_agents();
        let new = || ServingAgent {
            pool: String::new(),
            served: Vec::new(),
            seen: now,
            active: 0,
            suspect_until: None,
        };
        let known = agents.entry(name).or_insert_with(new);
        (known.pool, known.served, known.seen) = (status.pool, served, now);
        // Open requests of the others count until they end.
        agents.retain(|_, it| it.active > 0 || !it.served.is_empty() && it.is_fresh(now));
    }

    /// Returns the agent with the newest model of a channel and the smallest load; `None` if no
    /// agent but those in `tried` serves it.
    pub(super) fn choose_agent(&self, channel: &str, tried: &[AgentId]) -> Option<AgentRequest> {
        let newest = self.moves.find_newest(channel)?;
        let now = Instant::now();
        let mut agents = self.lock_agents();
        let candidates = agents.iter().filter_map(|(name, agent)| {
            let is_usable = agent.is_fresh(now)
                && agent.suspect_until.is_none_or(|until| until < now)
                && !tried.contains(name);
            let is_this = |it: &&v1::ServedChannel| {
                it.channel == channel && newest.allows(it.number, &agent.pool)
            };
            let served = agent.served.iter().find(is_this)?;
            is_usable.then(|| {
                let load = f64::from(agent.active) / f64::from(served.slots.max(1));
                (std::cmp::Reverse(served.number), load, name.clone())
            })
        });
        let best = candidates
            .min_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then_with(|| a.2.cmp(&b.2)));
        let (std::cmp::Reverse(number), _, name) = best?;
        agents.get_mut(&name)?.active += 1;
        Some(AgentRequest { agent: name, number, agents: self.clone() })
    }

    pub(super) fn suspect_agent(&self, name: &AgentId) {
        if let Some(agent) = self.lock_agents().get_mut(name) {
            agent.suspect_until = Some(Instant::now() + SUSPECT_TIME);
        }
    }

    /// Returns the channels that some agent serves now.
    pub(super) fn served_channels(&self) -> BTreeSet<String> {
        let now = Instant::now();
        let agents = self.lock_agents();
        let fresh = agents.values().filter(|it| it.is_fresh(now));
        let served =
            fresh.flat_map(|agent| agent.served.iter().map(move |it| (it, agent.pool.as_str())));
        let is_allowed = |(it, pool): &(&v1::ServedChannel, &str)| {
            let newest = self.moves.find_newest(&it.channel);
            newest.is_some_and(|newest| newest.allows(it.number, pool))
        };
        served.filter(is_allowed).map(|(it, _)| it.channel.clone()).collect()
    }

    fn lock_agents(&self) -> MutexGuard<'_, BTreeMap<AgentId, ServingAgent>> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use wire::{Fact, FactBody, FactKey, Record, Subject};

    use super::*;

    fn status(agent: &str, served: &[(&str, u64)]) -> v1::AgentStatus {
        let served = served.iter().map(|(channel, number)| v1::ServedChannel {
            channel: (*channel).into(),
            number: *number,
            slots: 2,
            ..Default::default()
        });
        let (served, roles) = (served.collect(), vec!["server".to_owned()]);
        let pool = "default".to_owned();
        v1::AgentStatus { agent: agent.into(), served, roles, pool, ..Default::default() }
    }

    /// Returns no agents, with a channel `stable` whose newest move is the second one.
    fn no_agents() -> ServingAgents {
        let moves = ChannelMoves::default();
        for number in 1..=2 {
            let serving = v1::channel_move::Serving { pool: "default".into(), replicas: 0 };
            let found = v1::ChannelMove { serving: Some(serving), ..Default::default() };
            let subject = Subject::new(&"stable".parse().unwrap(), FactKey::Channel { number });
            let fact = Fact { subject, body: FactBody::Channel(found) };
            moves.apply_record(&Record { sequence: number, time_ms: 0, author: None, fact });
        }
        ServingAgents::new(moves)
    }

    fn chosen(agents: &ServingAgents, tried: &[&str]) -> Option<AgentRequest> {
        let tried: Vec<AgentId> = tried.iter().map(|name| name.parse().unwrap()).collect();
        agents.choose_agent("stable", &tried)
    }

    #[tokio::test]
    async fn requests_are_spread_and_go_to_the_newest_model() {
        let agents = no_agents();
        agents.note_status(status("a", &[("stable", 1)]));
        agents.note_status(status("b", &[("stable", 1), ("other", 7)]));
        let first = chosen(&agents, &[]).unwrap();
        let second = chosen(&agents, &[]).unwrap();
        assert_eq!((first.agent().as_str(), second.agent().as_str()), ("a", "b"));
        drop(first);
        assert_eq!(chosen(&agents, &[]).unwrap().agent().as_str(), "a");
        agents.note_status(status("b", &[("stable", 2)]));
        assert_eq!(chosen(&agents, &[]).unwrap().agent().as_str(), "b");
        assert_eq!(chosen(&agents, &["b"]).unwrap().agent().as_str(), "a");
        assert!(chosen(&agents, &["a", "b"]).is_none());
    }

    #[tokio::test]
    async fn an_agent_that_announces_what_cannot_be_gets_no_requests() {
        let agents = no_agents();
        agents.note_status(status("honest", &[("stable", 1)]));
        agents.note_status(status("ahead", &[("stable", u64::MAX), ("invented", 1)]));
        let other_pool = v1::AgentStatus { pool: "other".into(), ..status("b", &[("stable", 2)]) };
        agents.note_status(other_pool);
        assert_eq!(chosen(&agents, &[]).unwrap().agent().as_str(), "honest");
        assert!(chosen(&agents, &["honest"]).is_none());
        assert!(agents.choose_agent("invented", &[]).is_none());
        assert_eq!(agents.served_channels(), ["stable".to_owned()].into());
    }

    #[tokio::test(start_paused = true)]
    async fn agents_that_are_silent_failed_or_still_load_get_no_requests() {
        let agents = no_agents();
        agents.note_status(status("a", &[("stable", 0)]));
        assert!(chosen(&agents, &[]).is_none(), "it has not loaded the model");
        agents.note_status(status("a", &[("stable", 1)]));
        agents.suspect_agent(&"a".parse().unwrap());
        assert!(chosen(&agents, &[]).is_none());
        tokio::time::advance(SUSPECT_TIME + Duration::from_secs(1)).await;
        assert!(chosen(&agents, &[]).is_some());
        tokio::time::advance(STATUS_AGE_MAX).await;
        assert!(chosen(&agents, &[]).is_none());
        assert!(agents.served_channels().is_empty());
        // It is forgotten, unless it has an open request.
        agents.note_status(status("b", &[("stable", 1)]));
        assert_eq!(agents.lock_agents().len(), 1);
        let open = chosen(&agents, &[]).unwrap();
        tokio::time::advance(STATUS_AGE_MAX).await;
        agents.note_status(status("c", &[("stable", 1)]));
        assert_eq!(agents.lock_agents().len(), 2);
        drop(open);
        agents.note_status(status("c", &[]));
        assert_eq!(agents.lock_agents().len(), 0);
    }
}
