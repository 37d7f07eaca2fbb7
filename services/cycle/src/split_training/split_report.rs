//! What it gives and costs to share a training among boxes.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{OuterStep, SplitTraining};

/// Gains and costs of a training that boxes shared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SplitReport {
    /// Outer steps that were merged.
    pub merges: u32,
    /// By agent.
    pub boxes: BTreeMap<String, BoxShare>,
    /// Seconds from the plan of each outer step to its merge, added up.
    pub elapsed_s: f64,
    /// The part of it in which weights were merged.
    pub merging_s: f64,
    /// Steps of slices that did not count and were planned again.
    pub repeated_steps: u32,
    /// Mean error of merging A and B separately, relative to the mean of the products BA.
    pub drift: f64,
    /// Mean loss of reducing stacked adapters to their rank, relative to the mean of the products.
    pub residual: f64,
    /// Mean bytes of the weights, or of their change, that a box published after its slice.
    pub sent_bytes: f64,
    /// What a soup kept; `None` of other methods.
    pub soup: Option<SoupReport>,
}

/// Which trainings of the boxes are in the mean of a soup.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SoupReport {
    /// Trainings among which its merges chose: one merge, or more if a box died and others trained
    /// its steps.
    pub trained: usize,
    /// The agents of the trainings in the means, one of each; none if the start was better.
    pub kept: Vec<String>,
    /// Mean negative log-likelihood of the held-out completions after the last merge, in nats per
    /// token.
    pub heldout_nll: f64,
}

/// The part of one box in a training.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct BoxShare {
    /// Steps that count.
    pub steps: u32,
    /// Seconds in which they were trained.
    pub seconds: f64,
    /// Seconds of its outer steps in which it trained nothing: others trained, or weights were sent
    /// and merged.
    pub waited_s: f64,
}

impl SplitReport {
    /// Returns how many times as fast the boxes were as one of their mean speed.
    pub fn speedup(&self) -> f64 {
        let trained: f64 = self.boxes.values().map(|share| share.seconds).sum();
        if self.elapsed_s > 0.0 { trained / self.elapsed_s } else { 0.0 }
    }

    /// Returns the share of the time of all boxes in which they trained.
    pub fn efficiency(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a count of boxes")]
        let boxes = self.boxes.len().max(1) as f64;
        self.speedup() / boxes
    }
}

impl SplitTraining {
    /// Reports on the merged outer steps; `None` before the first.
    pub fn report_split(&self) -> Option<SplitReport> {
        let merged =
            || self.outer_steps.values().filter(|it| it.plan.is_some() && it.merge.is_some());
        let merges = u32::try_from(merged().count()).unwrap_or(u32::MAX);
        if merges == 0 {
            return None;
        }
        let mut boxes: BTreeMap<String, BoxShare> = BTreeMap::new();
        let (mut sent, mut slices) = (0.0, 0.0);
        for step in merged() {
            let mut trained: BTreeMap<&str, f64> = BTreeMap::new();
            for delta in step.counted_deltas() {
                #[expect(clippy::cast_precision_loss, reason = "a figure")]
                let bytes = delta.bytes as f64;
                sent += bytes;
                slices += 1.0;
                let share = boxes.entry(delta.agent.clone()).or_default();
                share.steps = share.steps.saturating_add(delta.steps);
                share.seconds += delta.wall_s;
                *trained.entry(&delta.agent).or_default() += delta.wall_s;
            }
            for (agent, trained_s) in trained {
                let share = boxes.entry(agent.to_owned()).or_default();
                share.waited_s += (step.elapsed_s() - trained_s).max(0.0);
            }
        }
        let elapsed_s = merged().map(OuterStep::elapsed_s).sum();
        let merges_of = || merged().filter_map(|step| step.merge.as_ref());
        Some(SplitReport {
            merges,
            boxes,
            elapsed_s,
            merging_s: merges_of().map(|merge| merge.wall_s).sum(),
            repeated_steps: merged()
                .map(|step| self.missed_steps(step))
                .fold(0, u32::saturating_add),
            drift: merges_of().map(|merge| merge.drift).sum::<f64>() / f64::from(merges),
            residual: merges_of().map(|merge| merge.residual).sum::<f64>() / f64::from(merges),
            sent_bytes: if slices > 0.0 { sent / slices } else { 0.0 },
            soup: report_soup(merged),
        })
    }

    /// Returns the planned steps of a closed outer step that do not count.
    fn missed_steps(&self, step: &OuterStep) -> u32 {
        let total = self.total_steps.unwrap_or(u32::MAX);
        let planned = step.plan.iter().flat_map(|plan| &plan.slices).map(|slice| {
            let end = slice.first.saturating_add(slice.steps).min(total);
            end.saturating_sub(slice.first)
        });
        let planned = planned.fold(0, u32::saturating_add);
        step.counted_deltas().map(|delta| delta.steps).fold(planned, u32::saturating_sub)
    }
}

impl OuterStep {
    /// Returns the seconds from the plan to the merge.
    #[expect(clippy::cast_precision_loss, reason = "milliseconds")]
    fn elapsed_s(&self) -> f64 {
        self.merged_ms.saturating_sub(self.planned_ms) as f64 / 1000.0
    }
}

/// Reports on the merges of a soup; `None` of other methods. A merge of one training chooses nothing.
fn report_soup<'a, I>(merged: impl Fn() -> I) -> Option<SoupReport>
where
    I: DoubleEndedIterator<Item = &'a OuterStep>,
{
    let heldout_nll = merged().rev().find_map(OuterStep::soup_merge)?.heldout_nll;
    let kept = merged().flat_map(OuterStep::merged_deltas).map(|delta| delta.agent.clone());
    let trained = merged().flat_map(OuterStep::counted_deltas).count();
    Some(SoupReport { trained, kept: kept.collect(), heldout_nll })
}

#[cfg(test)]
mod tests {
    use wire::v1;

    use super::*;
    use crate::split_training::SliceState;

    /// An outer step of 10 s, with the seconds that each slice was trained.
    fn outer_step(seconds: &[(&str, f64)]) -> OuterStep {
        let slice = |(number, (agent, wall_s)): (u32, &(&str, f64))| {
            let agent = (*agent).to_owned();
            let delta = v1::Delta { agent, steps: 5, wall_s: *wall_s, ..Default::default() };
            (number, SliceState { delta: Some(delta), ..Default::default() })
        };
        let slices: BTreeMap<u32, SliceState> = (1..).zip(seconds).map(slice).collect();
        let counted = slices.keys().copied().collect();
        OuterStep {
            plan: Some(v1::SlicePlan::default()),
            slices,
            closed: Some(v1::SliceClose { slices: counted, ..Default::default() }),
            merge: Some(v1::Merge::default()),
            planned_ms: 5_000,
            merged_ms: 15_000,
            ..Default::default()
        }
    }

    #[test]
    fn boxes_wait_while_they_train_nothing_of_their_outer_steps() {
        let first = outer_step(&[("a", 8.0), ("b", 5.0)]);
        let second = outer_step(&[("a", 3.0), ("a", 4.0)]);
        let outer_steps = [(1, first), (2, second)].into();
        let training = SplitTraining { outer_steps, ..Default::default() };
        let report = training.report_split().unwrap();
        let waited: Vec<f64> = report.boxes.values().map(|share| share.waited_s).collect();
        assert_eq!((waited, report.elapsed_s), (vec![5.0, 5.0], 20.0));
        assert_eq!((report.speedup(), report.efficiency()), (1.0, 0.5));
    }
}
