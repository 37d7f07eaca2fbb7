//! Simulated time, network and processes.

use std::{collections::BTreeMap, rc::Rc};

use wire::{Fact, Record, WorkKind};

use crate::{
    agent::{Agent, AgentStatus},
    check::{Checker, Results},
    coordinator::Coordinator,
    faults::{FAULTS_MS, Faults},
    server::{Delivery, Published, Server, Settle},
    trace::Trace,
    user::User,
};

/// Limits of time and steps for the run to end after the phase with faults.
const RECOVERY_MS: u64 = 4 * 3_600_000;
const STEPS_MAX: u64 = 3_000_000;

const GENERATORS: usize = 3;

/// A request of a peer to the server or the store.
#[derive(Debug, Clone)]
pub(crate) enum Request {
    Publish(Box<Fact>),
    Get(String),
    LastWithPrefix(String),
    After(u64),
    Pull(WorkKind),
    Settle(WorkKind, u64, Settle),
    /// Reads or writes files.
    Store,
}

#[derive(Debug, Clone)]
pub(crate) enum Reply {
    Published(Published),
    Record(Option<Rc<Record>>),
    Records(Vec<Rc<Record>>),
    Settled,
    Stored(bool),
}

/// An event for a peer.
#[derive(Debug, Clone)]
pub(crate) enum Input {
    Start,
    Reply(u64, Reply),
    Deliver(Delivery),
    /// The log has grown.
    Notify,
    /// The broadcast status of an agent.
    Status(Rc<AgentStatus>),
    Timer(u64),
    /// The phase with faults is over.
    Healed,
}

/// An action of a peer.
#[derive(Debug)]
pub(crate) enum Command {
    Send(u64, Request),
    SetTimer(u64, u64),
    Broadcast(AgentStatus),
    /// A coordinator decides on an order, with its position in the log.
    OrderDecision(Box<Fact>, u64),
    /// An agent starts a job, with its position in the log.
    JobStart(Rc<Record>, u64),
    Die,
}

/// A process that handles events and returns commands.
pub(crate) trait Peer {
    fn handle(&mut self, now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command>;

    /// Forgets everything, like a killed process.
    fn reset(&mut self, incarnation: u64);
}

struct Process {
    name: String,
    peer: Box<dyn Peer>,
    incarnation: u64,
    up: bool,
    frozen_until: u64,
    cut_until: u64,
}

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
}

/// The outcome of a simulation.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub trace: u64,
    pub steps: u64,
    pub kills: u64,
    pub facts: u64,
    /// True if the results must equal those without faults.
    pub comparable: bool,
    pub results: Results,
}

struct World {
    now: u64,
    random: fastrand::Rng,
    faults: Faults,
    events: BTreeMap<(u64, u64), Event>,
    scheduled: u64,
    processes: Vec<Process>,
    server: Server,
    server_down_until: u64,
    store_down_until: u64,
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
    while !world.checker.is_over() {
        let Some(((at, _), event)) = world.events.pop_first() else {
            return Err("nothing happens any more, and the run has not ended".into());
        };
        world.now = at;
        world.steps += 1;
        world.handle_event(event);
        world.checker.result().map_err(|error| format!("at {} ms: {error}", world.now))?;
        if at > FAULTS_MS + RECOVERY_MS || world.steps > STEPS_MAX {
            return Err(format!("the run does not end: {}", world.checker.describe()));
        }
    }
    let results = world.checker.finish()?;
    Ok(Outcome {
        trace: world.trace.hash(),
        steps: world.steps,
        kills: world.kills,
        facts: world.server.log.len() as u64,
        comparable: world.checker.is_comparable(),
        results,
    })
}

impl World {
    fn new(seed: u64, faults: &Faults, print: bool) -> Self {
        let mut processes = Vec::new();
        let mut add = |name: String, peer: Box<dyn Peer>| {
            processes.push(Process {
                name,
                peer,
                incarnation: 0,
                up: true,
                frozen_until: 0,
                cut_until: 0,
            });
        };
        add("user".into(), Box::new(User::new(seed, faults)));
        for number in 0..faults.coordinators {
            add(format!("coordinator-{number}"), Box::new(Coordinator::new(number)));
        }
        let kinds = (0..GENERATORS).map(|_| vec![WorkKind::Generate]).chain([
            vec![WorkKind::Verify, WorkKind::Train],
            vec![WorkKind::Verify, WorkKind::Eval],
            vec![WorkKind::Generate, WorkKind::Verify, WorkKind::Train, WorkKind::Eval],
        ]);
        for (number, kinds) in kinds.enumerate() {
            let name = format!("agent-{number}");
            add(name.clone(), Box::new(Agent::new(&name, number, kinds, faults)));
        }
        Self {
            now: 0,
            random: fastrand::Rng::with_seed(wire::derive_seed(seed, &["world"])),
            faults: faults.clone(),
            events: BTreeMap::new(),
            scheduled: 0,
            processes,
            server: Server::new(faults.bug),
            server_down_until: 0,
            store_down_until: 0,
            steps: 0,
            kills: 0,
            checker: Checker::new(faults),
            trace: Trace::new(print),
            healed: false,
        }
    }

    fn start(&mut self) {
        for process in 0..self.processes.len() {
            self.send_input(0, process, Input::Start);
        }
        self.schedule(FAULTS_MS, Event::Healed);
        self.schedule(500, Event::Expire);
        for kind in [
            FaultKind::Crash,
            FaultKind::Freeze,
            FaultKind::Cut,
            FaultKind::Server,
            FaultKind::Store,
        ] {
            self.schedule_fault(kind);
        }
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
        let commands = process.peer.handle(self.now, &mut self.random, input);
        for command in commands {
            match command {
                Command::Send(id, request) => self.send_request(to, id, request),
                Command::SetTimer(after, token) => self.send_input(after, to, Input::Timer(token)),
                Command::Broadcast(status) => self.broadcast_status(to, status),
                Command::JobStart(record, known) => {
                    let subject = record.fact.subject.to_string();
                    let name = &self.processes[to].name;
                    self.trace.record_event(self.now, &format!("{name} begins {subject}"));
                    self.checker.check_job_start(&self.server.log, &record, known);
                }
                Command::OrderDecision(order, known) => {
                    self.checker.check_order(&self.server.log, &order, known);
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
            if to != from && self.is_connected(to) {
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
        self.now >= self.processes[peer].cut_until && self.now >= self.server_down_until
    }

    fn happens(&mut self, permille: u32) -> bool {
        permille > 0 && self.random.u32(0..1000) < permille
    }

    fn handle_request(&mut self, from: usize, incarnation: u64, id: u64, request: Request) {
        if !self.is_connected(from) {
            return;
        }
        let reply = match request {
            Request::Publish(fact) => Reply::Published(self.publish(from, &fact)),
            Request::Get(subject) => Reply::Record(self.server.get(&subject)),
            Request::LastWithPrefix(prefix) => Reply::Record(self.server.last_with_prefix(&prefix)),
            Request::After(sequence) => Reply::Records(self.server.after(sequence, 64)),
            Request::Pull(kind) => {
                if self.processes[from].incarnation == incarnation {
                    self.server.pull(kind, from);
                    self.deliver_ready();
                }
                return;
            }
            Request::Settle(kind, sequence, how) => {
                self.server.settle(self.now, kind, sequence, how);
                self.deliver_ready();
                Reply::Settled
            }
            Request::Store => Reply::Stored(self.now >= self.store_down_until),
        };
        for delay in self.draw_delays(from) {
            let input = Input::Reply(id, reply.clone());
            self.schedule(delay, Event::ToPeer { to: from, incarnation, input });
        }
    }

    fn publish(&mut self, from: usize, fact: &Fact) -> Published {
        let before = self.server.log.len();
        let published = self.server.publish(self.now, fact);
        let Some(record) = self.server.log.get(before).cloned() else { return published };
        let name = &self.processes[from].name;
        self.trace
            .record_event(self.now, &format!("{name} wrote {} {}", record.sequence, fact.subject));
        self.checker.apply_record(&record);
        self.deliver_ready();
        for to in 0..self.processes.len() {
            for delay in self.draw_delays(to) {
                self.send_input(delay, to, Input::Notify);
            }
        }
        published
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
        };
        if every > 0 {
            let after = self.random.u64(1..=2 * every);
            self.schedule(after, Event::Fault(kind));
        }
    }

    fn inject_fault(&mut self, kind: FaultKind) {
        let process = self.random.usize(1..self.processes.len());
        let duration_ms = self.random.u64(200..20_000);
        let until = self.now + duration_ms;
        let name = self.processes[process].name.clone();
        match kind {
            FaultKind::Crash => self.kill(process),
            FaultKind::Freeze => {
                self.trace
                    .record_event(self.now, &format!("{name} is stopped for {duration_ms} ms"));
                self.processes[process].frozen_until = until;
            }
            FaultKind::Cut => {
                self.trace
                    .record_event(self.now, &format!("{name} is cut off for {duration_ms} ms"));
                self.processes[process].cut_until = until;
            }
            FaultKind::Server => {
                self.trace.record_event(
                    self.now,
                    &format!("the server is killed, back after {duration_ms} ms"),
                );
                let random = &mut self.random;
                let loses_acks = self.faults.loses_acks;
                self.server.crash(self.now, || loses_acks && random.bool());
                self.server_down_until = until;
                if self.faults.clock_jumps {
                    self.server.skew_ms = self.random.u64(0..100_000);
                }
                self.schedule(duration_ms, Event::ServerRestart);
            }
            FaultKind::Store => {
                self.trace
                    .record_event(self.now, &format!("the store is away for {duration_ms} ms"));
                self.store_down_until = until;
            }
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
        process.peer.reset(process.incarnation);
        let name = process.name.clone();
        self.trace.record_event(self.now, &format!("{name} is killed"));
        let after = self.random.u64(100..5_000);
        self.schedule(after, Event::Restart { process: index });
    }

    fn end_faults(&mut self) {
        self.trace.record_event(self.now, &"healed");
        self.healed = true;
        self.faults = Faults { poison: self.faults.poison, bug: self.faults.bug, ..Faults::none() };
        self.server_down_until = self.now;
        self.store_down_until = self.now;
        for process in 0..self.processes.len() {
            self.processes[process].cut_until = self.now;
            self.processes[process].frozen_until = self.now;
            self.send_input(1, process, Input::Healed);
        }
        self.deliver_ready();
    }
}
