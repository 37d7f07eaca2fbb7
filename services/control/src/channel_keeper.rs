//! Moves channels without a user: to better checkpoints of runs, and back when users rate the
//! present model lower; starts runs from feedback. The coordinator that leads runs it.
//!
//! What is to be done follows from the facts of the log and the kept requests. A restarted keeper
//! decides the same again; a move of a channel is written once.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    time::Duration,
};

use bus::{ExchangePart, LogEvent};
use comparison::{Comparison, DEFAULT_ALPHA, Decision, Pair, PairedTest};
use cycle::{ChannelSet, DuePromotion, LearnedFeedback, NumberedMove};
use futures::StreamExt;
use tokio::time::{Instant, interval};
use wire::{RunId, v1};

use crate::{
    ChannelError, CompareError, FleetControl,
    channels::CHANNEL_FACTS,
    exchanges::{exchange_score, fold_exchanges},
};

use v1::channel_move::Evidence;

/// Between two looks at promotions and feedback.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// The pause after all feedback on a channel was read, as a multiple of the time that it took.
const REST_FACTOR: u32 = 9;

/// The keeper's memory between two looks.
#[derive(Debug, Default)]
struct KeeperMemory {
    /// Runs that were compared with their channel's model.
    decided: BTreeSet<RunId>,
    /// What was looked at last, by channel.
    seen: BTreeMap<RunId, SeenFeedback>,
    /// The newest feedback for which a run was started or refused.
    started: BTreeMap<RunId, u64>,
    /// When the feedback on a channel is looked at again.
    rests_until: BTreeMap<RunId, Instant>,
}

/// The state on which a decision about a channel's feedback depended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct SeenFeedback {
    /// Position of the newest message about the channel's requests.
    newest: u64,
    move_number: u64,
    learned: LearnedFeedback,
}

impl FleetControl {
    /// Moves channels as runs and their users' feedback require, while `leads` returns true. Never
    /// ends by itself.
    pub async fn keep_channels(&self, leads: impl Fn() -> bool) -> Infallible {
        let mut facts = self.bus.follow_facts(CHANNEL_FACTS.map(str::to_owned).to_vec(), 0);
        let (mut channels, mut memory) = (ChannelSet::default(), KeeperMemory::default());
        let (mut looks, mut caught_up) = (interval(LOOK_INTERVAL), false);
        loop {
            tokio::select! {
                biased;
                event = facts.next() => match event {
                    Some(Ok(LogEvent::Record(record))) => channels.fold_record(&record),
                    Some(Ok(LogEvent::CaughtUp)) => caught_up = true,
                    Some(Ok(LogEvent::Unreadable { .. })) => {}
                    Some(Err(error)) => tracing::debug!(%error, "following channels"),
                    // The stream never ends.
                    None => std::future::pending().await,
                },
                _ = looks.tick(), if caught_up => {
                    if leads() {
                        self.decide_promotions(&channels, &mut memory).await;
                        self.look_at_feedback(&channels, &mut memory).await;
                    }
                }
            }
        }
    }

    async fn decide_promotions(&self, channels: &ChannelSet, memory: &mut KeeperMemory) {
        for due in channels.due_promotions(&memory.decided) {
            let DuePromotion { channel, run, alpha, move_number } = due;
            match self.promote_run(&channel, &run, alpha, move_number).await {
                Ok(moved) => {
                    let number = moved.number;
                    tracing::info!(%channel, %run, number, "moved the channel to a better model");
                }
                Err(error) if error.is_transient() => {
                    tracing::warn!(%channel, %run, error = %wire::format_error_chain(&error),
                        "cannot compare the run with the channel's model; trying again");
                    continue;
                }
                Err(error) => {
                    tracing::info!(%channel, %run, reason = %wire::format_error_chain(&error),
                        "the channel keeps its model");
                }
            }
            memory.decided.insert(run);
        }
    }

    /// Looks at the feedback on the channels that roll back or learn by it, if any is new.
    async fn look_at_feedback(&self, channels: &ChannelSet, memory: &mut KeeperMemory) {
        for channel in channels.channels() {
            let Some(last) = channels.last_move(channel) else { continue };
            let NumberedMove { number, fact: named, .. } = last;
            if !named.roll_back && named.learning.is_none() {
                continue;
            }
            if memory.rests_until.get(channel).is_some_and(|until| Instant::now() < *until) {
                continue;
            }
            let began = Instant::now();
            let seen = memory.seen.get(channel).copied().unwrap_or_default();
            let new = match self.bus.list_exchanges(channel, seen.newest).await {
                Ok(new) => new,
                Err(error) => {
                    let error = wire::format_error_chain(&error);
                    tracing::warn!(%channel, error, "cannot read the feedback on a channel");
                    continue;
                }
            };
            let newest = new.last().map_or(seen.newest, |message| message.sequence);
            let learned = channels.learned_feedback(channel);
            let looked_at = SeenFeedback { newest, move_number: *number, learned };
            let is_rated = new.iter().any(|message| message.part == ExchangePart::Feedback);
            if !is_rated && looked_at == (SeenFeedback { newest, ..seen }) {
                memory.seen.insert(channel.clone(), looked_at);
                continue;
            }
            let exchanges = match seen.newest {
                0 => Ok(fold_exchanges(&new)),
                _ => self.list_exchanges(channel).await,
            };
            let Ok(exchanges) = exchanges else { continue };
            let rest = began.elapsed() * REST_FACTOR;
            memory.rests_until.insert(channel.clone(), Instant::now() + rest);
            if named.roll_back && self.roll_back_if_worse(channels, channel, &exchanges).await {
                continue;
            }
            let due = channels.due_promotions(&memory.decided);
            let is_moving = due.iter().any(|due| due.channel == *channel);
            let is_decided = !is_moving
                && self.start_run_if_due((channel, last), learned, &exchanges, memory).await;
            if is_decided {
                memory.seen.insert(channel.clone(), looked_at);
            }
        }
    }

    /// Returns true if the channel was moved, or is to be looked at again before anything else.
    async fn roll_back_if_worse(
        &self,
        channels: &ChannelSet,
        channel: &RunId,
        exchanges: &[v1::KeptExchange],
    ) -> bool {
        let Some(moves) = channels.model_moves(channel) else { return false };
        let Some(last) = channels.last_move(channel) else { return false };
        let NumberedMove { number, fact: present, .. } = last;
        let Some(test) = compare_ratings(exchanges, &moves) else { return false };
        if test.decision != Decision::A {
            return false;
        }
        let evidence = Evidence {
            run: present.run.clone(),
            cycle: present.cycle,
            pairs: u32::try_from(test.at).unwrap_or(u32::MAX),
            p: test.p,
            difference: -test.difference,
            interval: vec![-test.interval[1], -test.interval[0]],
            live: true,
        };
        match self.roll_back_worse(channel, *number, evidence).await {
            Ok(_) => {
                tracing::warn!(%channel, "users rate the channel's model lower than the one before: \
                    moved back");
                true
            }
            Err(error) => {
                let is_transient = error.is_transient();
                let error = wire::format_error_chain(&error);
                tracing::warn!(%channel, error, "cannot move the channel back");
                is_transient
            }
        }
    }

    /// Starts a run from the feedback on a channel, whose last move this is, if it learns and there
    /// is enough. Returns false if it must be tried again.
    async fn start_run_if_due(
        &self,
        (channel, last): (&RunId, &NumberedMove),
        learned: LearnedFeedback,
        exchanges: &[v1::KeptExchange],
        memory: &mut KeeperMemory,
    ) -> bool {
        let Some(learning) = &last.fact.learning else { return true };
        let started = memory.started.get(channel).copied().unwrap_or(0);
        let learned = LearnedFeedback { tried: learned.tried.max(started), ..learned };
        let positions: Vec<u64> = exchanges.iter().map(|it| it.feedback_at).collect();
        let Some(new) = learned.count_due(&positions, learning.at_least) else { return true };
        let newest = positions.into_iter().max().unwrap_or(0);
        match self.submit_learning_run(channel, learning, last.number).await {
            Ok(run) => tracing::info!(%channel, %run, new, "started a run from new feedback"),
            Err(error) => {
                let is_transient = error.is_transient();
                let error = wire::format_error_chain(&error);
                tracing::warn!(%channel, error, "cannot start a run from new feedback");
                if is_transient {
                    return false;
                }
            }
        }
        memory.started.insert(channel.clone(), newest);
        true
    }
}

/// Compares the ratings of answers by the present model (`b`), in the order of the answers, with those
/// by the one before (`a`), the newest first. `None` without any pair.
///
/// The scores of each model are independent of those of the other, so the test of pairs applies: their
/// difference has mean 0 if users like both alike and ask questions of the same kind. A rating that
/// comes late shifts the pairs after it, so the error rate holds approximately.
fn compare_ratings(
    exchanges: &[v1::KeptExchange],
    [present, before]: &[BTreeSet<u64>; 2],
) -> Option<Comparison> {
    let rated = |moves: &BTreeSet<u64>| -> Vec<f64> {
        let of_model = exchanges.iter().filter(|it| moves.contains(&it.number));
        of_model.filter_map(exchange_score).collect()
    };
    let mut test = PairedTest::new(DEFAULT_ALPHA).ok()?;
    let mut pairs = 0;
    for (a, b) in rated(before).into_iter().rev().zip(rated(present)) {
        test.add_pair(Pair { a, b });
        pairs += 1;
    }
    (pairs > 0).then(|| test.comparison())
}

impl ChannelError {
    /// Returns true if the log or the store, not the models, is the reason.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Read(_) | Self::Publish(_) | Self::Presence(_) => true,
            Self::Busy(_) | Self::Moved(_) => true,
            Self::Run(error) => error.is_transient(),
            Self::Checkpoint(error) | Self::Compare(CompareError::Checkpoint(error)) => {
                error.is_transient()
            }
            Self::Compare(CompareError::History(error)) => error.is_transient(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CheckpointError, HistoryError, LearnError, StoreAccessError};

    #[test]
    fn a_log_or_a_store_that_is_away_decides_nothing_about_a_run() {
        let elsewhere = || StoreAccessError::Elsewhere("file:///away".into());
        let unopened = || CheckpointError::OpenStore(elsewhere());
        let archive =
            |is_transient| HistoryError::Archive { cycle: 1, why: "away".into(), is_transient };
        let compared = |error: HistoryError| ChannelError::Compare(error.into());
        for (error, is_transient) in [
            (compared(archive(true)), true),
            (compared(archive(false)), false),
            (compared(HistoryError::Store(elsewhere())), true),
            (ChannelError::Compare(unopened().into()), true),
            (ChannelError::Checkpoint(unopened()), true),
            (ChannelError::Checkpoint(CheckpointError::Unknown("raft-1".into())), false),
        ] {
            assert_eq!(error.is_transient(), is_transient, "{error}");
        }
        assert!(LearnError::Submit(unopened().into()).is_transient());
    }

    fn rated(id: usize, number: u64, at: u64, reward: f64) -> v1::KeptExchange {
        let reward = Some(reward);
        let feedback = v1::kept_exchange::Feedback { reward, ..Default::default() };
        let (id, feedback) = (id.to_string(), Some(feedback));
        v1::KeptExchange { id, number, feedback, feedback_at: at, ..Default::default() }
    }

    #[test]
    fn a_model_that_users_rate_lower_loses_soon_and_an_equal_one_does_not() {
        let moves = [[2, 3].into(), [1].into()];
        let ratings = |good: u64, bad: u64| {
            let of = move |number, from: u64, liked: u64| {
                (0..60).map(move |at| {
                    let reward = f64::from(u8::from(at % 10 < liked));
                    rated(usize::try_from(from + at).unwrap(), number, from + at, reward)
                })
            };
            of(1, 1, good).chain(of(3, 101, bad)).collect::<Vec<_>>()
        };
        let worse = compare_ratings(&ratings(9, 2), &moves).unwrap();
        assert_eq!(worse.decision, Decision::A);
        let equal = compare_ratings(&ratings(6, 6), &moves).unwrap();
        assert_ne!(equal.decision, Decision::A);
        let better = compare_ratings(&ratings(2, 9), &moves).unwrap();
        assert_ne!(better.decision, Decision::A);
        assert_eq!(compare_ratings(&[], &moves), None);
    }
}
