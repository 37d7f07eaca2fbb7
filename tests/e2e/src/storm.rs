//! A storm over a fleet: its processes are killed and stopped, one after another, as a seed
//! has it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::process::{Signal, kill_process};

use crate::{Fleet, Member, Process, Random};

/// Seconds a process may be stopped: over the fleet's lease of 3 s and below.
const STOPPED_S: (f64, f64) = (0.2, 6.0);

/// A kind of process, and how many of a hundred strikes it gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Agent,
    Worker,
    Coordinator,
    NatsServer,
    Up,
}

const SHARES: [(Kind, u64); 5] = [
    (Kind::Agent, 35),
    (Kind::Worker, 25),
    (Kind::Coordinator, 20),
    (Kind::NatsServer, 15),
    (Kind::Up, 5),
];

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Worker => "worker",
            Self::Coordinator => "coordinator",
            Self::NatsServer => "nats-server",
            Self::Up => "up",
        }
    }
}

/// What was done to whom.
#[derive(Debug, Clone)]
pub struct Strike {
    pub kind: Kind,
    /// As in the logs: an agent's name, `coordinator`, `coordinator-2`.
    pub name: String,
    /// Seconds since 1970.
    pub at_s: f64,
    /// Killed, when it was not stopped for a while.
    pub stopped_s: Option<f64>,
}

/// The weather and what it has done.
pub struct Storm {
    random: Random,
    /// Seconds from one strike to the next, at least and at most.
    gap_s: (f64, f64),
    next: Instant,
    stopped: Vec<(Instant, Process)>,
    pub strikes: Vec<Strike>,
}

impl Storm {
    pub fn new(seed: u64, gap_s: (f64, f64)) -> Self {
        let (stopped, strikes) = (Vec::new(), Vec::new());
        Self { random: Random::new(seed), gap_s, next: Instant::now(), stopped, strikes }
    }

    pub fn kills(&self) -> usize {
        self.strikes.iter().filter(|strike| strike.stopped_s.is_none()).count()
    }

    /// Strikes if it is time to, and lets those go on that were stopped for long enough.
    pub fn blow(&mut self, fleet: &Fleet, second: &Member) {
        self.resume(Instant::now());
        if Instant::now() < self.next {
            return;
        }
        let mut targets = targets(fleet.processes(), "coordinator");
        targets.extend(targets_of(second));
        targets.retain(|(_, _, process)| self.stopped.iter().all(|(_, one)| one != process));
        let kind = self.kind();
        let found: Vec<_> = targets.iter().filter(|(one, ..)| *one == kind).collect();
        // None of this kind now: there is a worker only while there is work.
        if found.is_empty() {
            return;
        }
        let (_, name, process) = *self.random.pick(&found);
        let (name, process) = (name.clone(), process.clone());
        let stopped_s =
            (self.random.share() < 0.33).then(|| self.random.between(STOPPED_S.0, STOPPED_S.1));
        let at_s = now_s();
        if strike(&process, if stopped_s.is_some() { Signal::STOP } else { Signal::KILL }) {
            let until = stopped_s.map(|s| Instant::now() + Duration::from_secs_f64(s));
            self.stopped.extend(until.map(|until| (until, process)));
            self.strikes.push(Strike { kind, name, at_s, stopped_s });
        }
        let gap = self.random.between(self.gap_s.0, self.gap_s.1);
        self.next = Instant::now() + Duration::from_secs_f64(gap);
    }

    /// Lets everybody go on at once.
    pub fn calm(&mut self) {
        let later = Instant::now() + Duration::from_secs(3600);
        self.resume(later);
    }

    fn resume(&mut self, now: Instant) {
        self.stopped.retain(|(until, process)| {
            if *until <= now {
                strike(process, Signal::CONT);
            }
            *until > now
        });
    }

    fn kind(&mut self) -> Kind {
        let mut left = self.random.draw() % 100;
        for (kind, share) in SHARES {
            if left < share {
                return kind;
            }
            left -= share;
        }
        Kind::Agent
    }

    /// Kills and stops by kind of process.
    pub fn counts(&self) -> BTreeMap<&'static str, (usize, usize)> {
        let mut counts: BTreeMap<_, (usize, usize)> = BTreeMap::new();
        for strike in &self.strikes {
            let count = counts.entry(strike.kind.as_str()).or_default();
            match strike.stopped_s {
                None => count.0 += 1,
                Some(_) => count.1 += 1,
            }
        }
        counts
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        self.calm();
    }
}

/// False when it had just ended by itself.
fn strike(process: &Process, signal: Signal) -> bool {
    process.is_alive() && process.pid().is_some_and(|pid| kill_process(pid, signal).is_ok())
}

type Target = (Kind, String, Process);

fn targets_of(second: &Member) -> Vec<Target> {
    targets(second.processes(), &second.name)
}

fn targets(family: Vec<Process>, coordinator: &str) -> Vec<Target> {
    let kind = |process: Process| {
        let first = process.arguments.first()?;
        let word = process.arguments.get(1)?;
        let (kind, name) = match word.as_str() {
            "up" => (Kind::Up, "up".to_owned()),
            "coordinator" => (Kind::Coordinator, coordinator.to_owned()),
            "agent" => (Kind::Agent, process.member()?.to_owned()),
            "worker" => (Kind::Worker, process.arguments.get(2)?.clone()),
            _ if first.ends_with("nats-server") => (Kind::NatsServer, "nats-server".to_owned()),
            _ => return None,
        };
        Some((kind, name, process))
    };
    family.into_iter().filter_map(kind).collect()
}

pub(crate) fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
