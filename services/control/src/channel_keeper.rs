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
use comparison::{Comparison, Decision, Pair, PairedTest};
use futures::StreamExt;
use tokio::time::interval;
use wire::{FactBody, FactKey, Record, RunId, v1};

use crate::{
    ChannelError, DEFAULT_ALPHA, FleetControl, channel_learning::AT_LEAST_MIN,
    exchanges::exchange_score,
};

use v1::channel_move::{Evidence, Learning};

/// Between two looks at promotions and feedback.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// The channels of the log, and the runs that move them.
#[derive(Debug, Default)]
struct KeeperView {
    /// The moves of each channel by number, with their positions.
    moves: BTreeMap<RunId, BTreeMap<u64, (u64, v1::ChannelMove)>>,
    promotions: BTreeMap<RunId, v1::spec::Promotion>,
    /// Runs that have ended: position, and whether they succeeded.
    ended: BTreeMap<RunId, (u64, bool)>,
}

/// The keeper's memory between two looks.
#[derive(Debug, Default)]
struct KeeperMemory {
    /// Runs that were compared with their channel's model.
    decided: BTreeSet<RunId>,
    /// What was looked at last, by channel.
    seen: BTreeMap<RunId, SeenFeedback>,
    /// The newest feedback for which a run was started or refused.
    started: BTreeMap<RunId, u64>,
}

/// A run whose best checkpoint may move a channel.
#[derive(Debug, Clone, PartialEq)]
struct DuePromotion {
    channel: RunId,
    run: RunId,
    alpha: f64,
    /// The channel's last move.
    move_number: u64,
}

/// The state on which a decision about a channel's feedback depended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct SeenFeedback {
    /// Position of the newest message about the channel's requests.
    newest: u64,
    move_number: u64,
    learned: LearnedFeedback,
}

/// The feedback that the runs of a channel have learned from, by positions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct LearnedFeedback {
    /// The newest that runs have used which succeeded or have not ended.
    used: u64,
    /// The newest that any run has used.
    tried: u64,
    /// A run has not ended yet.
    is_open: bool,
}

impl LearnedFeedback {
    /// Returns the number of requests with feedback that a run would learn from; `None` if there is
    /// not enough for one. Feedback of a run that failed is used again, but not without some that is
    /// new: the next run may fail as well.
    fn count_due(self, exchanges: &[v1::KeptExchange], at_least: u32) -> Option<usize> {
        let after = |position: u64| {
            exchanges.iter().filter(|exchange| exchange.feedback_at > position).count()
        };
        let (unused, new) = (after(self.used), after(self.tried));
        let is_due = unused >= at_least as usize && new >= AT_LEAST_MIN as usize;
        (is_due && !self.is_open).then_some(unused)
    }
}

impl KeeperView {
    fn fold_record(&mut self, record: &Record) {
        let run = &record.fact.subject.run;
        match (&record.fact.subject.key, &record.fact.body) {
            (FactKey::Channel { number }, FactBody::Channel(found)) => {
                let moves = self.moves.entry(run.clone()).or_default();
                moves.insert(*number, (record.sequence, found.clone()));
            }
            (FactKey::Spec, FactBody::Spec(spec)) => {
                if let Some(promotion) = &spec.promotion {
                    self.promotions.insert(run.clone(), promotion.clone());
                }
            }
            (FactKey::Done, FactBody::Done(done)) if self.promotions.contains_key(run) => {
                let succeeded = done.status() == v1::done::Status::Succeeded;
                self.ended.insert(run.clone(), (record.sequence, succeeded));
            }
            _ => {}
        }
    }

    /// Returns the last move of a channel with its number and position.
    fn last_move(&self, channel: &RunId) -> Option<(u64, u64, &v1::ChannelMove)> {
        let (number, (sequence, found)) = self.moves.get(channel)?.last_key_value()?;
        Some((*number, *sequence, found))
    }

    /// Returns the runs whose best checkpoint is to be compared with their channel's model. A channel
    /// that got another model after a run had ended got it on purpose.
    fn due_promotions(&self, decided: &BTreeSet<RunId>) -> Vec<DuePromotion> {
        let is_due = |(run, promotion): (&RunId, &v1::spec::Promotion)| {
            let channel: RunId = promotion.channel.parse().ok()?;
            let (move_number, ..) = self.last_move(&channel)?;
            let (ended, succeeded) = *self.ended.get(run)?;
            let due = succeeded && ended > self.model_since(&channel)? && !decided.contains(run);
            let (run, alpha) = (run.clone(), promotion.alpha);
            due.then_some(DuePromotion { channel, run, alpha, move_number })
        };
        self.promotions.iter().filter_map(is_due).collect()
    }

    /// Returns the position since which a channel names its present model.
    fn model_since(&self, channel: &RunId) -> Option<u64> {
        let moves = self.moves.get(channel)?;
        let [present, _] = self.model_moves(channel)?;
        moves.get(present.first()?).map(|(sequence, _)| *sequence)
    }

    /// Returns the feedback that a channel's runs have learned from.
    fn learned_feedback(&self, channel: &RunId) -> LearnedFeedback {
        let mut learned = LearnedFeedback::default();
        for (run, promotion) in &self.promotions {
            if promotion.channel == channel.as_str() && promotion.feedback > 0 {
                let ended = self.ended.get(run);
                learned.tried = promotion.feedback.max(learned.tried);
                learned.is_open |= ended.is_none();
                if ended.is_none_or(|(_, succeeded)| *succeeded) {
                    learned.used = promotion.feedback.max(learned.used);
                }
            }
        }
        learned
    }

    /// Returns the numbers of the last moves, which name the channel's present model, and of those
    /// just before, which name another one; the second set may be empty.
    fn model_moves(&self, channel: &RunId) -> Option<[BTreeSet<u64>; 2]> {
        let moves = self.moves.get(channel)?;
        let mut moves = moves.iter().rev().map(|(number, (_, found))| (*number, found)).peekable();
        let mut take_model = || -> BTreeSet<u64> {
            let Some((_, wanted)) = moves.peek().copied() else { return BTreeSet::new() };
            let next = || moves.next_if(|(_, found)| found.has_model_of(wanted));
            std::iter::from_fn(next).map(|(number, _)| number).collect()
        };
        Some([take_model(), take_model()])
    }
}

impl FleetControl {
    /// Moves channels as runs and their users' feedback require, while `leads` returns true. Never
    /// ends by itself.
    pub async fn keep_channels(&self, leads: impl Fn() -> bool) -> Infallible {
        let filters = ["spec", "channel.*", "done"].map(|kind| format!("flotilla.*.{kind}"));
        let mut facts = self.bus.follow_facts(filters.to_vec(), 0);
        let (mut view, mut memory) = (KeeperView::default(), KeeperMemory::default());
        let (mut looks, mut caught_up) = (interval(LOOK_INTERVAL), false);
        loop {
            tokio::select! {
                biased;
                event = facts.next() => match event {
                    Some(Ok(LogEvent::Record(record))) => view.fold_record(&record),
                    Some(Ok(LogEvent::CaughtUp)) => caught_up = true,
                    Some(Ok(LogEvent::Unreadable { .. })) => {}
                    Some(Err(error)) => tracing::debug!(%error, "following channels"),
                    // The stream never ends.
                    None => std::future::pending().await,
                },
                _ = looks.tick(), if caught_up => {
                    if leads() {
                        self.decide_promotions(&view, &mut memory).await;
                        self.look_at_feedback(&view, &mut memory).await;
                    }
                }
            }
        }
    }

    async fn decide_promotions(&self, view: &KeeperView, memory: &mut KeeperMemory) {
        for due in view.due_promotions(&memory.decided) {
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
    async fn look_at_feedback(&self, view: &KeeperView, memory: &mut KeeperMemory) {
        for channel in view.moves.keys() {
            let Some((number, _, found)) = view.last_move(channel) else { continue };
            if !found.roll_back && found.learning.is_none() {
                continue;
            }
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
            let learned = view.learned_feedback(channel);
            let looked_at = SeenFeedback { newest, move_number: number, learned };
            let is_rated = new.iter().any(|message| message.part == ExchangePart::Feedback);
            if !is_rated && looked_at == (SeenFeedback { newest, ..seen }) {
                memory.seen.insert(channel.clone(), looked_at);
                continue;
            }
            let Ok(exchanges) = self.list_exchanges(channel).await else { continue };
            if found.roll_back && self.roll_back_if_worse(view, channel, &exchanges).await {
                continue;
            }
            let is_moving =
                view.due_promotions(&memory.decided).iter().any(|due| due.channel == *channel);
            let is_decided = match &found.learning {
                Some(_) if is_moving => false,
                Some(learning) => {
                    self.start_run_if_due(channel, learning, learned, &exchanges, memory).await
                }
                None => true,
            };
            if is_decided {
                memory.seen.insert(channel.clone(), looked_at);
            }
        }
    }

    /// Returns true if the channel was moved.
    async fn roll_back_if_worse(
        &self,
        view: &KeeperView,
        channel: &RunId,
        exchanges: &[v1::KeptExchange],
    ) -> bool {
        let Some(moves) = view.model_moves(channel) else { return false };
        let Some((number, _, present)) = view.last_move(channel) else { return false };
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
        match self.roll_back_worse(channel, number, evidence).await {
            Ok(_) => {
                tracing::warn!(%channel, "users rate the channel's model lower than the one before: \
                    moved back");
                true
            }
            Err(error) => {
                let error = wire::format_error_chain(&error);
                tracing::warn!(%channel, error, "cannot move the channel back");
                false
            }
        }
    }

    /// Returns false if it must be tried again.
    async fn start_run_if_due(
        &self,
        channel: &RunId,
        learning: &Learning,
        learned: LearnedFeedback,
        exchanges: &[v1::KeptExchange],
        memory: &mut KeeperMemory,
    ) -> bool {
        let started = memory.started.get(channel).copied().unwrap_or(0);
        let learned = LearnedFeedback { tried: learned.tried.max(started), ..learned };
        let Some(new) = learned.count_due(exchanges, learning.at_least) else { return true };
        let newest = exchanges.iter().map(|it| it.feedback_at).max().unwrap_or(0);
        match self.submit_learning_run(channel, learning).await {
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
    /// Returns true if the log, not the models, is the reason.
    pub(crate) fn is_transient(&self) -> bool {
        use crate::{CheckpointError, CompareError, HistoryError, RunError};
        let is_run_fault =
            |error: &RunError| !matches!(error, RunError::Unknown(_) | RunError::Ended { .. });
        match self {
            Self::Read(_) | Self::Publish(_) | Self::Presence(_) | Self::Busy(_) => true,
            Self::Run(error)
            | Self::Checkpoint(CheckpointError::Run(error))
            | Self::Compare(
                CompareError::Checkpoint(CheckpointError::Run(error))
                | CompareError::History(HistoryError::Run(error)),
            ) => is_run_fault(error),
            Self::Compare(CompareError::History(error)) => {
                matches!(error, HistoryError::Store(_) | HistoryError::Read(_))
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rated(id: usize, number: u64, at: u64, reward: f64) -> v1::KeptExchange {
        let reward = Some(reward);
        let feedback = v1::kept_exchange::Feedback { reward, ..Default::default() };
        let (id, feedback) = (id.to_string(), Some(feedback));
        v1::KeptExchange { id, number, feedback, feedback_at: at, ..Default::default() }
    }

    fn view(models: &[&str]) -> KeeperView {
        let mut view = KeeperView::default();
        let moves = view.moves.entry("stable".parse().unwrap()).or_default();
        for (number, model) in (1..).zip(models) {
            let base = Some(v1::Tree { manifest: (*model).into(), ..Default::default() });
            moves.insert(number, (number, v1::ChannelMove { base, ..Default::default() }));
        }
        view
    }

    #[test]
    fn a_model_that_users_rate_lower_loses_soon_and_an_equal_one_does_not() {
        let moves = view(&["m", "n", "n"]).model_moves(&"stable".parse().unwrap()).unwrap();
        assert_eq!(moves, [[2, 3].into(), [1].into()]);
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
        let channel = "stable".parse().unwrap();
        assert_eq!(view(&["m", "m"]).model_moves(&channel), Some([[1, 2].into(), [].into()]));
        // Ratings of an earlier time do not count when a model returns.
        assert_eq!(view(&["m", "n", "m"]).model_moves(&channel), Some([[3].into(), [2].into()]));
    }

    #[test]
    fn a_run_is_compared_once_and_only_if_the_channel_was_not_moved_after_it() {
        let mut view = view(&["m"]);
        let promotion =
            |feedback| v1::spec::Promotion { channel: "stable".into(), alpha: 0.05, feedback };
        for (run, feedback, ended) in [
            ("old-1", 0, Some((1, true))),
            ("new-1", 7, Some((5, true))),
            ("bad-1", 9, Some((6, false))),
        ] {
            let run: RunId = run.parse().unwrap();
            view.promotions.insert(run.clone(), promotion(feedback));
            view.ended.extend(ended.map(|ended| (run, ended)));
        }
        let due = |decided: &[&str]| {
            let decided = decided.iter().map(|run| run.parse().unwrap()).collect();
            let due = view.due_promotions(&decided).into_iter();
            due.map(|due| due.run.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(due(&[]), ["new-1"]);
        assert!(due(&["new-1"]).is_empty());
        let learned = |view: &KeeperView| view.learned_feedback(&"stable".parse().unwrap());
        assert_eq!(learned(&view), LearnedFeedback { used: 7, tried: 9, is_open: false });
        view.promotions.insert("open-1".parse().unwrap(), promotion(11));
        assert_eq!(learned(&view), LearnedFeedback { used: 11, tried: 11, is_open: true });
    }

    #[test]
    fn feedback_of_a_failed_run_is_used_again_once_some_is_new() {
        let exchanges = |count: u64| -> Vec<v1::KeptExchange> {
            (1..=count).map(|at| rated(usize::try_from(at).unwrap(), 1, at, 1.0)).collect()
        };
        let due = |used, tried, count| {
            let learned = LearnedFeedback { used, tried, is_open: false };
            learned.count_due(&exchanges(count), 50)
        };
        assert_eq!((due(0, 0, 49), due(0, 0, 50)), (None, Some(50)));
        assert_eq!((due(50, 50, 99), due(50, 50, 100)), (None, Some(50)), "it was used");
        assert_eq!(due(0, 50, 50), None, "the same again would fail again");
        assert_eq!((due(0, 50, 59), due(0, 50, 60)), (None, Some(60)));
        let open = LearnedFeedback { is_open: true, ..LearnedFeedback::default() };
        assert_eq!(open.count_due(&exchanges(99), 50), None);
    }
}
