//! The next facts of a training on several boxes.

use std::collections::BTreeMap;

use wire::{FactBody, FactKey, Pool, TrainPart, v1};

use super::{OuterStep, SplitTraining};
use crate::{
    FleetMember,
    command::{PlannerInputs, WriteCommand, write_command},
    speculation::is_training_due,
    state::Run,
};

/// The wait for missing slices once at least half of an outer step's slices have a result: this
/// share of the time of the longest slice, and at least this many milliseconds.
const GRACE: (f64, f64) = (0.5, 5_000.0);

/// [`GRACE`] while the speed of a missing box is unknown: it may be many times slower.
const FIRST_GRACE: (f64, f64) = (8.0, 60_000.0);

/// If boxes send only changes, the merged weights of every 8th outer step are in the store, so that
/// a box that joins has few merges to repeat.
const STORED_EVERY: u32 = 8;

/// No box trains faster; a larger speed in a status is not believed.
const TOKENS_PER_S_MAX: f64 = 1e7;
/// While no speed is measured, slices have this share of their steps, so that fast boxes do not
/// wait.
const FIRST_SHARE: u32 = 8;

/// Returns the next facts of the training that `order` describes as a whole. None while boxes train,
/// and when the last merge has been ordered.
pub(crate) fn next_commands(
    run: &Run,
    training: &SplitTraining,
    order: &v1::TrainOrder,
    pool: &Pool,
    inputs: PlannerInputs<'_>,
) -> Vec<WriteCommand> {
    let planner = SplitTrainingPlanner { run, training, order, pool, inputs };
    let outer = match training.last_merge() {
        Some((last, _)) => last.saturating_add(1),
        None => u32::from(order.adapter.is_some() && !is_soup(order)),
    };
    if outer == 0 {
        return planner.order_merge(0);
    }
    match training.outer_steps.get(&outer).filter(|step| step.plan.is_some()) {
        None if training.is_complete() => Vec::new(),
        None => vec![planner.plan_slices(outer)],
        Some(step) if step.closed.is_some() => planner.order_merge(outer),
        Some(step) => match planner.close_step(outer, step) {
            Some(close) => vec![close],
            None => planner.order_slices(outer, step),
        },
    }
}

/// Returns the order of a slice; `None` if it is not planned or its start does not exist yet.
pub(crate) fn slice_order(
    training: &SplitTraining,
    order: &v1::TrainOrder,
    outer: u32,
    slice: u32,
) -> Option<v1::train_order::Slice> {
    let planned = training.outer_steps.get(&outer)?.planned_slice(slice)?.clone();
    let start = training.start_weights(outer, order.adapter.as_ref())?.clone();
    Some(v1::train_order::Slice {
        outer,
        slice,
        planned: Some(planned),
        start: Some(start),
        derivation: list_derived(training, order, outer),
        more: has_more_steps(training, outer),
    })
}

/// Returns true if steps remain after those of an outer step, or if no earlier one says so. Does not
/// depend on results of the outer step, so that it is the same in a repeated order.
fn has_more_steps(training: &SplitTraining, outer: u32) -> bool {
    let before = training.outer_steps.range(..outer).map(|(_, step)| step);
    let counted: Vec<&v1::Delta> = before.flat_map(OuterStep::counted_deltas).collect();
    let new = training.outer_steps.get(&0).and_then(|step| step.merge.as_ref());
    let total = new.map(|merge| merge.total_steps).filter(|steps| *steps > 0);
    let total = total.or(counted.first().map(|delta| delta.total_steps));
    let Some(total) = total else { return true };
    let counted = counted.iter().map(|delta| delta.steps);
    let plan = training.outer_steps.get(&outer).and_then(|step| step.plan.as_ref());
    let planned = plan.into_iter().flat_map(|plan| &plan.slices).map(|slice| slice.steps);
    counted.chain(planned).fold(0, u32::saturating_add) < total
}

/// Returns the order of a merge with the deltas that count, and with the checkpoint to publish if
/// one is due.
pub(crate) fn merge_order(
    run: &Run,
    training: &SplitTraining,
    order: &v1::TrainOrder,
    outer: u32,
) -> v1::train_order::Merge {
    let checkpoint = due_checkpoint(training, order, outer);
    let sends_changes = across_settings(order).send_share > 0.0;
    v1::train_order::Merge {
        derived: sends_changes && checkpoint.is_none() && !outer.is_multiple_of(STORED_EVERY),
        checkpoint,
        heldout: heldout_text(run).filter(|_| is_soup(order) && outer > 0),
        derivation: list_derived(training, order, outer),
        ..merge_inputs(training, order, outer)
    }
}

/// Returns the order of a merge with only the files that go into it.
fn merge_inputs(
    training: &SplitTraining,
    order: &v1::TrainOrder,
    outer: u32,
) -> v1::train_order::Merge {
    let before = outer.checked_sub(1).and_then(|before| training.outer_steps.get(&before));
    let momentum = before.and_then(|step| step.merge.as_ref()?.momentum.clone());
    let deltas = training.outer_steps.get(&outer).into_iter().flat_map(OuterStep::counted_deltas);
    v1::train_order::Merge {
        outer,
        start: training.start_weights(outer, order.adapter.as_ref()).cloned(),
        momentum,
        deltas: deltas.filter(|delta| delta.tree.is_some()).cloned().collect(),
        ..Default::default()
    }
}

/// Returns true if each box trains its share of all steps at once. The first merge then says how
/// many there are.
fn is_soup(order: &v1::TrainOrder) -> bool {
    across_settings(order).method() == v1::across::Method::Soup
}

/// Returns the text by which a soup is chosen.
fn heldout_text(run: &Run) -> Option<v1::Blob> {
    let is_completions = |suite: &&v1::Suite| suite.format() == v1::suite::Format::Documents;
    run.spec.suites.iter().find(is_completions).and_then(|suite| suite.text.clone())
}

/// Returns the last merges before an outer step whose weights are not in the store, in order.
fn list_derived(
    training: &SplitTraining,
    order: &v1::TrainOrder,
    outer: u32,
) -> Vec<v1::train_order::Merge> {
    let before = training.outer_steps.range(..outer).rev();
    let is_derived = |step: &OuterStep| step.merge.as_ref().is_some_and(|merge| merge.derived);
    let derived = before.take_while(|(_, step)| is_derived(step));
    let inputs = |(number, _): (&u32, _)| {
        let mut merge = merge_inputs(training, order, *number);
        merge.deltas.iter_mut().for_each(keep_files);
        merge
    };
    let mut merges: Vec<_> = derived.map(inputs).collect();
    merges.reverse();
    merges
}

/// Drops the figures of a delta.
fn keep_files(delta: &mut v1::Delta) {
    let v1::Delta { outer, slice, trained_tokens, .. } = *delta;
    let tree = delta.tree.take();
    *delta = v1::Delta { outer, slice, trained_tokens, tree, ..Default::default() };
}

fn across_settings(order: &v1::TrainOrder) -> v1::Across {
    order.training.as_ref().and_then(|training| training.across).unwrap_or_default()
}

/// Returns the checkpoint that the merge of an outer step publishes: the final one once every step
/// counts, others at the training's interval. Without the fields that only the merge knows.
fn due_checkpoint(
    training: &SplitTraining,
    order: &v1::TrainOrder,
    outer: u32,
) -> Option<v1::Checkpoint> {
    let steps = training.total_steps?;
    let settings = order.training.as_ref()?;
    let new: Vec<&v1::Delta> = training.outer_steps.get(&outer)?.counted_deltas().collect();
    // Up to this outer step: an order may be repeated after later ones.
    let until = || training.outer_steps.range(..=outer).map(|(_, step)| step);
    let all = || until().flat_map(OuterStep::counted_deltas);
    let step = all().map(|delta| delta.steps).fold(0, u32::saturating_add);
    let before = new.iter().map(|delta| delta.steps).fold(step, u32::saturating_sub);
    let every = settings.save_every;
    let is_final = step == steps;
    let is_due = every > 0 && step / every > before / every;
    if !is_final && !is_due {
        return None;
    }
    let tokens = |delta: &v1::Delta| delta.trained_tokens as f64;
    let weigh = |value: fn(&v1::Delta) -> f64| {
        let total: f64 = new.iter().map(|delta| tokens(delta)).sum();
        let sum: f64 = new.iter().map(|delta| value(delta) * tokens(delta)).sum();
        if total > 0.0 { sum / total } else { 0.0 }
    };
    let largest = |value: fn(&v1::Delta) -> f64| new.iter().map(|it| value(it)).fold(0.0, f64::max);
    let longest = |step: &OuterStep| step.counted_deltas().map(|it| it.wall_s).fold(0.0, f64::max);
    let base = order.base.as_ref().and_then(|base| base.tree.clone());
    Some(v1::Checkpoint {
        run: order.run.clone(),
        cycle: order.cycle,
        step,
        steps,
        r#final: is_final,
        content: v1::checkpoint::Content::Adapter.into(),
        parent: order.adapter.clone().or_else(|| base.clone()),
        base,
        loss: weigh(|delta| delta.loss),
        learning_rate: new.last().map_or(0.0, |delta| delta.learning_rate),
        tokens: all().map(|delta| delta.tokens).fold(0, u64::saturating_add),
        trained_tokens: all().map(|delta| delta.trained_tokens).fold(0, u64::saturating_add),
        wall_s: until().map(longest).sum(),
        grad_norm: weigh(|delta| delta.grad_norm),
        grad_norm_max: largest(|delta| delta.grad_norm_max),
        packing: weigh(|delta| delta.packing),
        skipped: new.iter().map(|delta| delta.skipped).max().unwrap_or(0),
        ..Default::default()
    })
}

struct SplitTrainingPlanner<'a> {
    run: &'a Run,
    training: &'a SplitTraining,
    order: &'a v1::TrainOrder,
    pool: &'a Pool,
    inputs: PlannerInputs<'a>,
}

/// Returns the mean of known speeds; 1 without any.
fn mean_speed(speeds: &BTreeMap<String, f64>) -> f64 {
    match speeds.len() {
        0 => 1.0,
        #[expect(clippy::cast_precision_loss, reason = "a count of boxes")]
        count => speeds.values().sum::<f64>() / count as f64,
    }
}

/// Returns the measured speeds of boxes, and for others those that they report, in the unit of the
/// measured ones if a box has both.
fn combine_speeds(
    measured: BTreeMap<String, f64>,
    reported: BTreeMap<String, f64>,
) -> BTreeMap<String, f64> {
    if measured.is_empty() {
        return reported;
    }
    let ratio =
        |(agent, speed): (&String, &f64)| Some((agent.clone(), speed / reported.get(agent)?));
    let ratios: BTreeMap<String, f64> = measured.iter().filter_map(ratio).collect();
    let mut speeds = measured;
    if !ratios.is_empty() {
        let unit = mean_speed(&ratios);
        for (agent, speed) in reported {
            speeds.entry(agent).or_insert(speed * unit);
        }
    }
    speeds
}

impl SplitTrainingPlanner<'_> {
    /// Splits the next steps among the boxes in proportion to their speeds. Each box has one range;
    /// steps that did not count before come first.
    fn plan_slices(&self, outer: u32) -> WriteCommand {
        let across = across_settings(self.order);
        let v1::Across { workers, every, .. } = across;
        let measured = self.measured_speeds();
        let is_measured = !measured.is_empty();
        let speeds = combine_speeds(measured, self.reported_speeds());
        let boxes = self.available_boxes(workers, &speeds);
        let every = match !is_measured && boxes.len() > 1 {
            _ if is_soup(self.order) => u32::MAX,
            true => (every / FIRST_SHARE).max(1),
            false => every,
        };
        let mean = mean_speed(&speeds);
        let speed_of = |agent: &str| speeds.get(agent).copied().unwrap_or(mean);
        // Stacked weights have other factors, to which no optimizer state belongs.
        let has_states = across.method() == v1::across::Method::Step;
        let counted = self.training.counted_deltas();
        let counted = counted.filter(|delta| has_states && delta.tree.is_some());
        let state_of = |delta: &v1::Delta| delta.tree.clone().unwrap_or_default().manifest;
        let states: BTreeMap<String, String> =
            counted.map(|delta| (delta.agent.clone(), state_of(delta))).collect();
        let sum: f64 = boxes.iter().map(|agent| speed_of(agent)).sum();
        let end = self.training.total_steps.unwrap_or(u32::MAX);
        let left = end.saturating_sub(self.training.counted_steps());
        let count = u32::try_from(boxes.len()).unwrap_or(u32::MAX);
        let steps = f64::from(every.max(1).saturating_mul(count).min(left));
        let mut counted = self.training.counted.clone();
        let mut slices = Vec::new();
        // Shares are rounded so that they add up to all steps.
        let (mut speed, mut shared) = (0.0, 0u32);
        for agent in boxes {
            speed += speed_of(&agent);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounded")]
            let until = (steps * speed / sum).round() as u32;
            let share = until.saturating_sub(shared).max(1);
            shared = shared.saturating_add(share);
            let Some(gap) = counted.next_gap(end) else { break };
            let share = share.min(gap.end - gap.start);
            counted.add_range(gap.start..gap.start + share);
            let state = states.get(&agent).cloned().unwrap_or_default();
            slices.push(v1::slice_plan::Slice { first: gap.start, steps: share, agent, state });
        }
        let plan = v1::SlicePlan { cycle: self.order.cycle, outer, slices };
        let place = FactKey::SlicePlan { cycle: self.order.cycle, outer };
        write_command(self.run, place, FactBody::SlicePlan(plan))
    }

    /// Returns the names of the trainers that do nothing else, at most `most` if it is not 0: the
    /// fastest, those of unknown speed last. One without a name if there are none.
    fn available_boxes(&self, most: u32, speeds: &BTreeMap<String, f64>) -> Vec<String> {
        // Statuses are seconds old: a box may seem to hold what it has done already.
        let settled = self.training.settled_jobs();
        let is_free = |member: &&FleetMember| {
            member.held_jobs.iter().all(|held| {
                let ours = held.run == self.run.id && held.cycle == self.order.cycle;
                ours && settled.contains(&held.job)
            })
        };
        let free = self.inputs.fleet.trainers.iter().filter(is_free);
        let mut names: Vec<String> = free.map(|member| member.agent.clone()).collect();
        names.sort();
        if most > 0 && names.len() > most as usize {
            let mean = mean_speed(speeds);
            let speed = |name: &String| speeds.get(name).copied().unwrap_or(mean);
            // Stable: equal ones stay in the order of their names.
            names.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
            names.truncate(most as usize);
            names.sort();
        }
        if names.is_empty() {
            names.push(String::new());
        }
        names
    }

    /// Returns each agent's speed in steps per second, as of its last slice in this training or in
    /// that of an earlier cycle, even if it was too late to count.
    fn measured_speeds(&self) -> BTreeMap<String, f64> {
        let trainings = self.run.cycles.values().map(|cycle| &cycle.split_training);
        let slices = trainings.flat_map(|training| training.outer_steps.values());
        let slices = slices.flat_map(|step| step.slices.values());
        let deltas = slices.filter_map(|slice| slice.delta.as_ref());
        let speed = |delta: &v1::Delta| f64::from(delta.steps) / delta.wall_s.max(1e-3);
        let trained = deltas.filter(|delta| delta.steps > 0);
        trained.map(|delta| (delta.agent.clone(), speed(delta))).collect()
    }

    /// Returns the speeds in tokens per second that boxes report of their last trainings, if those
    /// had the same base.
    fn reported_speeds(&self) -> BTreeMap<String, f64> {
        let base = self.order.base.as_ref().and_then(|base| base.tree.as_ref());
        let Some(base) = base else { return BTreeMap::new() };
        let speed_of = |member: &FleetMember| {
            let speed = member.training_speed.as_ref()?;
            let is_known = speed.tokens_per_s > 0.0 && speed.tokens_per_s < TOKENS_PER_S_MAX;
            (is_known && speed.base == base.manifest)
                .then(|| (member.agent.clone(), speed.tokens_per_s))
        };
        self.inputs.fleet.trainers.iter().filter_map(speed_of).collect()
    }

    fn order_slices(&self, outer: u32, step: &OuterStep) -> Vec<WriteCommand> {
        let count = step.plan.as_ref().map_or(0, |plan| plan.slices.len());
        let untouched = super::SliceState::default();
        let mut commands = Vec::new();
        for slice in 1..=u32::try_from(count).unwrap_or(u32::MAX) {
            let state = step.slices.get(&slice).unwrap_or(&untouched);
            if state.is_settled() {
                continue;
            }
            let part = TrainPart::Slice(slice);
            let Some(ordered) = slice_order(self.training, self.order, outer, slice) else {
                continue;
            };
            let ordered = v1::train_order::Part::Slice(ordered);
            commands.extend(self.order_part(outer, part, ordered, state.orders));
        }
        commands
    }

    fn order_merge(&self, outer: u32) -> Vec<WriteCommand> {
        let orders = self.training.outer_steps.get(&outer).map(|step| step.merge_orders);
        let ordered = merge_order(self.run, self.training, self.order, outer);
        let ordered = v1::train_order::Part::Merge(ordered);
        let command = self.order_part(outer, TrainPart::Merge, ordered, orders.unwrap_or_default());
        command.into_iter().collect()
    }

    fn order_part(
        &self,
        outer: u32,
        part: TrainPart,
        ordered: v1::train_order::Part,
        orders: crate::state::OrderHistory,
    ) -> Option<WriteCommand> {
        let cycle = self.order.cycle;
        let job = wire::train_part_name(outer, part);
        if !is_training_due(self.run, cycle, &job, &orders, self.inputs) {
            return None;
        }
        let attempt = orders.last_attempt.saturating_add(1);
        let order = v1::TrainOrder { attempt, part: Some(ordered), ..self.order.clone() };
        let place =
            FactKey::TrainPartOrder { pool: self.pool.clone(), cycle, outer, part, attempt };
        Some(write_command(self.run, place, FactBody::TrainOrder(order)))
    }

    /// Closes an outer step when all its slices have results, or at least half of them and the
    /// others are late.
    fn close_step(&self, outer: u32, step: &OuterStep) -> Option<WriteCommand> {
        let plan = step.plan.as_ref()?;
        let planned = plan.slices.len();
        let settled_ms = || step.slices.values().filter_map(|state| state.settled_ms);
        let (settled, last_ms) = (settled_ms().count(), settled_ms().max()?);
        let speeds = self.measured_speeds();
        let is_missing = |slice: u32| step.slices.get(&slice).is_none_or(|it| !it.is_settled());
        let mut missing = (1..).zip(&plan.slices).filter(|(number, _)| is_missing(*number));
        let is_known = missing.all(|(_, slice)| speeds.contains_key(&slice.agent));
        let (share, least_ms) = if is_known { GRACE } else { FIRST_GRACE };
        #[expect(clippy::cast_precision_loss, reason = "milliseconds")]
        let [longest_ms, waited_ms] = [
            last_ms.saturating_sub(step.planned_ms) as f64,
            self.inputs.now_ms.saturating_sub(last_ms) as f64,
        ];
        let is_late = waited_ms > (longest_ms * share).max(least_ms);
        if settled < planned && (!is_late || settled * 2 < planned) {
            return None;
        }
        let trained = step.slices.iter().filter(|(_, state)| state.delta.is_some());
        let slices = trained.map(|(slice, _)| *slice).collect();
        let close = v1::SliceClose { cycle: self.order.cycle, outer, slices };
        let place = FactKey::SliceClose { cycle: self.order.cycle, outer };
        Some(write_command(self.run, place, FactBody::SliceClose(close)))
    }
}
