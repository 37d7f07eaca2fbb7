//! Simulated time, network and processes.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use wire::{AgentId, Fact, RunId, Subject};

use crate::{
    agent::AgentStatus,
    channel_model,
    check::Checker,
    faults::{FAULTS_MS, Faults},
    peer::{Command, Input, Reply, Request},
    process::{Process, ProcessClock, REVOCABLE_AGENTS, create_processes},
    run_check::RunResults,
    server::{PAGE, Published, Server},
    specs,
    store::{Store, StoreOutcome},
    trace::Trace,
};

/// Limits of time and steps for the runs to end after the phase with faults.
const RECOVERY_MS: u64 = 4 * 3_600_000;
const STEPS_MAX: u64 = 3_000_000;

/// The time for the runs to end after the phase with faults if the log has lost facts.
const STALL_MS: u64 = 600_000;
/// Simulated time after the end of all runs, in which late facts arrive.
const LATE_MS: u64 = 20_000;

/// The largest number of facts that a crash of the server loses.
const LOST_FACTS_MAX: u64 = 8;

enum Event {
    ToServer { from: usize, incarnation: u64, id: u64, request: Request },
    ToPeer { to: usize, incarnation: u64, input: Input },
    Restart { process: usize },
    Fault(FaultKind),
    ServerRestart,
    Expire,
    Healed,
}

#[derive(Debug, Clone, Copy)]
enum FaultKind {
    Crash,
    Freeze,
    Cut,
    Server,
    Store,
    Full,
    Damage,
    Revoke,
}

impl FaultKind {
    fn hits_process(self) -> bool {
        matches!(self, Self::Crash | Self::Freeze | Self::Cut)
    }
}

const FAULT_KINDS: [FaultKind; 8] = [
    FaultKind::Crash,
    FaultKind::Freeze,
    FaultKind::Cut,
    FaultKind::Server,
    FaultKind::Store,
    FaultKind::Full,
    FaultKind::Damage,
    FaultKind::Revoke,
];

/// The outcome of a simulation.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub trace: u64,
    pub steps: u64,
    pub kills: u64,
    pub facts: u64,
    /// True if all results must equal those without faults.
    pub comparable: bool,
    /// The log has lost facts, and a run has stalled or contradicts itself.
    pub damaged: bool,
    /// The results that must be among those without faults.
    pub results: BTreeMap<RunId, RunResults>,
}

struct World {
    now: u64,
    random: fastrand::Rng,
    faults: Faults,
    events: BTreeMap<(u64, u64), Event>,
    scheduled: u64,
    processes: Vec<Process>,
    /// The first process that faults may hit. Those before are users.
    first_exposed: usize,
    server: Server,
    server_down_until: u64,
    log_full_until: u64,
    store: Store,
    store_down_until: u64,
    revoked: BTreeSet<usize>,
    /// The log has changed since the runs were last seen to be open.
    log_changed: bool,
    steps: u64,
    kills: u64,
    checker: Checker,
    trace: Trace,
    healed: bool,
}

/// Simulates a seed to the end of its run.
///
/// # Errors
/// If an invariant is violated or the run does not end.
pub fn simulate(seed: u64, faults: &Faults, print: bool) -> Result<Outcome, String> {
    let mut world = World::new(seed, faults, print);
    world.start();
    let mut ends_at = u64::MAX;
    loop {
        let Some(((at, _), event)) = world.events.pop_first() else {
            return Err("nothing happens any more, and the run has not ended".into());
        };
        if at > ends_at {
            if world.checker.is_over(&world.server) {
                break;
            }
            // The log has lost the end.
            ends_at = u64::MAX;
        }
        world.now = at;
        world.steps += 1;
        world.handle_event(event);
        world.checker.result().map_err(|error| format!("at {} ms: {error}", world.now))?;
        let stalls = at > FAULTS_MS + STALL_MS && world.checker.has_lost_facts();
        if stalls {
            break;
        }
        if at > FAULTS_MS + RECOVERY_MS || world.steps > STEPS_MAX {
            return Err(format!("the run does not end: {}", world.checker.describe()));
        }
        if ends_at == u64::MAX && world.is_over() {
            ends_at = at + LATE_MS;
        }
    }
    let (results, damaged) = world.checker.finish(&world.server, &world.store)?;
    Ok(Outcome {
        trace: world.trace.hash(),
        steps: world.steps,
        kills: world.kills,
        facts: world.server.end(),
        comparable: !damaged && world.checker.is_comparable(),
        damaged,
        results,
    })
}

impl World {
    fn new(seed: u64, faults: &Faults, print: bool) -> Self {
        let mut random = fastrand::Rng::with_seed(wire::derive_seed(seed, &["world"]));
        let runs = specs::seed_specs(seed);
        let mut store = Store::default();
        // A channel's learning stores its files too.
        let learning = specs::learning_spec("learned-1", 1, 1);
        for fact in runs.iter().chain([&learning]).flat_map(specs::submitted_facts) {
            // What a user submits is stored before.
            crate::store::named_files(&fact).iter().for_each(|digest| store.put_file(digest));
        }
        let (first_exposed, processes) = create_processes(&runs, faults, &mut random);
        Self {
            now: 0,
            faults: faults.clone(),
            events: BTreeMap::new(),
            scheduled: 0,
            processes,
            first_exposed,
            random,
            server: Server::new(faults.bug),
            server_down_until: 0,
            log_full_until: 0,
            store,
            store_down_until: 0,
            revoked: BTreeSet::new(),
            log_changed: false,
            steps: 0,
            kills: 0,
            checker: Checker::new(faults, &runs),
            trace: Trace::new(print),
            healed: false,
        }
    }

    fn is_over(&mut self) -> bool {
        std::mem::take(&mut self.log_changed) && self.checker.is_over(&self.server)
    }

    fn start(&mut self) {
        for process in 0..self.processes.len() {
            self.send_input(0, process, Input::Start);
        }
        self.schedule(FAULTS_MS, Event::Healed);
        self.schedule(500, Event::Expire);
        FAULT_KINDS.into_iter().for_each(|kind| self.schedule_fault(kind));
    }

    fn schedule(&mut self, after: u64, event: Event) {
        // Events at the same time happen in the order in which they were scheduled.
        self.scheduled += 1;
        self.events.insert((self.now + after, self.scheduled), event);
    }

    fn send_input(&mut self, after: u64, to: usize, input: Input) {
        let incarnation = self.processes[to].incarnation;
        self.schedule(after, Event::ToPeer { to, incarnation, input });
    }

    fn handle_event(&mut self, event: Event) {
        match event {
            Event::ToServer { from, incarnation, id, request } => {
                self.handle_request(from, incarnation, id, request);
            }
            Event::ToPeer { to, incarnation, input } => self.deliver_input(to, incarnation, input),
            Event::Restart { process } => {
                self.trace
                    .record_event(self.now, &format!("{} starts", self.processes[process].name));
                self.processes[process].up = true;
                self.send_input(0, process, Input::Start);
            }
            Event::Fault(kind) => {
                if !self.healed {
                    self.inject_fault(kind);
                    self.schedule_fault(kind);
                }
            }
            Event::ServerRestart => self.deliver_ready(),
            Event::Expire => {
                self.server.expire(self.now);
                self.deliver_ready();
                self.schedule(500, Event::Expire);
            }
            Event::Healed => self.end_faults(),
        }
    }

    /// Handles an event at a peer and executes the commands of the peer.
    fn deliver_input(&mut self, to: usize, incarnation: u64, input: Input) {
        let process = &mut self.processes[to];
        if !process.up || process.incarnation != incarnation {
            return;
        }
        if self.now < process.frozen_until {
            let wait = process.frozen_until - self.now;
            self.schedule(wait, Event::ToPeer { to, incarnation, input });
            return;
        }
        let clock = process.clock;
        let commands = process.peer.handle(clock.read_clock(self.now), &mut self.random, input);
        for command in commands {
            match command {
                Command::Send(id, request) => self.send_request(to, id, request),
                Command::SetTimer(after, token) => {
                    self.send_input(clock.real_duration(after), to, Input::Timer(token));
                }
                Command::Broadcast(status) => self.broadcast_status(to, status),
                Command::JobStart(record, known) => {
                    let subject = record.fact.subject.to_string();
                    let name = &self.processes[to].name;
                    self.trace.record_event(self.now, &format!("{name} begins {subject}"));
                    self.checker.check_job_start(&record, known);
                }
                Command::DuplicateStart(record) => self.checker.report_duplicate_start(&record),
                Command::OrderDecision(order, known) => {
                    self.checker.check_order(&order, known);
                }
                Command::Die => {
                    self.kill(to);
                    return;
                }
            }
        }
    }

    fn send_request(&mut self, from: usize, id: u64, request: Request) {
        let incarnation = self.processes[from].incarnation;
        for delay in self.draw_delays(from) {
            let request = request.clone();
            self.schedule(delay, Event::ToServer { from, incarnation, id, request });
        }
    }

    fn broadcast_status(&mut self, from: usize, status: AgentStatus) {
        let status = Rc::new(status);
        for to in 0..self.processes.len() {
            if to != from && self.processes[to].follows && self.is_connected(to) {
                for delay in self.draw_delays(from) {
                    self.send_input(delay, to, Input::Status(status.clone()));
                }
            }
        }
    }

    /// Draws the delays of the copies of a message: one, none, or two.
    fn draw_delays(&mut self, peer: usize) -> Vec<u64> {
        if !self.is_connected(peer) || self.happens(self.faults.lost) {
            return Vec::new();
        }
        let copies = if self.happens(self.faults.duplicated) { 2 } else { 1 };
        (0..copies)
            .map(|_| {
                let late = self.happens(self.faults.late);
                self.random.u64(1..if late { 8_000 } else { 20 })
            })
            .collect()
    }

    fn is_connected(&self, peer: usize) -> bool {
        self.now >= self.processes[peer].cut_until
            && self.now >= self.server_down_until
            && !self.revoked.contains(&peer)
    }

    fn happens(&mut self, permille: u32) -> bool {
        permille > 0 && self.random.u32(0..1000) < permille
    }

    fn handle_request(&mut self, from: usize, incarnation: u64, id: u64, request: Request) {
        if !self.is_connected(from) {
            return;
        }
        let reply = match request {
            Request::Publish(fact) => self.publish(from, &fact),
            Request::PublishBatch(facts) => self.publish_batch(from, &facts),
            Request::Get(subject) => Reply::Record(self.server.get(&subject)),
            Request::LastWithPrefix(prefix) => Reply::Record(self.server.last_with_prefix(&prefix)),
            Request::After(sequence) => {
                Reply::Records(self.server.after(sequence, PAGE), self.server.end())
            }
            Request::ReadChannels { after } => {
                Reply::Records(self.server.read_channels(after), self.server.end())
            }
            Request::ReadRun(run) => Reply::Records(self.server.read_run(&run), self.server.end()),
            Request::ReadFeedback => Reply::Feedback(channel_model::feedback_positions(self.now)),
            Request::ReadCycle { run, cycle, after, up_to } => {
                let records = self.server.read_cycle((&run, cycle), after, up_to, PAGE);
                Reply::Records(records, self.server.end())
            }
            Request::Purge { run, cycle, kind, up_to } => {
                self.purge((&run, cycle), kind, up_to);
                Reply::Purged
            }
            Request::Pull(queue) => {
                if self.processes[from].incarnation == incarnation {
                    self.server.pull(queue, from);
                    self.deliver_ready();
                }
                return;
            }
            Request::Settle(queue, sequence, how) => {
                self.server.settle(self.now, queue, sequence, how);
                self.deliver_ready();
                Reply::Settled
            }
            Request::CountLeased { queue, order, own } => {
                let leased = self.server.count_leased(queue);
                self.checker.note_leased((from, order), leased > own);
                Reply::Leased(leased)
            }
            Request::Fetch(_) | Request::Store(_) | Request::StoreArchive(_) => {
                Reply::Stored(self.use_store(from, &request))
            }
            Request::Timer => return,
        };
        for delay in self.draw_delays(from) {
            let input = Input::Reply(id, reply.clone());
            self.schedule(delay, Event::ToPeer { to: from, incarnation, input });
        }
    }

    fn use_store(&mut self, from: usize, request: &Request) -> StoreOutcome {
        match request {
            _ if self.now < self.store_down_until => return StoreOutcome::Away,
            Request::Fetch(_) if self.now < self.processes[from].disk_full_until => {
                return StoreOutcome::DiskFull;
            }
            Request::Fetch(files) => return self.store.read_files(self.now, files),
            Request::StoreArchive(records) => self.store.put_archive(records),
            Request::Store(digest) => self.store.put_file(digest),
            _ => {}
        }
        StoreOutcome::Done
    }

    fn publish(&mut self, from: usize, fact: &Fact) -> Reply {
        if self.now < self.log_full_until {
            return Reply::LogFull;
        }
        let published = self.append(from, fact);
        self.announce_facts();
        Reply::Published(published)
    }

    fn publish_batch(&mut self, from: usize, facts: &[Fact]) -> Reply {
        if self.faults.unbatched
            || self.now < self.log_full_until
            || !self.server.accepts_batch(facts)
        {
            return Reply::PublishedBatch(None);
        }
        let first = self.server.end() + 1;
        for fact in facts {
            self.append(from, fact);
        }
        self.announce_facts();
        Reply::PublishedBatch(Some(first))
    }

    fn append(&mut self, from: usize, fact: &Fact) -> Published {
        let before = self.server.end();
        let name = &self.processes[from].name;
        let author = self.faults.revokes.then(|| AgentId::new(name.as_str()).ok()).flatten();
        let published = self.server.publish(self.now, author.as_ref(), fact);
        if let Some(record) = self.server.after(before, 1).first() {
            let text = format!("{name} wrote {} {}", record.sequence, fact.subject);
            self.trace.record_event(self.now, &text);
            self.checker.apply_record(record, &self.store);
            self.checker.check_declined(from, fact);
            self.log_changed = true;
        }
        published
    }

    fn announce_facts(&mut self) {
        self.deliver_ready();
        for to in 0..self.processes.len() {
            if self.processes[to].follows {
                for delay in self.draw_delays(to) {
                    self.send_input(delay, to, Input::Notify);
                }
            }
        }
    }

    fn purge(&mut self, (run, cycle): (&RunId, u32), kind: usize, up_to: u64) {
        let purged = self.server.purge((run, cycle), kind, up_to);
        let archived = Subject::new(run, wire::FactKey::Archived { cycle }).to_string();
        self.checker.check_purge(&purged, self.server.get(&archived), &self.store);
        self.log_changed = true;
        let text = format!("{} facts of {run} cycle {cycle} are purged", purged.len());
        self.trace.record_event(self.now, &text);
    }

    fn deliver_ready(&mut self) {
        if self.now < self.server_down_until {
            return;
        }
        self.checker.check_queues(&self.server);
        for (to, delivery) in self.server.deliver_ready(self.now) {
            for delay in self.draw_delays(to) {
                self.send_input(delay, to, Input::Deliver(delivery.clone()));
            }
        }
    }

    fn schedule_fault(&mut self, kind: FaultKind) {
        let every = match kind {
            FaultKind::Crash => self.faults.crash_every,
            FaultKind::Freeze => self.faults.freeze_every,
            FaultKind::Cut => self.faults.cut_every,
            FaultKind::Server => self.faults.server_every,
            FaultKind::Store => self.faults.store_every,
            FaultKind::Full => self.faults.full_every,
            FaultKind::Damage => self.faults.damage_every,
            FaultKind::Revoke if self.faults.revokes && self.revoked.is_empty() => FAULTS_MS / 3,
            FaultKind::Revoke => 0,
        };
        if every > 0 {
            let after = self.random.u64(1..=2 * every);
            self.schedule(after, Event::Fault(kind));
        }
    }

    fn inject_fault(&mut self, kind: FaultKind) {
        let process = self.random.usize(self.first_exposed..self.processes.len());
        let duration_ms = self.random.u64(200..20_000);
        let until = self.now + duration_ms;
        let name = self.processes[process].name.clone();
        match kind {
            FaultKind::Crash => self.kill(process),
            FaultKind::Freeze => self.processes[process].frozen_until = until,
            FaultKind::Cut => self.processes[process].cut_until = until,
            FaultKind::Server => self.crash_server(duration_ms),
            FaultKind::Store => self.store_down_until = until,
            FaultKind::Full if self.random.bool() => self.log_full_until = until,
            // A store without space is as good as away.
            FaultKind::Full if self.random.bool() => self.store_down_until = until,
            FaultKind::Full => self.processes[process].disk_full_until = until,
            FaultKind::Damage => {
                self.store.damage_file(&mut self.random, until);
            }
            FaultKind::Revoke => self.revoke_agent(),
        }
        let of = if kind.hits_process() { name } else { "the server or the store".into() };
        let text = format!("{kind:?} of {of}, for {duration_ms} ms");
        self.trace.record_event(self.now, &text);
    }

    fn crash_server(&mut self, duration_ms: u64) {
        let random = &mut self.random;
        let loses_acks = self.faults.loses_acks;
        self.server.crash(self.now, || loses_acks && random.bool());
        self.server_down_until = self.now + duration_ms;
        if self.faults.clock_jumps {
            self.server.skew_ms = self.random.u64(0..100_000);
        }
        if self.faults.loses_tail {
            let lost = self.random.u64(0..=LOST_FACTS_MAX).min(self.server.end());
            let end = self.server.end() - lost;
            if lost > 0 {
                self.server.lose_tail(end);
                self.checker.lose_tail(end);
            }
            self.trace.record_event(self.now, &format!("the log ends at {end}"));
        }
        self.schedule(duration_ms, Event::ServerRestart);
    }

    /// Ends the membership of an agent, and so its connections, for good.
    fn revoke_agent(&mut self) {
        let is_revocable = |process: &Process| REVOCABLE_AGENTS.contains(&process.name.as_str());
        let revocable = (0..self.processes.len()).filter(|p| is_revocable(&self.processes[*p]));
        let agent = self.random.choice(revocable.collect::<Vec<usize>>());
        self.revoked.extend(agent);
        if let Some(agent) = agent {
            let text = format!("{} is revoked", self.processes[agent].name);
            self.trace.record_event(self.now, &text);
        }
    }

    fn kill(&mut self, index: usize) {
        let process = &mut self.processes[index];
        if !process.up {
            return;
        }
        self.kills += 1;
        process.up = false;
        process.incarnation += 1;
        process.frozen_until = 0;
        if self.faults.skewed_clocks {
            process.clock = ProcessClock::draw(&mut self.random);
        }
        process.peer.reset(process.incarnation);
        let name = process.name.clone();
        self.trace.record_event(self.now, &format!("{name} is killed"));
        let after = self.random.u64(100..5_000);
        self.schedule(after, Event::Restart { process: index });
    }

    fn end_faults(&mut self) {
        self.trace.record_event(self.now, &"healed");
        self.healed = true;
        self.faults = self.faults.after_healing();
        self.server_down_until = self.now;
        self.log_full_until = self.now;
        self.store_down_until = self.now;
        self.store.repair_files();
        for process in 0..self.processes.len() {
            self.processes[process].cut_until = self.now;
            self.processes[process].frozen_until = self.now;
            self.processes[process].disk_full_until = self.now;
            self.send_input(1, process, Input::Healed);
        }
        self.deliver_ready();
    }
}
