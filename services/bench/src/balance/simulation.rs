//! Simulates a fleet of generators on one order queue, driven by the real planner; with the other
//! roles it simulates whole runs.

mod whole_run;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque},
};

use anyhow::{Context, ensure};
use cycle::{FleetMember, FleetSnapshot, HeldJob};
use wire::{FactBody, FactKey, WorkKind, derive_seed, v1};

use self::whole_run::OtherRoles;
use super::simulated_generator::SimulatedGenerator;

pub(crate) use self::whole_run::{SimulatedFleet, SimulatedRun, simulate_run};
use crate::{
    memory_log::{MemoryLog, RaftWorkload},
    stub_agents,
};

/// Time from a pull to the first token of a job, in nanoseconds.
const PULL_TIME: u64 = 3_000_000;
/// Time from the last token of a job to its fact in the log.
const WRITE_TIME: u64 = 5_000_000;
/// Time from a fact to the orders that follow from it.
const DECIDE_TIME: u64 = 3_000_000;

/// A second and a millisecond in nanoseconds.
const SECOND: u64 = 1_000_000_000;
const MILLISECOND: u64 = 1_000_000;

/// Interval between two status messages of an agent, as in real agents.
const STATUS_INTERVAL: u64 = SECOND;
/// Delay of the status message of an agent that has become idle.
const IDLE_STATUS_DELAY: u64 = SECOND / 10;
/// Age at which a status no longer counts.
const SILENCE_LIMIT: u64 = 5 * SECOND;
/// Interval between two checks for stragglers.
const STRAGGLER_INTERVAL: u64 = 2 * SECOND;
const LEASE: u64 = 30 * SECOND;
/// Pause of a box that was offered a job that it already runs.
const DUPLICATE_PAUSE: u64 = SECOND;

/// Shortest sample. Lengths are uniform between this and the maximum tokens of a sample.
const TOKENS_MIN: u64 = 16;

/// Longest accepted phase, in hours of virtual time.
const HOURS_MAX: u64 = 10;

pub(super) struct PhaseOutcome {
    pub seconds: f64,
    /// If all boxes that remain worked at full speed until the end.
    pub ideal_s: f64,
    pub samples: u32,
    pub jobs: usize,
    /// Number of orders beyond one per job.
    pub again: usize,
    pub shares: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct PhaseBoxes<'a> {
    /// Tokens per second of each box with full slots.
    pub speeds: &'a [f64],
    pub known: bool,
    /// A box that disappears without a message when half of the work is done.
    pub lost: Option<usize>,
}

/// An event in virtual time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SimulationEvent {
    /// A new order reaches the end of the queue.
    Ordered { order: usize },
    /// An order reaches the box whose pull it answers.
    Delivered { machine: usize, order: usize },
    /// A box has finished a step.
    Stepped { machine: usize },
    /// The samples of an order reach the log.
    Written { machine: usize, order: usize },
    /// An order returns to the front of the queue.
    Returned { order: usize },
    /// A box that declined an order may pull again.
    BackoffEnded { machine: usize },
    /// A box announces its status. `idle` marks the extra message of a box that has become idle.
    StatusDue { machine: usize, idle: bool },
    /// The coordinator checks for stragglers.
    StragglerCheck,
    /// A box disappears; its orders return after their lease.
    Lost { machine: usize },
    /// The result of another role reaches the log.
    Answered { answer: usize },
}

struct PhaseSimulation {
    log: MemoryLog,
    workload: RaftWorkload,
    machines: Vec<SimulatedGenerator>,
    events: BinaryHeap<Reverse<(u64, u64, SimulationEvent)>>,
    scheduled: u64,
    now: u64,
    orders: Vec<v1::GenerateOrder>,
    delivered: Vec<u64>,
    /// Orders without a box, and (in `pulls`) boxes with an open pull; both are first in, first
    /// out.
    queue: VecDeque<usize>,
    pulls: VecDeque<usize>,
    /// Time and content of the last status. `held` has the time of the last report on each job.
    last_status: BTreeMap<usize, (u64, FleetMember)>,
    held: BTreeMap<HeldJob, u64>,
    /// Jobs with samples, by cycle.
    written: BTreeSet<(u32, String)>,
    /// Boxes with the orders that they declined.
    declined: BTreeSet<(usize, usize)>,
    ended: u64,
    tokens: u64,
    shares: Vec<u32>,
    /// Absent: only the samples of the first cycle are drawn.
    roles: Option<OtherRoles>,
}

pub(super) fn simulate_phase(
    workload: RaftWorkload,
    boxes: PhaseBoxes<'_>,
) -> anyhow::Result<PhaseOutcome> {
    let PhaseBoxes { speeds, known, lost } = boxes;
    let mut simulation = PhaseSimulation::start("share", workload, (speeds, known), None)?;
    let all: f64 = speeds.iter().sum();
    let half_s = simulation.planned_tokens() / all / 2.0;
    if let Some(machine) = lost {
        simulation.schedule_event(to_nanoseconds(half_s), SimulationEvent::Lost { machine });
    }
    simulation.run_until_complete()?;
    let cycle = simulation.log.run_state().cycles.get(&1).context("the cycle was planned")?;
    ensure!(cycle.has_all_samples(v1::Purpose::Train), "the simulation ended before its work");
    ensure!(
        simulation.log.run_state().anomalies.is_empty(),
        "the simulated log contradicts itself"
    );
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let (seconds, tokens) = (simulation.ended as f64 / 1e9, simulation.tokens as f64);
    let rest = all - lost.map_or(0.0, |lost| speeds[lost]);
    Ok(PhaseOutcome {
        seconds,
        ideal_s: half_s + (tokens - half_s * all) / rest,
        samples: simulation.shares.iter().sum(),
        jobs: cycle.jobs.len(),
        again: simulation.orders.len().saturating_sub(cycle.jobs.len()),
        shares: simulation.shares,
    })
}

/// Converts seconds to nanoseconds.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "seconds of one phase")]
fn to_nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

impl PhaseSimulation {
    fn start(
        run: &str,
        workload: RaftWorkload,
        (speeds, known): (&[f64], bool),
        roles: Option<OtherRoles>,
    ) -> anyhow::Result<Self> {
        let mut simulation = Self {
            log: MemoryLog::submit_run(run, 0, workload, FleetSnapshot::default())?,
            workload,
            machines: speeds.iter().map(|speed| SimulatedGenerator::new(*speed, known)).collect(),
            events: BinaryHeap::new(),
            scheduled: 0,
            now: 0,
            orders: Vec::new(),
            delivered: Vec::new(),
            queue: VecDeque::new(),
            pulls: VecDeque::new(),
            last_status: BTreeMap::new(),
            held: BTreeMap::new(),
            written: BTreeSet::new(),
            declined: BTreeSet::new(),
            ended: 0,
            tokens: 0,
            shares: vec![0; speeds.len()],
            roles,
        };
        for machine in 0..speeds.len() {
            simulation.announce_status(machine);
            let due = SimulationEvent::StatusDue { machine, idle: false };
            simulation.schedule_event(STATUS_INTERVAL, due);
        }
        simulation.schedule_event(STRAGGLER_INTERVAL, SimulationEvent::StragglerCheck);
        simulation.run_planner(false);
        Ok(simulation)
    }

    fn run_until_complete(&mut self) -> anyhow::Result<()> {
        (0..self.machines.len()).for_each(|machine| self.open_pull(machine));
        while !self.is_complete() {
            let Some(Reverse((at, _, event))) = self.events.pop() else { break };
            ensure!(at < HOURS_MAX * 3600 * SECOND, "the phase does not end");
            self.now = at;
            self.handle_event(event)?;
        }
        Ok(())
    }

    /// Schedules an event `after` nanoseconds from now.
    fn schedule_event(&mut self, after: u64, event: SimulationEvent) {
        // The sequence number keeps events of the same time in the order in which they were
        // scheduled.
        self.scheduled += 1;
        self.events.push(Reverse((self.now + after, self.scheduled, event)));
    }

    fn is_complete(&self) -> bool {
        if self.roles.is_some() {
            return self.log.is_run_done();
        }
        let cycle = self.log.run_state().cycles.get(&1);
        cycle.is_some_and(|cycle| cycle.jobs.len() == self.written.len())
    }

    fn planned_tokens(&self) -> f64 {
        let prompts = u64::from(self.workload.prompts * self.workload.samples_per_prompt);
        let each = u64::from(self.workload.max_new_tokens) + TOKENS_MIN;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let tokens = (prompts * each) as f64 / 2.0;
        tokens
    }

    fn handle_event(&mut self, event: SimulationEvent) -> anyhow::Result<()> {
        match event {
            SimulationEvent::Ordered { order } => {
                self.queue.push_back(order);
                self.match_pulls();
            }
            SimulationEvent::Returned { order } => {
                self.queue.push_front(order);
                self.match_pulls();
            }
            SimulationEvent::Delivered { machine, order } => self.deliver_order(machine, order),
            SimulationEvent::Stepped { machine } => {
                if self.machines[machine].lost {
                    return Ok(());
                }
                for order in self.machines[machine].end_step(self.now) {
                    self.schedule_event(WRITE_TIME, SimulationEvent::Written { machine, order });
                }
                self.start_step(machine);
                self.open_pull(machine);
            }
            SimulationEvent::Written { machine, order } if !self.machines[machine].lost => {
                self.machines[machine].complete_order(order);
                self.write_samples(machine, order)?;
                self.open_pull(machine);
                if self.machines[machine].is_idle() {
                    self.schedule_event(
                        IDLE_STATUS_DELAY,
                        SimulationEvent::StatusDue { machine, idle: true },
                    );
                }
            }
            SimulationEvent::Written { .. } => {}
            SimulationEvent::BackoffEnded { machine } => {
                self.machines[machine].backing_off = false;
                self.open_pull(machine);
            }
            SimulationEvent::StatusDue { machine, idle } => {
                if self.machines[machine].lost {
                    return Ok(());
                }
                self.announce_status(machine);
                if !idle {
                    self.schedule_event(
                        STATUS_INTERVAL,
                        SimulationEvent::StatusDue { machine, idle },
                    );
                } else if self.machines[machine].is_idle() {
                    self.run_planner(true);
                }
            }
            SimulationEvent::StragglerCheck => {
                self.schedule_event(STRAGGLER_INTERVAL, SimulationEvent::StragglerCheck);
                self.run_planner(true);
            }
            SimulationEvent::Lost { machine } => {
                self.machines[machine].lost = true;
                self.pulls.retain(|waiting| *waiting != machine);
                for order in self.machines[machine].held_orders() {
                    self.schedule_event(LEASE, SimulationEvent::Returned { order });
                }
            }
            SimulationEvent::Answered { answer } => self.write_answer(answer),
        }
        Ok(())
    }

    /// Gives an order to a box, or returns it to the queue if the box declines it.
    fn deliver_order(&mut self, machine: usize, order: usize) {
        self.machines[machine].pulling = false;
        if self.machines[machine].lost {
            self.schedule_event(LEASE, SimulationEvent::Returned { order });
            return;
        }
        let work = |order: usize| (self.orders[order].cycle, &self.orders[order].job);
        let twin = self.machines[machine].held_orders().into_iter().any(|o| work(o) == work(order));
        let declined = if twin { None } else { self.decline_order(machine, order) };
        if let Some(rest) = declined.or(twin.then_some(DUPLICATE_PAUSE)) {
            self.machines[machine].backing_off = true;
            self.schedule_event(rest, SimulationEvent::BackoffEnded { machine });
            self.schedule_event(PULL_TIME, SimulationEvent::Returned { order });
            return;
        }
        let tokens = self.sample_lengths(order);
        self.machines[machine].accept_order(order, tokens, self.now);
        if !self.machines[machine].stepping {
            self.start_step(machine);
        }
        self.open_pull(machine);
    }

    /// Returns the pause of a box that declines an order, as in real agents: once, and only while
    /// another box works.
    fn decline_order(&mut self, machine: usize, order: usize) -> Option<u64> {
        let declinable = agent_core::decide_decline(
            &self.orders[order],
            self.delivered[order],
            &machine.to_string(),
            self.machines[machine].sampling_throughput(),
        )?;
        let works = |(other, state): (usize, &SimulatedGenerator)| {
            other != machine && !state.held_orders().is_empty()
        };
        let declines =
            self.machines.iter().enumerate().any(works) && self.declined.insert((machine, order));
        declines.then(|| to_nanoseconds(declinable.pause.as_secs_f64()))
    }

    fn start_step(&mut self, machine: usize) {
        let step = self.machines[machine].begin_step();
        self.machines[machine].stepping = step.is_some();
        if let Some(nanoseconds) = step {
            self.schedule_event(nanoseconds, SimulationEvent::Stepped { machine });
        }
    }

    fn open_pull(&mut self, machine: usize) {
        if self.machines[machine].can_pull() {
            self.machines[machine].pulling = true;
            self.pulls.push_back(machine);
            self.match_pulls();
        }
    }

    fn match_pulls(&mut self) {
        while let (Some(&machine), Some(&order)) = (self.pulls.front(), self.queue.front()) {
            self.pulls.pop_front();
            self.queue.pop_front();
            self.delivered[order] += 1;
            self.schedule_event(PULL_TIME, SimulationEvent::Delivered { machine, order });
        }
    }

    /// Writes the samples of an order unless another box wrote them first.
    fn write_samples(&mut self, machine: usize, order: usize) -> anyhow::Result<()> {
        let mut samples = stub_agents::make_samples(&self.orders[order]);
        for (sample, tokens) in samples.samples.iter_mut().zip(self.sample_lengths(order)) {
            sample.tokens = tokens;
        }
        if !self.written.insert((samples.cycle, samples.job.clone())) {
            // Another box wrote the samples first.
            return Ok(());
        }
        self.ended = self.now;
        self.shares[machine] += u32::try_from(samples.samples.len())?;
        let place = FactKey::Samples { cycle: samples.cycle, job: samples.job.parse()? };
        let wall_s = self.machines[machine].order_seconds(order, self.now);
        let agent = machine.to_string();
        self.log.advance_time(self.now / MILLISECOND);
        self.log.append_fact(place, FactBody::Samples(v1::Samples { wall_s, agent, ..samples }));
        self.run_planner(false);
        Ok(())
    }

    fn announce_status(&mut self, machine: usize) {
        let run = self.log.run_state().id.clone();
        let holds: BTreeSet<HeldJob> = self.machines[machine]
            .held_orders()
            .into_iter()
            .map(|order| &self.orders[order])
            .map(|order| HeldJob { run: run.clone(), cycle: order.cycle, job: order.job.clone() })
            .collect();
        self.held.extend(holds.iter().map(|held| (held.clone(), self.now)));
        let pace = self.machines[machine].sampling_throughput();
        let member = FleetMember {
            agent: machine.to_string(),
            tokens_per_s: pace.tokens_per_s,
            seconds_per_sample: pace.seconds_per_sample(),
            remaining_samples: self.machines[machine].outstanding_samples(),
            held_jobs: holds,
            training_speed: None,
        };
        self.last_status.insert(machine, (self.now, member));
    }

    fn known_fleet(&self) -> FleetSnapshot {
        let there = self.last_status.values().filter(|(at, _)| self.now - at < SILENCE_LIMIT);
        let ago = |at: &u64| (self.now - at) / MILLISECOND;
        FleetSnapshot {
            generators: there.map(|(_, member)| member.clone()).collect(),
            last_held_ago_ms: self
                .held
                .iter()
                .map(|(held, at)| ((WorkKind::Generate, held.clone()), ago(at)))
                .collect(),
            ..FleetSnapshot::default()
        }
    }

    fn run_planner(&mut self, again: bool) {
        self.log.coordinate_fleet(self.known_fleet(), self.now / MILLISECOND, again);
        for record in self.log.take_records() {
            self.note_record(&record);
            if let FactBody::GenerateOrder(order) = record.fact.body {
                let first = order.attempt == 1;
                self.orders.push(order);
                self.delivered.push(0);
                let order = self.orders.len() - 1;
                if first {
                    let tokens = self.sample_lengths(order);
                    self.tokens += tokens.iter().map(|tokens| u64::from(*tokens)).sum::<u64>();
                }
                self.schedule_event(DECIDE_TIME, SimulationEvent::Ordered { order });
            }
        }
    }

    /// Returns the length of each sample of an order. It does not depend on the box that runs the
    /// order.
    fn sample_lengths(&self, order: usize) -> Vec<u32> {
        let span = u64::from(self.workload.max_new_tokens) - TOKENS_MIN + 1;
        let order = &self.orders[order];
        let mut lengths = Vec::new();
        for request in &order.requests {
            for index in request.first..request.first + request.count {
                let drawn =
                    derive_seed(order.seed, &["length", &request.prompt_id, &index.to_string()]);
                let length = u32::try_from(TOKENS_MIN + drawn % span).unwrap_or(u32::MAX);
                lengths.push(self.roles.as_ref().map_or(length, |it| it.scale_length(length)));
            }
        }
        lengths
    }
}
