//! The user of a run, who submits it, and pauses, resumes and cancels it. The user of a watched run
//! is its watcher, which writes the spec and then each checkpoint.

use std::rc::Rc;

use wire::{Fact, FactBody, FactKey, RunId, Subject, v1};

use crate::{
    faults::Faults,
    peer::{Command, Input, Peer, Reply, Request},
    specs,
};

const REPLY_MS: u64 = 1_500;
/// The time until the run is submitted, or the next checkpoint of a watched run is written.
const WAIT_MS: u64 = 15_000;

const RETRY: u64 = 1;
const CHOOSE_ACTION: u64 = 2;
const SUBMIT: u64 = 3;

pub(crate) struct User {
    run: RunId,
    /// The facts of the submission, and the number of those in the log.
    facts: Vec<Rc<Fact>>,
    submitted: usize,
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
    pub(crate) fn new(spec: &v1::Spec, faults: &Faults) -> Self {
        let is_watched = matches!(spec.kind, Some(v1::spec::Kind::Watched(_)));
        Self {
            run: RunId::new(spec.run.as_str()).expect("a legal name"),
            facts: specs::submitted_facts(spec).into_iter().map(Rc::new).collect(),
            submitted: 0,
            pause_every: if is_watched { 0 } else { faults.pause_every },
            cancel: faults.cancel && !is_watched,
            pending: None,
            request_id: 0,
            paused: false,
            healed: false,
        }
    }

    fn send_pending(&mut self) -> Vec<Command> {
        let request = match &self.pending {
            None => return Vec::new(),
            Some(Action::Submit) => match self.facts.get(self.submitted) {
                Some(fact) => Request::Publish(fact.clone()),
                None => return Vec::new(),
            },
            Some(Action::ReadNumber(_)) => {
                Request::LastWithPrefix(format!("flotilla.{}.control.", self.run))
            }
            Some(Action::Write(action, number)) => {
                let control = v1::Control { action: (*action).into(), ..Default::default() };
                let subject = Subject::new(&self.run, FactKey::Control { number: *number });
                Request::Publish(Rc::new(Fact { subject, body: FactBody::Control(control) }))
            }
        };
        self.request_id += 1;
        vec![Command::Send(self.request_id, request), Command::SetTimer(REPLY_MS, RETRY)]
    }

    fn handle_reply(&mut self, random: &mut fastrand::Rng, reply: Reply) -> Vec<Command> {
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
            (Some(Action::Submit), Reply::Published(_)) => {
                self.submitted += 1;
                self.pending = None;
                let next = if self.submitted < self.facts.len() { SUBMIT } else { CHOOSE_ACTION };
                return vec![Command::SetTimer(random.u64(1..WAIT_MS), next)];
            }
            (Some(Action::Write(..)), Reply::Published(_)) => None,
            // The timer repeats the request.
            (pending, _) => {
                self.pending = pending;
                return Vec::new();
            }
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
                let cancels = self.healed && std::mem::take(&mut self.cancel);
                cancels.then_some(Action::ReadNumber(Control::Cancel))
            } else {
                self.paused = true;
                Some(Action::ReadNumber(Control::Pause))
            };
        }
        let mut commands = self.send_pending();
        if !self.healed || self.pending.is_some() || self.paused {
            let after = random.u64(1..=2 * self.pause_every.max(1_000));
            commands.push(Command::SetTimer(after, CHOOSE_ACTION));
        }
        commands
    }
}

impl Peer for User {
    fn handle(&mut self, _now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command> {
        match input {
            Input::Start => {
                let first = self.run.as_str() == specs::FIRST_RUN;
                let after = if first { 1 } else { random.u64(1..WAIT_MS) };
                vec![Command::SetTimer(after, SUBMIT)]
            }
            Input::Timer(SUBMIT) => {
                self.pending = Some(Action::Submit);
                self.send_pending()
            }
            Input::Reply(id, reply) if id == self.request_id => self.handle_reply(random, reply),
            Input::Timer(RETRY) => self.send_pending(),
            Input::Timer(CHOOSE_ACTION) => self.choose_action(random),
            Input::Healed => {
                self.healed = true;
                // A log that lost facts may have lost the run, which is then submitted again.
                if self.facts.len() > 1 {
                    (self.submitted, self.pending) = (0, None);
                    return vec![Command::SetTimer(1, SUBMIT)];
                }
                let submission = Request::Publish(self.facts[0].clone());
                vec![Command::Send(0, submission), Command::SetTimer(1, CHOOSE_ACTION)]
            }
            Input::Reply(..)
            | Input::Timer(_)
            | Input::Notify
            | Input::Status(_)
            | Input::Deliver(_) => Vec::new(),
        }
    }

    /// Only watchers are killed. They write their facts again, of which each is accepted once.
    fn reset(&mut self, _incarnation: u64) {
        (self.submitted, self.pending) = (0, None);
    }
}
