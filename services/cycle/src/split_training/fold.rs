//! The facts of a training on several boxes, applied to its state.

use wire::{TrainPart, v1};

use super::{OuterStep, SliceState, SplitTraining};

/// The longest text of a digest in a message.
const DIGEST_TEXT_MAX: usize = 80;

/// The result of applying a fact: an error is a contradiction of earlier facts.
type Applied = Result<(), String>;

impl SplitTraining {
    /// Fails unless the outer step follows the last merged one and its slices have steps that have
    /// not counted yet, each once.
    pub(crate) fn apply_plan(&mut self, outer: u32, plan: &v1::SlicePlan, at_ms: u64) -> Applied {
        let applied = self.store_plan(outer, plan, at_ms);
        self.record_contradiction(applied, || format!("plan {outer}"))
    }

    /// Records the error of a fact as that of the training, unless it has one.
    fn record_contradiction(&mut self, applied: Applied, fact: impl FnOnce() -> String) -> Applied {
        if let Err(why) = &applied {
            self.contradiction.get_or_insert_with(|| format!("{}: {why}", fact()));
        }
        applied
    }

    fn store_plan(&mut self, outer: u32, plan: &v1::SlicePlan, at_ms: u64) -> Applied {
        let last = self.last_merge().map_or(0, |(number, _)| number);
        let is_next = outer == last.saturating_add(1);
        let mut counted = self.counted.clone();
        let once = plan
            .slices
            .iter()
            .all(|slice| counted.add_range(slice.first..slice.first.saturating_add(slice.steps)));
        let step = self.outer_steps.entry(outer).or_default();
        step.plan = Some(plan.clone());
        step.planned_ms = at_ms;
        match (is_next, once, plan.slices.is_empty()) {
            (true, true, false) => Ok(()),
            (false, ..) => Err(format!("planned while outer step {last} is the last merged one")),
            (_, false, _) => Err("plans steps that have counted, or twice".into()),
            (_, _, true) => Err("plans no slice".into()),
        }
    }

    pub(crate) fn record_order(
        &mut self,
        outer: u32,
        part: TrainPart,
        (attempt, round, at_ms): (u32, u32, u64),
    ) {
        let step = self.outer_steps.entry(outer).or_default();
        let orders = match part {
            TrainPart::Slice(slice) => &mut step.slices.entry(slice).or_default().orders,
            TrainPart::Merge => &mut step.merge_orders,
        };
        orders.record_order(attempt, round, at_ms);
    }

    /// Fails unless the delta is that of a planned slice, from the right start; otherwise the slice
    /// has no result that could count. A delta after the outer step was closed does not count either.
    /// `adapter` is that of the training's order.
    pub(crate) fn apply_delta(
        &mut self,
        (outer, slice): (u32, u32),
        adapter: Option<&v1::Tree>,
        delta: &v1::Delta,
        at_ms: u64,
    ) -> Applied {
        let checked = self.check_delta((outer, slice), adapter, delta);
        let entry = self.outer_steps.entry(outer).or_default().slices.entry(slice).or_default();
        entry.settled_ms = Some(at_ms);
        checked?;
        self.total_steps = Some(delta.total_steps);
        entry.delta = Some(delta.clone());
        Ok(())
    }

    fn check_delta(
        &self,
        (outer, slice): (u32, u32),
        adapter: Option<&v1::Tree>,
        delta: &v1::Delta,
    ) -> Applied {
        let start = self.start_weights(outer, adapter).map(|tree| &tree.manifest);
        let total = self.total_steps.unwrap_or(delta.total_steps);
        let planned = self.outer_steps.get(&outer).and_then(|step| step.planned_slice(slice));
        let Some(planned) = planned else { return Err("its slice was never planned".into()) };
        let end = planned.first.saturating_add(planned.steps).min(total);
        let steps = end.saturating_sub(planned.first);
        if (delta.first, delta.steps) != (planned.first, steps) {
            return Err(format!(
                "has {} steps from {}, the plan {steps} from {}",
                delta.steps, delta.first, planned.first
            ));
        }
        let is_trained = steps > 0;
        if delta.tree.is_some() != is_trained || (delta.trained_tokens > 0) != is_trained {
            return Err("has steps without weights or tokens, or these without steps".into());
        }
        if delta.total_steps != total {
            return Err(format!("says {} steps in all, others {total}", delta.total_steps));
        }
        if start != Some(&delta.start) {
            return Err("started from other weights than those of the last merge".into());
        }
        Ok(())
    }

    /// Fails unless each of the slices has a delta and steps that have not counted yet.
    pub(crate) fn apply_close(&mut self, outer: u32, closed: &v1::SliceClose) -> Applied {
        let step = self.outer_steps.entry(outer).or_default();
        step.closed = Some(closed.clone());
        let counted: Vec<v1::Delta> = step.counted_deltas().cloned().collect();
        let ascending = closed.slices.windows(2).all(|pair| pair[0] < pair[1]);
        let whole = counted.len() == closed.slices.len() && ascending;
        let mut once = true;
        for delta in &counted {
            once &= self.counted.add_range(delta.first..delta.first.saturating_add(delta.steps));
        }
        match (whole, once) {
            (true, true) => Ok(()),
            (false, _) => Err("counts slices without a delta".into()),
            (true, false) => Err("counts steps a second time".into()),
        }
    }

    /// Fails unless the merge follows the last one and has the weights that count. `adapter` is that of
    /// the training's order.
    pub(crate) fn apply_merge(
        &mut self,
        outer: u32,
        adapter: Option<&v1::Tree>,
        merge: &v1::Merge,
        at_ms: u64,
    ) -> Applied {
        let applied = self.check_merge_place(outer);
        let applied = applied.and_then(|()| self.store_merge(outer, adapter, merge, at_ms));
        self.record_contradiction(applied, || format!("merge {outer}"))
    }

    /// A training that continues an adapter has no merge 0. The other merges need a closed outer step
    /// anyway.
    fn check_merge_place(&self, outer: u32) -> Applied {
        let last = self.last_merge().map(|(number, _)| number);
        if last.map_or(outer > 1, |last| outer != last.saturating_add(1)) {
            let last = last.unwrap_or_default();
            return Err(format!("merged while outer step {last} is the last merged one"));
        }
        let step = self.outer_steps.get(&outer);
        match outer == 0 && step.is_none_or(|step| step.merge_orders.last_attempt == 0) {
            true => Err("merged without an order".into()),
            false => Ok(()),
        }
    }

    fn store_merge(
        &mut self,
        outer: u32,
        adapter: Option<&v1::Tree>,
        merge: &v1::Merge,
        at_ms: u64,
    ) -> Applied {
        let start = self.start_weights(outer, adapter).map(|tree| tree.manifest.clone());
        if outer == 0 && merge.total_steps > 0 {
            self.total_steps = Some(merge.total_steps);
        }
        let step = self.outer_steps.entry(outer).or_default();
        step.merge = Some(merge.clone());
        step.merged_ms = at_ms;
        let merged = step.merged_manifests();
        let counted = step.closed.iter().flat_map(|closed| &closed.slices);
        let counted: Vec<u32> = counted.copied().collect();
        if merge.kept.iter().any(|slice| !counted.contains(slice)) {
            return Err("merges slices that do not count".into());
        }
        if outer > 0 && step.closed.is_none() {
            return Err("merged before it was closed".into());
        }
        if let Some(what) = find_difference(merge, &start.unwrap_or_default(), &merged) {
            return Err(format!("merges other weights than those that count: {what}"));
        }
        if merge.tree.is_none() { Err("names no weights".into()) } else { Ok(()) }
    }
}

/// Returns the first digest of a merge that differs from that of its outer step, with both; `None`
/// if all are alike.
fn find_difference(merge: &v1::Merge, start: &str, counted: &[String]) -> Option<String> {
    let entry = |digests: &[String], index: usize| digests.get(index).cloned();
    let deltas = (0..merge.deltas.len().max(counted.len())).map(|index| {
        (format!("delta {}", index + 1), entry(&merge.deltas, index), entry(counted, index))
    });
    let starts = ("the start".to_owned(), Some(merge.start.clone()), Some(start.to_owned()));
    let mut pairs = [starts].into_iter().chain(deltas);
    let (name, merged, expected) = pairs.find(|(_, merged, expected)| merged != expected)?;
    Some(format!("{name} is {}, not {}", describe_digest(merged), describe_digest(expected)))
}

/// Returns a digest in quotes, cut: members may write any text.
fn describe_digest(digest: Option<String>) -> String {
    let Some(digest) = digest else { return "missing".to_owned() };
    format!("{:?}", &digest[..digest.floor_char_boundary(DIGEST_TEXT_MAX)])
}

impl OuterStep {
    /// Returns the slice of a number (from 1) in the plan.
    pub(crate) fn planned_slice(&self, slice: u32) -> Option<&v1::slice_plan::Slice> {
        self.plan.as_ref()?.slices.get(slice.checked_sub(1)? as usize)
    }

    /// Returns the manifest digests of the weights that count. Slices without steps have none.
    pub(crate) fn merged_manifests(&self) -> Vec<String> {
        let trees = self.counted_deltas().filter_map(|delta| delta.tree.as_ref());
        trees.map(|tree| tree.manifest.clone()).collect()
    }
}

impl SliceState {
    /// Returns true if the slice has a result, which counts unless it contradicts others.
    pub(crate) fn is_settled(&self) -> bool {
        self.settled_ms.is_some()
    }
}
