//! An agent around the real `agent_core`, as `agents/agent` is: pull, hold the lease, work,
//! write the result, acknowledge.

use std::{collections::BTreeMap, time::Duration};

use agent_core::{CircuitBreaker, InFlightState, JobFault, QuarantineState, RunStatuses};
use wire::WorkKind;

use crate::{
    faults::{Bug, Faults},
    job::{Job, Step},
    server::{Delivery, LEASE_MS, Settle},
    user::run,
    world::{Command, Input, Peer, Reply, Request},
};

const ANSWER_MS: u64 = 1_500;
const SAY_MS: u64 = 1_000;
const FOLLOW_MS: u64 = 5_000;
const PULL_MS: u64 = 20_000;

/// Timers that are no request's: fixed ones, then those of kinds of work, then jobs'.
const SAY: u64 = 0;
const FOLLOW: u64 = 1;
const PULLS: u64 = 2;
const FIRST_ID: u64 = 16;

/// The one that does work of every kind; there are others for each.
const BROKEN: usize = 5;

/// One that generates.
const STALE: usize = 1;

/// What an agent says of itself.
#[derive(Debug, Clone)]
pub(crate) struct Says {
    pub(crate) agent: String,
    pub(crate) kinds: Vec<WorkKind>,
    pub(crate) tokens_per_s: f64,
    pub(crate) holds: Vec<(WorkKind, u32, String)>,
    /// Samples it has still to draw.
    pub(crate) left: u32,
}

/// What an agent is like, whatever happens to it.
#[derive(Debug, Clone)]
pub(crate) struct Nature {
    pub(crate) name: String,
    pub(crate) samples_per_s: f64,
    pub(crate) lies: bool,
    pub(crate) stale: bool,
    /// A chance in a thousand that a job fails, and that the agent dies at a step of one.
    pub(crate) fails: u32,
    pub(crate) dies: u32,
    pub(crate) broken: bool,
    pub(crate) poison: bool,
    pub(crate) zombie: bool,
    pub(crate) bug: Option<Bug>,
}

pub(crate) struct Agent {
    nature: Nature,
    kinds: Vec<WorkKind>,
    courses: RunStatuses,
    standing: QuarantineState,
    known: u64,
    following: Option<u64>,
    temper: BTreeMap<WorkKind, CircuitBreaker>,
    resting_until: BTreeMap<WorkKind, u64>,
    jobs: BTreeMap<u64, Job>,
    /// Requests of jobs that wait for their answer.
    asked: BTreeMap<u64, (u64, Request)>,
    next: u64,
}

impl Agent {
    pub(crate) fn new(name: &str, number: usize, kinds: Vec<WorkKind>, faults: &Faults) -> Self {
        let nature = Nature {
            name: name.into(),
            samples_per_s: if faults.slow && number == 1 { 0.2 } else { 4.0 },
            lies: faults.liar && number == 2,
            stale: faults.stale && number == STALE,
            fails: if faults.sick || (faults.flaky && number == 0) { 500 } else { 0 },
            dies: faults.dies,
            broken: faults.broken && number == BROKEN,
            poison: faults.poison,
            zombie: faults.zombies,
            bug: faults.bug,
        };
        Self {
            standing: QuarantineState::new(name),
            nature,
            kinds,
            courses: RunStatuses::default(),
            known: 0,
            following: None,
            temper: BTreeMap::new(),
            resting_until: BTreeMap::new(),
            jobs: BTreeMap::new(),
            asked: BTreeMap::new(),
            next: FIRST_ID,
        }
    }

    fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn follow(&mut self) -> Vec<Command> {
        if self.following.is_some() {
            return Vec::new();
        }
        let id = self.id();
        self.following = Some(id);
        vec![Command::Ask(id, Request::After(self.known)), Command::Later(ANSWER_MS, id)]
    }

    /// Pulls where there is room. What a lost pull cost is found by the next.
    fn pull(&mut self, now_ms: u64) -> Vec<Command> {
        let mut commands = Vec::new();
        for (place, kind) in (0_u64..).zip(self.kinds.clone()) {
            commands.push(Command::Later(PULL_MS / 40, PULLS + place));
            let rests = self.resting_until.get(&kind).is_some_and(|until| now_ms < *until);
            let jobs = || self.jobs.values().filter(|job| job.delivery.kind == kind);
            let busy = jobs().filter(|job| !job.waits()).count();
            let held_up = jobs().any(Job::is_held_up);
            let room = if kind == WorkKind::Generate { 2 } else { 1 };
            let convicted =
                kind == WorkKind::Generate && self.standing.quarantine_reason().is_some();
            if self.known > 0 && !convicted && !rests && !held_up && busy < room {
                let id = self.id();
                commands.push(Command::Ask(id, Request::Pull(kind)));
            }
        }
        commands
    }

    fn take(&mut self, now_ms: u64, random: &mut fastrand::Rng, new: Delivery) -> Vec<Command> {
        let name = self.id();
        let mut commands = vec![Command::Later(LEASE_MS / 3, name)];
        self.jobs.insert(name, Job::new(new));
        commands.extend(self.advance(now_ms, random, name, None));
        commands
    }

    /// Takes a job one step on, and does what that says.
    fn advance(
        &mut self,
        now_ms: u64,
        random: &mut fastrand::Rng,
        name: u64,
        reply: Option<Reply>,
    ) -> Vec<Command> {
        let Some(job) = self.jobs.get(&name) else { return Vec::new() };
        let (what, sequence) = (job.name(), job.delivery.record.sequence);
        let mut others = self.jobs.iter().filter(|(other, job)| **other != name && !job.waits());
        let at_hand = match others.find(|(_, other)| other.name() == what) {
            None => InFlightState::NotRunning,
            Some((_, other)) if other.delivery.record.sequence == sequence => {
                InFlightState::SameDelivery
            }
            Some(_) => InFlightState::OtherOrder,
        };
        let Some(job) = self.jobs.get_mut(&name) else { return Vec::new() };
        if random.u32(0..1000) < self.nature.dies {
            return vec![Command::Die];
        }
        let course = self.courses.run_status(&run());
        let record = job.delivery.record.clone();
        let step = job.step(&self.nature, random, course, at_hand, reply);
        let kind = job.delivery.kind;
        match step {
            Step::Ask(request) => {
                let id = self.id();
                self.asked.insert(id, (name, request.clone()));
                vec![Command::Ask(id, request), Command::Later(ANSWER_MS, id)]
            }
            Step::Begin(request) => {
                let id = self.id();
                self.asked.insert(id, (name, request.clone()));
                vec![
                    Command::Begin(record, self.known),
                    Command::Ask(id, request),
                    Command::Later(ANSWER_MS, id),
                ]
            }
            Step::Work(after) => {
                let id = self.id();
                // A timer that comes back as the job's own request.
                self.asked.insert(id, (name, Request::Store));
                vec![Command::Later(after, id)]
            }
            Step::Wait => Vec::new(),
            Step::Failed { fault, delay_ms } => self.rest(now_ms, name, fault, delay_ms),
            Step::Over { well } => {
                self.jobs.remove(&name);
                if well {
                    self.temper.entry(kind).or_default().record_success();
                }
                self.pull(now_ms)
            }
            Step::Die => vec![Command::Die],
        }
    }

    fn rest(&mut self, now_ms: u64, name: u64, fault: JobFault, delay_ms: u64) -> Vec<Command> {
        let Some(job) = self.jobs.get(&name) else { return Vec::new() };
        let kind = job.delivery.kind;
        let subject = job.delivery.record.fact.subject.to_string();
        let delay = Duration::from_millis(delay_ms);
        let lease = Duration::from_millis(LEASE_MS);
        let rest =
            self.temper.entry(kind).or_default().record_failure(&subject, fault, "", delay, lease);
        let until = now_ms + u64::try_from(rest.pause.as_millis()).unwrap_or(u64::MAX);
        self.resting_until.insert(kind, until);
        let request = self.jobs.get_mut(&name).map(Job::settle);
        request.map_or_else(Vec::new, |request| {
            let id = self.id();
            self.asked.insert(id, (name, request.clone()));
            vec![Command::Ask(id, request), Command::Later(ANSWER_MS, id)]
        })
    }

    fn timer(&mut self, now_ms: u64, random: &mut fastrand::Rng, token: u64) -> Vec<Command> {
        if token == SAY {
            let holds = self.jobs.values().filter(|job| !job.waits()).map(Job::name).collect();
            let working = self.jobs.values().filter(|job| job.is_working());
            let left = working.map(Job::samples).sum();
            let says = Says {
                agent: self.nature.name.clone(),
                kinds: self.kinds.clone(),
                tokens_per_s: 3.0 * self.nature.samples_per_s,
                holds,
                left,
            };
            return vec![Command::Say(says), Command::Later(SAY_MS, SAY)];
        }
        if token == FOLLOW {
            let mut commands = self.follow();
            commands.push(Command::Later(FOLLOW_MS, FOLLOW));
            return commands;
        }
        if token < FIRST_ID {
            // One timer for all kinds is enough.
            return if token == PULLS { self.pull(now_ms) } else { Vec::new() };
        }
        if self.following == Some(token) {
            self.following = None;
            return self.follow();
        }
        if let Some(job) = self.jobs.get(&token) {
            let (kind, sequence) = (job.delivery.kind, job.delivery.record.sequence);
            let id = self.id();
            let beat = Request::Settle(kind, sequence, Settle::Progress);
            return vec![Command::Ask(id, beat), Command::Later(LEASE_MS / 3, token)];
        }
        let Some((name, request)) = self.asked.get(&token).cloned() else { return Vec::new() };
        if self.jobs.get(&name).is_some_and(Job::is_working) {
            self.asked.remove(&token);
            return self.advance(now_ms, random, name, None);
        }
        // Asked again for as long as it takes: the work is done.
        vec![Command::Ask(token, request), Command::Later(ANSWER_MS, token)]
    }

    /// What a convicted agent would make counts for nothing.
    fn hand_back(&mut self) -> Vec<Command> {
        if self.standing.quarantine_reason().is_none() {
            return Vec::new();
        }
        let of = |job: &Job| job.delivery.kind == WorkKind::Generate && job.is_working();
        let held = self.jobs.iter().filter(|(_, job)| of(job)).map(|(name, _)| *name);
        let mut commands = Vec::new();
        for name in held.collect::<Vec<u64>>() {
            self.asked.retain(|_, (owner, _)| *owner != name);
            let Some(job) = self.jobs.get_mut(&name) else { continue };
            let request = job.hand_back();
            let id = self.id();
            self.asked.insert(id, (name, request.clone()));
            commands.extend([Command::Ask(id, request), Command::Later(ANSWER_MS, id)]);
        }
        commands
    }

    fn learn(&mut self, now_ms: u64, random: &mut fastrand::Rng, reply: Reply) -> Vec<Command> {
        self.following = None;
        let Reply::Records(records) = reply else { return Vec::new() };
        let more = records.len() == 64;
        for record in records {
            self.known = self.known.max(record.sequence);
            self.courses.apply_fact(&record);
            self.standing.apply_fact(&record);
        }
        if !more {
            self.standing.mark_caught_up();
        }
        let mut commands = if more { self.follow() } else { Vec::new() };
        commands.extend(self.hand_back());
        // Those that wait may go on, and those of a run that is over may end.
        let course = self.courses.run_status(&run());
        let stirred: Vec<u64> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.is_parked() || (course.is_over && job.is_working()))
            .map(|(name, _)| *name)
            .collect();
        for name in stirred {
            self.asked.retain(|_, (owner, _)| *owner != name);
            commands.extend(self.advance(now_ms, random, name, None));
        }
        commands
    }
}

impl Peer for Agent {
    fn handle(&mut self, now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command> {
        match input {
            Input::Start => {
                let mut commands = self.follow();
                commands.extend([SAY, FOLLOW].map(|token| Command::Later(FOLLOW_MS, token)));
                commands.push(Command::Later(100, PULLS));
                commands
            }
            Input::Notify => self.follow(),
            Input::Deliver(delivery) => self.take(now_ms, random, delivery),
            Input::Timer(token) => self.timer(now_ms, random, token),
            Input::Reply(id, reply) if self.following == Some(id) => {
                self.learn(now_ms, random, reply)
            }
            Input::Reply(id, reply) => match self.asked.get(&id) {
                // The timer of its work is no request.
                Some((name, _)) if !self.jobs.get(name).is_some_and(Job::is_working) => {
                    let name = *name;
                    self.asked.remove(&id);
                    self.advance(now_ms, random, name, Some(reply))
                }
                _ => Vec::new(),
            },
            Input::Healed => {
                (self.nature.dies, self.nature.fails, self.nature.broken) = (0, 0, false);
                Vec::new()
            }
            Input::Heard(_) => Vec::new(),
        }
    }

    fn reset(&mut self, incarnation: u64) {
        self.courses = RunStatuses::default();
        self.standing = QuarantineState::new(self.nature.name.clone());
        self.known = 0;
        self.following = None;
        self.temper.clear();
        self.resting_until.clear();
        self.jobs.clear();
        self.asked.clear();
        self.next = FIRST_ID + (incarnation << 32);
    }
}
