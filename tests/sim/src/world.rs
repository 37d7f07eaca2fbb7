//! Time, the network and the processes: what happens when, to whom.

use std::{collections::BTreeMap, rc::Rc};

use wire::{Fact, Record, WorkKind};

use crate::{
    agent::{Agent, Says},
    check::{Check, Results},
    coordinator::Coordinator,
    faults::{Faults, TROUBLE_MS},
    server::{Delivery, Published, Server, Settle},
    trace::Trace,
    user::User,
};

/// After the trouble a run must end within this time, and within so many steps.
const HEALING_MS: u64 = 4 * 3_600_000;
const STEPS_MAX: u64 = 3_000_000;

const GENERATORS: usize = 3;

/// What a peer asks of the server or the store.
#[derive(Debug, Clone)]
pub(crate) enum Request {
    Publish(Box<Fact>),
    Get(String),
    LastBelow(String),
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

/// What happens to a peer.
#[derive(Debug, Clone)]
pub(crate) enum Input {
    Start,
    Reply(u64, Reply),
    Deliver(Delivery),
    /// The log has grown.
    Notify,
    /// An agent says how it is.
    Heard(Rc<Says>),
    Timer(u64),
    /// Nothing more will go wrong.
    Healed,
}

/// What a peer does.
#[derive(Debug)]
pub(crate) enum Command {
    Ask(u64, Request),
    Later(u64, u64),
    Say(Says),
    /// A coordinator decides on an order, knowing the log up to a sequence.
    Order(Box<Fact>, u64),
    /// An agent begins a job, knowing the log up to a sequence.
    Begin(Rc<Record>, u64),
    Die,
}

/// One process: events in, commands out.
pub(crate) trait Peer {
    fn handle(&mut self, now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command>;

    /// Forgets all, as a process that was killed.
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
    Restart { who: usize },
    Trouble(Kind),
    ServerBack,
    Expire,
    Healed,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Crash,
    Freeze,
    Cut,
    Server,
    Store,
}

/// How a seed ended.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub trace: u64,
    pub steps: u64,
    pub kills: u64,
    pub facts: u64,
    /// Whether nothing happened that may change what comes out.
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
    check: Check,
    trace: Trace,
    healed: bool,
}

/// Plays one world to its end.
///
/// # Errors
/// When an invariant is broken, or the run does not end.
pub fn simulate(seed: u64, faults: &Faults, print: bool) -> Result<Outcome, String> {
    let mut world = World::new(seed, faults, print);
    world.begin();
    while !world.check.is_over() {
        let Some(((at, _), event)) = world.events.pop_first() else {
            return Err("nothing happens any more, and the run has not ended".into());
        };
        world.now = at;
        world.steps += 1;
        world.happen(event);
        world.check.verdict().map_err(|error| format!("at {} ms: {error}", world.now))?;
        if at > TROUBLE_MS + HEALING_MS || world.steps > STEPS_MAX {
            return Err(format!("the run does not end: {}", world.check.describe()));
        }
    }
    let results = world.check.end()?;
    Ok(Outcome {
        trace: world.trace.hash(),
        steps: world.steps,
        kills: world.kills,
        facts: world.server.log.len() as u64,
        comparable: world.check.comparable(),
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
            check: Check::new(faults),
            trace: Trace::new(print),
            healed: false,
        }
    }

    fn begin(&mut self) {
        for who in 0..self.processes.len() {
            self.tell(0, who, Input::Start);
        }
        self.schedule(TROUBLE_MS, Event::Healed);
        self.schedule(500, Event::Expire);
        for kind in [Kind::Crash, Kind::Freeze, Kind::Cut, Kind::Server, Kind::Store] {
            self.next_trouble(kind);
        }
    }

    fn schedule(&mut self, after: u64, event: Event) {
        // Numbered, so that what was scheduled first happens first.
        self.scheduled += 1;
        self.events.insert((self.now + after, self.scheduled), event);
    }

    fn tell(&mut self, after: u64, to: usize, input: Input) {
        let incarnation = self.processes[to].incarnation;
        self.schedule(after, Event::ToPeer { to, incarnation, input });
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::ToServer { from, incarnation, id, request } => {
                self.serve(from, incarnation, id, request);
            }
            Event::ToPeer { to, incarnation, input } => self.reach(to, incarnation, input),
            Event::Restart { who } => {
                self.trace.note(self.now, &format!("{} starts", self.processes[who].name));
                self.processes[who].up = true;
                self.tell(0, who, Input::Start);
            }
            Event::Trouble(kind) => {
                if !self.healed {
                    self.trouble(kind);
                    self.next_trouble(kind);
                }
            }
            Event::ServerBack => self.hand_out(),
            Event::Expire => {
                self.server.expire(self.now);
                self.hand_out();
                self.schedule(500, Event::Expire);
            }
            Event::Healed => self.heal(),
        }
    }

    /// Gives a peer what happens to it, and carries out what it does.
    fn reach(&mut self, to: usize, incarnation: u64, input: Input) {
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
                Command::Ask(id, request) => self.ask(to, id, request),
                Command::Later(after, token) => self.tell(after, to, Input::Timer(token)),
                Command::Say(says) => self.say(to, says),
                Command::Begin(record, known) => {
                    let subject = record.fact.subject.to_string();
                    let name = &self.processes[to].name;
                    self.trace.note(self.now, &format!("{name} begins {subject}"));
                    self.check.begins(&self.server.log, &record, known);
                }
                Command::Order(order, known) => {
                    self.check.orders(&self.server.log, &order, known);
                }
                Command::Die => {
                    self.kill(to);
                    return;
                }
            }
        }
    }

    fn ask(&mut self, from: usize, id: u64, request: Request) {
        let incarnation = self.processes[from].incarnation;
        for delay in self.delays(from) {
            let request = request.clone();
            self.schedule(delay, Event::ToServer { from, incarnation, id, request });
        }
    }

    fn say(&mut self, from: usize, says: Says) {
        let says = Rc::new(says);
        for to in 0..self.processes.len() {
            if to != from && self.connected(to) {
                for delay in self.delays(from) {
                    self.tell(delay, to, Input::Heard(says.clone()));
                }
            }
        }
    }

    /// When the copies of a message arrive: one, none, or two.
    fn delays(&mut self, peer: usize) -> Vec<u64> {
        if !self.connected(peer) || self.chance(self.faults.lost) {
            return Vec::new();
        }
        let copies = if self.chance(self.faults.doubled) { 2 } else { 1 };
        (0..copies)
            .map(|_| {
                let late = self.chance(self.faults.late);
                self.random.u64(1..if late { 8_000 } else { 20 })
            })
            .collect()
    }

    fn connected(&self, peer: usize) -> bool {
        self.now >= self.processes[peer].cut_until && self.now >= self.server_down_until
    }

    fn chance(&mut self, permille: u32) -> bool {
        permille > 0 && self.random.u32(0..1000) < permille
    }

    fn serve(&mut self, from: usize, incarnation: u64, id: u64, request: Request) {
        if !self.connected(from) {
            return;
        }
        let reply = match request {
            Request::Publish(fact) => Reply::Published(self.publish(from, &fact)),
            Request::Get(subject) => Reply::Record(self.server.get(&subject)),
            Request::LastBelow(prefix) => Reply::Record(self.server.last_below(&prefix)),
            Request::After(sequence) => Reply::Records(self.server.after(sequence, 64)),
            Request::Pull(kind) => {
                if self.processes[from].incarnation == incarnation {
                    self.server.pull(kind, from);
                    self.hand_out();
                }
                return;
            }
            Request::Settle(kind, sequence, how) => {
                self.server.settle(self.now, kind, sequence, how);
                self.hand_out();
                Reply::Settled
            }
            Request::Store => Reply::Stored(self.now >= self.store_down_until),
        };
        for delay in self.delays(from) {
            let input = Input::Reply(id, reply.clone());
            self.schedule(delay, Event::ToPeer { to: from, incarnation, input });
        }
    }

    fn publish(&mut self, from: usize, fact: &Fact) -> Published {
        let before = self.server.log.len();
        let published = self.server.publish(self.now, fact);
        let Some(record) = self.server.log.get(before).cloned() else { return published };
        let name = &self.processes[from].name;
        self.trace.note(self.now, &format!("{name} wrote {} {}", record.sequence, fact.subject));
        self.check.append(&record);
        self.hand_out();
        for to in 0..self.processes.len() {
            for delay in self.delays(to) {
                self.tell(delay, to, Input::Notify);
            }
        }
        published
    }

    fn hand_out(&mut self) {
        if self.now < self.server_down_until {
            return;
        }
        self.check.queues(&self.server);
        for (to, delivery) in self.server.hand_out(self.now) {
            for delay in self.delays(to) {
                self.tell(delay, to, Input::Deliver(delivery.clone()));
            }
        }
    }

    fn next_trouble(&mut self, kind: Kind) {
        let every = match kind {
            Kind::Crash => self.faults.crash_every,
            Kind::Freeze => self.faults.freeze_every,
            Kind::Cut => self.faults.cut_every,
            Kind::Server => self.faults.server_every,
            Kind::Store => self.faults.store_every,
        };
        if every > 0 {
            let after = self.random.u64(1..=2 * every);
            self.schedule(after, Event::Trouble(kind));
        }
    }

    fn trouble(&mut self, kind: Kind) {
        let who = self.random.usize(1..self.processes.len());
        let long = self.random.u64(200..20_000);
        let until = self.now + long;
        let name = self.processes[who].name.clone();
        match kind {
            Kind::Crash => self.kill(who),
            Kind::Freeze => {
                self.trace.note(self.now, &format!("{name} is stopped for {long} ms"));
                self.processes[who].frozen_until = until;
            }
            Kind::Cut => {
                self.trace.note(self.now, &format!("{name} is cut off for {long} ms"));
                self.processes[who].cut_until = until;
            }
            Kind::Server => {
                self.trace.note(self.now, &format!("the server is killed, back after {long} ms"));
                let random = &mut self.random;
                let forgets = self.faults.forgets;
                self.server.crash(self.now, || forgets && random.bool());
                self.server_down_until = until;
                if self.faults.clock_jumps {
                    self.server.skew_ms = self.random.u64(0..100_000);
                }
                self.schedule(long, Event::ServerBack);
            }
            Kind::Store => {
                self.trace.note(self.now, &format!("the store is away for {long} ms"));
                self.store_down_until = until;
            }
        }
    }

    fn kill(&mut self, who: usize) {
        let process = &mut self.processes[who];
        if !process.up {
            return;
        }
        self.kills += 1;
        process.up = false;
        process.incarnation += 1;
        process.frozen_until = 0;
        process.peer.reset(process.incarnation);
        let name = process.name.clone();
        self.trace.note(self.now, &format!("{name} is killed"));
        let after = self.random.u64(100..5_000);
        self.schedule(after, Event::Restart { who });
    }

    fn heal(&mut self) {
        self.trace.note(self.now, &"healed");
        self.healed = true;
        self.faults = Faults { poison: self.faults.poison, bug: self.faults.bug, ..Faults::none() };
        self.server_down_until = self.now;
        self.store_down_until = self.now;
        for who in 0..self.processes.len() {
            self.processes[who].cut_until = self.now;
            self.processes[who].frozen_until = self.now;
            self.tell(1, who, Input::Healed);
        }
        self.hand_out();
    }
}
