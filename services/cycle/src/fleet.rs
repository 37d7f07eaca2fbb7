//! The agents as they say of themselves: who is there, how fast, and what each holds.
//!
//! Never more than a hint. It may be seconds old, or empty; what is decided with it costs
//! at worst an order too many.

use std::collections::{BTreeMap, BTreeSet};

use wire::{RunId, WorkKind};

/// The agents of one pool that are there and take work.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Fleet {
    pub generators: Vec<Member>,
    pub verifiers: Vec<Member>,
    pub trainers: Vec<Member>,
    /// Milliseconds since jobs were last seen in somebody's hands.
    pub held_ago_ms: BTreeMap<(WorkKind, Held), u64>,
}

/// One agent in one role.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Member {
    pub agent: String,
    /// Generated tokens a second; 0 when not yet known.
    pub tokens_per_s: f64,
    pub holds: BTreeSet<Held>,
}

/// A job an agent works on; a training is called `train`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Held {
    pub run: RunId,
    pub cycle: u32,
    pub job: String,
}

impl Fleet {
    pub fn members(&self, kind: WorkKind) -> &[Member] {
        match kind {
            WorkKind::Generate => &self.generators,
            WorkKind::Verify => &self.verifiers,
            WorkKind::Train => &self.trainers,
            WorkKind::Eval => &[],
        }
    }

    pub(crate) fn holds(&self, kind: WorkKind, held: &Held) -> bool {
        self.members(kind).iter().any(|member| member.holds.contains(held))
    }

    /// How long nobody has held a job that was ordered so long ago.
    pub(crate) fn unheld_ms(&self, kind: WorkKind, held: &Held, ordered_ago_ms: u64) -> u64 {
        let seen = self.held_ago_ms.get(&(kind, held.clone())).copied();
        seen.map_or(ordered_ago_ms, |ago| ago.min(ordered_ago_ms))
    }

    pub(crate) fn idle(&self, kind: WorkKind) -> usize {
        self.members(kind).iter().filter(|member| member.holds.is_empty()).count()
    }
}
