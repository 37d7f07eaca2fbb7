//! Trainings of one adapter on several boxes (DiLoCo, arXiv:2311.08105).
//!
//! The steps of such a training are those of the same training on one box: which examples a step
//! has follows from the dataset and the seed. An outer step gives each box a slice, a range of these
//! steps. All start from the same weights, and the merge of their weights starts the next outer
//! step:
//!
//! ```text
//! merge 0 (new adapter) -> slices 1 -> delta 1.1, delta 1.2, … -> close 1 -> merge 1 -> slices 2 …
//! ```
//!
//! Steps of a slice that does not count, because its box died or is far behind, are planned again in
//! a later outer step. So each step counts once. When all have counted, the merged weights are the
//! final checkpoint.

mod fold;
mod planner;
mod split_report;
mod step_ranges;

use std::collections::{BTreeMap, BTreeSet};

use wire::{TrainPart, v1};

pub(crate) use planner::{merge_order, next_commands, slice_order};
pub use split_report::{BoxShare, SoupReport, SplitReport};
pub(crate) use step_ranges::StepRanges;

use crate::state::OrderHistory;

/// A training on several boxes, derived from its facts.
#[derive(Debug, Clone, Default)]
pub struct SplitTraining {
    /// Outer steps by number. Step 0 has only a merge.
    pub outer_steps: BTreeMap<u32, OuterStep>,
    /// Steps of the whole training, as the first slice reported them.
    pub total_steps: Option<u32>,
    /// The steps that count so far, those of closed outer steps.
    pub(crate) counted: StepRanges,
    /// The first plan or merge that contradicts the facts before it, and how. No other fact can take
    /// its place, so the training cannot continue.
    pub(crate) contradiction: Option<String>,
}

/// One outer step.
#[derive(Debug, Clone, Default)]
pub struct OuterStep {
    pub plan: Option<v1::SlicePlan>,
    /// Slices by number, from 1.
    pub slices: BTreeMap<u32, SliceState>,
    pub closed: Option<v1::SliceClose>,
    pub(crate) merge_orders: OrderHistory,
    pub merge: Option<v1::Merge>,
    /// Log times of plan and merge, in milliseconds since 1970.
    pub(crate) planned_ms: u64,
    pub(crate) merged_ms: u64,
}

/// One slice of an outer step.
#[derive(Debug, Clone, Default)]
pub struct SliceState {
    pub(crate) orders: OrderHistory,
    /// The result, if it contradicts nothing.
    pub delta: Option<v1::Delta>,
    /// Log time of the result, in milliseconds since 1970; `None` before it.
    pub(crate) settled_ms: Option<u64>,
}

impl SplitTraining {
    /// Returns the number of steps that count so far.
    pub fn counted_steps(&self) -> u32 {
        self.counted.step_count()
    }

    /// Returns the number and the merge of the last merged outer step.
    pub(crate) fn last_merge(&self) -> Option<(u32, &v1::Merge)> {
        let mut steps = self.outer_steps.iter().rev();
        steps.find_map(|(number, step)| Some((*number, step.merge.as_ref()?)))
    }

    /// Returns the weights from which the slices of an outer step start. `adapter` is that of the
    /// training's order. `None` if they do not exist yet.
    fn start_weights<'a>(
        &'a self,
        outer: u32,
        adapter: Option<&'a v1::Tree>,
    ) -> Option<&'a v1::Tree> {
        let before = self.outer_steps.get(&outer.checked_sub(1)?);
        let merged = before.and_then(|step| step.merge.as_ref()?.tree.as_ref());
        merged.or(adapter.filter(|_| outer == 1))
    }

    /// Returns true if every step of the training has counted.
    pub(crate) fn is_complete(&self) -> bool {
        self.total_steps.is_some_and(|total| self.counted.next_gap(total).is_none())
    }

    /// Returns the names of the jobs that are in the log or no longer needed.
    pub(crate) fn settled_jobs(&self) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for (outer, step) in &self.outer_steps {
            let settled = step.slices.iter().filter(|(_, slice)| slice.is_settled());
            names.extend(
                settled.map(|(slice, _)| wire::train_part_name(*outer, TrainPart::Slice(*slice))),
            );
            if step.merge.is_some() {
                names.insert(wire::train_part_name(*outer, TrainPart::Merge));
            }
        }
        names
    }

    /// Returns true if no slice counted in the last `most` closed outer steps.
    pub(crate) fn is_stuck(&self, most: usize) -> bool {
        let closed = self.outer_steps.values().rev().filter_map(|step| step.closed.as_ref());
        closed.take_while(|closed| closed.slices.is_empty()).count() >= most
    }

    /// Returns the deltas of all closed outer steps that count, in order.
    pub fn counted_deltas(&self) -> impl Iterator<Item = &v1::Delta> {
        self.outer_steps.values().flat_map(OuterStep::counted_deltas)
    }
}

impl OuterStep {
    /// Returns the deltas that count, in the order of their slices; none before the step is closed.
    pub fn counted_deltas(&self) -> impl Iterator<Item = &v1::Delta> {
        let counted = self.closed.iter().flat_map(|closed| &closed.slices);
        counted.filter_map(|slice| self.slices.get(slice)?.delta.as_ref())
    }

    /// Returns the deltas in the merged weights: those that count or, of a soup, that it kept.
    pub fn merged_deltas(&self) -> impl Iterator<Item = &v1::Delta> {
        let soup = self.soup_merge();
        self.counted_deltas()
            .filter(move |delta| soup.is_none_or(|soup| soup.kept.contains(&delta.slice)))
    }

    /// Returns the merge if it is that of a soup.
    fn soup_merge(&self) -> Option<&v1::Merge> {
        self.merge.as_ref().filter(|merge| merge.heldout_nll > 0.0)
    }
}
