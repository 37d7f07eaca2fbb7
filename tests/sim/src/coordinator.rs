//! A simulated coordinator around the real `RunSet`. Like `services/coordinator` it replays and
//! follows the log, decides and writes. Several may act at the same time, because no lease stops
//! them.

use std::collections::{BTreeMap, VecDeque};

use cycle::{FleetMember, FleetSnapshot, HeldJob, PlannerInputs, ReissueTimeouts, RunSet};
use wire::{FactBody, PromptEntry, WorkKind};

use crate::{
    agent::AgentStatus,
    server::LEASE_MS,
    task,
    user::run,
    world::{Command, Input, Peer, Reply, Request},
};

const REPLY_MS: u64 = 1_500;
const TRIES_MAX: u32 = 6;
const SILENT_MS: u64 = 10_000;
const RETRY_MS: u64 = 2_000;

const TICK: u64 = 0;
const FIRST_ID: u64 = 1;

pub(crate) struct Coordinator {
    number: usize,
    runs: RunSet,
    known_sequence: u64,
    next_id: u64,
    /// The pending request.
    pending: Option<PendingRequest>,
    /// Remaining writes of the last decisions, in order.
    queue: VecDeque<cycle::WriteCommand>,
    statuses: BTreeMap<String, (u64, std::rc::Rc<AgentStatus>)>,
    /// The last time at which an agent reported each job.
    last_held_ms: BTreeMap<(WorkKind, HeldJob), u64>,
    /// The log time of the last entry, and the simulated time of its arrival.
    log_clock: (u64, u64),
    leads: bool,
    prompts: [Vec<PromptEntry>; 2],
    suites: BTreeMap<String, Vec<PromptEntry>>,
}

struct PendingRequest {
    id: u64,
    kind: RequestKind,
    request: Request,
    tries: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RequestKind {
    Follow,
    Blob,
    Fact,
}

impl Coordinator {
    pub(crate) fn new(number: usize) -> Self {
        Self {
            number,
            runs: RunSet::default(),
            known_sequence: 0,
            next_id: FIRST_ID,
            pending: None,
            queue: VecDeque::new(),
            statuses: BTreeMap::new(),
            last_held_ms: BTreeMap::new(),
            log_clock: (0, 0),
            leads: true,
            prompts: [task::prompts("p"), task::prompts("h")],
            suites: task::suite_prompts(),
        }
    }

    fn send(&mut self, kind: RequestKind, request: Request) -> Vec<Command> {
        self.next_id += 1;
        let id = self.next_id;
        self.pending = Some(PendingRequest { id, kind, request: request.clone(), tries: 1 });
        vec![Command::Send(id, request), Command::SetTimer(REPLY_MS, id)]
    }

    /// Sends one request at a time: first the writes, then reads of the log.
    fn proceed(&mut self, now_ms: u64) -> Vec<Command> {
        if self.pending.is_some() {
            return Vec::new();
        }
        let mut commands = Vec::new();
        if self.queue.is_empty() && self.leads {
            self.decide(now_ms);
            let facts = self.queue.iter().map(|command| &command.fact);
            let orders = facts.filter(|fact| {
                matches!(fact.body, FactBody::GenerateOrder(_) | FactBody::TrainOrder(_))
            });
            commands.extend(
                orders.map(|o| Command::OrderDecision(Box::new(o.clone()), self.known_sequence)),
            );
        }
        let Some(next) = self.queue.front() else { return commands };
        let (kind, request) = match next.blob {
            Some(_) => (RequestKind::Blob, Request::Store),
            None => (RequestKind::Fact, Request::Publish(Box::new(next.fact.clone()))),
        };
        commands.extend(self.send(kind, request));
        commands
    }

    fn decide(&mut self, now_ms: u64) {
        let fleet = self.fleet_snapshot(now_ms);
        let (last, at) = self.log_clock;
        let inputs = PlannerInputs {
            prompts: &self.prompts[0],
            heldout: &self.prompts[1],
            suites: &self.suites,
            fleet: &fleet,
            sizing: &task::job_sizing(),
            check_stragglers: true,
            timeouts: &ReissueTimeouts {
                unclaimed_ms: 2 * LEASE_MS + 10_000,
                ..ReissueTimeouts::default()
            },
            now_ms: last + (now_ms - at),
        };
        for id in self.runs.take_dirty() {
            self.queue.extend(self.runs.next_commands(&id, inputs));
        }
    }

    fn fleet_snapshot(&self, now_ms: u64) -> FleetSnapshot {
        let recent = self.statuses.values().filter(|(at, _)| at + SILENT_MS > now_ms);
        let recent: Vec<&AgentStatus> = recent.map(|(_, status)| &**status).collect();
        let with = |kind: WorkKind| {
            let member = |status: &&AgentStatus| FleetMember {
                agent: status.agent.clone(),
                tokens_per_s: status.tokens_per_s,
                held_jobs: status
                    .holds
                    .iter()
                    .filter(|(held, ..)| *held == kind)
                    .map(|(_, cycle, job)| HeldJob { run: run(), cycle: *cycle, job: job.clone() })
                    .collect(),
                remaining_samples: status.remaining_samples,
                sample_s: 0.0,
            };
            recent.iter().filter(|status| status.kinds.contains(&kind)).map(member).collect()
        };
        FleetSnapshot {
            generators: with(WorkKind::Generate),
            verifiers: with(WorkKind::Verify),
            trainers: with(WorkKind::Train),
            last_held_ago_ms: self
                .last_held_ms
                .iter()
                .map(|(job, at)| (job.clone(), now_ms - at))
                .collect(),
        }
    }

    fn handle_reply(&mut self, now_ms: u64, reply: Reply) -> Vec<Command> {
        let Some(pending) = self.pending.take() else { return Vec::new() };
        match (pending.kind, reply) {
            (RequestKind::Follow, Reply::Records(records)) => {
                let more = records.len() == 64;
                for record in records {
                    self.known_sequence = self.known_sequence.max(record.sequence);
                    self.log_clock = (record.time_ms.max(self.log_clock.0), now_ms);
                    self.runs.fold_record(&record);
                }
                if more {
                    return self.send(RequestKind::Follow, Request::After(self.known_sequence));
                }
                self.runs.mark_caught_up();
            }
            (RequestKind::Blob, Reply::Stored(true)) => {
                if let Some(next) = self.queue.front_mut() {
                    next.blob = None;
                }
            }
            (RequestKind::Fact, Reply::Published(published)) => {
                self.runs.record_write(published.sequence);
                self.queue.pop_front();
            }
            // The store is down, so everything is decided again later.
            (RequestKind::Blob, _) => self.queue.clear(),
            (RequestKind::Follow | RequestKind::Fact, _) => {}
        }
        let mut commands = self.proceed(now_ms);
        if commands.is_empty() {
            // The next decision needs the records that were written.
            if self.pending.is_none() && pending.kind != RequestKind::Follow {
                commands = self.send(RequestKind::Follow, Request::After(self.known_sequence));
            }
        }
        commands
    }

    fn handle_timeout(&mut self, id: u64) -> Vec<Command> {
        let Some(pending) = self.pending.as_mut().filter(|pending| pending.id == id) else {
            return Vec::new();
        };
        pending.tries += 1;
        if pending.tries > TRIES_MAX {
            self.pending = None;
            self.queue.clear();
            return Vec::new();
        }
        vec![Command::Send(id, pending.request.clone()), Command::SetTimer(REPLY_MS, id)]
    }
}

impl Peer for Coordinator {
    fn handle(&mut self, now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command> {
        match input {
            Input::Start => {
                let mut commands = self.send(RequestKind::Follow, Request::After(0));
                commands.push(Command::SetTimer(RETRY_MS, TICK));
                commands
            }
            Input::Notify if self.pending.is_none() && self.queue.is_empty() => {
                self.send(RequestKind::Follow, Request::After(self.known_sequence))
            }
            Input::Reply(id, reply) if self.pending.as_ref().is_some_and(|a| a.id == id) => {
                self.handle_reply(now_ms, reply)
            }
            Input::Timer(TICK) => {
                // Leadership changes at random, but coordinator 0 always leads.
                self.leads = self.number == 0 || random.f64() < 0.7;
                self.runs.mark_dirty();
                let mut commands = vec![Command::SetTimer(RETRY_MS, TICK)];
                if self.pending.is_none() && self.queue.is_empty() {
                    commands.extend(
                        self.send(RequestKind::Follow, Request::After(self.known_sequence)),
                    );
                }
                commands
            }
            Input::Timer(id) => self.handle_timeout(id),
            Input::Status(status) => {
                for (kind, cycle, job) in &status.holds {
                    let held = HeldJob { run: run(), cycle: *cycle, job: job.clone() };
                    self.last_held_ms.insert((*kind, held), now_ms);
                }
                self.statuses.insert(status.agent.clone(), (now_ms, status));
                Vec::new()
            }
            Input::Notify | Input::Reply(..) | Input::Deliver(_) | Input::Healed => Vec::new(),
        }
    }

    fn reset(&mut self, incarnation: u64) {
        *self = Self { next_id: FIRST_ID + (incarnation << 32), ..Self::new(self.number) };
    }
}
