//! Who submits the run, and pauses, resumes and cancels it.

use wire::{Fact, FactBody, FactKey, RunId, Subject, v1};

use crate::{
    faults::Faults,
    task,
    world::{Command, Input, Peer, Reply, Request},
};

pub(crate) const RUN: &str = "r1";

const ANSWER_MS: u64 = 1_500;
const RETRY: u64 = 1;
const STEER: u64 = 2;

pub(crate) struct User {
    spec: v1::Spec,
    pause_every: u64,
    cancel: bool,
    /// What is being asked for, until it is known to be done.
    wish: Option<Wish>,
    asked: u64,
    paused: bool,
    healed: bool,
}

#[derive(Debug, Clone, Copy)]
enum Wish {
    Submit,
    /// Look which number the next control has, then write it.
    Look(v1::control::Action),
    Write(v1::control::Action, u64),
}

impl User {
    pub(crate) fn new(seed: u64, faults: &Faults) -> Self {
        Self {
            spec: task::spec(RUN, seed),
            pause_every: faults.pause_every,
            cancel: faults.cancel,
            wish: None,
            asked: 0,
            paused: false,
            healed: false,
        }
    }

    fn ask(&mut self) -> Vec<Command> {
        let fact = |place, body| Fact { subject: Subject::new(&run(), place), body };
        let request = match &self.wish {
            None => return Vec::new(),
            Some(Wish::Submit) => {
                Request::Publish(Box::new(fact(FactKey::Spec, FactBody::Spec(self.spec.clone()))))
            }
            Some(Wish::Look(_)) => Request::LastBelow(format!("flotilla.{RUN}.control.")),
            Some(Wish::Write(action, number)) => {
                let control = v1::Control { action: (*action).into(), reason: String::new() };
                let place = FactKey::Control { number: *number };
                Request::Publish(Box::new(fact(place, FactBody::Control(control))))
            }
        };
        self.asked += 1;
        vec![Command::Ask(self.asked, request), Command::Later(ANSWER_MS, RETRY)]
    }

    fn answered(&mut self, reply: Reply) -> Vec<Command> {
        self.wish = match (self.wish, reply) {
            (Some(Wish::Look(action)), Reply::Record(last)) => {
                let number = last.map_or(0, |record| match record.fact.subject.key {
                    FactKey::Control { number } => number,
                    _ => 0,
                });
                Some(Wish::Write(action, number + 1))
            }
            (Some(Wish::Write(action, _)), Reply::Published(published)) if !published.ours => {
                Some(Wish::Look(action))
            }
            (Some(Wish::Submit | Wish::Write(..)), Reply::Published(_)) => None,
            (wish, _) => wish,
        };
        self.ask()
    }

    /// What the user wants next.
    fn steer(&mut self, random: &mut fastrand::Rng) -> Vec<Command> {
        use v1::control::Action;
        if self.wish.is_none() {
            self.wish = if self.paused {
                self.paused = false;
                Some(Wish::Look(Action::Resume))
            } else if self.healed || self.pause_every == 0 {
                (self.healed && self.cancel).then_some(Wish::Look(Action::Cancel))
            } else {
                self.paused = true;
                Some(Wish::Look(Action::Pause))
            };
            self.cancel &= !self.healed;
        }
        let mut commands = self.ask();
        if !self.healed || self.wish.is_some() || self.paused {
            let after = random.u64(1..=2 * self.pause_every.max(1_000));
            commands.push(Command::Later(after, STEER));
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
                self.wish = Some(Wish::Submit);
                let mut commands = self.ask();
                commands.push(Command::Later(2_000, STEER));
                commands
            }
            Input::Reply(id, reply) if id == self.asked => self.answered(reply),
            Input::Timer(RETRY) => self.ask(),
            Input::Timer(STEER) => self.steer(random),
            Input::Healed => {
                self.healed = true;
                vec![Command::Later(1, STEER)]
            }
            Input::Reply(..)
            | Input::Timer(_)
            | Input::Notify
            | Input::Heard(_)
            | Input::Deliver(_) => Vec::new(),
        }
    }

    fn reset(&mut self, _incarnation: u64) {}
}
