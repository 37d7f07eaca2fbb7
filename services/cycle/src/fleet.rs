//! The agents as they say of themselves: who is there, how fast, and what each holds.
//!
//! Never more than a hint. It may be seconds old, or empty; what is decided with it costs
//! at worst an order too many.

use std::collections::{BTreeMap, BTreeSet};

use wire::{RunId, WorkKind};

use crate::visits::visit;

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
    /// What a sample takes while it draws as many as it can; 0 when not yet known.
    pub sample_s: f64,
    pub holds: BTreeSet<Held>,
    /// Samples of what it holds that are not drawn yet.
    pub left: u32,
}

/// A job an agent works on; a training is called `train`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Held {
    pub run: RunId,
    pub cycle: u32,
    pub job: String,
}

/// The last samples are drawn in less company, and so faster than others: by this much.
const ALONE: f64 = 0.5;

impl Member {
    /// How long it will be at what it holds; `None` when nobody knows.
    pub(crate) fn left_s(&self, tokens_a_sample: f64) -> Option<f64> {
        (self.tokens_per_s > 0.0).then(|| self.takes_s(f64::from(self.left) * tokens_a_sample))
    }

    /// How long so many tokens take.
    pub(crate) fn takes_s(&self, tokens: f64) -> f64 {
        (tokens / self.tokens_per_s).max(ALONE * self.sample_s)
    }
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
        self.members(kind).iter().inspect(|_| visit()).any(|member| member.holds.contains(held))
    }

    /// How long nobody has held a job that was ordered so long ago.
    pub(crate) fn unheld_ms(&self, kind: WorkKind, held: &Held, ordered_ago_ms: u64) -> u64 {
        let seen = self.held_ago_ms.get(&(kind, held.clone())).copied();
        seen.map_or(ordered_ago_ms, |ago| ago.min(ordered_ago_ms))
    }

    pub(crate) fn idle(&self, kind: WorkKind) -> usize {
        self.members(kind)
            .iter()
            .inspect(|_| visit())
            .filter(|member| member.holds.is_empty())
            .count()
    }
}
