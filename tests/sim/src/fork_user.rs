//! A user who forks the first run after a cycle, without other settings.

use std::rc::Rc;

use cycle::fork_after;
use wire::{Fact, FactBody, FactKey, Record, RunId, Subject, v1};

use crate::{
    peer::{Command, Input, Peer, Reply, Request},
    pending::PendingRequest,
    specs,
};

/// The cycle that the fork continues after.
pub(crate) const CYCLE: u32 = 1;

const LOOK_MS: u64 = 2_000;
/// The longest time between the cycle's end and the fork: less than the simulation lasts after the
/// end of all runs.
const WAIT_MS: u64 = 16_000;
const LOOK: u64 = 0;

pub(crate) struct ForkUser {
    /// Looks that are still to be made after the cycle's end.
    looks_left: Option<u64>,
    fork: Option<Rc<Fact>>,
    is_written: bool,
    pending: PendingRequest,
}

impl ForkUser {
    pub(crate) fn new() -> Self {
        let pending = PendingRequest::new(0);
        Self { looks_left: None, fork: None, is_written: false, pending }
    }

    fn look(&mut self) -> Vec<Command> {
        if self.is_written {
            return Vec::new();
        }
        let mut commands = vec![Command::SetTimer(LOOK_MS, LOOK)];
        if self.pending.is_idle() {
            let request = match &self.fork {
                Some(fork) => Request::Publish(fork.clone()),
                None => Request::ReadRun(RunId::new(specs::FIRST_RUN).expect("a legal name")),
            };
            commands.extend(self.pending.send(request));
        }
        commands
    }

    fn handle_reply(&mut self, random: &mut fastrand::Rng, reply: Reply) -> Vec<Command> {
        self.is_written |= matches!(reply, Reply::Published(_));
        let (Reply::Records(records, _), None) = (reply, &self.fork) else { return Vec::new() };
        let Some(spec) = build_fork(&records) else { return Vec::new() };
        let left = self.looks_left.get_or_insert_with(|| random.u64(0..WAIT_MS / LOOK_MS));
        if *left > 0 {
            *left -= 1;
            return Vec::new();
        }
        let run = RunId::new(specs::FORKED_RUN).expect("a legal name");
        let fact = Fact { subject: Subject::new(&run, FactKey::Spec), body: FactBody::Spec(spec) };
        let fact = Rc::new(fact);
        self.fork = Some(fact.clone());
        self.pending.send(Request::Publish(fact))
    }
}

/// Returns the spec of a fork; `None` if the cycle is not done.
fn build_fork(records: &[Rc<Record>]) -> Option<v1::Spec> {
    // Those that the shipped fork reads.
    let is_read = |record: &&Rc<Record>| {
        let key = &record.fact.subject.key;
        matches!(
            key,
            FactKey::Spec
                | FactKey::Selection { .. }
                | FactKey::TrainOrder { .. }
                | FactKey::TrainPartOrder { .. }
                | FactKey::Checkpoint { .. }
                | FactKey::Eval { .. }
                | FactKey::PassRates { .. }
                | FactKey::Plan { .. }
                | FactKey::CycleDone { .. }
                | FactKey::Archived { .. }
        )
    };
    let spec = records.iter().find_map(|record| match &record.fact.body {
        FactBody::Spec(spec) => Some(spec.clone()),
        _ => None,
    })?;
    let fork = Some(fork_after(records.iter().filter(is_read).map(|record| &**record), CYCLE)?);
    Some(v1::Spec { run: specs::FORKED_RUN.into(), fork, promotion: None, ..spec })
}

impl Peer for ForkUser {
    fn handle(&mut self, _now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command> {
        match input {
            Input::Start => vec![Command::SetTimer(LOOK_MS, LOOK)],
            Input::Timer(LOOK) => self.look(),
            Input::Timer(id) => self.pending.send_again(id),
            Input::Reply(id, reply) if self.pending.accept_reply(id) => {
                self.handle_reply(random, reply)
            }
            // A log that lost facts may have lost the run, which is then submitted again.
            Input::Healed => match self.fork.clone() {
                Some(fork) => self.pending.send(Request::Publish(fork)),
                None => Vec::new(),
            },
            Input::Reply(..) | Input::Notify | Input::Status(_) | Input::Deliver(_) => Vec::new(),
        }
    }

    /// Users are never killed.
    fn reset(&mut self, incarnation: u64) {
        *self = Self { pending: PendingRequest::new(incarnation), ..Self::new() };
    }
}
