//! A simulated keeper, the task of a coordinator that moves channels and starts runs from feedback.
//! Like `services/control` it follows the log, decides by what it knows, reads the newest facts and
//! then writes. Several may act at the same time.

use std::{collections::BTreeSet, rc::Rc};

use cycle::{
    ChannelSet, DuePromotion, NumberedMove, Run, move_to_model, promotion_move, require_move,
};
use wire::{Fact, FactBody, FactKey, Record, RunId, Subject, v1};

use crate::{
    channel_model::{self, channel},
    peer::{Command, Input, Peer, Reply, Request},
    pending::PendingRequest,
    specs,
};

const LOOK_MS: u64 = 1_000;
/// The longest time that it takes to find the best checkpoint of a run.
const FIND_MS: u64 = 2_000;

const TICK: u64 = 0;
const FOUND: u64 = 1;

pub(crate) struct Keeper {
    number: usize,
    death_permille: u32,
    channels: ChannelSet,
    known_sequence: u64,
    /// Runs that were compared with the channel's model.
    decided: BTreeSet<RunId>,
    leads: bool,
    task: Option<Task>,
    pending: PendingRequest,
}

/// What the reply to the pending request is for.
enum Task {
    Follow,
    /// Reads the run that may move the channel, then the channel, then writes the move.
    ReadRun(DuePromotion),
    FindBest(DuePromotion, Box<Run>),
    Promote(DuePromotion, Box<Run>),
    ReadFeedback,
    /// Looks for a free number of the run's name, then at the newest facts, then writes the run.
    FindNumber(LearningRun),
    CheckFeedback(LearningRun),
    WriteRun(LearningRun),
    /// Reads the channel, whose move of this number users rate lower, then returns it.
    ReadMoves(u64),
    /// Writes a move, which may be the promotion of a run.
    WriteMove(Option<RunId>),
}

#[derive(Clone, Copy)]
struct LearningRun {
    number: u32,
    feedback: u64,
    learning: u64,
}

impl Keeper {
    pub(crate) fn new(number: usize, death_permille: u32) -> Self {
        Self {
            number,
            death_permille,
            channels: ChannelSet::default(),
            known_sequence: 0,
            decided: BTreeSet::new(),
            leads: true,
            task: None,
            pending: PendingRequest::new(0),
        }
    }

    fn begin(&mut self, task: Task, request: Request) -> Vec<Command> {
        self.task = Some(task);
        self.pending.send(request)
    }

    fn look(&mut self) -> Vec<Command> {
        if self.task.is_none() {
            self.begin(Task::Follow, Request::ReadChannels { after: self.known_sequence })
        } else {
            Vec::new()
        }
    }

    /// Decides on the first due promotion; without any, on the feedback.
    fn decide(&mut self) -> Vec<Command> {
        if !self.leads {
            return Vec::new();
        }
        if let Some(due) = self.channels.due_promotions(&self.decided).into_iter().next() {
            let request = Request::ReadRun(due.run.clone());
            return self.begin(Task::ReadRun(due), request);
        }
        match self.channels.last_move(&channel()) {
            Some(last) if last.fact.roll_back || last.fact.learning.is_some() => {
                self.begin(Task::ReadFeedback, Request::ReadFeedback)
            }
            _ => Vec::new(),
        }
    }

    fn promote(&mut self, due: &DuePromotion, run: &Run, newest: &ChannelSet) -> Vec<Command> {
        let last = newest.last_move(&due.channel);
        let last = last.map(|last| (last.number, &last.fact));
        let Ok(before) = require_move(last, due.move_number) else { return Vec::new() };
        let Some((model, evidence)) = channel_model::compare_best(before, run) else {
            self.decided.insert(due.run.clone());
            return Vec::new();
        };
        let moved = promotion_move(before, &due.run, model, evidence);
        self.write_move(newest, moved, Some(due.run.clone()))
    }

    /// Writes a move under the next free number, as the facts that were read tell it.
    fn write_move(
        &mut self,
        newest: &ChannelSet,
        named: v1::ChannelMove,
        promoted: Option<RunId>,
    ) -> Vec<Command> {
        let number = newest.last_move(&channel()).map_or(1, |last| last.number + 1);
        let request = Request::Publish(Rc::new(move_fact(number, named)));
        self.begin(Task::WriteMove(promoted), request)
    }

    /// Returns the channel if users rate its model lower than the one before, or starts a run if
    /// there is enough new feedback.
    fn use_feedback(&mut self, positions: &[u64]) -> Vec<Command> {
        let Some(last) = self.channels.last_move(&channel()) else { return Vec::new() };
        let NumberedMove { number, fact: named, .. } = last;
        let target = self.channels.roll_back_target(&channel());
        if named.roll_back
            && target.is_some_and(|target| channel_model::is_better(&target.fact, named))
        {
            let number = *number;
            return self.begin(Task::ReadMoves(number), Request::ReadChannels { after: 0 });
        }
        let learned = self.channels.learned_feedback(&channel());
        let (Some(learning), Some(feedback)) = (&named.learning, positions.last()) else {
            return Vec::new();
        };
        if learned.count_due(positions, learning.at_least).is_none() {
            return Vec::new();
        }
        self.find_number(LearningRun { number: 1, feedback: *feedback, learning: *number })
    }

    fn find_number(&mut self, run: LearningRun) -> Vec<Command> {
        let subject = Subject::new(&learning_run_id(run.number), FactKey::Spec).to_string();
        self.begin(Task::FindNumber(run), Request::Get(subject))
    }

    fn roll_back(&mut self, number: u64, newest: &ChannelSet) -> Vec<Command> {
        let last = newest.last_move(&channel()).map(|last| (last.number, &last.fact));
        let target = newest.roll_back_target(&channel());
        let (Ok(before), Some(target)) = (require_move(last, number), target) else {
            return Vec::new();
        };
        let (run, cycle) = (before.run.clone(), before.cycle);
        let evidence = Some(channel_model::find_evidence(run, cycle, true));
        let moved = v1::ChannelMove { evidence, ..move_to_model(before, target.fact.clone()) };
        self.write_move(newest, moved, None)
    }

    fn handle_reply(&mut self, random: &mut fastrand::Rng, reply: Reply) -> Vec<Command> {
        let Some(task) = self.task.take() else { return Vec::new() };
        match (task, reply) {
            (Task::Follow, Reply::Records(records, end)) => {
                if end < self.known_sequence {
                    // The log was lost in part, so the process ends and is started again.
                    return vec![Command::Die];
                }
                self.known_sequence = end;
                records.iter().for_each(|record| self.channels.fold_record(record));
                self.decide()
            }
            (Task::ReadRun(due), Reply::Records(records, _)) => match fold_run(&records) {
                Some(run) => {
                    self.task = Some(Task::FindBest(due, Box::new(run)));
                    vec![Command::SetTimer(random.u64(1..FIND_MS), FOUND)]
                }
                None => Vec::new(),
            },
            (Task::Promote(due, run), Reply::Records(records, _)) => {
                self.promote(&due, &run, &fold_channels(&records))
            }
            (Task::ReadFeedback, Reply::Feedback(positions)) => self.use_feedback(&positions),
            (Task::FindNumber(run), Reply::Record(Some(_))) => {
                self.find_number(LearningRun { number: run.number + 1, ..run })
            }
            (Task::FindNumber(run), Reply::Record(None)) => {
                self.begin(Task::CheckFeedback(run), Request::ReadChannels { after: 0 })
            }
            (Task::CheckFeedback(run), Reply::Records(records, _)) => {
                let learned = fold_channels(&records).learned_feedback(&channel());
                if !learned.allows_run(run.feedback) {
                    return Vec::new();
                }
                self.begin(Task::WriteRun(run), Request::Publish(Rc::new(learning_fact(run))))
            }
            (Task::WriteRun(run), Reply::Published(published)) if !published.ours => {
                self.find_number(LearningRun { number: run.number + 1, ..run })
            }
            (Task::ReadMoves(number), Reply::Records(records, _)) => {
                self.roll_back(number, &fold_channels(&records))
            }
            (Task::WriteMove(promoted), Reply::Published(published)) if published.ours => {
                self.decided.extend(promoted);
                Vec::new()
            }
            // It is written, another move was first, or the log is full: the next look decides again.
            _ => Vec::new(),
        }
    }
}

/// Returns the fact of a move of the channel.
pub(crate) fn move_fact(number: u64, named: v1::ChannelMove) -> Fact {
    let subject = Subject::new(&channel(), FactKey::Channel { number });
    Fact { subject, body: FactBody::Channel(named) }
}

pub(crate) fn fold_channels(records: &[Rc<Record>]) -> ChannelSet {
    let mut channels = ChannelSet::default();
    records.iter().for_each(|record| channels.fold_record(record));
    channels
}

pub(crate) fn fold_run(records: &[Rc<Record>]) -> Option<Run> {
    let mut records = records.iter();
    let mut run = records.by_ref().find_map(|record| Run::start(record))?;
    records.for_each(|record| run.fold_record(record));
    Some(run)
}

fn learning_run_id(number: u32) -> RunId {
    RunId::new(format!("{}-{number}", specs::LEARNING_RUN)).expect("a legal name")
}

fn learning_fact(run: LearningRun) -> Fact {
    let LearningRun { number, feedback, learning } = run;
    let id = learning_run_id(number);
    let spec = specs::learning_spec(id.as_str(), feedback, learning);
    Fact { subject: Subject::new(&id, FactKey::Spec), body: FactBody::Spec(spec) }
}

impl Peer for Keeper {
    fn handle(&mut self, _now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command> {
        if random.u32(0..1000) < self.death_permille {
            return vec![Command::Die];
        }
        match input {
            Input::Start => vec![Command::SetTimer(1, TICK)],
            Input::Timer(TICK) => {
                // Leadership changes at random, but keeper 0 always leads.
                self.leads = self.number == 0 || random.f64() < 0.7;
                let mut commands = vec![Command::SetTimer(LOOK_MS, TICK)];
                commands.extend(self.look());
                commands
            }
            Input::Timer(FOUND) => match self.task.take() {
                Some(Task::FindBest(due, run)) => {
                    self.begin(Task::Promote(due, run), Request::ReadChannels { after: 0 })
                }
                other => {
                    self.task = other;
                    Vec::new()
                }
            },
            Input::Timer(id) => self.pending.send_again(id),
            Input::Reply(id, reply) if self.pending.accept_reply(id) => {
                self.handle_reply(random, reply)
            }
            // It dies after that phase as well: what it decides must not depend on its memory.
            Input::Healed
            | Input::Reply(..)
            | Input::Notify
            | Input::Status(_)
            | Input::Deliver(_) => Vec::new(),
        }
    }

    fn reset(&mut self, incarnation: u64) {
        let pending = PendingRequest::new(incarnation);
        *self = Self { pending, ..Self::new(self.number, self.death_permille) };
    }
}
