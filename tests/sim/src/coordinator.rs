//! A simulated coordinator around the real `RunSet`. Like `services/coordinator` it replays and
//! follows the log, decides, stores blobs and writes facts in batches. Several may act at the same
//! time, because no lease stops them.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    rc::Rc,
};

use cycle::{
    FleetMember, FleetSnapshot, PlannerInputs, ReissueTimeouts, RunSet, WriteCommand, fail_run,
};
use wire::{Digest, Fact, FactBody, FactKey, PromptEntry, RunId, WorkKind, v1};

use crate::{
    agent::{AgentStatus, HeldWork},
    peer::{Command, Input, Peer, Reply, Request},
    server::{LEASE_MS, PAGE, Published},
    store::StoreOutcome,
    task,
};

const REPLY_MS: u64 = 1_500;
const TRIES_MAX: u32 = 6;
/// As in the shipped registry of agents.
const SILENT_MS: u64 = 5_000;
const RETRY_MS: u64 = 2_000;
const IDLE_CHECK_MS: u64 = 300;
const FACTS_IN_FLIGHT: usize = 16;

const TICK: u64 = 0;
const FIRST_ID: u64 = 1;

pub(crate) struct Coordinator {
    number: usize,
    runs: RunSet,
    known_sequence: u64,
    next_id: u64,
    /// Pending requests, with the number of times that each was sent.
    requests: BTreeMap<u64, (Request, u32)>,
    /// The runs whose decisions are due after the one that is being written.
    due: VecDeque<RunId>,
    writing: Option<RunWrites>,
    statuses: BTreeMap<String, (u64, Rc<AgentStatus>)>,
    /// The last time at which an agent reported each job.
    last_held_ms: BTreeMap<HeldWork, u64>,
    last_idle_check_ms: u64,
    /// The log time of the last entry, and the simulated time of its arrival.
    log_clock: (u64, u64),
    leads: bool,
    /// Runs whose prompts were fetched.
    loaded: BTreeSet<RunId>,
    prompts: [Vec<PromptEntry>; 2],
    suites: BTreeMap<String, Vec<PromptEntry>>,
}

/// The decision on one run while it is carried out. Nothing is read meanwhile.
struct RunWrites {
    run: RunId,
    stage: WriteStage,
}

enum WriteStage {
    Prompts,
    /// Blobs to store, then the facts to write.
    Blobs(VecDeque<String>, Vec<Fact>),
    Batch(Rc<[Fact]>),
    Facts {
        waiting: VecDeque<Rc<Fact>>,
        written: Vec<(Rc<Fact>, Published)>,
    },
}

impl Coordinator {
    pub(crate) fn new(number: usize) -> Self {
        Self {
            number,
            runs: RunSet::default(),
            known_sequence: 0,
            next_id: FIRST_ID,
            requests: BTreeMap::new(),
            due: VecDeque::new(),
            writing: None,
            statuses: BTreeMap::new(),
            last_held_ms: BTreeMap::new(),
            last_idle_check_ms: 0,
            log_clock: (0, 0),
            leads: true,
            loaded: BTreeSet::new(),
            prompts: [task::prompts("p"), task::prompts("h")],
            suites: task::suite_prompts(),
        }
    }

    fn send(&mut self, request: Request) -> Vec<Command> {
        self.next_id += 1;
        let id = self.next_id;
        self.requests.insert(id, (request.clone(), 1));
        vec![Command::Send(id, request), Command::SetTimer(REPLY_MS, id)]
    }

    fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.writing.is_none()
    }

    fn follow(&mut self) -> Vec<Command> {
        if self.is_idle() { self.send(Request::After(self.known_sequence)) } else { Vec::new() }
    }

    /// Carries out the decisions on all dirty runs, one run after the other.
    fn advance_runs(&mut self, now_ms: u64) -> Vec<Command> {
        let mut commands = Vec::new();
        while self.is_idle() {
            if self.due.is_empty() && self.leads {
                let minute = u32::try_from(now_ms / 60_000 % 1440).unwrap_or(0);
                let queue = self.runs.queue_commands(minute);
                if let Some(run) = queue.first().map(|write| write.fact.subject.run.clone()) {
                    commands.extend(self.execute_commands(&run, queue));
                    continue;
                }
                self.due.extend(self.runs.take_dirty());
            }
            let Some(run) = self.due.pop_front() else { break };
            commands.extend(self.advance_run(now_ms, &run));
        }
        commands
    }

    fn advance_run(&mut self, now_ms: u64, id: &RunId) -> Vec<Command> {
        let Some(run) = self.runs.find_run(id) else { return Vec::new() };
        if let Some(v1::spec::Kind::Raft(raft)) = &run.spec.kind
            && !self.loaded.contains(id)
        {
            let files = raft.prompt_sets().filter_map(|set| set.file);
            let files = files.map(|file| file.digest.clone()).collect();
            self.writing = Some(RunWrites { run: id.clone(), stage: WriteStage::Prompts });
            return self.send(Request::Fetch(files));
        }
        let fleet = self.fleet_snapshot(now_ms, &run.spec.pool);
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
        let commands = self.runs.next_commands(id, inputs);
        self.execute_commands(id, commands)
    }

    fn execute_commands(&mut self, run: &RunId, writes: Vec<WriteCommand>) -> Vec<Command> {
        let blobs = writes.iter().filter_map(|write| write.blob.as_deref());
        let blobs = blobs.map(|bytes| Digest::hash_bytes(bytes).to_string()).collect();
        let facts: Vec<Fact> = writes.into_iter().map(|write| write.fact).collect();
        let orders = facts.iter().filter(|fact| {
            matches!(
                fact.body,
                FactBody::GenerateOrder(_) | FactBody::TrainOrder(_) | FactBody::SlicePlan(_)
            )
        });
        let mut commands: Vec<Command> = orders
            .map(|order| Command::OrderDecision(Rc::new(order.clone()), self.known_sequence))
            .collect();
        let stage = WriteStage::Blobs(blobs, facts);
        commands.extend(self.continue_writes(RunWrites { run: run.clone(), stage }));
        commands
    }

    /// Sends the next requests of a decision, or ends it.
    fn continue_writes(&mut self, mut writes: RunWrites) -> Vec<Command> {
        let commands = match &mut writes.stage {
            WriteStage::Prompts => Vec::new(),
            WriteStage::Blobs(blobs, facts) => match blobs.front().cloned() {
                Some(digest) => self.send(Request::Store(digest)),
                None if facts.len() > 1 => {
                    let batch: Rc<[Fact]> = std::mem::take(facts).into();
                    writes.stage = WriteStage::Batch(batch.clone());
                    self.send(Request::PublishBatch(batch))
                }
                None => {
                    let waiting = std::mem::take(facts).into_iter().map(Rc::new).collect();
                    writes.stage = WriteStage::Facts { waiting, written: Vec::new() };
                    return self.continue_writes(writes);
                }
            },
            WriteStage::Batch(_) => Vec::new(),
            WriteStage::Facts { waiting, written } => {
                let room = FACTS_IN_FLIGHT.saturating_sub(self.requests.len());
                let next: Vec<Rc<Fact>> = waiting.drain(..room.min(waiting.len())).collect();
                if next.is_empty() && self.requests.is_empty() {
                    for (fact, published) in written {
                        self.record_published(fact, *published);
                    }
                    return Vec::new();
                }
                next.into_iter().flat_map(|fact| self.send(Request::Publish(fact))).collect()
            }
        };
        self.writing = Some(writes);
        commands
    }

    fn record_published(&mut self, fact: &Fact, Published { sequence, ours, .. }: Published) {
        self.runs.record_write(sequence);
        if !ours {
            self.runs.record_conflict(&fact.subject, sequence);
        }
    }

    /// Gives up the decision on one run. The next tick marks it as dirty, and it is decided again.
    fn abandon_writes(&mut self) {
        self.requests.clear();
        self.writing = None;
    }

    fn fleet_snapshot(&self, now_ms: u64, pool: &str) -> FleetSnapshot {
        let recent = self.statuses.values().filter(|(at, _)| at + SILENT_MS > now_ms);
        let recent: Vec<&AgentStatus> = recent.map(|(_, status)| &**status).collect();
        let with = |kind: WorkKind| {
            let member = |status: &&AgentStatus| FleetMember {
                agent: status.agent.clone(),
                tokens_per_s: status.tokens_per_s,
                held_jobs: status
                    .holds
                    .iter()
                    .filter(|(held, _)| *held == kind)
                    .map(|(_, job)| job.clone())
                    .collect(),
                remaining_samples: status.remaining_samples,
                seconds_per_sample: 0.0,
                training_speed: None,
            };
            let serves_all = matches!(kind, WorkKind::Verify | WorkKind::Score);
            let in_pool = |status: &&&AgentStatus| serves_all || status.pool == pool;
            let recent = recent.iter().filter(in_pool);
            recent.filter(|status| status.kinds.contains(&kind)).map(member).collect()
        };
        FleetSnapshot {
            generators: with(WorkKind::Generate),
            verifiers: with(WorkKind::Verify),
            scorers: with(WorkKind::Score),
            trainers: with(WorkKind::Train),
            last_held_ago_ms: self
                .last_held_ms
                .iter()
                .map(|(job, at)| (job.clone(), now_ms - at))
                .collect(),
        }
    }

    fn fold_records(&mut self, now_ms: u64, records: &[Rc<wire::Record>]) {
        for record in records {
            self.known_sequence = self.known_sequence.max(record.sequence);
            self.log_clock = (record.time_ms.max(self.log_clock.0), now_ms);
            self.forget_held(record);
            self.runs.fold_record(record);
        }
    }

    /// A job is not held any more once its result is in the log.
    fn forget_held(&mut self, record: &wire::Record) {
        let (kind, cycle, job) = match &record.fact.subject.key {
            FactKey::Samples { cycle, job } => (WorkKind::Generate, *cycle, job),
            FactKey::Verdicts { cycle, job } => (WorkKind::Verify, *cycle, job),
            FactKey::Scores { cycle, job } => (WorkKind::Score, *cycle, job),
            _ => return,
        };
        let run = record.fact.subject.run.clone();
        self.last_held_ms.remove(&(kind, cycle::HeldJob { run, cycle, job: job.to_string() }));
    }

    fn record_status(&mut self, now_ms: u64, status: Rc<AgentStatus>) -> bool {
        for held in &status.holds {
            self.last_held_ms.insert(held.clone(), now_ms);
        }
        let is_idle = status.holds.is_empty();
        let before = self.statuses.insert(status.agent.clone(), (now_ms, status));
        let became_idle = is_idle && before.is_some_and(|(_, before)| !before.holds.is_empty());
        let due = became_idle && now_ms > self.last_idle_check_ms + IDLE_CHECK_MS;
        if due {
            self.last_idle_check_ms = now_ms;
            self.runs.mark_dirty();
        }
        due
    }

    fn handle_reply(&mut self, now_ms: u64, request: Request, reply: Reply) -> Vec<Command> {
        if let (Request::After(_), Reply::Records(records, end)) = (&request, &reply) {
            if *end < self.known_sequence {
                // The log was lost in part, so the process ends and is started again.
                return vec![Command::Die];
            }
            self.fold_records(now_ms, records);
            if records.len() == PAGE {
                return self.follow();
            }
            self.runs.mark_caught_up();
            return self.advance_runs(now_ms);
        }
        let Some(mut writes) = self.writing.take() else { return Vec::new() };
        let mut commands = match (&mut writes.stage, request, reply) {
            (WriteStage::Prompts, _, Reply::Stored(StoreOutcome::Done)) => {
                self.loaded.insert(writes.run.clone());
                self.advance_run(now_ms, &writes.run)
            }
            (WriteStage::Prompts, _, Reply::Stored(StoreOutcome::Damaged)) => {
                let message = "a file of prompts is damaged".to_owned();
                self.execute_commands(&writes.run, vec![fail_run(&writes.run, message)])
            }
            (WriteStage::Blobs(blobs, _), _, Reply::Stored(StoreOutcome::Done)) => {
                blobs.pop_front();
                self.continue_writes(writes)
            }
            (WriteStage::Batch(batch), _, Reply::PublishedBatch(Some(first))) => {
                for (fact, sequence) in batch.iter().zip(first..) {
                    self.record_published(fact, Published { sequence, ours: true, is_new: true });
                }
                Vec::new()
            }
            (WriteStage::Batch(batch), _, Reply::PublishedBatch(None)) => {
                let waiting = batch.iter().cloned().map(Rc::new).collect();
                writes.stage = WriteStage::Facts { waiting, written: Vec::new() };
                self.continue_writes(writes)
            }
            (
                WriteStage::Facts { written, .. },
                Request::Publish(fact),
                Reply::Published(published),
            ) => {
                written.push((fact, published));
                self.continue_writes(writes)
            }
            // The store or the log is down or full.
            _ => {
                self.abandon_writes();
                Vec::new()
            }
        };
        if self.is_idle() {
            commands.extend(self.advance_runs(now_ms));
            // The next decision needs the records that were written.
            commands.extend(self.follow());
        }
        commands
    }

    fn handle_timeout(&mut self, now_ms: u64, id: u64) -> Vec<Command> {
        let Some((request, tries)) = self.requests.get_mut(&id) else { return Vec::new() };
        *tries += 1;
        if *tries <= TRIES_MAX || matches!(request, Request::After(_)) {
            return vec![Command::Send(id, request.clone()), Command::SetTimer(REPLY_MS, id)];
        }
        let (request, _) = self.requests.remove(&id).expect("it was found above");
        if matches!(request, Request::PublishBatch(_)) {
            // It may be in the log; the facts are then found there one by one.
            return self.handle_reply(now_ms, request, Reply::PublishedBatch(None));
        }
        self.abandon_writes();
        self.advance_runs(now_ms)
    }
}

impl Peer for Coordinator {
    fn handle(&mut self, now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command> {
        match input {
            Input::Start => {
                let mut commands = self.follow();
                commands.push(Command::SetTimer(RETRY_MS, TICK));
                commands
            }
            Input::Notify => self.follow(),
            Input::Reply(id, reply) => match self.requests.remove(&id) {
                Some((request, _)) => self.handle_reply(now_ms, request, reply),
                None => Vec::new(),
            },
            Input::Timer(TICK) => {
                // Leadership changes at random, but coordinator 0 always leads.
                self.leads = self.number == 0 || random.f64() < 0.7;
                self.runs.mark_dirty();
                let runs = &self.runs;
                self.last_held_ms.retain(|(_, held), _| runs.find_run(&held.run).is_some());
                let mut commands = vec![Command::SetTimer(RETRY_MS, TICK)];
                commands.extend(self.follow());
                commands
            }
            Input::Timer(id) => self.handle_timeout(now_ms, id),
            Input::Status(status) => {
                if self.record_status(now_ms, status) {
                    self.follow()
                } else {
                    Vec::new()
                }
            }
            Input::Deliver(_) | Input::Healed => Vec::new(),
        }
    }

    fn reset(&mut self, incarnation: u64) {
        *self = Self { next_id: FIRST_ID + (incarnation << 32), ..Self::new(self.number) };
    }
}
