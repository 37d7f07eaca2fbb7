//! The processes of a simulation and their clocks.

use wire::{WorkKind, v1};

use crate::{
    agent::Agent, archiver::Archiver, channel_user::ChannelUser, coordinator::Coordinator,
    faults::Faults, fork_user::ForkUser, keeper::Keeper, peer::Peer, specs, task::OTHER_POOL,
    user::User,
};

/// The largest difference of the clocks of two processes.
const CLOCK_SKEW_MS: u64 = 10_000_000;

/// The agents: the pool and the kinds of work of each. Those in the other pool exist only if a run
/// is in it.
const AGENTS: [(&str, &[WorkKind]); 8] = [
    ("default", &[WorkKind::Generate]),
    ("default", &[WorkKind::Generate]),
    ("default", &[WorkKind::Generate]),
    ("default", &[WorkKind::Verify, WorkKind::Score, WorkKind::Train]),
    ("default", &[WorkKind::Verify, WorkKind::Eval]),
    ("default", &WorkKind::ALL),
    (OTHER_POOL, &[WorkKind::Generate, WorkKind::Train]),
    (OTHER_POOL, &[WorkKind::Generate]),
];

/// The agents that may be revoked: for each kind of work of each pool there are others.
pub(crate) const REVOCABLE_AGENTS: [&str; 5] =
    ["agent-0", "agent-1", "agent-2", "agent-5", "agent-7"];

pub(crate) struct Process {
    pub(crate) name: String,
    pub(crate) peer: Box<dyn Peer>,
    pub(crate) incarnation: u64,
    pub(crate) up: bool,
    pub(crate) frozen_until: u64,
    pub(crate) cut_until: u64,
    pub(crate) disk_full_until: u64,
    pub(crate) clock: ProcessClock,
    /// Wants to know when the log has grown.
    pub(crate) follows: bool,
}

/// The clock of a process, which never stops, but starts anew with the process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProcessClock {
    offset_ms: u64,
    /// Its speed, of 1000.
    permille: u64,
}

impl ProcessClock {
    const EXACT: Self = Self { offset_ms: 0, permille: 1000 };

    pub(crate) fn draw(random: &mut fastrand::Rng) -> Self {
        Self { offset_ms: random.u64(0..CLOCK_SKEW_MS), permille: random.u64(900..=1100) }
    }

    pub(crate) fn read_clock(self, now_ms: u64) -> u64 {
        self.offset_ms + now_ms * self.permille / 1000
    }

    /// Returns the real duration of what the clock measures as `ms`.
    pub(crate) fn real_duration(self, ms: u64) -> u64 {
        ms * 1000 / self.permille
    }
}

/// Creates the processes of runs. Returns the number of users, which come first and which faults
/// never hit.
pub(crate) fn create_processes(
    runs: &[v1::Spec],
    faults: &Faults,
    random: &mut fastrand::Rng,
) -> (usize, Vec<Process>) {
    let (users, peers) = build_peers(runs, faults);
    let process = |(name, peer, follows)| Process {
        name,
        peer,
        incarnation: 0,
        up: true,
        frozen_until: 0,
        cut_until: 0,
        disk_full_until: 0,
        clock: match faults.skewed_clocks {
            true => ProcessClock::draw(random),
            false => ProcessClock::EXACT,
        },
        follows,
    };
    (users, peers.into_iter().map(process).collect())
}

type NamedPeer = (String, Box<dyn Peer>, bool);

/// Returns the processes, and the number of users, which faults never hit.
fn build_peers(runs: &[v1::Spec], faults: &Faults) -> (usize, Vec<NamedPeer>) {
    let mut peers: Vec<NamedPeer> = Vec::new();
    let is_watched = |spec: &&v1::Spec| matches!(spec.kind, Some(v1::spec::Kind::Watched(_)));
    let (watched, submitted): (Vec<&v1::Spec>, _) = runs.iter().partition(is_watched);
    for spec in submitted {
        peers.push((format!("user-{}", spec.run), Box::new(User::new(spec, faults)), false));
    }
    let channel_user = ChannelUser::new(specs::learns_from_feedback(runs));
    peers.push(("user-channel".into(), Box::new(channel_user), false));
    if specs::is_forked(runs) {
        peers.push(("user-fork".into(), Box::new(ForkUser::new()), false));
    }
    let users = peers.len();
    for spec in watched {
        peers.push((specs::WATCHER.into(), Box::new(User::new(spec, faults)), false));
    }
    for number in 0..faults.coordinators {
        let name = format!("coordinator-{number}");
        peers.push((name, Box::new(Coordinator::new(number)), true));
        let keeper = Keeper::new(number, faults.death_permille);
        peers.push((format!("keeper-{number}"), Box::new(keeper), false));
        if let Some(keep) = faults.keep_cycles {
            peers.push((format!("archiver-{number}"), Box::new(Archiver::new(keep)), false));
        }
    }
    let has_other = runs.iter().any(|spec| spec.pool == OTHER_POOL);
    let agents = AGENTS.iter().enumerate();
    for (number, (pool, kinds)) in agents.filter(|(_, (pool, _))| has_other || *pool == "default") {
        let name = format!("agent-{number}");
        let agent = Agent::new(&name, number, pool, kinds.to_vec(), faults);
        peers.push((name, Box::new(agent), true));
    }
    (users, peers)
}
