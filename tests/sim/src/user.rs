//! The user who submits the run, and pauses, resumes and cancels it.

use wire::{Fact, FactBody, FactKey, RunId, Subject, v1};

use crate::{
    faults::Faults,
    task,
    world::{Command, Input, Peer, Reply, Request},
};

pub(crate) const RUN: &str = "r1";

const REPLY_MS: u64 = 1_500;
const RETRY: u64 = 1;
const CHOOSE_ACTION: u64 = 2;

pub(crate) struct User {
    spec: v1::Spec,
    pause_every: u64,
    cancel: bool,
    /// The pending action.
    pending: Option<Action>,
    request_id: u64,
    paused: bool,
    healed: bool,
}

#[derive(Debug, Clone, Copy)]
enum Action {
    Submit,
    /// Reads the number of the last control, then writes the next.
    ReadNumber(v1::control::Action),
    Write(v1::control::Action, u64),
}

impl User {
    pub(crate) fn new(seed: u64, faults: &Faults) -> Self {
        Self {
            spec: task::run_spec(RUN, seed),
            pause_every: faults.pause_every,
            cancel: faults.cancel,
            pending: None,
            request_id: 0,
            paused: false,
            healed: false,
        }
    }

    fn send_pending(&mut self) -> Vec<Command> {
        let fact = |place, body| Fact { subject: Subject::new(&run(), place), body };
        let request = match &self.pending {
            None => return Vec::new(),
            Some(Action::Submit) => {
                Request::Publish(Box::new(fact(FactKey::Spec, FactBody::Spec(self.spec.clone()))))
            }
            Some(Action::ReadNumber(_)) => {
                Request::LastWithPrefix(format!("flotilla.{RUN}.control."))
            }
            Some(Action::Write(action, number)) => {
                let control = v1::Control { action: (*action).into(), reason: String::new() };
                let place = FactKey::Control { number: *number };
                Request::Publish(Box::new(fact(place, FactBody::Control(control))))
            }
        };
        self.request_id += 1;
        vec![Command::Send(self.request_id, request), Command::SetTimer(REPLY_MS, RETRY)]
    }

    fn handle_reply(&mut self, reply: Reply) -> Vec<Command> {
        self.pending = match (self.pending, reply) {
            (Some(Action::ReadNumber(action)), Reply::Record(last)) => {
                let number = last.map_or(0, |record| match record.fact.subject.key {
                    FactKey::Control { number } => number,
                    _ => 0,
                });
                Some(Action::Write(action, number + 1))
            }
            (Some(Action::Write(action, _)), Reply::Published(published)) if !published.ours => {
                Some(Action::ReadNumber(action))
            }
            (Some(Action::Submit | Action::Write(..)), Reply::Published(_)) => None,
            (pending, _) => pending,
        };
        self.send_pending()
    }

    fn choose_action(&mut self, random: &mut fastrand::Rng) -> Vec<Command> {
        use v1::control::Action as Control;
        if self.pending.is_none() {
            self.pending = if self.paused {
                self.paused = false;
                Some(Action::ReadNumber(Control::Resume))
            } else if self.healed || self.pause_every == 0 {
                (self.healed && self.cancel).then_some(Action::ReadNumber(Control::Cancel))
            } else {
                self.paused = true;
                Some(Action::ReadNumber(Control::Pause))
            };
            self.cancel &= !self.healed;
        }
        let mut commands = self.send_pending();
        if !self.healed || self.pending.is_some() || self.paused {
            let after = random.u64(1..=2 * self.pause_every.max(1_000));
            commands.push(Command::SetTimer(after, CHOOSE_ACTION));
        }
        commands
    }
}

pub(crate) fn run() -> RunId {
    RunId::new(RUN).expect("a legal name")
}

impl Peer for User {
    fn handle(&mut self, _now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command> {
        match input {
            Input::Start => {
                self.pending = Some(Action::Submit);
                let mut commands = self.send_pending();
                commands.push(Command::SetTimer(2_000, CHOOSE_ACTION));
                commands
            }
            Input::Reply(id, reply) if id == self.request_id => self.handle_reply(reply),
            Input::Timer(RETRY) => self.send_pending(),
            Input::Timer(CHOOSE_ACTION) => self.choose_action(random),
            Input::Healed => {
                self.healed = true;
                vec![Command::SetTimer(1, CHOOSE_ACTION)]
            }
            Input::Reply(..)
            | Input::Timer(_)
            | Input::Notify
            | Input::Status(_)
            | Input::Deliver(_) => Vec::new(),
        }
    }

    fn reset(&mut self, _incarnation: u64) {}
}
