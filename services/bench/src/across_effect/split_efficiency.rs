//! How busy the planner keeps boxes of different speeds, in virtual time.

use std::collections::BTreeMap;

use cycle::{
    FleetMember, FleetSnapshot, JobSizing, PlannerInputs, ReissueTimeouts, Run, next_commands,
};
use serde::Serialize;
use wire::{Digest, Fact, FactBody, FactKey, Record, RunId, Subject, v1};

/// Steps of the training.
const STEPS: u32 = 2000;
const EVERY: u32 = 20;

/// Steps between two merges over a slow link.
const SLOW_INTERVALS: [u32; 3] = [EVERY, 50, 100];

/// Equal boxes behind the slow link.
const SLOW_BOXES: u32 = 4;

/// Steps a second of a box behind the slow link: a 7B model on a Strix Halo.
const SLOW_SPEED: f64 = 1.0 / 2.65;

/// Returns relative speeds of boxes, and the share of the sum of their speeds that is used.
pub(super) fn measure_efficiency() -> Vec<(Vec<f64>, f64)> {
    let fleets: [&[f64]; 3] = [&[1.0; 4], &[1.0, 2.0, 4.0], &[1.0, 2.0, 4.0, 8.0]];
    let measure =
        |speeds: &[f64]| (speeds.to_vec(), VirtualFleet::new(speeds, EVERY).use_of_speeds(0.0));
    fleets.into_iter().map(measure).collect()
}

/// A link in TCP's steady state.
#[derive(Debug, Clone, Copy)]
pub(super) struct SlowLink {
    pub bits_s: f64,
    pub round_trip_s: f64,
    pub loss: f64,
}

/// The share of the sum of speeds that is used behind a slow link.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct SlowShare {
    pub every: u32,
    /// If boxes send their weights.
    pub with_weights: f64,
    /// If they send changes.
    pub with_changes: f64,
}

impl SlowLink {
    /// Returns the shares for files of these sizes. Boxes send one file each and fetch the merged
    /// weights, or the changes of all others at once.
    pub(super) fn measure_shares(self, weights: f64, change: f64) -> Vec<SlowShare> {
        let others = f64::from(SLOW_BOXES - 1);
        let exchange_weights = 2.0 * self.transfer_s(weights, PARTS);
        let exchange_changes =
            self.transfer_s(change, 1.0) + self.transfer_s(others * change, others);
        let share = |every, exchange_s: f64| {
            let speeds = [SLOW_SPEED; SLOW_BOXES as usize];
            VirtualFleet::new(&speeds, every).use_of_speeds(exchange_s)
        };
        let shares = SLOW_INTERVALS.map(|every| SlowShare {
            every,
            with_weights: share(every, exchange_weights),
            with_changes: share(every, exchange_changes),
        });
        shares.into()
    }

    /// Returns the seconds of a transfer over several connections. Each is as fast as losses allow
    /// (Mathis et al. 1997, doi:10.1145/263932.264023).
    fn transfer_s(self, bytes: f64, connections: f64) -> f64 {
        let connection = 8.0 * SEGMENT_BYTES / self.round_trip_s * (1.5 / self.loss).sqrt();
        self.round_trip_s + 8.0 * bytes / (connections * connection).min(self.bits_s)
    }
}

const SEGMENT_BYTES: f64 = 1460.0;

/// Connections over which a large file is transferred.
const PARTS: f64 = 8.0;

struct VirtualFleet {
    run: Run,
    speeds: BTreeMap<String, f64>,
    sequence: u64,
    now_s: f64,
    /// Seconds of each outer step in which boxes do not train.
    exchange_s: f64,
}

impl VirtualFleet {
    fn new(speeds: &[f64], every: u32) -> Self {
        let across = v1::Across { workers: 0, every, outer_rate: 0.7, ..Default::default() };
        let training = v1::Training {
            lora: Some(v1::Lora::default()),
            across: Some(across),
            ..Default::default()
        };
        let sft = v1::spec::Sft { dataset: None, training: Some(training) };
        let base = v1::Base { tree: named_tree("base"), ..Default::default() };
        let kind = Some(v1::spec::Kind::Sft(sft));
        let spec = v1::Spec { run: "r1".into(), base: Some(base), kind, ..Default::default() };
        let run = Run::new(RunId::new("r1").expect("a legal name"), spec, 0);
        let name = |number: usize| format!("box-{number}");
        let speeds = speeds.iter().enumerate().map(|(number, speed)| (name(number), *speed));
        Self { run, speeds: speeds.collect(), sequence: 0, now_s: 0.0, exchange_s: 0.0 }
    }

    /// Returns the share of the sum of the speeds that a training uses.
    fn use_of_speeds(mut self, exchange_s: f64) -> f64 {
        self.exchange_s = exchange_s;
        let sum: f64 = self.speeds.values().sum();
        f64::from(STEPS) / sum / self.train()
    }

    /// Returns the seconds until the final checkpoint.
    fn train(mut self) -> f64 {
        while self.run.cycles.get(&0).is_none_or(|cycle| cycle.final_checkpoint().is_none()) {
            let orders = self.plan();
            let mut longest_s: f64 = 0.0;
            let results: Vec<Fact> = orders.iter().flat_map(|order| self.answer(order)).collect();
            for fact in &results {
                if let FactBody::Delta(delta) = &fact.body {
                    longest_s = longest_s.max(delta.wall_s);
                }
            }
            self.now_s += longest_s + if longest_s > 0.0 { self.exchange_s } else { 0.0 };
            results.into_iter().for_each(|fact| self.write(fact));
        }
        self.now_s
    }

    /// Writes what the planner decides and returns its orders.
    fn plan(&mut self) -> Vec<v1::TrainOrder> {
        let member = |agent: &String| FleetMember { agent: agent.clone(), ..Default::default() };
        let trainers = self.speeds.keys().map(member).collect();
        let fleet = FleetSnapshot { trainers, ..Default::default() };
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
                if let FactBody::TrainOrder(order) = &command.fact.body {
                    orders.push(order.clone());
                }
                self.write(command.fact);
            }
        }
    }

    fn answer(&self, order: &v1::TrainOrder) -> Vec<Fact> {
        let fact = |key, body| Fact { subject: Subject::new(&self.run.id, key), body };
        let manifest = |tree: &Option<v1::Tree>| tree.clone().unwrap_or_default().manifest;
        match &order.part {
            Some(v1::train_order::Part::Slice(slice)) => {
                let planned = slice.planned.clone().unwrap_or_default();
                let v1::slice_plan::Slice { first, steps, agent, .. } = planned;
                let steps = steps.min(STEPS.saturating_sub(first));
                let (outer, slice_number) = (slice.outer, slice.slice);
                let speed = self.speeds.get(&agent).copied().unwrap_or(1.0);
                let delta = v1::Delta {
                    tree: named_tree(&format!("{outer} {slice_number}")).filter(|_| steps > 0),
                    start: manifest(&slice.start),
                    wall_s: f64::from(steps) / speed,
                    total_steps: STEPS,
                    trained_tokens: steps.into(),
                    agent,
                    first,
                    steps,
                    ..Default::default()
                };
                let key = FactKey::Delta { cycle: 0, outer, slice: slice_number };
                vec![fact(key, FactBody::Delta(delta))]
            }
            Some(v1::train_order::Part::Merge(merge)) => {
                let tree = named_tree(&format!("merge {}", merge.outer));
                let due = merge.checkpoint.clone().map(|due| {
                    let key = FactKey::Checkpoint { cycle: 0, step: due.step };
                    let tree = tree.clone();
                    fact(key, FactBody::Checkpoint(v1::Checkpoint { tree, ..due }))
                });
                let merged = v1::Merge {
                    start: manifest(&merge.start),
                    deltas: merge.deltas.iter().map(|delta| manifest(&delta.tree)).collect(),
                    tree,
                    ..Default::default()
                };
                let key = FactKey::Merge { cycle: 0, outer: merge.outer };
                due.into_iter().chain([fact(key, FactBody::Merge(merged))]).collect()
            }
            None => Vec::new(),
        }
    }

    fn now_ms(&self) -> u64 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "hours")]
        let now_ms = (self.now_s * 1000.0) as u64;
        now_ms
    }

    fn write(&mut self, fact: Fact) {
        self.sequence += 1;
        let (sequence, time_ms) = (self.sequence, self.now_ms());
        self.run.fold_record(&Record { sequence, time_ms, author: None, fact });
    }
}

fn named_tree(name: &str) -> Option<v1::Tree> {
    let manifest = Digest::hash_bytes(name.as_bytes()).to_string();
    Some(v1::Tree { path: name.into(), manifest })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_of_different_speeds_are_busy() {
        for (speeds, share) in measure_efficiency() {
            assert!((0.85..=1.0).contains(&share), "{speeds:?}: {share}");
        }
    }

    #[test]
    fn over_a_slow_link_changes_leave_boxes_time_to_train() {
        let link = SlowLink { bits_s: 20e6, round_trip_s: 0.1, loss: 0.02 };
        // 1460 bytes a round trip of .1 s, times 8.66: a megabit a second.
        assert!((link.transfer_s(1e6, 1.0) - 8.0).abs() < 0.2);
        for share in link.measure_shares(160e6, 0.5e6) {
            assert!(share.with_weights < 0.5 && share.with_changes > 0.8, "{share:?}");
        }
    }
}
