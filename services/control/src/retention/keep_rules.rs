//! Decides which checkpoints and samples a fleet keeps. Pure: knows neither the log nor the store.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
};

use wire::{RunId, v1};

const DAY_MS: u64 = 24 * 3600 * 1000;

/// Rules that keep checkpoints, such as `best,last=3,promoted,days=30`. A checkpoint is kept if any
/// rule keeps it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeepRules {
    /// Keeps the best checkpoint of each run.
    pub best: bool,
    /// Keeps this many of the newest checkpoints of each run.
    pub last: usize,
    /// Keeps each model that a channel has ever named.
    pub promoted: bool,
    /// Keeps the checkpoints of this many days.
    pub days: u64,
}

impl FromStr for KeepRules {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut rules = Self::default();
        for rule in text.split(',') {
            let wrong = || {
                format!(
                    "{rule:?} is not a rule; write best, promoted, last=NUMBER or days=NUMBER, \
                     separated by commas"
                )
            };
            match rule.trim().split_once('=') {
                None if rule.trim() == "best" => rules.best = true,
                None if rule.trim() == "promoted" => rules.promoted = true,
                Some(("last", number)) => rules.last = number.parse().map_err(|_| wrong())?,
                Some(("days", number)) => rules.days = number.parse().map_err(|_| wrong())?,
                _ => return Err(wrong()),
            }
        }
        Ok(rules)
    }
}

impl fmt::Display for KeepRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules = [
            self.best.then(|| "best".to_owned()),
            (self.last > 0).then(|| format!("last={}", self.last)),
            self.promoted.then(|| "promoted".to_owned()),
            (self.days > 0).then(|| format!("days={}", self.days)),
        ];
        f.write_str(&rules.into_iter().flatten().collect::<Vec<_>>().join(","))
    }
}

/// A run with the trees in the store that its facts name.
#[derive(Debug, Clone)]
pub(super) struct RunTrees {
    pub(super) run: RunId,
    pub(super) has_ended: bool,
    /// True if the user asks about this run. All trees of other runs are kept.
    pub(super) is_selected: bool,
    /// Paths of the trees that the spec names.
    pub(super) spec_trees: Vec<String>,
    /// The checkpoints before its own, in their order: those of its base and of the cycles that a
    /// fork took over.
    pub(super) adopted: Vec<AdoptedCheckpoint>,
    /// In the order of cycles and steps, without those in places of other runs.
    pub(super) checkpoints: Vec<CheckpointTree>,
    /// Archives of facts and samples by cycle.
    pub(super) archives: BTreeMap<u32, v1::Tree>,
}

/// A checkpoint of a run whose files are in the place of the run that made it.
#[derive(Debug, Clone)]
pub(super) struct AdoptedCheckpoint {
    pub(super) path: String,
    pub(super) is_best: bool,
}

#[derive(Debug, Clone)]
pub(super) struct CheckpointTree {
    pub(super) cycle: u32,
    pub(super) step: u32,
    pub(super) tree: v1::Tree,
    pub(super) resume: Option<v1::Tree>,
    /// Path of the model to which an adapter belongs.
    pub(super) base: Option<String>,
    pub(super) is_best: bool,
    pub(super) published_ms: u64,
}

/// The paths of the trees that a channel names.
#[derive(Debug, Clone, Default)]
pub(super) struct ChannelTrees {
    pub(super) name: String,
    pub(super) present: Vec<String>,
    /// Of the model to which a roll-back returns.
    pub(super) before: Vec<String>,
    pub(super) ever: Vec<String>,
}

/// The settings of a decision.
#[derive(Debug, Clone)]
pub(super) struct KeepPolicy {
    pub(super) rules: KeepRules,
    /// Keeps the newest checkpoint of each run, whatever the rules are.
    pub(super) keep_newest: bool,
    pub(super) now_ms: u64,
}

/// The reason why a tree is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KeepReason {
    RunNotEnded,
    NamedByChannel(String),
    RollBackOf(String),
    NamedByRun(RunId),
    BaseOf {
        run: RunId,
        cycle: u32,
        step: u32,
    },
    Newest,
    /// By a rule of the user.
    Rule(String),
    /// It is a checkpoint of another run too, for which this is the reason.
    UsedBy {
        run: RunId,
        reason: Box<KeepReason>,
    },
    /// The samples of the base, with which later cycles are compared.
    FirstCycle,
    /// The samples of a cycle with a kept checkpoint.
    CycleOf {
        step: u32,
    },
}

impl fmt::Display for KeepReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RunNotEnded => write!(f, "the run has not ended"),
            Self::NamedByChannel(name) => write!(f, "channel {name} names it"),
            Self::RollBackOf(name) => write!(f, "channel {name} rolls back to it"),
            Self::NamedByRun(run) => write!(f, "{run} needs it"),
            Self::BaseOf { run, cycle, step } => write!(f, "base of {run}/{cycle}/{step}"),
            Self::Newest => write!(f, "newest of its run"),
            Self::Rule(rule) => write!(f, "rule {rule}"),
            Self::UsedBy { run, reason } => write!(f, "{run} uses it: {reason}"),
            Self::FirstCycle => write!(f, "samples of the base"),
            Self::CycleOf { step } => write!(f, "checkpoint of step {step} is kept"),
        }
    }
}

/// The content of a tree that may be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TreeContent {
    /// Of this step.
    Checkpoint(u32),
    Samples,
}

/// The decision on one tree; it is removed if there is no reason to keep it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TreeDecision {
    pub(super) run: RunId,
    pub(super) cycle: u32,
    pub(super) content: TreeContent,
    pub(super) tree: v1::Tree,
    /// The optimizer's state, which is removed with its checkpoint.
    pub(super) resume: Option<v1::Tree>,
    pub(super) kept: Option<KeepReason>,
}

/// Decides on every tree of the selected runs, in the order of runs, cycles and steps.
///
/// A tree is kept if a rule keeps it, for its own run or for one that took it over, if its run has
/// not ended, or if something that is kept needs it: a channel, a run that has not ended, or an
/// adapter of which it is the base.
pub(super) fn decide_trees(
    runs: &[RunTrees],
    channels: &[ChannelTrees],
    policy: &KeepPolicy,
) -> Vec<TreeDecision> {
    let mut needed = needed_paths(runs, channels, &policy.rules);
    let adopted = adopted_paths(runs, policy);
    let mut kept: Vec<Vec<Option<KeepReason>>> =
        runs.iter().map(|run| vec![None; run.checkpoints.len()]).collect();
    // A kept adapter needs its base, which may be an adapter's base in turn.
    loop {
        let mut has_changed = false;
        for (run, kept) in runs.iter().zip(&mut kept) {
            for (index, reason) in kept.iter_mut().enumerate().filter(|(_, it)| it.is_none()) {
                *reason = reason_to_keep(run, index, &needed, policy)
                    .or_else(|| adopted.get(&run.checkpoints[index].tree.path).cloned());
                if reason.is_none() {
                    continue;
                }
                has_changed = true;
                let CheckpointTree { cycle, step, base, .. } = &run.checkpoints[index];
                if let Some(base) = base {
                    let (run, cycle, step) = (run.run.clone(), *cycle, *step);
                    let reason = KeepReason::BaseOf { run, cycle, step };
                    needed.entry(base.clone()).or_insert(reason);
                }
            }
        }
        if !has_changed {
            break;
        }
    }
    let selected = runs.iter().zip(kept).filter(|(run, _)| run.is_selected);
    selected.flat_map(|(run, kept)| list_decisions(run, &kept)).collect()
}

/// Returns the paths that channels and runs that have not ended name, with the reasons.
fn needed_paths(
    runs: &[RunTrees],
    channels: &[ChannelTrees],
    rules: &KeepRules,
) -> BTreeMap<String, KeepReason> {
    let mut needed = BTreeMap::new();
    let mut add = |paths: &[String], reason: KeepReason| {
        for path in paths {
            needed.entry(path.clone()).or_insert_with(|| reason.clone());
        }
    };
    for channel in channels {
        add(&channel.present, KeepReason::NamedByChannel(channel.name.clone()));
    }
    for channel in channels {
        add(&channel.before, KeepReason::RollBackOf(channel.name.clone()));
    }
    for run in runs.iter().filter(|run| !run.has_ended) {
        add(&run.spec_trees, KeepReason::NamedByRun(run.run.clone()));
    }
    for channel in channels.iter().filter(|_| rules.promoted) {
        add(&channel.ever, KeepReason::Rule("promoted".to_owned()));
    }
    needed
}

/// Returns the paths of what the rules choose among the adopted checkpoints of runs that have ended,
/// with the reasons. Days count for the run that made a checkpoint.
fn adopted_paths(runs: &[RunTrees], policy: &KeepPolicy) -> BTreeMap<String, KeepReason> {
    let mut chosen = BTreeMap::new();
    for run in runs.iter().filter(|run| run.has_ended) {
        for (index, checkpoint) in run.adopted.iter().enumerate() {
            let newer = run.adopted.len() - index - 1 + run.checkpoints.len();
            if let Some(reason) = reason_by_order(newer, checkpoint.is_best, policy) {
                let reason = KeepReason::UsedBy { run: run.run.clone(), reason: Box::new(reason) };
                chosen.entry(checkpoint.path.clone()).or_insert(reason);
            }
        }
    }
    chosen
}

fn reason_to_keep(
    run: &RunTrees,
    index: usize,
    needed: &BTreeMap<String, KeepReason>,
    policy: &KeepPolicy,
) -> Option<KeepReason> {
    let checkpoint = &run.checkpoints[index];
    let newer = run.checkpoints.len() - index - 1;
    let days = policy.rules.days;
    let age_ms = policy.now_ms.saturating_sub(checkpoint.published_ms);
    if !run.has_ended || !run.is_selected {
        return Some(KeepReason::RunNotEnded);
    }
    needed
        .get(&checkpoint.tree.path)
        .cloned()
        .or_else(|| reason_by_order(newer, checkpoint.is_best, policy))
        .or_else(|| {
            let is_recent = age_ms < days.saturating_mul(DAY_MS);
            is_recent.then(|| KeepReason::Rule(format!("days={days}")))
        })
}

/// Returns the reason to keep one of a run's checkpoints, after which the run made `newer` ones.
fn reason_by_order(
    newer: usize,
    is_best: bool,
    KeepPolicy { rules, keep_newest, .. }: &KeepPolicy,
) -> Option<KeepReason> {
    let by_rule = |keeps: bool, rule: String| keeps.then_some(KeepReason::Rule(rule));
    (*keep_newest && newer == 0)
        .then_some(KeepReason::Newest)
        .or_else(|| by_rule(rules.best && is_best, "best".to_owned()))
        .or_else(|| by_rule(newer < rules.last, format!("last={}", rules.last)))
}

fn list_decisions(run: &RunTrees, kept: &[Option<KeepReason>]) -> Vec<TreeDecision> {
    let cycles: BTreeSet<u32> = run
        .checkpoints
        .iter()
        .map(|checkpoint| checkpoint.cycle)
        .chain(run.archives.keys().copied())
        .collect();
    let mut decisions = Vec::new();
    for cycle in cycles {
        let mut last_kept = None;
        for (checkpoint, kept) in run.checkpoints.iter().zip(kept) {
            if checkpoint.cycle != cycle {
                continue;
            }
            last_kept = kept.as_ref().map(|_| checkpoint.step).or(last_kept);
            decisions.push(TreeDecision {
                run: run.run.clone(),
                cycle,
                content: TreeContent::Checkpoint(checkpoint.step),
                tree: checkpoint.tree.clone(),
                resume: checkpoint.resume.clone(),
                kept: kept.clone(),
            });
        }
        decisions.extend(run.archives.get(&cycle).map(|tree| TreeDecision {
            run: run.run.clone(),
            cycle,
            content: TreeContent::Samples,
            tree: tree.clone(),
            resume: None,
            kept: match last_kept {
                _ if !run.has_ended => Some(KeepReason::RunNotEnded),
                _ if cycle == 0 => Some(KeepReason::FirstCycle),
                Some(step) => Some(KeepReason::CycleOf { step }),
                None => None,
            },
        }));
    }
    decisions
}

#[cfg(test)]
mod tests;
