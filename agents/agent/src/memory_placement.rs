//! The memory for a training: reads the other agents' statuses, and describes where a training
//! runs. `agent-core` decides.

use std::{collections::BTreeMap, time::Duration};

use agent_core::{MemoryFit, TrainerPeer, TrainingPlacement};
use wire::v1::{self, agent_status::State};

/// The time, beyond the interval of status records, for which an agent takes no training after it
/// handed one over, so that the other agent receives it.
pub(crate) const HAND_OVER_MARGIN: Duration = Duration::from_secs(2);

const STATUS_AGE_MAX_S: i64 = 30;

/// The memory that a job needs on a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryNeeds {
    pub own: MemoryFit,
    /// The needed bytes by hardware profile; on other profiles the need is the same as on this
    /// host.
    pub by_profile: BTreeMap<String, u64>,
}

/// Returns true for another agent that is ready, has the role, and was seen in the last 30 s.
pub(crate) fn is_available(status: &v1::AgentStatus, own: &str, role: &str) -> bool {
    let now = i64::try_from(wire::clock::unix_seconds()).unwrap_or(i64::MAX);
    let seen = status.seen_at.as_ref().map_or(0, |at| at.seconds);
    status.agent != own
        && status.state() == State::Ready
        && status.roles.iter().any(|has| has == role)
        && now.saturating_sub(seen) <= STATUS_AGE_MAX_S
}

/// Lists the other available agents of a pool that have the role. The tuple is this agent's id, its
/// pool and the role.
pub(crate) fn list_peers(
    needs: &MemoryNeeds,
    statuses: &[v1::AgentStatus],
    (own, pool, role): (&str, &str, &str),
) -> Vec<TrainerPeer> {
    let is_there =
        |status: &&v1::AgentStatus| status.pool == pool && is_available(status, own, role);
    let works =
        |status: &v1::AgentStatus| status.jobs.iter().any(|job| job.role == role && !job.waits);
    let peer = |status: &v1::AgentStatus| TrainerPeer {
        agent: status.agent.clone(),
        memory_fit: MemoryFit {
            needed_bytes: needs
                .by_profile
                .get(&status.profile)
                .copied()
                .unwrap_or(needs.own.needed_bytes),
            available_bytes: (status.training_bytes > 0).then_some(status.training_bytes),
        },
        is_idle: !works(status),
    };
    statuses.iter().filter(is_there).map(peer).collect()
}

/// Describes a placement for users; empty if the job runs here.
pub(crate) fn describe_placement(needs: &MemoryNeeds, placing: &TrainingPlacement) -> String {
    let gb = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
    let MemoryFit { needed_bytes: bytes, available_bytes: has } = needs.own;
    let here = format!("it needs {}, {} are free here", gb(bytes), gb(has.unwrap_or(0)));
    match placing {
        TrainingPlacement::RunHere => String::new(),
        TrainingPlacement::HandOver(agent) => format!("{here}; {agent} has room and takes it"),
        TrainingPlacement::WaitFor(agent) => format!("{here}; waiting for {agent}, which has room"),
        TrainingPlacement::Unschedulable(largest) => {
            let largest = largest
                .as_ref()
                .map_or(String::new(), |(agent, bytes)| format!(", {} on {agent}", gb(*bytes)));
            format!(
                "no trainer has room: {here}{largest}. Lower training.micro_batch_tokens or the \
                 adapter's rank, train an adapter instead of all weights, or start a trainer on a \
                 larger box; the run then continues by itself (--training-gib overrides the \
                 detected training memory)"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(agent: &str) -> v1::AgentStatus {
        v1::AgentStatus {
            agent: agent.into(),
            pool: "default".into(),
            roles: vec!["trainer".into()],
            state: State::Ready.into(),
            seen_at: Some(wire::clock::now()),
            profile: "gfx1151".into(),
            training_bytes: 99,
            ..Default::default()
        }
    }

    #[test]
    fn peers_are_those_that_train_here_and_now() {
        let needs = MemoryNeeds {
            own: MemoryFit { needed_bytes: 19, available_bytes: Some(16) },
            by_profile: BTreeMap::from([("gfx906".to_owned(), 36)]),
        };
        let job = |waits| v1::ActiveJob { role: "trainer".into(), waits, ..Default::default() };
        let silent = Some(wire::to_timestamp(Duration::ZERO));
        let statuses = [
            status("self"),
            status("halo"),
            v1::AgentStatus { jobs: vec![job(false)], ..status("busy") },
            v1::AgentStatus { jobs: vec![job(true)], ..status("holds") },
            v1::AgentStatus { profile: "gfx906".into(), training_bytes: 31, ..status("mi50") },
            v1::AgentStatus { training_bytes: 0, ..status("unknown") },
            v1::AgentStatus { pool: "other".into(), ..status("elsewhere") },
            v1::AgentStatus { roles: vec!["verifier".into()], ..status("verifier") },
            v1::AgentStatus { state: State::Quarantined.into(), ..status("suspect") },
            v1::AgentStatus { seen_at: silent, ..status("gone") },
        ];
        let found = list_peers(&needs, &statuses, ("self", "default", "trainer"));
        let found: Vec<_> = found
            .iter()
            .map(|peer| {
                (
                    peer.agent.as_str(),
                    peer.memory_fit.needed_bytes,
                    peer.memory_fit.available_bytes,
                    peer.is_idle,
                )
            })
            .collect();
        assert_eq!(
            found,
            [
                ("halo", 19, Some(99), true),
                ("busy", 19, Some(99), false),
                ("holds", 19, Some(99), true),
                ("mi50", 36, Some(31), true),
                ("unknown", 19, None, true),
            ]
        );
    }

    #[test]
    fn a_training_that_fits_nowhere_is_described_with_sizes() {
        let own = MemoryFit { needed_bytes: 19_000_000_000, available_bytes: Some(16_000_000_000) };
        let needs = MemoryNeeds { own, by_profile: BTreeMap::new() };
        let message = describe_placement(
            &needs,
            &TrainingPlacement::Unschedulable(Some(("mi50".into(), 18_000_000_000))),
        );
        for part in ["no trainer has room", "needs 19.0 GB", "16.0 GB", "18.0 GB on mi50"] {
            assert!(message.contains(part), "{message}");
        }
    }
}
