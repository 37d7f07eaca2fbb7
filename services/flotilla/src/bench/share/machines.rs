//! A fleet of simulated generators on one order queue, driven by the real core.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque},
};

use anyhow::{Context, ensure};
use cycle::{Fleet, Held, Member};
use wire::{Body, Place, RunId, WorkKind, derive, v1};

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

const SECOND: u64 = 1_000_000_000;

/// As agents and coordinators have it: words of each agent, and of one that has become idle; how
/// long a silent one counts; looks for what should be ordered once more; a lease; how long a
/// box takes nothing that was offered what it works on already.
const SAY_EVERY: u64 = SECOND;
const SAY_IDLE: u64 = SECOND / 10;
const SILENT: u64 = 5 * SECOND;
const LOOK_EVERY: u64 = 2 * SECOND;
const LEASE: u64 = 30 * SECOND;
const PASS_ON: u64 = SECOND;

/// Lengths of samples are uniform between this and the most tokens a sample may have.
const TOKENS_MIN: u64 = 16;

/// No phase takes so long.
const HOURS_MAX: u64 = 10;

pub(super) struct Outcome {
    /// From the plan to the last sample in the log.
    pub seconds: f64,
    /// All tokens at the speed of all boxes that are there.
    pub ideal_s: f64,
    pub samples: u32,
    pub jobs: usize,
    /// Orders written beside one for each job.
    pub again: usize,
    /// Samples by box.
    pub shares: Vec<u32>,
}

/// The boxes of a phase.
#[derive(Debug, Clone, Copy)]
pub(super) struct Boxes<'a> {
    /// Tokens a second with full slots.
    pub speeds: &'a [f64],
    /// Whether that is known from earlier phases.
    pub known: bool,
    /// One that is gone, without a word, when half the work is done.
    pub lost: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ordered {
        order: usize,
    },
    Delivered {
        machine: usize,
        order: usize,
    },
    Stepped {
        machine: usize,
    },
    Written {
        machine: usize,
        order: usize,
    },
    /// An order is there for anybody again.
    Back {
        order: usize,
    },
    Rested {
        machine: usize,
    },
    Says {
        machine: usize,
        idle: bool,
    },
    Look,
    Lost {
        machine: usize,
    },
}

struct Simulation {
    log: Log,
    workload: Workload,
    machines: Vec<Machine>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
    now: u64,
    orders: Vec<v1::GenerateOrder>,
    delivered: Vec<u64>,
    /// Orders nobody has, and machines whose pull waits, each first come first served.
    queue: VecDeque<usize>,
    pulls: VecDeque<usize>,
    /// The last word of each machine, and who was seen to hold what.
    said: BTreeMap<usize, (u64, Member)>,
    held: BTreeMap<Held, u64>,
    written: BTreeSet<String>,
    ended: u64,
    tokens: u64,
    shares: Vec<u32>,
}

/// Plays the generate phase of a cycle.
pub(super) fn simulate(workload: Workload, boxes: Boxes<'_>) -> anyhow::Result<Outcome> {
    let Boxes { speeds, known, lost } = boxes;
    let machines: Vec<Machine> = speeds.iter().map(|speed| Machine::new(*speed, known)).collect();
    let mut simulation = Simulation {
        log: Log::submit("share", 0, workload, Fleet::default())?,
        workload,
        machines,
        events: BinaryHeap::new(),
        scheduled: 0,
        now: 0,
        orders: Vec::new(),
        delivered: Vec::new(),
        queue: VecDeque::new(),
        pulls: VecDeque::new(),
        said: BTreeMap::new(),
        held: BTreeMap::new(),
        written: BTreeSet::new(),
        ended: 0,
        tokens: 0,
        shares: vec![0; speeds.len()],
    };
    for machine in 0..speeds.len() {
        simulation.say(machine)?;
        simulation.schedule(SAY_EVERY, Event::Says { machine, idle: false });
    }
    simulation.schedule(LOOK_EVERY, Event::Look);
    simulation.coordinate(false);
    let all: f64 = speeds.iter().sum();
    let half_s = simulation.planned() / all / 2.0;
    if let Some(machine) = lost {
        simulation.schedule(nanoseconds(half_s), Event::Lost { machine });
    }
    (0..speeds.len()).for_each(|machine| simulation.ask(machine));
    while !simulation.is_over() {
        let Some(Reverse((at, _, event))) = simulation.events.pop() else { break };
        ensure!(at < HOURS_MAX * 3600 * SECOND, "the phase does not end");
        simulation.now = at;
        simulation.happen(event)?;
    }
    let cycle = simulation.log.run().cycles.get(&1).context("the cycle was planned")?;
    ensure!(cycle.has_all_samples(v1::Purpose::Train), "the simulation ended before its work");
    ensure!(simulation.log.run().anomalies.is_empty(), "the simulated log contradicts itself");
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let (seconds, tokens) = (simulation.ended as f64 / 1e9, simulation.tokens as f64);
    let rest = all - lost.map_or(0.0, |lost| speeds[lost]);
    Ok(Outcome {
        seconds,
        ideal_s: half_s + (tokens - half_s * all) / rest,
        samples: simulation.shares.iter().sum(),
        jobs: cycle.jobs.len(),
        again: simulation.orders.len().saturating_sub(cycle.jobs.len()),
        shares: simulation.shares,
    })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "seconds of one phase")]
fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

impl Simulation {
    fn schedule(&mut self, after: u64, event: Event) {
        // Numbered, so that what was scheduled first happens first.
        self.scheduled += 1;
        self.events.push(Reverse((self.now + after, self.scheduled, event)));
    }

    fn is_over(&self) -> bool {
        let cycle = self.log.run().cycles.get(&1);
        cycle.is_some_and(|cycle| cycle.jobs.len() == self.written.len())
    }

    /// Tokens of the whole plan.
    fn planned(&self) -> f64 {
        let prompts = u64::from(self.workload.prompts * self.workload.samples_per_prompt);
        let each = u64::from(self.workload.max_new_tokens) + TOKENS_MIN;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let tokens = (prompts * each) as f64 / 2.0;
        tokens
    }

    fn happen(&mut self, event: Event) -> anyhow::Result<()> {
        match event {
            Event::Ordered { order } => {
                self.queue.push_back(order);
                self.hand_out();
            }
            Event::Back { order } => {
                self.queue.push_front(order);
                self.hand_out();
            }
            Event::Delivered { machine, order } => self.deliver(machine, order),
            Event::Stepped { machine } => {
                if self.machines[machine].lost {
                    return Ok(());
                }
                for order in self.machines[machine].end_step(self.now) {
                    self.schedule(WRITE, Event::Written { machine, order });
                }
                self.step(machine);
                self.ask(machine);
            }
            Event::Written { machine, order } if !self.machines[machine].lost => {
                self.machines[machine].settle(order);
                self.write(machine, order)?;
                self.ask(machine);
                if self.machines[machine].is_idle() {
                    self.schedule(SAY_IDLE, Event::Says { machine, idle: true });
                }
            }
            Event::Written { .. } => {}
            Event::Rested { machine } => {
                self.machines[machine].resting = false;
                self.ask(machine);
            }
            Event::Says { machine, idle } => {
                if self.machines[machine].lost {
                    return Ok(());
                }
                self.say(machine)?;
                if !idle {
                    self.schedule(SAY_EVERY, Event::Says { machine, idle });
                } else if self.machines[machine].is_idle() {
                    self.coordinate(true);
                }
            }
            Event::Look => {
                self.schedule(LOOK_EVERY, Event::Look);
                self.coordinate(true);
            }
            Event::Lost { machine } => {
                self.machines[machine].lost = true;
                self.pulls.retain(|waiting| *waiting != machine);
                for order in self.machines[machine].orders() {
                    self.schedule(LEASE, Event::Back { order });
                }
            }
        }
        Ok(())
    }

    fn deliver(&mut self, machine: usize, order: usize) {
        self.machines[machine].asking = false;
        if self.machines[machine].lost {
            self.schedule(LEASE, Event::Back { order });
            return;
        }
        let job = &self.orders[order].job;
        let twin = self.machines[machine].orders().into_iter().any(|o| self.orders[o].job == *job);
        let left = conduct::leaves(
            &self.orders[order],
            self.delivered[order],
            self.machines[machine].pace(),
        );
        let rest = if twin { Some(PASS_ON) } else { left.map(|r| nanoseconds(r.as_secs_f64())) };
        if let Some(rest) = rest {
            self.machines[machine].resting = true;
            self.schedule(rest, Event::Rested { machine });
            self.schedule(PULL, Event::Back { order });
            return;
        }
        let tokens = self.lengths(order);
        self.machines[machine].take(order, tokens, self.now);
        if !self.machines[machine].stepping {
            self.step(machine);
        }
        self.ask(machine);
    }

    fn step(&mut self, machine: usize) {
        let step = self.machines[machine].begin_step();
        self.machines[machine].stepping = step.is_some();
        if let Some(nanoseconds) = step {
            self.schedule(nanoseconds, Event::Stepped { machine });
        }
    }

    fn ask(&mut self, machine: usize) {
        if self.machines[machine].may_ask() {
            self.machines[machine].asking = true;
            self.pulls.push_back(machine);
            self.hand_out();
        }
    }

    fn hand_out(&mut self) {
        while let (Some(&machine), Some(&order)) = (self.pulls.front(), self.queue.front()) {
            self.pulls.pop_front();
            self.queue.pop_front();
            self.delivered[order] += 1;
            self.schedule(PULL, Event::Delivered { machine, order });
        }
    }

    fn write(&mut self, machine: usize, order: usize) -> anyhow::Result<()> {
        let samples = agents::samples(&self.orders[order]);
        if !self.written.insert(samples.job.clone()) {
            // Somebody else was first.
            return Ok(());
        }
        self.ended = self.now;
        self.shares[machine] += u32::try_from(samples.samples.len())?;
        let place = Place::Samples { cycle: samples.cycle, job: samples.job.parse()? };
        let wall_s = self.machines[machine].wall_s(order, self.now);
        let agent = machine.to_string();
        self.log.write(place, Body::Samples(v1::Samples { wall_s, agent, ..samples }));
        self.coordinate(false);
        Ok(())
    }

    /// What a machine says of itself.
    fn say(&mut self, machine: usize) -> anyhow::Result<()> {
        let run = RunId::new("share")?;
        let holds: BTreeSet<Held> = self.machines[machine]
            .orders()
            .into_iter()
            .map(|order| &self.orders[order])
            .map(|order| Held { run: run.clone(), cycle: order.cycle, job: order.job.clone() })
            .collect();
        self.held.extend(holds.iter().map(|held| (held.clone(), self.now)));
        let pace = self.machines[machine].pace();
        let member = Member {
            agent: machine.to_string(),
            tokens_per_s: pace.tokens_per_s,
            sample_s: pace.sample_s(),
            left: self.machines[machine].left(),
            holds,
        };
        self.said.insert(machine, (self.now, member));
        Ok(())
    }

    /// What the coordinator knows by then.
    fn fleet(&self) -> Fleet {
        let there = self.said.values().filter(|(at, _)| self.now - at < SILENT);
        let ago = |at: &u64| (self.now - at) / 1_000_000;
        Fleet {
            generators: there.map(|(_, member)| member.clone()).collect(),
            held_ago_ms: self
                .held
                .iter()
                .map(|(held, at)| ((WorkKind::Generate, held.clone()), ago(at)))
                .collect(),
            ..Fleet::default()
        }
    }

    fn coordinate(&mut self, again: bool) {
        self.log.coordinate_with(self.fleet(), self.now / 1_000_000, again);
        for record in self.log.take() {
            if let Body::GenerateOrder(order) = record.fact.body {
                let first = order.attempt == 1;
                self.orders.push(order);
                self.delivered.push(0);
                let order = self.orders.len() - 1;
                if first {
                    let tokens = self.lengths(order);
                    self.tokens += tokens.iter().map(|tokens| u64::from(*tokens)).sum::<u64>();
                }
                self.schedule(DECIDE, Event::Ordered { order });
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
