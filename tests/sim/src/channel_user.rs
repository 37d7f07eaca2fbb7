//! The user of the channel, who serves and moves it: to models, to better ones, back, and who
//! forgets it and lets runs learn from feedback.

use std::rc::Rc;

use cycle::{
    ChannelSet, Run, best_checkpoint, move_to_checkpoint, move_to_model, newest_checkpoint,
    unchanged_move,
};
use wire::{RunId, v1};

use v1::channel_move::{Learning, Serving};

use crate::{
    channel_model::{self, AT_LEAST, channel},
    keeper::{fold_channels, fold_run, move_fact},
    peer::{Command, Input, Peer, Reply, Request},
    pending::PendingRequest,
    specs,
};

/// The longest time between two changes.
const WAIT_MS: u64 = 8_000;
/// The changes after the end of the first run, once the phase with faults is over: fewer than fit in
/// the time that the simulation lasts after the end of all runs.
const LAST_CHANGES: u32 = 4;
const CHOOSE: u64 = 0;

/// The reason of a move back to the model before.
pub(crate) const ROLL_BACK: &str = "roll back";

#[derive(Debug, Clone, Copy)]
enum Change {
    NameBase,
    NameBest,
    NameNewest,
    NameBetter,
    RollBack,
    Forget,
    Serve,
    Learn,
    StopLearning,
}

const CHANGES: [Change; 12] = [
    Change::NameBase,
    Change::NameBest,
    Change::NameNewest,
    Change::NameNewest,
    Change::NameBetter,
    Change::NameBetter,
    Change::RollBack,
    Change::RollBack,
    Change::Forget,
    Change::Serve,
    Change::Learn,
    Change::StopLearning,
];

pub(crate) struct ChannelUser {
    learns: bool,
    healed: bool,
    changes_left: u32,
    change: Change,
    run: Option<Run>,
    pending: PendingRequest,
}

impl ChannelUser {
    /// Creates a user who may let runs learn from feedback.
    pub(crate) fn new(learns: bool) -> Self {
        let (change, pending) = (Change::NameBase, PendingRequest::new(0));
        let changes_left = LAST_CHANGES;
        Self { learns, healed: false, changes_left, change, run: None, pending }
    }

    fn choose(&mut self, random: &mut fastrand::Rng) -> Vec<Command> {
        if self.changes_left == 0 {
            return Vec::new();
        }
        let mut commands = vec![Command::SetTimer(random.u64(1..WAIT_MS), CHOOSE)];
        if self.pending.is_idle() {
            self.change = random.choice(CHANGES).expect("there are some");
            let run = RunId::new(specs::FIRST_RUN).expect("a legal name");
            commands.extend(self.pending.send(Request::ReadRun(run)));
        }
        commands
    }

    fn handle_reply(&mut self, reply: Reply) -> Vec<Command> {
        match (self.run.take(), reply) {
            (None, Reply::Records(records, _)) => match fold_run(&records) {
                Some(run) => {
                    self.changes_left -= u32::from(self.healed && run.done.is_some());
                    self.run = Some(run);
                    self.pending.send(Request::ReadChannels { after: 0 })
                }
                None => Vec::new(),
            },
            (Some(run), Reply::Records(records, _)) => {
                let channels = fold_channels(&records);
                let number = channels.last_move(&channel()).map_or(1, |last| last.number + 1);
                let Some(next) = self.next_move(&channels, &run) else { return Vec::new() };
                self.run = Some(run);
                self.pending.send(Request::Publish(Rc::new(move_fact(number, next))))
            }
            // Another move came first.
            (Some(run), Reply::Published(published)) if !published.ours => {
                self.run = Some(run);
                self.pending.send(Request::ReadChannels { after: 0 })
            }
            _ => Vec::new(),
        }
    }

    fn next_move(&self, channels: &ChannelSet, run: &Run) -> Option<v1::ChannelMove> {
        let last = channels.last_move(&channel()).map(|last| &last.fact);
        let before = last.cloned().unwrap_or_default();
        let kept = || before.names_model().then(|| unchanged_move(&before));
        let named = |model: Option<v1::ChannelMove>| Some(move_to_model(&before, model?));
        match self.change {
            Change::NameBase => {
                let base = run.spec.base.clone().and_then(|base| base.tree);
                named(Some(v1::ChannelMove { base, ..Default::default() }))
            }
            Change::NameBest => named(best_checkpoint(run).map(move_to_checkpoint)),
            Change::NameNewest => named(newest_checkpoint(run).map(move_to_checkpoint)),
            Change::NameBetter => {
                before.names_model().then_some(())?;
                let (model, evidence) = channel_model::compare_best(&before, run)?;
                let evidence = Some(evidence);
                Some(v1::ChannelMove { evidence, ..move_to_model(&before, model) })
            }
            Change::RollBack => {
                let target = channels.roll_back_target(&channel())?.fact.clone();
                Some(v1::ChannelMove { reason: ROLL_BACK.into(), ..move_to_model(&before, target) })
            }
            Change::Forget => before.names_model().then(v1::ChannelMove::default),
            Change::Serve => {
                let serving = Some(Serving { pool: run.spec.pool.clone(), replicas: 0 });
                let roll_back = !before.roll_back;
                Some(v1::ChannelMove { serving, roll_back, ..kept()? })
            }
            Change::Learn => {
                let learning = Learning { at_least: AT_LEAST, ..Default::default() };
                let learning = self.learns.then_some(learning);
                Some(v1::ChannelMove { learning, ..kept()? })
            }
            Change::StopLearning => Some(v1::ChannelMove { learning: None, ..kept()? }),
        }
    }
}

impl Peer for ChannelUser {
    fn handle(&mut self, _now_ms: u64, random: &mut fastrand::Rng, input: Input) -> Vec<Command> {
        match input {
            Input::Start => vec![Command::SetTimer(random.u64(1..WAIT_MS), CHOOSE)],
            Input::Timer(CHOOSE) => self.choose(random),
            Input::Timer(id) => self.pending.send_again(id),
            Input::Reply(id, reply) if self.pending.accept_reply(id) => self.handle_reply(reply),
            Input::Healed => {
                self.healed = true;
                Vec::new()
            }
            Input::Reply(..) | Input::Notify | Input::Status(_) | Input::Deliver(_) => Vec::new(),
        }
    }

    /// Users are never killed.
    fn reset(&mut self, incarnation: u64) {
        *self = Self { pending: PendingRequest::new(incarnation), ..Self::new(self.learns) };
    }
}
