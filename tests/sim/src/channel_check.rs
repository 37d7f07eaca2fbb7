//! Invariants of the channel that hold after every step, and its audit.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use cycle::{ChannelSet, Run, audit_channel};
use wire::{FactBody, FactKey, Record, RunId, v1};

use crate::{
    channel_model::{self, channel},
    channel_user::ROLL_BACK,
};

/// Follows the facts of the channel and of the runs that move it, and keeps the first violated
/// invariant. The rules are written here again, without the core's decisions.
#[derive(Default)]
pub(crate) struct ChannelChecker {
    /// Without samples and verdicts.
    records: Vec<Rc<Record>>,
    moves: Vec<(u64, v1::ChannelMove)>,
    /// The models that exist: base and adapter.
    models: BTreeSet<(String, String)>,
    promotions: BTreeMap<RunId, v1::spec::Promotion>,
    /// Positions of the ends of runs, and whether they succeeded.
    ended: BTreeMap<RunId, (u64, bool)>,
    /// The runs that the coordinators have started from feedback.
    learning: Vec<RunId>,
    violation: Option<String>,
}

impl ChannelChecker {
    pub(crate) fn violation(&self) -> Option<&String> {
        self.violation.as_ref()
    }

    fn require(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds && self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    pub(crate) fn apply_record(&mut self, record: &Rc<Record>) {
        if record.fact.subject.key.is_bulky() {
            return;
        }
        let (run, sequence) = (&record.fact.subject.run, record.sequence);
        match (&record.fact.subject.key, &record.fact.body) {
            (FactKey::Channel { number }, FactBody::Channel(named)) => {
                self.check_move(*number, named);
                self.moves.push((sequence, named.clone()));
            }
            (_, FactBody::Spec(spec)) => {
                let base = spec.base.as_ref().and_then(|base| base.tree.as_ref());
                self.models.extend(base.map(|base| (base.manifest.clone(), String::new())));
                self.check_learning(run, spec.promotion.as_ref());
                self.promotions.extend(spec.promotion.clone().map(|it| (run.clone(), it)));
            }
            (_, FactBody::Checkpoint(checkpoint)) => {
                let manifest = |tree: &Option<v1::Tree>| tree.clone().unwrap_or_default().manifest;
                let (base, tree) = (manifest(&checkpoint.base), manifest(&checkpoint.tree));
                let is_adapter = checkpoint.content() == v1::checkpoint::Content::Adapter;
                self.models.insert(if is_adapter { (base, tree) } else { (tree, String::new()) });
            }
            (_, FactBody::Done(done)) => {
                let succeeded = done.status() == v1::done::Status::Succeeded;
                self.ended.insert(run.clone(), (sequence, succeeded));
            }
            _ => {}
        }
        self.records.push(record.clone());
    }

    /// Forgets the facts after a sequence, which the log has lost.
    pub(crate) fn lose_tail(&mut self, end: u64) {
        let mut kept = std::mem::take(&mut self.records);
        kept.retain(|record| record.sequence <= end);
        *self = Self::default();
        kept.iter().for_each(|record| self.apply_record(record));
    }

    fn check_move(&mut self, number: u64, named: &v1::ChannelMove) {
        let expected = self.moves.len() as u64 + 1;
        self.require(number == expected, || format!("move {number} was written as {expected}"));
        let model = model_of(named);
        let exists = model.as_ref().is_none_or(|model| self.models.contains(model));
        self.require(exists, || format!("move {number} names {model:?}, which does not exist"));
        let before = self.moves.last().and_then(|(_, before)| model_of(before));
        let returns =
            named.reason == ROLL_BACK || named.evidence.as_ref().is_some_and(|it| it.live);
        if returns {
            let target = self.model_before();
            self.require(model.is_some() && model == target, || {
                format!("move {number} returns to {model:?}, not to {target:?}")
            });
        }
        let is_compared = named.evidence.is_some();
        self.require(!is_compared || before.is_some(), || {
            format!("move {number} is compared with a forgotten channel")
        });
        self.check_comparison(number, named);
        if !named.promotion.is_empty() {
            self.check_promotion(named);
        }
    }

    /// Returns the model before the present one, unless the channel was forgotten between.
    fn model_before(&self) -> Option<(String, String)> {
        let (_, last) = self.moves.last()?;
        let present = model_of(last)?;
        for (_, named) in self.moves.iter().rev() {
            match model_of(named) {
                None => return None,
                Some(model) if model != present => return Some(model),
                Some(_) => {}
            }
        }
        None
    }

    /// Checks that the figures are of the channel's model: of its checkpoint, or of the cycle 0 of a
    /// run that starts from it.
    fn check_comparison(&mut self, number: u64, named: &v1::ChannelMove) {
        let (Some(evidence), Some((_, before))) = (&named.evidence, self.moves.last()) else {
            return;
        };
        let is_checkpoint = (&evidence.run, evidence.cycle) == (&before.run, before.cycle);
        let starts_from_it = self.records.iter().any(|record| match &record.fact.body {
            FactBody::Spec(spec) => {
                let base = spec.base.clone().unwrap_or_default();
                spec.run == evidence.run
                    && evidence.cycle == 0
                    && (base.tree, base.adapter) == (before.base.clone(), before.adapter.clone())
            }
            _ => false,
        });
        self.require(is_checkpoint || starts_from_it, || {
            format!("move {number} is compared with another model than the channel's")
        });
    }

    fn check_promotion(&mut self, named: &v1::ChannelMove) {
        let run = &named.promotion;
        let earlier = self.moves.iter().any(|(_, it)| it.promotion == *run);
        self.require(!earlier, || format!("run {run} moved the channel twice"));
        let end = run.parse::<RunId>().ok().and_then(|run| self.ended.get(&run).copied());
        let succeeded = end.is_some_and(|(_, succeeded)| succeeded);
        self.require(succeeded, || format!("run {run} moved the channel without success"));
        // The last move that named another model than the one before it.
        let models: Vec<_> = self.moves.iter().map(|(at, it)| (*at, model_of(it))).collect();
        let mut changes = models.windows(2).filter(|pair| pair[0].1 != pair[1].1);
        let changed = changes.next_back().map_or(0, |pair| pair[1].0);
        let is_newer = end.is_some_and(|(end, _)| changed > end);
        self.require(!is_newer, || {
            format!("run {run} moved the channel away from a model that it got later")
        });
    }

    /// Checks that the coordinators start one run at a time, each from newer feedback.
    fn check_learning(&mut self, run: &RunId, promotion: Option<&v1::spec::Promotion>) {
        let Some(promotion) = promotion.filter(|it| it.learning > 0) else { return };
        let open = self.learning.iter().find(|it| !self.ended.contains_key(*it)).cloned();
        self.require(open.is_none(), || format!("run {run} learns beside {open:?}"));
        let used = self.learning.iter().filter_map(|it| self.promotions.get(it));
        let used = used.map(|it| it.feedback).max().unwrap_or(0);
        self.require(promotion.feedback > used, || {
            format!("run {run} learns from the feedback up to {used} again")
        });
        self.learning.push(run.clone());
    }

    /// Returns true if no promotion is to be made any more.
    pub(crate) fn is_settled<'a>(&self, find_run: impl Fn(&RunId) -> Option<&'a Run>) -> bool {
        let mut channels = ChannelSet::default();
        self.records.iter().for_each(|record| channels.fold_record(record));
        let Some(last) = channels.last_move(&channel()).filter(|it| it.fact.names_model()) else {
            return true;
        };
        let mut due = channels.due_promotions(&BTreeSet::new()).into_iter();
        due.all(|due| {
            // The best checkpoint of other runs may be evaluated after their end.
            let run = find_run(&due.run).filter(|run| run.raft_spec().is_some());
            run.is_none_or(|run| channel_model::compare_best(&last.fact, run).is_none())
        })
    }

    /// Audits the channel.
    pub(crate) fn finish(&self) -> Result<(), String> {
        let records = self.records.iter().map(|record| &**record);
        match audit_channel(&channel(), records).first() {
            Some(finding) => Err(format!("the audit of the channel found: {finding:?}")),
            None => Ok(()),
        }
    }
}

/// Returns the manifests of the base and the adapter that a move names.
fn model_of(named: &v1::ChannelMove) -> Option<(String, String)> {
    let adapter = named.adapter.clone().unwrap_or_default().manifest;
    Some((named.base.clone()?.manifest, adapter))
}
