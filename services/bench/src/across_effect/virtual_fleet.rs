//! Boxes in virtual time that share a training as the planner splits it.

use std::collections::BTreeMap;

use anyhow::bail;
use cycle::{
    FleetMember, FleetSnapshot, JobSizing, PlannerInputs, ReissueTimeouts, Run, next_commands,
};
use wire::{Digest, Fact, FactBody, FactKey, Record, RunId, Subject, v1};

/// Rounds of orders and results, far more than any training takes.
const ROUNDS_MAX: usize = 100_000;

/// Seconds that pass at once while no box has a result.
const WAIT_S: f64 = 1.0;

/// A training of one adapter on several boxes.
#[derive(Debug, Clone)]
pub(super) struct VirtualTraining {
    /// Steps a second of each box.
    pub speeds: Vec<f64>,
    pub steps: u32,
    /// As in `training.across.every`.
    pub every: u32,
    pub method: v1::across::Method,
    /// Seconds of each outer step in which weights are sent and merged.
    pub exchange_s: f64,
    /// Seed of the boxes that die: one in each outer step but the first. `None` for none.
    pub deaths: Option<u64>,
}

/// A training as the planner splits it. Only the times depend on the exchange of weights.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SplitSchedule {
    pub outer_steps: Vec<ScheduledOuterStep>,
    /// Virtual seconds from the start to the last merge.
    pub end_s: f64,
    /// Facts that contradict others.
    pub contradictions: usize,
}

/// The slices of an outer step.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ScheduledOuterStep {
    /// Those that count, in order.
    pub slices: Vec<ScheduledSlice>,
    /// Those of boxes that died meanwhile.
    pub cut_off: Vec<ScheduledSlice>,
    /// Virtual seconds from the start to the merge.
    pub merged_s: f64,
}

/// Steps that a box trains.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ScheduledSlice {
    /// The index of the box.
    pub member: usize,
    pub first: u32,
    pub steps: u32,
}

impl VirtualTraining {
    /// Returns the training as the planner splits it.
    ///
    /// # Errors
    /// When the planner does not end the training.
    pub(super) fn split_steps(self) -> anyhow::Result<SplitSchedule> {
        let mut fleet = VirtualFleet::new(self);
        for _ in 0..ROUNDS_MAX {
            if fleet.run_round() {
                return Ok(fleet.into_schedule());
            }
        }
        bail!(
            "the planner has not ended a training after {ROUNDS_MAX} rounds: {:?}",
            fleet.training
        )
    }
}

impl SplitSchedule {
    /// Returns the same outer steps without the slices that were cut off.
    pub(super) fn without_cut_off(&self) -> Self {
        let mut counted = self.clone();
        counted.outer_steps.iter_mut().for_each(|step| step.cut_off.clear());
        counted
    }

    /// Returns the number of slices that were cut off.
    pub(super) fn cut_off_count(&self) -> usize {
        self.outer_steps.iter().map(|step| step.cut_off.len()).sum()
    }
}

struct VirtualFleet {
    training: VirtualTraining,
    run: Run,
    random: Option<fastrand::Rng>,
    sequence: u64,
    now_s: f64,
    /// By outer step, the slice whose box dies.
    cut_off: BTreeMap<u32, u32>,
    /// By outer step.
    merged_s: BTreeMap<u32, f64>,
}

impl VirtualFleet {
    fn new(training: VirtualTraining) -> Self {
        let VirtualTraining { every, method, deaths, .. } = training;
        let across =
            v1::Across { every, outer_rate: 1.0, method: method.into(), ..Default::default() };
        let settings = v1::Training {
            lora: Some(v1::Lora::default()),
            across: Some(across),
            ..Default::default()
        };
        let sft = v1::spec::Sft { dataset: None, training: Some(settings) };
        let base = v1::Base { tree: named_tree("base"), ..Default::default() };
        let kind = Some(v1::spec::Kind::Sft(sft));
        let spec = v1::Spec { run: "r1".into(), base: Some(base), kind, ..Default::default() };
        let run = Run::new(RunId::new("r1").expect("a legal name"), spec, 0);
        Self {
            training,
            run,
            random: deaths.map(fastrand::Rng::with_seed),
            sequence: 0,
            now_s: 0.0,
            cut_off: BTreeMap::new(),
            merged_s: BTreeMap::new(),
        }
    }

    /// Writes the next orders and their results. Returns true if the final checkpoint exists.
    fn run_round(&mut self) -> bool {
        let orders = self.plan_orders();
        let results: Vec<Fact> = orders.iter().flat_map(|order| self.answer_order(order)).collect();
        let slices = results.iter().filter_map(|fact| match &fact.body {
            FactBody::Delta(delta) => Some(delta.wall_s),
            _ => None,
        });
        self.now_s += match slices.reduce(f64::max) {
            Some(longest_s) => longest_s + self.training.exchange_s,
            None if results.is_empty() => WAIT_S,
            None => 0.0,
        };
        results.into_iter().for_each(|fact| self.write_fact(fact));
        self.run.cycles.get(&0).is_some_and(|cycle| cycle.final_checkpoint().is_some())
    }

    /// Writes what the planner decides and returns its orders.
    fn plan_orders(&mut self) -> Vec<v1::TrainOrder> {
        let trainers = (0..self.training.speeds.len()).map(|member| self.describe_member(member));
        let fleet = FleetSnapshot { trainers: trainers.collect(), ..Default::default() };
        let mut orders = Vec::new();
        loop {
            let inputs = PlannerInputs {
                prompts: &[],
                heldout: &[],
                suites: &BTreeMap::new(),
                fleet: &fleet,
                sizing: &JobSizing::default(),
                timeouts: &ReissueTimeouts::default(),
                check_stragglers: false,
                now_ms: self.now_ms(),
            };
            let commands = next_commands(&self.run, inputs);
            if commands.is_empty() {
                return orders;
            }
            for command in commands {
                match &command.fact.body {
                    FactBody::TrainOrder(order) => orders.push(order.clone()),
                    FactBody::SlicePlan(plan) => self.choose_death(plan),
                    _ => {}
                }
                self.write_fact(command.fact);
            }
        }
    }

    /// Describes a box. For a soup, whose steps are all planned at once, its speed is that of an
    /// earlier training.
    fn describe_member(&self, member: usize) -> FleetMember {
        let speed = self.training.speeds.get(member).copied();
        let speed = speed.filter(|_| self.training.method == v1::across::Method::Soup);
        let training_speed = speed.map(|tokens_per_s| {
            let base = named_tree("base").unwrap_or_default().manifest;
            v1::agent_status::TrainingSpeed { base, tokens_per_s }
        });
        FleetMember { agent: name_member(member), training_speed, ..Default::default() }
    }

    fn choose_death(&mut self, plan: &v1::SlicePlan) {
        let count = u32::try_from(plan.slices.len()).unwrap_or(u32::MAX);
        let Some(random) = self.random.as_mut().filter(|_| plan.outer > 1 && count > 1) else {
            return;
        };
        self.cut_off.insert(plan.outer, random.u32(1..=count));
    }

    fn answer_order(&self, order: &v1::TrainOrder) -> Vec<Fact> {
        match &order.part {
            Some(v1::train_order::Part::Slice(slice)) => {
                self.train_slice(slice).into_iter().collect()
            }
            Some(v1::train_order::Part::Merge(merge)) => self.merge_slices(merge),
            None => Vec::new(),
        }
    }

    /// Returns the result of a slice; `None` if its box dies.
    fn train_slice(&self, ordered: &v1::train_order::Slice) -> Option<Fact> {
        let v1::train_order::Slice { outer, slice, .. } = *ordered;
        let v1::slice_plan::Slice { first, steps, agent, .. } = ordered.planned.clone()?;
        if self.cut_off.get(&outer) == Some(&slice) {
            return None;
        }
        let steps = steps.min(self.training.steps.saturating_sub(first));
        let speed = self.training.speeds.get(find_member(&agent)).copied().unwrap_or(1.0);
        let delta = v1::Delta {
            tree: named_tree(&format!("{outer} {slice}")).filter(|_| steps > 0),
            start: manifest_of(ordered.start.as_ref()),
            wall_s: f64::from(steps) / speed,
            total_steps: self.training.steps,
            trained_tokens: steps.into(),
            agent,
            first,
            steps,
            ..Default::default()
        };
        Some(self.new_fact(FactKey::Delta { cycle: 0, outer, slice }, FactBody::Delta(delta)))
    }

    /// Returns the merge, after the checkpoint if one is due.
    fn merge_slices(&self, ordered: &v1::train_order::Merge) -> Vec<Fact> {
        let tree = named_tree(&format!("merge {}", ordered.outer));
        let due = ordered.checkpoint.clone().map(|due| {
            let key = FactKey::Checkpoint { cycle: 0, step: due.step };
            let tree = tree.clone();
            self.new_fact(key, FactBody::Checkpoint(v1::Checkpoint { tree, ..due }))
        });
        let deltas = ordered.deltas.iter().map(|delta| manifest_of(delta.tree.as_ref()));
        let merge = v1::Merge {
            start: manifest_of(ordered.start.as_ref()),
            deltas: deltas.collect(),
            tree,
            total_steps: if ordered.outer == 0 { self.training.steps } else { 0 },
            ..Default::default()
        };
        let key = FactKey::Merge { cycle: 0, outer: ordered.outer };
        due.into_iter().chain([self.new_fact(key, FactBody::Merge(merge))]).collect()
    }

    fn new_fact(&self, key: FactKey, body: FactBody) -> Fact {
        Fact { subject: Subject::new(&self.run.id, key), body }
    }

    fn now_ms(&self) -> u64 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "hours")]
        let now_ms = (self.now_s * 1000.0) as u64;
        now_ms
    }

    fn write_fact(&mut self, fact: Fact) {
        if let FactKey::Merge { outer, .. } = &fact.subject.key {
            self.merged_s.insert(*outer, self.now_s);
        }
        self.sequence += 1;
        let (sequence, time_ms) = (self.sequence, self.now_ms());
        self.run.fold_record(&Record { sequence, time_ms, author: None, fact });
    }

    fn into_schedule(self) -> SplitSchedule {
        let Self { run, cut_off, merged_s, now_s, .. } = self;
        let mut outer_steps = Vec::new();
        let steps = run.cycles.values().flat_map(|cycle| &cycle.split_training.outer_steps);
        for (outer, step) in steps {
            let Some(plan) = &step.plan else { continue };
            let counted = step.counted_deltas().filter(|delta| delta.steps > 0);
            let counted = counted.map(|delta| ScheduledSlice {
                member: find_member(&delta.agent),
                first: delta.first,
                steps: delta.steps,
            });
            let lost = cut_off.get(outer).and_then(|slice| slice.checked_sub(1));
            let lost = lost.and_then(|index| plan.slices.get(index as usize));
            let lost = lost.map(|slice| ScheduledSlice {
                member: find_member(&slice.agent),
                first: slice.first,
                steps: slice.steps,
            });
            outer_steps.push(ScheduledOuterStep {
                slices: counted.collect(),
                cut_off: lost.into_iter().collect(),
                merged_s: merged_s.get(outer).copied().unwrap_or(now_s),
            });
        }
        SplitSchedule { outer_steps, end_s: now_s, contradictions: run.anomalies.len() }
    }
}

fn name_member(member: usize) -> String {
    format!("box-{member}")
}

fn find_member(agent: &str) -> usize {
    agent.strip_prefix("box-").and_then(|number| number.parse().ok()).unwrap_or_default()
}

fn manifest_of(tree: Option<&v1::Tree>) -> String {
    tree.map(|tree| tree.manifest.clone()).unwrap_or_default()
}

fn named_tree(name: &str) -> Option<v1::Tree> {
    let manifest = Digest::hash_bytes(name.as_bytes()).to_string();
    Some(v1::Tree { path: name.into(), manifest })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn training(speeds: &[f64]) -> VirtualTraining {
        VirtualTraining {
            speeds: speeds.to_vec(),
            steps: 100,
            every: 8,
            method: v1::across::Method::Step,
            exchange_s: 0.0,
            deaths: None,
        }
    }

    fn steps_of(step: &ScheduledOuterStep) -> Vec<(usize, u32)> {
        step.slices.iter().map(|slice| (slice.member, slice.steps)).collect()
    }

    #[test]
    fn faster_boxes_have_more_steps_and_merges_take_their_time() {
        let alone = training(&[1.0, 3.0]).split_steps().unwrap();
        assert_eq!(steps_of(&alone.outer_steps[0]), [(0, 1), (1, 1)], "speeds are unknown");
        assert_eq!(steps_of(&alone.outer_steps[1]), [(0, 4), (1, 12)]);
        assert_eq!((alone.outer_steps[1].merged_s, alone.contradictions), (5.0, 0));
        let sent = VirtualTraining { exchange_s: 2.0, ..training(&[1.0, 3.0]) };
        let sent = sent.split_steps().unwrap();
        assert_eq!(sent.outer_steps.len(), alone.outer_steps.len());
        assert_eq!(sent.outer_steps[1].merged_s, 9.0);
        assert!((sent.end_s - alone.end_s - 2.0 * sent.outer_steps.len() as f64).abs() < 1e-9);
    }

    #[test]
    fn a_soup_is_one_merge_of_shares_by_speed() {
        let method = v1::across::Method::Soup;
        let soup = VirtualTraining { method, ..training(&[1.0, 3.0]) }.split_steps().unwrap();
        assert_eq!(soup.outer_steps.iter().map(steps_of).collect::<Vec<_>>(), [[(0, 25), (1, 75)]]);
        assert_eq!(soup.end_s, 25.0);
    }

    #[test]
    fn steps_of_boxes_that_die_count_once() {
        let deadly = VirtualTraining { deaths: Some(3), ..training(&[1.0; 4]) };
        let schedule = deadly.split_steps().unwrap();
        assert!(schedule.cut_off_count() > 3, "{schedule:?}");
        let slices = schedule.outer_steps.iter().flat_map(|step| &step.slices);
        let mut counted: Vec<u32> =
            slices.flat_map(|slice| slice.first..slice.first + slice.steps).collect();
        counted.sort_unstable();
        assert_eq!(counted, (0..100).collect::<Vec<_>>());
        assert_eq!(schedule.contradictions, 0);
        let counted = schedule.without_cut_off();
        assert_eq!((counted.cut_off_count(), counted.end_s), (0, schedule.end_s));
    }
}
