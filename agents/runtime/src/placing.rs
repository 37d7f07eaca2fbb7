//! Finding room for a training: `conduct` says where it goes; here the others are asked and
//! waited for.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use conduct::{Peer, Placing, Room};
use wire::v1::{self, agent_status::State};

/// Between two looks at the others; as often as they record how they are.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(10);

/// An agent that hands a training to another takes none for this long, so that it gets there.
pub(crate) const PASS_ON_REST: Duration = Duration::from_secs(12);

/// An agent that has said nothing for so long is not waited for.
const SILENT_S: i64 = 30;

/// What a job needs of a box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    pub own: Room,
    /// Bytes on a box of that profile; elsewhere as much as here.
    pub by_profile: BTreeMap<String, u64>,
}

/// Whether another agent does that work, and is there.
pub(crate) fn is_there(status: &v1::AgentStatus, own: &str, role: &str) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    let seen = status.seen_at.as_ref().map_or(0, |at| at.seconds);
    status.agent != own
        && status.state() == State::Ready
        && status.roles.iter().any(|has| has == role)
        && now.saturating_sub(seen) <= SILENT_S
}

/// The others of a pool that do the same work and are there.
pub(crate) fn peers(
    needs: &Needs,
    statuses: &[v1::AgentStatus],
    (own, pool, role): (&str, &str, &str),
) -> Vec<Peer> {
    let is_there = |status: &&v1::AgentStatus| status.pool == pool && is_there(status, own, role);
    let works =
        |status: &v1::AgentStatus| status.jobs.iter().any(|job| job.role == role && !job.waits);
    let peer = |status: &v1::AgentStatus| Peer {
        agent: status.agent.clone(),
        room: Room {
            needs: needs.by_profile.get(&status.profile).copied().unwrap_or(needs.own.needs),
            has: (status.training_bytes > 0).then_some(status.training_bytes),
        },
        idle: !works(status),
    };
    statuses.iter().filter(is_there).map(peer).collect()
}

/// What users are told while no box has room.
pub(crate) fn told(needs: &Needs, placing: &Placing) -> String {
    let gb = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
    let Room { needs: bytes, has } = needs.own;
    let here = format!("it needs {} and {} are free for it here", gb(bytes), gb(has.unwrap_or(0)));
    match placing {
        Placing::Take => String::new(),
        Placing::PassOn(agent) => format!("{here}; {agent} has room and takes it"),
        Placing::Await(agent) => format!("{here}; waiting for {agent}, which has room"),
        Placing::Nowhere(largest) => {
            let largest = largest
                .as_ref()
                .map_or(String::new(), |(agent, bytes)| format!(", {} on {agent}", gb(*bytes)));
            format!(
                "no trainer has room: {here}{largest}. Lower training.micro_batch_tokens or the \
                 adapter's rank, train an adapter instead of all weights, or start a trainer on a \
                 larger box: the run goes on by itself (--training-gib says what a training may \
                 plan with)"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presence::timestamp_now;

    fn status(agent: &str) -> v1::AgentStatus {
        v1::AgentStatus {
            agent: agent.into(),
            pool: "default".into(),
            roles: vec!["trainer".into()],
            state: State::Ready.into(),
            seen_at: Some(timestamp_now()),
            profile: "gfx1151".into(),
            training_bytes: 99,
            ..Default::default()
        }
    }

    #[test]
    fn peers_are_those_that_train_here_and_now() {
        let needs = Needs {
            own: Room { needs: 19, has: Some(16) },
            by_profile: BTreeMap::from([("gfx906".to_owned(), 36)]),
        };
        let job = |waits| v1::ActiveJob { role: "trainer".into(), waits, ..Default::default() };
        let silent = Some(wire::timestamp(Duration::ZERO));
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
        let found = peers(&needs, &statuses, ("self", "default", "trainer"));
        let found: Vec<_> = found
            .iter()
            .map(|peer| (peer.agent.as_str(), peer.room.needs, peer.room.has, peer.idle))
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
    fn what_fits_nowhere_is_told_with_figures() {
        let own = Room { needs: 19_000_000_000, has: Some(16_000_000_000) };
        let needs = Needs { own, by_profile: BTreeMap::new() };
        let said = told(&needs, &Placing::Nowhere(Some(("mi50".into(), 18_000_000_000))));
        for part in ["no trainer has room", "needs 19.0 GB", "16.0 GB", "18.0 GB on mi50"] {
            assert!(said.contains(part), "{said}");
        }
    }
}
