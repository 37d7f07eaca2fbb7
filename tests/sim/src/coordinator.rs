//! A coordinator around the real desk, as `services/coordinator` is: replay, follow,
//! decide, write. Several may act at once; none is ever stopped by a lease.

use std::collections::{BTreeMap, VecDeque};

use cycle::{FleetMember, FleetSnapshot, HeldJob, PlannerInputs, ReissueTimeouts, RunSet};
use wire::{FactBody, PromptEntry, WorkKind};

use crate::{
    agent::Says,
    server::LEASE_MS,
    task,
    user::run,
    world::{Command, Input, Peer, Reply, Request},
};

const ANSWER_MS: u64 = 1_500;
const TRIES_MAX: u32 = 6;
const SILENT_MS: u64 = 10_000;
const RETRY_MS: u64 = 2_000;

const TICK: u64 = 0;
const SKIPS: u64 = 1;

pub(crate) struct Coordinator {
    number: usize,
    desk: RunSet,
    known: u64,
    next: u64,
    /// The request under way.
    asked: Option<Asked>,
    /// What is still to be written of the last decisions, in order.
    queue: VecDeque<cycle::WriteCommand>,
    heard: BTreeMap<String, (u64, std::rc::Rc<Says>)>,
    /// When each job was last in somebody's hands.
    held: BTreeMap<(WorkKind, HeldJob), u64>,
    /// Time of the log's last entry, and when it came here.
    clock: (u64, u64),
    leads: bool,
    prompts: [Vec<PromptEntry>; 2],
    suites: BTreeMap<String, Vec<PromptEntry>>,
}

struct Asked {
    id: u64,
    what: What,
    request: Request,
    tries: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Follow,
    Blob,
    Fact,
}

impl Coordinator {
    pub(crate) fn new(number: usize) -> Self {
        Self {
            number,
            desk: RunSet::default(),
            known: 0,
            next: SKIPS,
            asked: None,
            queue: VecDeque::new(),
            heard: BTreeMap::new(),
            held: BTreeMap::new(),
            clock: (0, 0),
            leads: true,
            prompts: [task::prompts("p"), task::prompts("h")],
            suites: task::suites(),
        }
    }

    fn ask(&mut self, what: What, request: Request) -> Vec<Command> {
        self.next += 1;
        let id = self.next;
        self.asked = Some(Asked { id, what, request: request.clone(), tries: 1 });
        vec![Command::Ask(id, request), Command::Later(ANSWER_MS, id)]
    }

    /// One thing at a time: writes first, then the log.
    fn go_on(&mut self, now_ms: u64) -> Vec<Command> {
        if self.asked.is_some() {
            return Vec::new();
        }
        let mut commands = Vec::new();
        if self.queue.is_empty() && self.leads {
            self.decide(now_ms);
            let facts = self.queue.iter().map(|command| &command.fact);
            let orders = facts.filter(|fact| {
                matches!(fact.body, FactBody::GenerateOrder(_) | FactBody::TrainOrder(_))
            });
            commands.extend(orders.map(|o| Command::Order(Box::new(o.clone()), self.known)));
        }
        let Some(next) = self.queue.front() else { return commands };
        let (what, request) = match next.blob {
            Some(_) => (What::Blob, Request::Store),
            None => (What::Fact, Request::Publish(Box::new(next.fact.clone()))),
        };
        commands.extend(self.ask(what, request));
        commands
    }

    fn decide(&mut self, now_ms: u64) {
        let fleet = self.fleet(now_ms);
        let (last, at) = self.clock;
        let inputs = PlannerInputs {
            prompts: &self.prompts[0],
            heldout: &self.prompts[1],
            suites: &self.suites,
            fleet: &fleet,
            sizing: &task::sizing(),
            check_stragglers: true,
            timeouts: &ReissueTimeouts {
                unclaimed_ms: 2 * LEASE_MS + 10_000,
                ..ReissueTimeouts::default()
            },
            now_ms: last + (now_ms - at),
        };
        for id in self.desk.take_dirty() {
            self.queue.extend(self.desk.next_commands(&id, inputs));
        }
    }

    fn fleet(&self, now_ms: u64) -> FleetSnapshot {
        let there = self.heard.values().filter(|(at, _)| at + SILENT_MS > now_ms);
        let there: Vec<&Says> = there.map(|(_, says)| &**says).collect();
        let with = |kind: WorkKind| {
            let member = |says: &&Says| FleetMember {
                agent: says.agent.clone(),
                tokens_per_s: says.tokens_per_s,
                held_jobs: says
                    .holds
                    .iter()
                    .filter(|(held, ..)| *held == kind)
                    .map(|(_, cycle, job)| HeldJob { run: run(), cycle: *cycle, job: job.clone() })
                    .collect(),
                remaining_samples: says.left,
                sample_s: 0.0,
            };
            there.iter().filter(|says| says.kinds.contains(&kind)).map(member).collect()
        };
        FleetSnapshot {
            generators: with(WorkKind::Generate),
            verifiers: with(WorkKind::Verify),
            trainers: with(WorkKind::Train),
            last_held_ago_ms: self
                .held
                .iter()
                .map(|(job, at)| (job.clone(), now_ms - at))
                .collect(),
        }
    }

    fn answered(&mut self, now_ms: u64, reply: Reply) -> Vec<Command> {
        let Some(asked) = self.asked.take() else { return Vec::new() };
        match (asked.what, reply) {
            (What::Follow, Reply::Records(records)) => {
                let more = records.len() == 64;
                for record in records {
                    self.known = self.known.max(record.sequence);
                    self.clock = (record.time_ms.max(self.clock.0), now_ms);
                    self.desk.fold_record(&record);
                }
                if more {
                    return self.ask(What::Follow, Request::After(self.known));
                }
                self.desk.mark_caught_up();
            }
            (What::Blob, Reply::Stored(true)) => {
                if let Some(next) = self.queue.front_mut() {
                    next.blob = None;
                }
            }
            (What::Fact, Reply::Published(published)) => {
                self.desk.record_write(published.sequence);
                self.queue.pop_front();
            }
            // The store is away: all of it is decided anew.
            (What::Blob, _) => self.queue.clear(),
            (What::Follow | What::Fact, _) => {}
        }
        let mut commands = self.go_on(now_ms);
        if commands.is_empty() {
            // What was written must come back before the next decision.
            if self.asked.is_none() && asked.what != What::Follow {
                commands = self.ask(What::Follow, Request::After(self.known));
            }
        }
        commands
    }

    fn timed_out(&mut self, id: u64) -> Vec<Command> {
        let Some(asked) = self.asked.as_mut().filter(|asked| asked.id == id) else {
            return Vec::new();
        };
        asked.tries += 1;
        if asked.tries > TRIES_MAX {
            self.asked = None;
            self.queue.clear();
            return Vec::new();
        }
        vec![Command::Ask(id, asked.request.clone()), Command::Later(ANSWER_MS, id)]
    }
}

impl Peer for Coordinator {
    fn handle(&mut self, now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command> {
        match input {
            Input::Start => {
                let mut commands = self.ask(What::Follow, Request::After(0));
                commands.push(Command::Later(RETRY_MS, TICK));
                commands
            }
            Input::Notify if self.asked.is_none() && self.queue.is_empty() => {
                self.ask(What::Follow, Request::After(self.known))
            }
            Input::Reply(id, reply) if self.asked.as_ref().is_some_and(|a| a.id == id) => {
                self.answered(now_ms, reply)
            }
            Input::Timer(TICK) => {
                // Nobody may rely on who leads; one always does.
                self.leads = self.number == 0 || random.f64() < 0.7;
                self.desk.mark_dirty();
                let mut commands = vec![Command::Later(RETRY_MS, TICK)];
                if self.asked.is_none() && self.queue.is_empty() {
                    commands.extend(self.ask(What::Follow, Request::After(self.known)));
                }
                commands
            }
            Input::Timer(id) => self.timed_out(id),
            Input::Heard(says) => {
                for (kind, cycle, job) in &says.holds {
                    let held = HeldJob { run: run(), cycle: *cycle, job: job.clone() };
                    self.held.insert((*kind, held), now_ms);
                }
                self.heard.insert(says.agent.clone(), (now_ms, says));
                Vec::new()
            }
            Input::Notify | Input::Reply(..) | Input::Deliver(_) | Input::Healed => Vec::new(),
        }
    }

    fn reset(&mut self, incarnation: u64) {
        *self = Self { next: SKIPS + (incarnation << 32), ..Self::new(self.number) };
    }
}
