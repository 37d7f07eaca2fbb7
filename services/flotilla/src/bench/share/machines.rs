//! A fleet of simulated generators on one order queue, driven by the real core.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use anyhow::{Context, ensure};
use cycle::Fleet;
use wire::{Body, Place, derive, v1};

use super::machine::Machine;
use crate::bench::{
    agents,
    log::{Log, Workload},
};

/// What a job costs beside its tokens: from the pull to the first token, from the last
/// token to the fact in the log, and from a fact to the orders that follow from it.
const PULL: u64 = 3_000_000;
const WRITE: u64 = 5_000_000;
const DECIDE: u64 = 3_000_000;

/// Lengths of samples are uniform between this and the most tokens a sample may have.
const TOKENS_MIN: u64 = 16;

pub(super) struct Outcome {
    /// From the plan to the last sample in the log.
    pub seconds: f64,
    /// All tokens at the speed of all boxes together.
    pub ideal_s: f64,
    pub samples: u32,
    pub jobs: usize,
    /// Samples by box.
    pub shares: Vec<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ordered { order: usize },
    Delivered { machine: usize, order: usize },
    Stepped { machine: usize },
    Written { machine: usize, order: usize },
}

struct Simulation {
    log: Log,
    workload: Workload,
    machines: Vec<Machine>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
    now: u64,
    orders: Vec<v1::GenerateOrder>,
    /// Orders nobody has, and machines whose pull waits, each first come first served.
    queue: VecDeque<usize>,
    pulls: VecDeque<usize>,
    tokens: u64,
    shares: Vec<u32>,
}

/// Plays the generate phase of a cycle.
pub(super) fn simulate(
    workload: Workload,
    fleet: Fleet,
    speeds: &[f64],
) -> anyhow::Result<Outcome> {
    let mut simulation = Simulation {
        log: Log::submit("share", 0, workload, fleet)?,
        workload,
        machines: speeds.iter().copied().map(Machine::new).collect(),
        events: BinaryHeap::new(),
        scheduled: 0,
        now: 0,
        orders: Vec::new(),
        queue: VecDeque::new(),
        pulls: VecDeque::new(),
        tokens: 0,
        shares: vec![0; speeds.len()],
    };
    simulation.coordinate();
    (0..speeds.len()).for_each(|machine| simulation.ask(machine));
    while let Some(Reverse((at, _, event))) = simulation.events.pop() {
        simulation.now = at;
        simulation.happen(event)?;
    }
    let cycle = simulation.log.run().cycles.get(&1).context("the cycle was planned")?;
    ensure!(cycle.has_all_samples(v1::Purpose::Train), "the simulation ended before its work");
    ensure!(simulation.log.run().anomalies.is_empty(), "the simulated log contradicts itself");
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let (seconds, tokens) = (simulation.now as f64 / 1e9, simulation.tokens as f64);
    Ok(Outcome {
        seconds,
        ideal_s: tokens / speeds.iter().sum::<f64>(),
        samples: simulation.shares.iter().sum(),
        jobs: cycle.jobs.len(),
        shares: simulation.shares,
    })
}

impl Simulation {
    fn schedule(&mut self, after: u64, event: Event) {
        // Numbered, so that what was scheduled first happens first.
        self.scheduled += 1;
        self.events.push(Reverse((self.now + after, self.scheduled, event)));
    }

    fn happen(&mut self, event: Event) -> anyhow::Result<()> {
        match event {
            Event::Ordered { order } => {
                self.queue.push_back(order);
                self.hand_out();
            }
            Event::Delivered { machine, order } => {
                let tokens = self.lengths(order);
                self.tokens += tokens.iter().map(|tokens| u64::from(*tokens)).sum::<u64>();
                self.machines[machine].asking = false;
                self.machines[machine].take(order, tokens, self.now);
                if !self.machines[machine].stepping {
                    self.step(machine);
                }
                self.ask(machine);
            }
            Event::Stepped { machine } => {
                for order in self.machines[machine].end_step(self.now) {
                    self.schedule(WRITE, Event::Written { machine, order });
                }
                self.step(machine);
                self.ask(machine);
            }
            Event::Written { machine, order } => {
                self.machines[machine].settle(order);
                self.write(machine, order)?;
                self.ask(machine);
            }
        }
        Ok(())
    }

    fn step(&mut self, machine: usize) {
        let step = self.machines[machine].begin_step();
        self.machines[machine].stepping = step.is_some();
        if let Some(nanoseconds) = step {
            self.schedule(nanoseconds, Event::Stepped { machine });
        }
    }

    fn ask(&mut self, machine: usize) {
        if !self.machines[machine].asking && self.machines[machine].has_room() {
            self.machines[machine].asking = true;
            self.pulls.push_back(machine);
            self.hand_out();
        }
    }

    fn hand_out(&mut self) {
        while let (Some(&machine), Some(&order)) = (self.pulls.front(), self.queue.front()) {
            self.pulls.pop_front();
            self.queue.pop_front();
            self.schedule(PULL, Event::Delivered { machine, order });
        }
    }

    fn write(&mut self, machine: usize, order: usize) -> anyhow::Result<()> {
        let samples = agents::samples(&self.orders[order]);
        self.shares[machine] += u32::try_from(samples.samples.len())?;
        let place = Place::Samples { cycle: samples.cycle, job: samples.job.parse()? };
        self.log.write(place, Body::Samples(samples));
        self.coordinate();
        Ok(())
    }

    fn coordinate(&mut self) {
        self.log.coordinate();
        for record in self.log.take() {
            if let Body::GenerateOrder(order) = record.fact.body {
                self.orders.push(order);
                self.schedule(DECIDE, Event::Ordered { order: self.orders.len() - 1 });
            }
        }
    }

    /// How long each sample of an order gets, whoever makes it.
    fn lengths(&self, order: usize) -> Vec<u32> {
        let span = u64::from(self.workload.max_new_tokens) - TOKENS_MIN + 1;
        let order = &self.orders[order];
        let mut lengths = Vec::new();
        for request in &order.requests {
            for index in request.first..request.first + request.count {
                let drawn = derive(order.seed, &["length", &request.prompt_id, &index.to_string()]);
                lengths.push(u32::try_from(TOKENS_MIN + drawn % span).unwrap_or(u32::MAX));
            }
        }
        lengths
    }
}
