//! Kills and stops random processes of a fleet, in an order that a seed determines. The first kills
//! hit a process of each kind.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::process::{Signal, kill_process};

use crate::{Fleet, Member, Process, Random};

/// How long a process is stopped, in seconds: shorter and longer than the lease of 3 s.
const STOPPED_S: (f64, f64) = (0.2, 6.0);

/// A kind of process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProcessKind {
    Agent,
    Worker,
    Coordinator,
    NatsServer,
    Up,
}

const KIND_PERCENTAGES: [(ProcessKind, u64); 5] = [
    (ProcessKind::Agent, 35),
    (ProcessKind::Worker, 25),
    (ProcessKind::Coordinator, 20),
    (ProcessKind::NatsServer, 15),
    (ProcessKind::Up, 5),
];

impl ProcessKind {
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

/// A process that was killed or stopped.
#[derive(Debug, Clone)]
pub struct InjectedFault {
    pub kind: ProcessKind,
    /// The name in the logs: an agent's name, `coordinator`, or `coordinator-2`.
    pub name: String,
    /// Seconds since the Unix epoch.
    pub at_s: f64,
    /// Seconds until the process continued. `None` if it was killed.
    pub stopped_s: Option<f64>,
}

/// Injects faults into a fleet and records them.
pub struct FaultInjector {
    random: Random,
    /// The shortest and longest time between two faults, in seconds.
    gap_s: (f64, f64),
    next: Instant,
    /// The kinds of which no process was killed yet, the next one last.
    not_killed: Vec<ProcessKind>,
    stopped: Vec<(Instant, Process)>,
    pub faults: Vec<InjectedFault>,
}

impl FaultInjector {
    pub fn new(seed: u64, gap_s: (f64, f64)) -> Self {
        let mut random = Random::new(seed);
        let mut not_killed: Vec<_> =
            KIND_PERCENTAGES.map(|(kind, _)| (random.next_u64(), kind)).to_vec();
        not_killed.sort_unstable();
        let not_killed = not_killed.into_iter().map(|(_, kind)| kind).collect();
        let (stopped, faults) = (Vec::new(), Vec::new());
        Self { random, gap_s, next: Instant::now(), not_killed, stopped, faults }
    }

    pub fn kills(&self) -> usize {
        self.faults.iter().filter(|fault| fault.stopped_s.is_none()).count()
    }

    /// Resumes processes whose pause is over, and injects the next fault if it is due.
    pub fn inject_due(&mut self, fleet: &Fleet, second_coordinator: &Member) {
        self.resume(Instant::now());
        if Instant::now() < self.next {
            return;
        }
        let mut targets = targets(fleet.processes(), "coordinator");
        targets.extend(targets_of(second_coordinator));
        targets.retain(|(_, _, process)| self.stopped.iter().all(|(_, one)| one != process));
        let kind = self.not_killed.last().copied().unwrap_or_else(|| self.draw_kind());
        let found: Vec<_> = targets.iter().filter(|(one, ..)| *one == kind).collect();
        // No process of this kind runs now. Workers, for example, only run during a job.
        if found.is_empty() {
            return;
        }
        let (_, name, process) = *self.random.pick(&found);
        let (name, process) = (name.clone(), process.clone());
        let stopped_s = (self.not_killed.is_empty() && self.random.next_f64() < 0.33)
            .then(|| self.random.next_in_range(STOPPED_S.0, STOPPED_S.1));
        let at_s = unix_time_s();
        if send_signal(&process, if stopped_s.is_some() { Signal::STOP } else { Signal::KILL }) {
            let resume_at = stopped_s.map(|s| Instant::now() + Duration::from_secs_f64(s));
            self.stopped.extend(resume_at.map(|at| (at, process)));
            self.faults.push(InjectedFault { kind, name, at_s, stopped_s });
            self.not_killed.pop();
        }
        let gap = self.random.next_in_range(self.gap_s.0, self.gap_s.1);
        self.next = Instant::now() + Duration::from_secs_f64(gap);
    }

    /// Resumes all stopped processes.
    pub fn resume_all(&mut self) {
        let later = Instant::now() + Duration::from_secs(3600);
        self.resume(later);
    }

    fn resume(&mut self, now: Instant) {
        self.stopped.retain(|(resume_at, process)| {
            if *resume_at <= now {
                send_signal(process, Signal::CONT);
            }
            *resume_at > now
        });
    }

    fn draw_kind(&mut self) -> ProcessKind {
        let mut left = self.random.next_u64() % 100;
        for (kind, share) in KIND_PERCENTAGES {
            if left < share {
                return kind;
            }
            left -= share;
        }
        ProcessKind::Agent
    }

    /// Returns the numbers of kills and of stops of every kind of process.
    pub fn counts(&self) -> BTreeMap<&'static str, (usize, usize)> {
        let mut counts: BTreeMap<_, (usize, usize)> =
            KIND_PERCENTAGES.map(|(kind, _)| (kind.as_str(), (0, 0))).into();
        for fault in &self.faults {
            let count = counts.entry(fault.kind.as_str()).or_default();
            match fault.stopped_s {
                None => count.0 += 1,
                Some(_) => count.1 += 1,
            }
        }
        counts
    }
}

impl Drop for FaultInjector {
    fn drop(&mut self) {
        self.resume_all();
    }
}

/// Returns false if the process has ended already.
fn send_signal(process: &Process, signal: Signal) -> bool {
    process.is_alive() && process.pid().is_some_and(|pid| kill_process(pid, signal).is_ok())
}

type Target = (ProcessKind, String, Process);

fn targets_of(second_coordinator: &Member) -> Vec<Target> {
    targets(second_coordinator.processes(), &second_coordinator.name)
}

fn targets(processes: Vec<Process>, coordinator: &str) -> Vec<Target> {
    let kind = |process: Process| {
        let first = process.arguments.first()?;
        let word = process.arguments.get(1)?;
        let (kind, name) = match word.as_str() {
            "up" => (ProcessKind::Up, "up".to_owned()),
            "coordinator" => (ProcessKind::Coordinator, coordinator.to_owned()),
            "agent" => (ProcessKind::Agent, process.member_name()?.to_owned()),
            "worker" => (ProcessKind::Worker, process.arguments.get(2)?.clone()),
            _ if first.ends_with("nats-server") => {
                (ProcessKind::NatsServer, "nats-server".to_owned())
            }
            _ => return None,
        };
        Some((kind, name, process))
    };
    processes.into_iter().filter_map(kind).collect()
}

/// Returns the seconds since the Unix epoch.
pub fn unix_time_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
