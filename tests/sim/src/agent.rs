//! A simulated agent around the real `agent_core`. Like `agents/agent` it pulls a job, holds the
//! lease, works, writes the result and acknowledges.

use std::{collections::BTreeMap, time::Duration};

use agent_core::{
    CircuitBreaker, InFlightState, JobFault, QuarantineState, RunStatuses, SamplingThroughput,
};
use cycle::HeldJob;
use wire::{RunId, WorkKind};

use crate::{
    faults::{Bug, Faults},
    job::{Job, JobContext, Step},
    peer::{Command, Input, Peer, Reply, Request},
    server::{Delivery, LEASE_MS, Queue, Settle},
};

const REPLY_MS: u64 = 1_500;
const STATUS_MS: u64 = 1_000;
const FOLLOW_MS: u64 = 5_000;
const PULL_MS: u64 = 20_000;

/// Timer tokens. First the fixed ones, then one per kind of work; from `FIRST_ID` on they belong to
/// requests and jobs.
const STATUS: u64 = 0;
const FOLLOW: u64 = 1;
const PULLS: u64 = 2;
const FIRST_ID: u64 = 16;

/// A job that an agent works on.
pub(crate) type HeldWork = (WorkKind, HeldJob);

/// The number of the broken agent. It does all kinds of work, and for each kind there are other
/// agents.
const BROKEN_AGENT: usize = 5;

const TOKENS_PER_SAMPLE: f64 = 3.0;
/// Samples that an agent counts as drawn at the same time.
const SLOTS: u32 = 8;

/// The number of the stale agent, which is a generator.
const STALE_AGENT: usize = 1;

/// The status that an agent broadcasts.
#[derive(Debug, Clone)]
pub(crate) struct AgentStatus {
    pub(crate) agent: String,
    pub(crate) pool: &'static str,
    pub(crate) kinds: Vec<WorkKind>,
    pub(crate) tokens_per_s: f64,
    pub(crate) holds: Vec<HeldWork>,
    /// Samples of its jobs that are not drawn yet.
    pub(crate) remaining_samples: u32,
}

/// Properties of an agent that survive a restart.
#[derive(Debug, Clone)]
pub(crate) struct AgentTraits {
    pub(crate) name: String,
    pub(crate) samples_per_s: f64,
    pub(crate) reports_other_adapter: bool,
    pub(crate) stale: bool,
    /// Probabilities per 1000: that a job fails, and that the agent dies at a step of a job.
    pub(crate) failure_permille: u32,
    pub(crate) death_permille: u32,
    pub(crate) broken: bool,
    pub(crate) poison: bool,
    pub(crate) writes_late: bool,
    pub(crate) bug: Option<Bug>,
}

impl AgentTraits {
    pub(crate) fn throughput(&self) -> SamplingThroughput {
        SamplingThroughput {
            tokens_per_s: TOKENS_PER_SAMPLE * self.samples_per_s,
            tokens_per_sample: TOKENS_PER_SAMPLE,
            slots: SLOTS,
        }
    }
}

pub(crate) struct Agent {
    traits: AgentTraits,
    pool: &'static str,
    kinds: Vec<WorkKind>,
    run_statuses: RunStatuses,
    quarantine: QuarantineState,
    known_sequence: u64,
    follow_request: Option<u64>,
    circuit_breakers: BTreeMap<WorkKind, CircuitBreaker>,
    backoff_until_ms: BTreeMap<WorkKind, u64>,
    jobs: BTreeMap<u64, Job>,
    /// Requests of jobs that wait for their reply, with the id of the job.
    requests: BTreeMap<u64, (u64, Request)>,
    next_id: u64,
}

impl Agent {
    pub(crate) fn new(
        name: &str,
        number: usize,
        pool: &'static str,
        kinds: Vec<WorkKind>,
        faults: &Faults,
    ) -> Self {
        let traits = AgentTraits {
            name: name.into(),
            samples_per_s: if faults.slow && number == 1 { 0.2 } else { 4.0 },
            reports_other_adapter: faults.liar && number == 2,
            stale: faults.stale && number == STALE_AGENT,
            failure_permille: if faults.all_flaky || (faults.flaky && number == 0) {
                500
            } else {
                0
            },
            death_permille: faults.death_permille,
            broken: faults.broken && number == BROKEN_AGENT,
            poison: faults.poison,
            writes_late: faults.late_results,
            bug: faults.bug,
        };
        Self {
            quarantine: QuarantineState::new(name),
            traits,
            pool,
            kinds,
            run_statuses: RunStatuses::default(),
            known_sequence: 0,
            follow_request: None,
            circuit_breakers: BTreeMap::new(),
            backoff_until_ms: BTreeMap::new(),
            jobs: BTreeMap::new(),
            requests: BTreeMap::new(),
            next_id: FIRST_ID,
        }
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn follow(&mut self) -> Vec<Command> {
        if self.follow_request.is_some() {
            return Vec::new();
        }
        let id = self.new_id();
        self.follow_request = Some(id);
        vec![
            Command::Send(id, Request::After(self.known_sequence)),
            Command::SetTimer(REPLY_MS, id),
        ]
    }

    /// Requests jobs for each kind of work with a free slot. A lost request is repeated by the next
    /// timer.
    fn pull_jobs(&mut self, now_ms: u64) -> Vec<Command> {
        let mut commands = Vec::new();
        for (index, kind) in (0_u64..).zip(self.kinds.clone()) {
            commands.push(Command::SetTimer(PULL_MS / 40, PULLS + index));
            let is_backing_off =
                self.backoff_until_ms.get(&kind).is_some_and(|until| now_ms < *until);
            let jobs = || self.jobs.values().filter(|job| job.delivery.queue.kind == kind);
            let busy = jobs().filter(|job| !job.is_waiting()).count();
            let is_waiting_for_store = jobs().any(Job::waits_for_store);
            let room = if kind == WorkKind::Generate { 2 } else { 1 };
            let is_quarantined =
                kind == WorkKind::Generate && self.quarantine.quarantine_reason().is_some();
            if self.known_sequence > 0
                && !is_quarantined
                && !is_backing_off
                && !is_waiting_for_store
                && busy < room
            {
                let id = self.new_id();
                commands.push(Command::Send(id, Request::Pull(Queue::new(kind, self.pool))));
            }
        }
        commands
    }

    fn accept_delivery(
        &mut self,
        now_ms: u64,
        random: &mut fastrand::Rng,
        new: Delivery,
    ) -> Vec<Command> {
        let job_id = self.new_id();
        let mut commands = vec![Command::SetTimer(LEASE_MS / 3, job_id)];
        self.jobs.insert(job_id, Job::new(new));
        commands.extend(self.advance(now_ms, random, job_id, None));
        commands
    }

    /// Advances a job by one step and returns the commands of that step.
    fn advance(
        &mut self,
        now_ms: u64,
        random: &mut fastrand::Rng,
        job_id: u64,
        reply: Option<Reply>,
    ) -> Vec<Command> {
        let Some(job) = self.jobs.get(&job_id) else { return Vec::new() };
        let in_flight = self.in_flight_state(job_id, job);
        let (subject, queue) = (&job.delivery.record.fact.subject, job.delivery.queue);
        let context = JobContext {
            run_status: self.run_statuses.run_status(&subject.run),
            status_for_fact: self.run_statuses.status_for_fact(subject),
            in_flight,
            is_quarantined: self.quarantine.quarantine_reason().is_some(),
            held: self.jobs.values().filter(|other| other.delivery.queue == queue).count(),
        };
        let Some(job) = self.jobs.get_mut(&job_id) else { return Vec::new() };
        if random.u32(0..1000) < self.traits.death_permille {
            return vec![Command::Die];
        }
        let record = job.delivery.record.clone();
        let step = job.step(&self.traits, random, context, reply);
        let kind = job.delivery.queue.kind;
        match step {
            Step::Send(request) => self.send(job_id, request),
            Step::SendAndStart(request) => {
                let mut commands = vec![Command::JobStart(record.clone(), self.known_sequence)];
                if in_flight != InFlightState::NotRunning {
                    commands.push(Command::DuplicateStart(record));
                }
                commands.extend(self.send(job_id, request));
                commands
            }
            Step::PauseAndSend(pause_ms, request) => {
                let until = now_ms + pause_ms;
                self.backoff_until_ms.insert(kind, until);
                self.send(job_id, request)
            }
            Step::SetTimer(after) => {
                let id = self.new_id();
                // A timer that comes back as the job's own request.
                self.requests.insert(id, (job_id, Request::Timer));
                vec![Command::SetTimer(after, id)]
            }
            Step::Wait => Vec::new(),
            Step::Failed { fault, delay_ms } => {
                self.record_failure(now_ms, job_id, fault, delay_ms);
                let request = self.jobs.get_mut(&job_id).map(Job::settle_request);
                request.map_or_else(Vec::new, |request| self.send(job_id, request))
            }
            Step::Abandoned(fault) => {
                // The lease expires.
                self.record_failure(now_ms, job_id, fault, 0);
                self.jobs.remove(&job_id);
                Vec::new()
            }
            Step::Finished { succeeded } => {
                self.jobs.remove(&job_id);
                if succeeded {
                    self.circuit_breakers.entry(kind).or_default().record_success();
                }
                self.pull_jobs(now_ms)
            }
            Step::Die => vec![Command::Die],
        }
    }

    /// Returns the state of a job on this agent, as of the other jobs.
    fn in_flight_state(&self, job_id: u64, job: &Job) -> InFlightState {
        let (work_id, sequence) = (job.work_id(), job.delivery.record.sequence);
        let mut others =
            self.jobs.iter().filter(|(other, job)| **other != job_id && !job.is_waiting());
        match others.find(|(_, other)| other.work_id() == work_id) {
            None => InFlightState::NotRunning,
            Some((_, other)) if other.delivery.record.sequence == sequence => {
                InFlightState::SameDelivery
            }
            Some(_) => InFlightState::OtherOrder,
        }
    }

    fn send(&mut self, job_id: u64, request: Request) -> Vec<Command> {
        let id = self.new_id();
        self.requests.insert(id, (job_id, request.clone()));
        vec![Command::Send(id, request), Command::SetTimer(REPLY_MS, id)]
    }

    fn record_failure(&mut self, now_ms: u64, job_id: u64, fault: JobFault, delay_ms: u64) {
        let Some(job) = self.jobs.get(&job_id) else { return };
        let kind = job.delivery.queue.kind;
        let subject = job.delivery.record.fact.subject.to_string();
        let delay = Duration::from_millis(delay_ms);
        let lease = Duration::from_millis(LEASE_MS);
        let breaker = self.circuit_breakers.entry(kind).or_default();
        let backoff = breaker.record_failure(&subject, fault, "", delay, lease);
        let until = now_ms + u64::try_from(backoff.pause.as_millis()).unwrap_or(u64::MAX);
        self.backoff_until_ms.insert(kind, until);
    }

    fn handle_timer(
        &mut self,
        now_ms: u64,
        random: &mut fastrand::Rng,
        token: u64,
    ) -> Vec<Command> {
        if token == STATUS {
            let holds =
                self.jobs.values().filter(|job| !job.is_waiting()).map(Job::work_id).collect();
            let working = self.jobs.values().filter(|job| job.is_working());
            let remaining_samples = working.map(Job::sample_count).sum();
            let status = AgentStatus {
                agent: self.traits.name.clone(),
                pool: self.pool,
                kinds: self.kinds.clone(),
                tokens_per_s: self.traits.throughput().tokens_per_s,
                holds,
                remaining_samples,
            };
            return vec![Command::Broadcast(status), Command::SetTimer(STATUS_MS, STATUS)];
        }
        if token == FOLLOW {
            let mut commands = self.follow();
            commands.push(Command::SetTimer(FOLLOW_MS, FOLLOW));
            return commands;
        }
        if token < FIRST_ID {
            // One timer serves all kinds.
            return if token == PULLS { self.pull_jobs(now_ms) } else { Vec::new() };
        }
        if self.follow_request == Some(token) {
            self.follow_request = None;
            return self.follow();
        }
        if let Some(job) = self.jobs.get(&token) {
            let (queue, sequence) = (job.delivery.queue, job.delivery.record.sequence);
            let id = self.new_id();
            let heartbeat = Request::Settle(queue, sequence, Settle::Progress);
            return vec![Command::Send(id, heartbeat), Command::SetTimer(LEASE_MS / 3, token)];
        }
        let Some((job_id, request)) = self.requests.get(&token).cloned() else { return Vec::new() };
        if matches!(request, Request::Timer) {
            self.requests.remove(&token);
            return self.advance(now_ms, random, job_id, None);
        }
        // The work is done, so the request is repeated until there is a reply.
        vec![Command::Send(token, request), Command::SetTimer(REPLY_MS, token)]
    }

    /// Returns the jobs of a quarantined generator, because its samples would not count.
    fn return_quarantined_jobs(&mut self) -> Vec<Command> {
        if self.quarantine.quarantine_reason().is_none() {
            return Vec::new();
        }
        let of = |job: &Job| job.delivery.queue.kind == WorkKind::Generate && job.is_working();
        let ids = self.jobs.iter().filter(|(_, job)| of(job)).map(|(job_id, _)| *job_id);
        let mut commands = Vec::new();
        for job_id in ids.collect::<Vec<u64>>() {
            self.requests.retain(|_, (owner, _)| *owner != job_id);
            let Some(job) = self.jobs.get_mut(&job_id) else { continue };
            let request = job.nack();
            commands.extend(self.send(job_id, request));
        }
        commands
    }

    fn apply_records(
        &mut self,
        now_ms: u64,
        random: &mut fastrand::Rng,
        reply: Reply,
    ) -> Vec<Command> {
        self.follow_request = None;
        let Reply::Records(records, end) = reply else { return Vec::new() };
        if end < self.known_sequence {
            // The log was lost in part, so the process ends and is started again.
            return vec![Command::Die];
        }
        let more = records.len() == 64;
        for record in records {
            self.known_sequence = self.known_sequence.max(record.sequence);
            self.run_statuses.apply_fact(&record);
            self.quarantine.apply_fact(&record);
        }
        if !more {
            self.quarantine.mark_caught_up();
        }
        let mut commands = if more { self.follow() } else { Vec::new() };
        commands.extend(self.return_quarantined_jobs());
        // Parked jobs may start now, and jobs of an ended run end.
        let is_over = |run: &RunId| self.run_statuses.run_status(run).is_over;
        let affected = |job: &Job| {
            job.is_parked() || (job.is_working() && is_over(&job.delivery.record.fact.subject.run))
        };
        let affected = self.jobs.iter().filter(|(_, job)| affected(job));
        let affected: Vec<u64> = affected.map(|(job_id, _)| *job_id).collect();
        for job_id in affected {
            self.requests.retain(|_, (owner, _)| *owner != job_id);
            commands.extend(self.advance(now_ms, random, job_id, None));
        }
        commands
    }
}

impl Peer for Agent {
    fn handle(&mut self, now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command> {
        match input {
            Input::Start => {
                let mut commands = self.follow();
                commands.extend([STATUS, FOLLOW].map(|token| Command::SetTimer(FOLLOW_MS, token)));
                commands.push(Command::SetTimer(100, PULLS));
                commands
            }
            Input::Notify => self.follow(),
            Input::Deliver(delivery) => self.accept_delivery(now_ms, random, delivery),
            Input::Timer(token) => self.handle_timer(now_ms, random, token),
            Input::Reply(id, reply) if self.follow_request == Some(id) => {
                self.apply_records(now_ms, random, reply)
            }
            Input::Reply(id, reply) => match self.requests.get(&id) {
                // The timer of the work is no request.
                Some((job_id, _)) if !self.jobs.get(job_id).is_some_and(Job::is_working) => {
                    let job_id = *job_id;
                    self.requests.remove(&id);
                    self.advance(now_ms, random, job_id, Some(reply))
                }
                _ => Vec::new(),
            },
            Input::Healed => {
                (self.traits.death_permille, self.traits.failure_permille, self.traits.broken) =
                    (0, 0, false);
                Vec::new()
            }
            Input::Status(_) => Vec::new(),
        }
    }

    fn reset(&mut self, incarnation: u64) {
        self.run_statuses = RunStatuses::default();
        self.quarantine = QuarantineState::new(self.traits.name.clone());
        self.known_sequence = 0;
        self.follow_request = None;
        self.circuit_breakers.clear();
        self.backoff_until_ms.clear();
        self.jobs.clear();
        self.requests.clear();
        self.next_id = FIRST_ID + (incarnation << 32);
    }
}
