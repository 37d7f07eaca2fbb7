//! Channels: the models that they name, the runs that move them, and the feedback that runs have
//! learned from, all folded from facts. Coordinators and users decide by it; pure.
//!
//! A decision is made on the moves that its maker knows. [`require_move`] refuses it if another move
//! came first, and the log accepts each number once, so two coordinators move a channel once.

use std::collections::{BTreeMap, BTreeSet};

use wire::{FactBody, FactKey, Record, RunId, v1};

/// Fewer new ratings than this teach nothing.
pub const NEW_FEEDBACK_MIN: u32 = 10;

/// The channels of a log, and the runs that move them.
#[derive(Debug, Clone, Default)]
pub struct ChannelSet {
    /// The moves of each channel by number. Of several with one number the first counts.
    moves: BTreeMap<RunId, BTreeMap<u64, NumberedMove>>,
    promotions: BTreeMap<RunId, v1::spec::Promotion>,
    /// Runs that have ended: position, and whether they succeeded.
    ended: BTreeMap<RunId, (u64, bool)>,
}

/// A move of a channel, with its place.
#[derive(Debug, Clone, PartialEq)]
pub struct NumberedMove {
    pub number: u64,
    /// Position in the log.
    pub sequence: u64,
    pub fact: v1::ChannelMove,
}

/// A run whose best checkpoint may move a channel.
#[derive(Debug, Clone, PartialEq)]
pub struct DuePromotion {
    pub channel: RunId,
    pub run: RunId,
    /// Highest probability of a wrong decision.
    pub alpha: f64,
    /// Number of the channel's last move.
    pub move_number: u64,
}

/// The feedback that the runs of a channel have learned from, by positions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LearnedFeedback {
    /// The newest that runs have used which succeeded or have not ended.
    pub used: u64,
    /// The newest that any run has used.
    pub tried: u64,
    /// A run has not ended yet.
    pub is_open: bool,
}

/// The reason why a decision about a channel does not hold any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutdatedMove {
    /// Another move came first.
    Moved,
    /// The channel names no model.
    Forgotten,
}

impl LearnedFeedback {
    /// Returns the number of requests with feedback that a run would learn from, given the positions
    /// of all feedback; `None` if there is not enough for one. Feedback of a run that failed is used
    /// again, but not without some that is new: the next run may fail as well.
    pub fn count_due(self, positions: &[u64], at_least: u32) -> Option<usize> {
        let after = |known: u64| positions.iter().filter(|position| **position > known).count();
        let (unused, new) = (after(self.used), after(self.tried));
        let is_due = unused >= at_least as usize && new >= NEW_FEEDBACK_MIN as usize;
        (is_due && !self.is_open).then_some(unused)
    }

    /// Returns true if a run may begin to learn from the feedback up to a position. Asked of the
    /// newest facts just before the run is written: another coordinator may have started one.
    pub fn allows_run(self, feedback: u64) -> bool {
        !self.is_open && self.tried < feedback
    }
}

impl ChannelSet {
    /// Applies a fact of any run or channel; ignores those that say nothing of channels.
    pub fn fold_record(&mut self, record: &Record) {
        let run = &record.fact.subject.run;
        match (&record.fact.subject.key, &record.fact.body) {
            (FactKey::Channel { number }, FactBody::Channel(fact)) => {
                let (number, sequence, fact) = (*number, record.sequence, fact.clone());
                let moves = self.moves.entry(run.clone()).or_default();
                moves.entry(number).or_insert(NumberedMove { number, sequence, fact });
            }
            (FactKey::Spec, FactBody::Spec(spec)) => {
                if let Some(promotion) = &spec.promotion {
                    self.promotions.entry(run.clone()).or_insert_with(|| promotion.clone());
                }
            }
            (FactKey::Done, FactBody::Done(done)) if self.promotions.contains_key(run) => {
                let succeeded = done.status() == v1::done::Status::Succeeded;
                self.ended.entry(run.clone()).or_insert((record.sequence, succeeded));
            }
            _ => {}
        }
    }

    /// Iterates over the names of all channels.
    pub fn channels(&self) -> impl Iterator<Item = &RunId> {
        self.moves.keys()
    }

    /// Iterates over the moves of a channel in their order.
    pub fn moves_of(&self, channel: &RunId) -> impl DoubleEndedIterator<Item = &NumberedMove> {
        self.moves.get(channel).into_iter().flat_map(BTreeMap::values)
    }

    /// Returns the last move of a channel.
    pub fn last_move(&self, channel: &RunId) -> Option<&NumberedMove> {
        self.moves_of(channel).next_back()
    }

    /// Returns the promotion of a run, if its spec has one.
    pub(crate) fn promotion_of(&self, run: &RunId) -> Option<&v1::spec::Promotion> {
        self.promotions.get(run)
    }

    /// Returns true if a run with a promotion has succeeded.
    pub fn has_succeeded(&self, run: &RunId) -> bool {
        self.ended.get(run).is_some_and(|(_, succeeded)| *succeeded)
    }

    /// Returns the runs whose best checkpoint is to be compared with their channel's model, but for
    /// those that are decided.
    pub fn due_promotions(&self, decided: &BTreeSet<RunId>) -> Vec<DuePromotion> {
        let is_due = |(run, promotion): (&RunId, &v1::spec::Promotion)| {
            let channel: RunId = promotion.channel.parse().ok()?;
            let move_number = self.last_move(&channel)?.number;
            let is_due = self.may_promote(run, &channel) && !decided.contains(run);
            let (run, alpha) = (run.clone(), promotion.alpha);
            is_due.then_some(DuePromotion { channel, run, alpha, move_number })
        };
        self.promotions.iter().filter_map(is_due).collect()
    }

    /// Returns true if a run has succeeded, and its channel names no model that it got after the
    /// run's end: it got that one on purpose.
    pub(crate) fn may_promote(&self, run: &RunId, channel: &RunId) -> bool {
        let (ended, since) = (self.ended.get(run), self.model_since(channel));
        let (Some((ended, succeeded)), Some(since)) = (ended, since) else { return false };
        *succeeded && *ended > since
    }

    /// Returns the position since which a channel names its present model.
    fn model_since(&self, channel: &RunId) -> Option<u64> {
        let [present, _] = self.model_moves(channel)?;
        self.moves.get(channel)?.get(present.first()?).map(|first| first.sequence)
    }

    /// Returns the feedback that a channel's runs have learned from.
    pub fn learned_feedback(&self, channel: &RunId) -> LearnedFeedback {
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
    pub fn model_moves(&self, channel: &RunId) -> Option<[BTreeSet<u64>; 2]> {
        self.moves.get(channel)?;
        let mut moves = self.moves_of(channel).rev().peekable();
        let mut take_model = || -> BTreeSet<u64> {
            let Some(wanted) = moves.peek().copied() else { return BTreeSet::new() };
            let next = || moves.next_if(|found| found.fact.has_model_of(&wanted.fact));
            std::iter::from_fn(next).map(|found| found.number).collect()
        };
        Some([take_model(), take_model()])
    }

    /// Returns the move that a channel would be rolled back to.
    pub fn roll_back_target(&self, channel: &RunId) -> Option<&NumberedMove> {
        let newest_first = self.moves_of(channel).rev().map(|found| (found.number, &found.fact));
        let number = roll_back_target(newest_first)?;
        self.moves.get(channel)?.get(&number)
    }
}

/// Returns the number of the last move to another model than the present one, given all moves, the
/// newest first. `None` for a channel that is forgotten. Moves before a forgetting do not count:
/// their models may be removed.
pub fn roll_back_target<'a>(
    newest_first: impl IntoIterator<Item = (u64, &'a v1::ChannelMove)>,
) -> Option<u64> {
    let names_model = |found: &(u64, &v1::ChannelMove)| found.1.names_model();
    let mut moves = newest_first.into_iter().take_while(names_model);
    let (_, last) = moves.next()?;
    moves.find(|(_, fact)| !fact.has_model_of(last)).map(|(number, _)| number)
}

/// Returns the last move of a channel, with which the model of a decision was compared: that with
/// this number.
///
/// # Errors
/// The channel has moved since, or names no model.
pub fn require_move(
    last: Option<(u64, &v1::ChannelMove)>,
    number: u64,
) -> Result<&v1::ChannelMove, OutdatedMove> {
    let (last, fact) = last.ok_or(OutdatedMove::Forgotten)?;
    if last != number {
        return Err(OutdatedMove::Moved);
    }
    if fact.base.is_none() {
        return Err(OutdatedMove::Forgotten);
    }
    Ok(fact)
}

/// Returns the run and cycle whose samples stand for a channel's model, when a checkpoint of a run
/// with this spec is compared with it. `None` if there are none.
///
/// A run that starts from the channel's model has measured it in its cycle 0, with the same prompts
/// and random numbers.
pub fn compared_cycle(
    before: &v1::ChannelMove,
    run: &str,
    spec: &v1::Spec,
) -> Option<(String, u32)> {
    let base = spec.base.clone().unwrap_or_default();
    let starts_from_model = base.tree == before.base && base.adapter == before.adapter;
    if starts_from_model {
        return Some((run.to_owned(), 0));
    }
    (!before.run.is_empty()).then(|| (before.run.clone(), before.cycle))
}

/// Returns a move that leaves everything of the channel as it is, without a reason.
pub fn unchanged_move(before: &v1::ChannelMove) -> v1::ChannelMove {
    v1::ChannelMove {
        reason: String::new(),
        user: String::new(),
        promotion: String::new(),
        evidence: None,
        ..before.clone()
    }
}

/// Returns a move to another model that leaves everything else of the channel as it is.
pub fn move_to_model(before: &v1::ChannelMove, model: v1::ChannelMove) -> v1::ChannelMove {
    let v1::ChannelMove { base, adapter, run, cycle, step, .. } = model;
    v1::ChannelMove { base, adapter, run, cycle, step, ..unchanged_move(before) }
}

/// Returns the move to the best checkpoint of a run, which the evidence shows to be better.
pub fn promotion_move(
    before: &v1::ChannelMove,
    run: &RunId,
    model: v1::ChannelMove,
    evidence: v1::channel_move::Evidence,
) -> v1::ChannelMove {
    v1::ChannelMove {
        reason: format!("the best checkpoint of {run}"),
        promotion: run.to_string(),
        evidence: Some(evidence),
        ..move_to_model(before, model)
    }
}

/// Returns a move to a checkpoint.
pub fn move_to_checkpoint(checkpoint: &v1::Checkpoint) -> v1::ChannelMove {
    let v1::Checkpoint { run, cycle, step, tree, base, .. } = checkpoint.clone();
    let (base, adapter) = match checkpoint.content() {
        v1::checkpoint::Content::Adapter => (base, tree),
        v1::checkpoint::Content::Model | v1::checkpoint::Content::Unspecified => (tree, None),
    };
    v1::ChannelMove { base, adapter, run, cycle, step, ..v1::ChannelMove::default() }
}

/// Returns a move to the base that a run starts from: its cycle 0. A base of random weights is no
/// model.
pub fn move_to_base(run: &str, spec: &v1::Spec) -> v1::ChannelMove {
    let base = spec.base.clone().filter(|base| !base.random_init).unwrap_or_default();
    let v1::Base { tree, adapter, .. } = base;
    v1::ChannelMove { base: tree, adapter, run: run.to_owned(), ..v1::ChannelMove::default() }
}
