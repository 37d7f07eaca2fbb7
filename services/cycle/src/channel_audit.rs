//! Checks the moves of a channel, and the runs that move it, against the facts before them.

use std::collections::BTreeMap;

use comparison::{DEFAULT_ALPHA, DecisionFigures};
use wire::{FactBody, FactKey, Record, RunId, v1};

use crate::{
    audit::{FindingList, LogContradiction},
    best_checkpoint::best_checkpoint,
    channels::{ChannelSet, NumberedMove, move_to_base, move_to_checkpoint},
    state::Run,
};

/// An audit of one channel. Takes, in log order, the channel's moves and the facts of all runs that
/// they name or that promote to it; samples and verdicts are not needed.
///
/// Facts cannot show, so this does not check, that a user was allowed to move the channel, that a
/// comparison's numbers follow from the ratings or samples, and that a run's data is the feedback up
/// to the position that its spec names.
#[derive(Debug)]
pub struct ChannelAuditor {
    channel: RunId,
    set: ChannelSet,
    runs: BTreeMap<RunId, Run>,
    /// The newest feedback of the runs that the coordinator has started, and the last of them.
    learned: Option<(u64, RunId)>,
    findings: FindingList,
}

impl ChannelAuditor {
    /// Creates an audit of a channel that has seen no fact.
    pub fn new(channel: RunId) -> Self {
        let (set, runs) = (ChannelSet::default(), BTreeMap::new());
        Self { channel, set, runs, learned: None, findings: FindingList::default() }
    }

    /// Checks the next fact against the facts before it.
    pub fn audit_record(&mut self, record: &Record) {
        let run = &record.fact.subject.run;
        let found = match (&record.fact.subject.key, &record.fact.body) {
            (FactKey::Channel { number }, FactBody::Channel(fact)) if *run == self.channel => {
                self.check_move(*number, fact)
            }
            (FactKey::Spec, FactBody::Spec(spec)) => self.check_learning_run(run, spec),
            _ => Vec::new(),
        };
        for description in found {
            let (sequence, subject) = (Some(record.sequence), record.fact.subject.to_string());
            let finding = LogContradiction { sequence, subject: Some(subject), description };
            self.findings.add_finding(finding);
        }
        self.set.fold_record(record);
        match self.runs.get_mut(run) {
            Some(run) => run.fold_record(record),
            None => self.runs.extend(Run::start(record).map(|started| (run.clone(), started))),
        }
    }

    /// Returns the contradictions, and the number of those that are not listed.
    pub fn finish_audit(self) -> (Vec<LogContradiction>, u64) {
        (self.findings.listed, self.findings.left_out)
    }

    fn check_move(&self, number: u64, fact: &v1::ChannelMove) -> Vec<String> {
        let last = self.set.last_move(&self.channel);
        let expected = last.map_or(1, |last| last.number.saturating_add(1));
        if number != expected {
            return vec![format!("it is move {number}, where move {expected} belongs")];
        }
        let before = last.filter(|last| last.fact.names_model());
        let mut found = Vec::new();
        found.extend(self.check_model(fact));
        if !fact.names_model() && before.is_none() {
            found.push("it forgets a channel that names no model".to_owned());
        }
        let is_automatic =
            !fact.promotion.is_empty() || fact.evidence.as_ref().is_some_and(|it| it.live);
        match (before, &fact.evidence) {
            (None, Some(_)) => found.push("it is compared with a channel without a model".into()),
            (Some(before), Some(evidence)) => {
                found.extend(self.check_evidence(before, fact, evidence));
            }
            (None, None) if is_automatic => found.push("it moves a forgotten channel".into()),
            (_, None) => {}
        }
        if !fact.promotion.is_empty() {
            found.extend(self.check_promotion(fact));
        }
        found
    }

    /// Checks that the model existed: as a checkpoint, or as the base of a run.
    fn check_model(&self, fact: &v1::ChannelMove) -> Option<String> {
        let v1::ChannelMove { run, cycle, step, .. } = fact;
        if run.is_empty() || !fact.names_model() {
            return None;
        }
        let Some(made_by) = self.find_run(run) else {
            return Some(format!("it names run {run}, which did not exist"));
        };
        let checkpoint = made_by.cycles.get(cycle).and_then(|it| it.checkpoints.get(step));
        let is_base = *cycle == 0 && move_to_base(run, &made_by.spec).has_model_of(fact);
        match checkpoint.map(move_to_checkpoint) {
            Some(model) if model.has_model_of(fact) => None,
            _ if is_base => None,
            Some(_) => Some(format!("its files are not those of {run}/{cycle}/{step}")),
            None => Some(format!("it names {run}/{cycle}/{step}, which did not exist")),
        }
    }

    /// Checks that the figures of a comparison decide for the move, and that it is one with the
    /// model that the channel named.
    fn check_evidence(
        &self,
        before: &NumberedMove,
        fact: &v1::ChannelMove,
        evidence: &v1::channel_move::Evidence,
    ) -> Vec<String> {
        let v1::channel_move::Evidence { run, cycle, pairs, p, difference, interval, live } =
            evidence;
        let mut found = Vec::new();
        let figures = DecisionFigures { pairs: *pairs, p: *p, difference: *difference, interval };
        let promotion = self.promotion(fact);
        let alpha = promotion.map_or(DEFAULT_ALPHA, |promotion| promotion.alpha);
        found.extend(figures.find_contradiction(alpha).map(|why| format!("its evidence: {why}")));
        let is_before = (run, cycle) == (&before.fact.run, &before.fact.cycle);
        if *live {
            let target = self.set.roll_back_target(&self.channel);
            if !target.is_some_and(|target| target.fact.has_model_of(fact)) {
                found.push("it returns to another model than the one before".to_owned());
            }
            if !before.fact.roll_back {
                found.push("it returns, though the channel does not roll back by itself".into());
            }
        }
        // A run that starts from the channel's model has measured it in its cycle 0.
        let is_start = || {
            let base = self.find_run(run).map(|it| move_to_base(run, &it.spec));
            *cycle == 0 && base.is_some_and(|base| base.has_model_of(&before.fact))
        };
        if !is_before && (*live || !is_start()) {
            found
                .push(format!("it is compared with {run}/{cycle}, which the channel did not name"));
        }
        found
    }

    /// Checks that a run moves its channel once, after it has succeeded, to its best checkpoint, and
    /// not away from a newer model.
    fn check_promotion(&self, fact: &v1::ChannelMove) -> Vec<String> {
        let run = &fact.promotion;
        if self.promotion(fact).is_none() {
            return vec![format!("run {run} does not promote to the channel")];
        }
        let mut found = Vec::new();
        let mut expect = |holds: bool, what: String| {
            if !holds {
                found.push(what);
            }
        };
        let id = run.parse().ok();
        let may_promote = id.as_ref().is_some_and(|id| self.set.may_promote(id, &self.channel));
        let succeeded = id.as_ref().is_some_and(|id| self.set.has_succeeded(id));
        let is_first = self.set.moves_of(&self.channel).all(|it| it.fact.promotion != *run);
        expect(is_first, format!("run {run} has moved the channel before"));
        expect(succeeded, format!("run {run} had not succeeded"));
        expect(may_promote || !succeeded, format!("the channel had moved since run {run} ended"));
        expect(fact.evidence.as_ref().is_some_and(|it| !it.live), "it has no evidence".into());
        let raft = self.find_run(run).filter(|run| run.raft_spec().is_some());
        if let Some(best) = raft.and_then(best_checkpoint) {
            let is_best = move_to_checkpoint(best).has_model_of(fact);
            expect(is_best, format!("it is not the best checkpoint of run {run}"));
        }
        found
    }

    /// Checks that the coordinator starts one run at a time, from feedback that is new.
    fn check_learning_run(&mut self, run: &RunId, spec: &v1::Spec) -> Vec<String> {
        let promotion = spec.promotion.as_ref();
        let Some(promotion) = promotion.filter(|it| {
            it.learning > 0 && it.channel == self.channel.as_str() && !self.runs.contains_key(run)
        }) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        let settings = self.set.moves_of(&self.channel).find(|it| it.number == promotion.learning);
        if settings.is_none_or(|it| it.fact.learning.is_none()) {
            let number = promotion.learning;
            found.push(format!("move {number} of the channel does not learn from feedback"));
        }
        if let Some((newest, last)) = &self.learned {
            let has_ended = self.runs.get(last).is_some_and(|last| last.done.is_some());
            if !has_ended {
                found.push(format!("run {last} learned from the channel at the same time"));
            }
            if promotion.feedback <= *newest {
                found.push(format!("its feedback is that of run {last}"));
            }
        }
        self.learned = Some((promotion.feedback, run.clone()));
        found
    }

    /// Returns the promotion that a move is of.
    fn promotion(&self, fact: &v1::ChannelMove) -> Option<&v1::spec::Promotion> {
        let run: RunId = fact.promotion.parse().ok()?;
        self.set.promotion_of(&run).filter(|it| it.channel == self.channel.as_str())
    }

    fn find_run(&self, id: &str) -> Option<&Run> {
        self.runs.get(&id.parse().ok()?)
    }
}

/// Audits a channel by facts in log order, as [`ChannelAuditor`] does.
pub fn audit_channel<'a>(
    channel: &RunId,
    records: impl IntoIterator<Item = &'a Record>,
) -> Vec<LogContradiction> {
    let mut auditor = ChannelAuditor::new(channel.clone());
    records.into_iter().for_each(|record| auditor.audit_record(record));
    auditor.finish_audit().0
}
