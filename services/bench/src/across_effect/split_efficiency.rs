//! How busy the planner keeps boxes of different speeds, in virtual time.

use std::collections::BTreeMap;

use cycle::{
    FleetMember, FleetSnapshot, JobSizing, PlannerInputs, ReissueTimeouts, Run, next_commands,
};
use wire::{Digest, Fact, FactBody, FactKey, Record, RunId, Subject, v1};

/// Steps of the training.
const STEPS: u32 = 2000;
const EVERY: u32 = 20;

/// Returns relative speeds of boxes, and the share of the sum of their speeds that is used.
pub(super) fn measure_efficiency() -> Vec<(Vec<f64>, f64)> {
    let fleets: [&[f64]; 3] = [&[1.0; 4], &[1.0, 2.0, 4.0], &[1.0, 2.0, 4.0, 8.0]];
    let measure = |speeds: &[f64]| {
        let seconds = VirtualFleet::new(speeds).train();
        (speeds.to_vec(), f64::from(STEPS) / speeds.iter().sum::<f64>() / seconds)
    };
    fleets.into_iter().map(measure).collect()
}

struct VirtualFleet {
    run: Run,
    speeds: BTreeMap<String, f64>,
    sequence: u64,
    now_s: f64,
}

impl VirtualFleet {
    fn new(speeds: &[f64]) -> Self {
        let across = v1::Across { workers: 0, every: EVERY, outer_rate: 0.7, ..Default::default() };
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
        Self { run, speeds: speeds.collect(), sequence: 0, now_s: 0.0 }
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
            self.now_s += longest_s;
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
}
