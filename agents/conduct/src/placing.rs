//! Which box a training goes to: the one it was handed to, if it has room, or else one that has.

/// What a training needs, as estimated for a box, and what that box may plan with. In bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub needs: u64,
    /// `None`: nobody knows, and it tries what it is handed.
    pub has: Option<u64>,
}

impl Room {
    pub fn is_enough(self) -> bool {
        self.has.is_none_or(|has| self.needs <= has)
    }
}

/// Another box of the same pool that trains, as it says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub agent: String,
    pub room: Room,
    /// It trains nothing now.
    pub idle: bool,
}

/// What to do with a training.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placing {
    Take,
    /// Hand it back at once: this box has no room, and that one has and is idle.
    PassOn(String),
    /// Keep it until one that has room is idle: handed back now, it would only come again.
    Await(String),
    /// No box that is there has room; the largest and what it has.
    Nowhere(Option<(String, u64)>),
}

/// Decides for the box that was handed a training.
pub fn place(own: Room, peers: &[Peer]) -> Placing {
    if own.is_enough() {
        return Placing::Take;
    }
    let mut large = peers.iter().filter(|peer| peer.room.is_enough());
    if let Some(first) = large.clone().find(|peer| peer.idle).or_else(|| large.next()) {
        let agent = first.agent.clone();
        return if first.idle { Placing::PassOn(agent) } else { Placing::Await(agent) };
    }
    let known = peers.iter().filter_map(|peer| Some((peer.agent.clone(), peer.room.has?)));
    Placing::Nowhere(known.max_by_key(|(_, has)| *has))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(agent: &str, has: u64, idle: bool) -> Peer {
        Peer { agent: agent.into(), room: Room { needs: 19, has: Some(has) }, idle }
    }

    fn small() -> Room {
        Room { needs: 19, has: Some(16) }
    }

    #[test]
    fn a_box_with_room_takes_it_and_so_does_one_that_does_not_know() {
        let peers = [peer("b", 99, true)];
        assert_eq!(place(Room { needs: 19, has: Some(19) }, &peers), Placing::Take);
        assert_eq!(place(Room { needs: 19, has: None }, &peers), Placing::Take);
    }

    #[test]
    fn one_without_passes_it_on_as_soon_as_one_with_room_is_idle() {
        let busy = [peer("b", 12, true), peer("c", 31, false)];
        assert_eq!(place(small(), &busy), Placing::Await("c".into()));
        let idle = [peer("c", 31, false), peer("d", 99, true)];
        assert_eq!(place(small(), &idle), Placing::PassOn("d".into()));
        let unknown = Peer { room: Room { needs: 19, has: None }, ..peer("e", 0, true) };
        assert_eq!(place(small(), &[unknown]), Placing::PassOn("e".into()));
    }

    #[test]
    fn what_fits_nowhere_is_said_with_the_largest_box() {
        let peers = [peer("b", 12, true), peer("c", 18, false)];
        assert_eq!(place(small(), &peers), Placing::Nowhere(Some(("c".into(), 18))));
        assert_eq!(place(small(), &[]), Placing::Nowhere(None));
    }

    #[test]
    fn a_box_is_judged_by_what_the_training_needs_there() {
        // The card in f32 needs twice what it does in bf16.
        let room = Room { needs: 36, has: Some(31) };
        let wide = Peer { room, ..peer("mi50", 31, true) };
        assert_eq!(place(small(), &[wide]), Placing::Nowhere(Some(("mi50".into(), 31))));
    }
}
