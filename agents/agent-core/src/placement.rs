//! Placement of a training by memory: on the agent that received it, or on another one.

/// The memory that a training needs on a host, and the memory that it may use there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryFit {
    pub needed_bytes: u64,
    /// `None` if unknown; the host then accepts any training.
    pub available_bytes: Option<u64>,
}

impl MemoryFit {
    /// Returns true if the training fits, or if the usable memory is unknown.
    pub fn has_room(self) -> bool {
        self.available_bytes.is_none_or(|has| self.needed_bytes <= has)
    }
}

/// Another trainer of the same pool, from its status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrainerPeer {
    pub agent: String,
    /// The need of the training on that host, and the memory there.
    pub memory_fit: MemoryFit,
    /// True if it trains nothing now.
    pub is_idle: bool,
}

/// The decision on where a training runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrainingPlacement {
    RunHere,
    /// Return the training at once: the named agent has enough memory and is idle.
    HandOver(String),
    /// Keep the training until the named agent, which has enough memory, is idle: if returned now,
    /// it would only be redelivered here.
    WaitFor(String),
    /// No online host has enough memory; contains the largest one with its usable bytes.
    Unschedulable(Option<(String, u64)>),
}

/// Decides where the training that an agent received runs: on that agent if it fits there,
/// otherwise on a peer where it fits, to which it is handed at once if idle, or else once it is
/// idle. Unknown memory counts as enough. If it fits nowhere, the result names the peer with the
/// most memory.
pub fn place_training(own: MemoryFit, peers: &[TrainerPeer]) -> TrainingPlacement {
    if own.has_room() {
        return TrainingPlacement::RunHere;
    }
    let mut large = peers.iter().filter(|peer| peer.memory_fit.has_room());
    if let Some(first) = large.clone().find(|peer| peer.is_idle).or_else(|| large.next()) {
        let agent = first.agent.clone();
        return if first.is_idle {
            TrainingPlacement::HandOver(agent)
        } else {
            TrainingPlacement::WaitFor(agent)
        };
    }
    let known = peers
        .iter()
        .filter_map(|peer| Some((peer.agent.clone(), peer.memory_fit.available_bytes?)));
    TrainingPlacement::Unschedulable(known.max_by_key(|(_, has)| *has))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(agent: &str, has: u64, idle: bool) -> TrainerPeer {
        TrainerPeer {
            agent: agent.into(),
            memory_fit: MemoryFit { needed_bytes: 19, available_bytes: Some(has) },
            is_idle: idle,
        }
    }

    fn small() -> MemoryFit {
        MemoryFit { needed_bytes: 19, available_bytes: Some(16) }
    }

    #[test]
    fn a_box_with_room_takes_it_and_so_does_one_that_does_not_know() {
        let peers = [peer("b", 99, true)];
        assert_eq!(
            place_training(MemoryFit { needed_bytes: 19, available_bytes: Some(19) }, &peers),
            TrainingPlacement::RunHere
        );
        assert_eq!(
            place_training(MemoryFit { needed_bytes: 19, available_bytes: None }, &peers),
            TrainingPlacement::RunHere
        );
    }

    #[test]
    fn one_without_passes_it_on_as_soon_as_one_with_room_is_idle() {
        let busy = [peer("b", 12, true), peer("c", 31, false)];
        assert_eq!(place_training(small(), &busy), TrainingPlacement::WaitFor("c".into()));
        let idle = [peer("c", 31, false), peer("d", 99, true)];
        assert_eq!(place_training(small(), &idle), TrainingPlacement::HandOver("d".into()));
        let unknown = TrainerPeer {
            memory_fit: MemoryFit { needed_bytes: 19, available_bytes: None },
            ..peer("e", 0, true)
        };
        assert_eq!(place_training(small(), &[unknown]), TrainingPlacement::HandOver("e".into()));
    }

    #[test]
    fn a_training_that_fits_nowhere_names_the_largest_host() {
        let peers = [peer("b", 12, true), peer("c", 18, false)];
        assert_eq!(
            place_training(small(), &peers),
            TrainingPlacement::Unschedulable(Some(("c".into(), 18)))
        );
        assert_eq!(place_training(small(), &[]), TrainingPlacement::Unschedulable(None));
    }

    #[test]
    fn a_peer_is_judged_by_the_need_on_its_own_host() {
        // The card in f32 needs twice what it does in bf16.
        let room = MemoryFit { needed_bytes: 36, available_bytes: Some(31) };
        let wide = TrainerPeer { memory_fit: room, ..peer("mi50", 31, true) };
        assert_eq!(
            place_training(small(), &[wide]),
            TrainingPlacement::Unschedulable(Some(("mi50".into(), 31)))
        );
    }
}
