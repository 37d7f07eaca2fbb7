//! Subjects of facts: `flotilla.<run>.<kind>.…`, one subject for each fact.

use std::{fmt, num::ParseIntError, str::FromStr};

use crate::{AgentId, JobId, Pool, RunId, SuiteName};

/// The subject filters of the log's stream. Each kind has two, because in a closed fleet a subject
/// ends with one more token, the name of the author.
pub const STREAM_SUBJECTS: [&str; 40] = [
    "flotilla.*.spec",
    "flotilla.*.spec.*",
    "flotilla.*.watched",
    "flotilla.*.watched.*",
    "flotilla.*.control.*",
    "flotilla.*.control.*.*",
    "flotilla.*.channel.*",
    "flotilla.*.channel.*.*",
    "flotilla.*.cycle.*.*",
    "flotilla.*.cycle.*.*.*",
    "flotilla.*.order.>",
    "flotilla.*.samples.*.*",
    "flotilla.*.samples.*.*.*",
    "flotilla.*.declined.*.*.*.*",
    "flotilla.*.declined.*.*.*.*.*",
    "flotilla.*.verdicts.*.*",
    "flotilla.*.verdicts.*.*.*",
    "flotilla.*.scores.*.*",
    "flotilla.*.scores.*.*.*",
    "flotilla.*.selection.*",
    "flotilla.*.selection.*.*",
    "flotilla.*.slices.*.*",
    "flotilla.*.slices.*.*.*",
    "flotilla.*.delta.*.*.*",
    "flotilla.*.delta.*.*.*.*",
    "flotilla.*.close.*.*",
    "flotilla.*.close.*.*.*",
    "flotilla.*.merge.*.*",
    "flotilla.*.merge.*.*.*",
    "flotilla.*.checkpoint.*.*",
    "flotilla.*.checkpoint.*.*.*",
    "flotilla.*.eval.*.*",
    "flotilla.*.eval.*.*.*",
    "flotilla.*.eval.*.*.*.*",
    "flotilla.*.failure.*.*.*",
    "flotilla.*.failure.*.*.*.*",
    "flotilla.*.quarantine.*.*",
    "flotilla.*.quarantine.*.*.*",
    "flotilla.*.done",
    "flotilla.*.done.*",
];

/// Returns the filters that match the same facts with and without an author. A filter that ends
/// with `>` already matches both.
pub fn expand_author_filters(filter: &str) -> Vec<String> {
    let mut filters = vec![filter.to_owned()];
    if !filter.ends_with('>') {
        filters.push(format!("{filter}.*"));
    }
    filters
}

/// The parsed subject of a fact.
///
/// ```text
/// flotilla.r1.samples.1.j3   run "r1", samples of job "j3" in cycle 1
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    pub run: RunId,
    pub key: FactKey,
}

/// The kind of fact and the identifiers that make it unique within the run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum FactKey {
    Spec,
    /// The spec of a watched run. It has its own subject, so that the NATS server can let watchers
    /// write these and no other specs.
    WatchedSpec,
    Control {
        number: u64,
    },
    /// A move of a channel, whose name takes the place of the run's.
    Channel {
        number: u64,
    },
    Plan {
        cycle: u32,
    },
    GenerateOrder {
        pool: Pool,
        cycle: u32,
        job: JobId,
        attempt: u32,
    },
    Samples {
        cycle: u32,
        job: JobId,
    },
    /// An agent left a generate order to a faster one.
    Declined {
        cycle: u32,
        job: JobId,
        attempt: u32,
        agent: AgentId,
    },
    Quarantine {
        agent: AgentId,
        number: u32,
    },
    Verdicts {
        cycle: u32,
        job: JobId,
    },
    /// The log-probabilities of a job's samples by the run's teacher.
    Scores {
        cycle: u32,
        job: JobId,
    },
    Selection {
        cycle: u32,
    },
    TrainOrder {
        pool: Pool,
        cycle: u32,
        attempt: u32,
    },
    /// The order of a part of a training on several boxes.
    TrainPartOrder {
        pool: Pool,
        cycle: u32,
        outer: u32,
        part: TrainPart,
        attempt: u32,
    },
    /// The slices of an outer step of a training on several boxes.
    SlicePlan {
        cycle: u32,
        outer: u32,
    },
    /// The weights of one box after its slice.
    Delta {
        cycle: u32,
        outer: u32,
        slice: u32,
    },
    /// The slices of an outer step that count.
    SliceClose {
        cycle: u32,
        outer: u32,
    },
    /// The weights after an outer step.
    Merge {
        cycle: u32,
        outer: u32,
    },
    Checkpoint {
        cycle: u32,
        step: u32,
    },
    /// A checkpoint of a watched run, in its cycle 0. It has its own subject, like
    /// [`FactKey::WatchedSpec`].
    WatchedCheckpoint {
        step: u32,
    },
    Eval {
        cycle: u32,
        step: u32,
        suite: SuiteName,
    },
    /// Pass rates on held-out prompts. The subject is shorter than that of an eval, so that the NATS
    /// server lets only the coordinator write it.
    PassRates {
        cycle: u32,
    },
    Failure {
        kind: WorkKind,
        id: String,
        attempt: u32,
    },
    CycleDone {
        cycle: u32,
    },
    Archived {
        cycle: u32,
    },
    Done,
}

impl FactKey {
    /// Returns the cycle, if the fact belongs to one. A failure names its cycle only inside its id
    /// and returns `None`.
    pub fn cycle_number(&self) -> Option<u32> {
        match self {
            Self::Plan { cycle }
            | Self::GenerateOrder { cycle, .. }
            | Self::Samples { cycle, .. }
            | Self::Declined { cycle, .. }
            | Self::Verdicts { cycle, .. }
            | Self::Scores { cycle, .. }
            | Self::Selection { cycle }
            | Self::TrainOrder { cycle, .. }
            | Self::TrainPartOrder { cycle, .. }
            | Self::SlicePlan { cycle, .. }
            | Self::Delta { cycle, .. }
            | Self::SliceClose { cycle, .. }
            | Self::Merge { cycle, .. }
            | Self::Checkpoint { cycle, .. }
            | Self::Eval { cycle, .. }
            | Self::PassRates { cycle }
            | Self::CycleDone { cycle }
            | Self::Archived { cycle } => Some(*cycle),
            Self::WatchedCheckpoint { .. } => Some(0),
            Self::Spec
            | Self::WatchedSpec
            | Self::Control { .. }
            | Self::Channel { .. }
            | Self::Quarantine { .. }
            | Self::Failure { .. }
            | Self::Done => None,
        }
    }

    /// Returns the cycle and step of a checkpoint of a trained or a watched run.
    pub fn checkpoint_position(&self) -> Option<(u32, u32)> {
        match self {
            Self::Checkpoint { cycle, step } => Some((*cycle, *step)),
            Self::WatchedCheckpoint { step } => Some((0, *step)),
            _ => None,
        }
    }

    /// Returns true for facts that the log purges once their cycle is archived: generate orders,
    /// samples, verdicts, scores.
    pub fn is_bulky(&self) -> bool {
        matches!(
            self,
            Self::GenerateOrder { .. }
                | Self::Samples { .. }
                | Self::Verdicts { .. }
                | Self::Scores { .. }
        )
    }

    /// Returns the subject filters of the bulky facts of one cycle.
    pub fn bulky_filters(run: &RunId, cycle: u32) -> [String; 4] {
        [
            format!("flotilla.{run}.order.generate.*.{cycle}.>"),
            format!("flotilla.{run}.samples.{cycle}.>"),
            format!("flotilla.{run}.verdicts.{cycle}.>"),
            format!("flotilla.{run}.scores.{cycle}.>"),
        ]
    }
}

/// A part of a training on several boxes that is ordered by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TrainPart {
    /// The slice of this number, from 1.
    Slice(u32),
    /// The merge after the slices.
    Merge,
}

impl fmt::Display for TrainPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slice(number) => number.fmt(f),
            Self::Merge => f.write_str("merge"),
        }
    }
}

/// Returns the name of a part's job in the statuses of agents, for example `train-3-merge`.
pub fn train_part_name(outer: u32, part: TrainPart) -> String {
    format!("train-{outer}-{part}")
}

impl FromStr for TrainPart {
    type Err = ParseIntError;
    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        match text {
            "merge" => Ok(Self::Merge),
            _ => text.parse().map(Self::Slice),
        }
    }
}

/// The kinds of work that agents do; failures have the same kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkKind {
    Generate,
    Verify,
    Score,
    Train,
    Eval,
}

impl WorkKind {
    /// In the order of a cycle.
    pub const ALL: [Self; 5] = [Self::Generate, Self::Verify, Self::Score, Self::Train, Self::Eval];

    /// Returns the name as used in subjects.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Generate => "generate",
            Self::Verify => "verify",
            Self::Score => "score",
            Self::Train => "train",
            Self::Eval => "eval",
        }
    }

    /// Returns the filter of the facts that request this work in a pool. Samples request verify and
    /// score work, and checkpoints request eval work, in all pools.
    pub fn subject_filter(self, pool: &Pool) -> String {
        match self {
            Self::Generate => format!("flotilla.*.order.generate.{pool}.>"),
            Self::Verify | Self::Score => "flotilla.*.samples.>".to_owned(),
            Self::Train => format!("flotilla.*.order.train.{pool}.>"),
            Self::Eval => "flotilla.*.checkpoint.>".to_owned(),
        }
    }

    /// Returns the queue from which agents take this work, for example `generate-default`. Verify,
    /// score and eval work is not divided by pool.
    pub fn queue_name(self, pool: &Pool) -> String {
        match self {
            Self::Generate | Self::Train => format!("{self}-{pool}"),
            Self::Verify | Self::Score | Self::Eval => self.to_string(),
        }
    }
}

impl fmt::Display for WorkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for WorkKind {
    type Err = ();
    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or(())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("subject {0:?} is not that of any fact (B113)")]
pub struct SubjectError(String);

impl Subject {
    pub fn new(run: &RunId, key: FactKey) -> Self {
        Self { run: run.clone(), key }
    }

    /// Returns the subject of the fact with which an agent declines this generate order; `None` for
    /// other facts.
    pub fn declined_by(&self, agent: &AgentId) -> Option<Self> {
        let FactKey::GenerateOrder { cycle, job, attempt, .. } = &self.key else { return None };
        let (cycle, job, attempt) = (*cycle, job.clone(), *attempt);
        let key = FactKey::Declined { cycle, job, attempt, agent: agent.clone() };
        Some(Self::new(&self.run, key))
    }

    /// Returns the subject as the log of a closed fleet stores it, with the author at the end.
    pub fn with_author(&self, author: &AgentId) -> String {
        format!("{self}.{author}")
    }

    /// Parses a subject as the log stores it, with or without an author.
    pub fn parse_with_author(text: &str) -> Result<(Self, Option<AgentId>), SubjectError> {
        if let Ok(subject) = text.parse() {
            return Ok((subject, None));
        }
        let wrong = || SubjectError(text.to_owned());
        let (place, author) = text.rsplit_once('.').ok_or_else(wrong)?;
        Ok((place.parse().map_err(|_| wrong())?, Some(author.parse().map_err(|_| wrong())?)))
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "flotilla.{}.", self.run)?;
        match &self.key {
            FactKey::Spec => write!(f, "spec"),
            FactKey::WatchedSpec => write!(f, "watched"),
            FactKey::Control { number } => write!(f, "control.{number}"),
            FactKey::Channel { number } => write!(f, "channel.{number}"),
            FactKey::Plan { cycle } => write!(f, "cycle.{cycle}.plan"),
            FactKey::GenerateOrder { pool, cycle, job, attempt } => {
                write!(f, "order.generate.{pool}.{cycle}.{job}.{attempt}")
            }
            FactKey::Samples { cycle, job } => write!(f, "samples.{cycle}.{job}"),
            FactKey::Declined { cycle, job, attempt, agent } => {
                write!(f, "declined.{cycle}.{job}.{attempt}.{agent}")
            }
            FactKey::Quarantine { agent, number } => write!(f, "quarantine.{agent}.{number}"),
            FactKey::Verdicts { cycle, job } => write!(f, "verdicts.{cycle}.{job}"),
            FactKey::Scores { cycle, job } => write!(f, "scores.{cycle}.{job}"),
            FactKey::Selection { cycle } => write!(f, "selection.{cycle}"),
            FactKey::TrainOrder { pool, cycle, attempt } => {
                write!(f, "order.train.{pool}.{cycle}.{attempt}")
            }
            FactKey::TrainPartOrder { pool, cycle, outer, part, attempt } => {
                write!(f, "order.train.{pool}.{cycle}.{outer}.{part}.{attempt}")
            }
            FactKey::SlicePlan { cycle, outer } => write!(f, "slices.{cycle}.{outer}"),
            FactKey::Delta { cycle, outer, slice } => write!(f, "delta.{cycle}.{outer}.{slice}"),
            FactKey::SliceClose { cycle, outer } => write!(f, "close.{cycle}.{outer}"),
            FactKey::Merge { cycle, outer } => write!(f, "merge.{cycle}.{outer}"),
            FactKey::Checkpoint { cycle, step } => write!(f, "checkpoint.{cycle}.{step}"),
            FactKey::WatchedCheckpoint { step } => write!(f, "checkpoint.watched.{step}"),
            FactKey::Eval { cycle, step, suite } => write!(f, "eval.{cycle}.{step}.{suite}"),
            FactKey::PassRates { cycle } => write!(f, "eval.{cycle}.pass-rates"),
            FactKey::Failure { kind, id, attempt } => write!(f, "failure.{kind}.{id}.{attempt}"),
            FactKey::CycleDone { cycle } => write!(f, "cycle.{cycle}.done"),
            FactKey::Archived { cycle } => write!(f, "cycle.{cycle}.archived"),
            FactKey::Done => write!(f, "done"),
        }
    }
}

impl FromStr for Subject {
    type Err = SubjectError;

    fn from_str(text: &str) -> Result<Self, SubjectError> {
        // Accept only the canonical form, so that each fact has one subject: `samples.01.j1` would
        // be a second subject for `samples.1.j1`.
        let canonical = |subject: &Self| subject.to_string() == text;
        parse_subject(text).filter(canonical).ok_or_else(|| SubjectError(text.to_owned()))
    }
}

/// Parses also numbers that are not canonical.
fn parse_subject(text: &str) -> Option<Subject> {
    let mut tokens = text.strip_prefix("flotilla.")?.split('.');
    let run = tokens.next()?.parse().ok()?;
    let rest: Vec<&str> = tokens.collect();
    let place = match rest.as_slice() {
        ["spec"] => FactKey::Spec,
        ["watched"] => FactKey::WatchedSpec,
        ["control", number] => FactKey::Control { number: number.parse().ok()? },
        ["channel", number] => FactKey::Channel { number: number.parse().ok()? },
        ["cycle", cycle, "plan"] => FactKey::Plan { cycle: cycle.parse().ok()? },
        ["cycle", cycle, "done"] => FactKey::CycleDone { cycle: cycle.parse().ok()? },
        ["cycle", cycle, "archived"] => FactKey::Archived { cycle: cycle.parse().ok()? },
        ["order", "generate", pool, cycle, job, attempt] => FactKey::GenerateOrder {
            pool: pool.parse().ok()?,
            cycle: cycle.parse().ok()?,
            job: job.parse().ok()?,
            attempt: attempt.parse().ok()?,
        },
        ["order", "train", pool, cycle, attempt] => FactKey::TrainOrder {
            pool: pool.parse().ok()?,
            cycle: cycle.parse().ok()?,
            attempt: attempt.parse().ok()?,
        },
        ["samples", cycle, job] => {
            FactKey::Samples { cycle: cycle.parse().ok()?, job: job.parse().ok()? }
        }
        ["declined", cycle, job, attempt, agent] => FactKey::Declined {
            cycle: cycle.parse().ok()?,
            job: job.parse().ok()?,
            attempt: attempt.parse().ok()?,
            agent: agent.parse().ok()?,
        },
        ["quarantine", agent, number] => {
            FactKey::Quarantine { agent: agent.parse().ok()?, number: number.parse().ok()? }
        }
        ["verdicts", cycle, job] => {
            FactKey::Verdicts { cycle: cycle.parse().ok()?, job: job.parse().ok()? }
        }
        ["scores", cycle, job] => {
            FactKey::Scores { cycle: cycle.parse().ok()?, job: job.parse().ok()? }
        }
        ["selection", cycle] => FactKey::Selection { cycle: cycle.parse().ok()? },
        ["checkpoint", "watched", step] => FactKey::WatchedCheckpoint { step: step.parse().ok()? },
        ["checkpoint", cycle, step] => {
            FactKey::Checkpoint { cycle: cycle.parse().ok()?, step: step.parse().ok()? }
        }
        ["eval", cycle, "pass-rates"] => FactKey::PassRates { cycle: cycle.parse().ok()? },
        ["eval", cycle, step, suite] => FactKey::Eval {
            cycle: cycle.parse().ok()?,
            step: step.parse().ok()?,
            suite: suite.parse().ok()?,
        },
        ["failure", kind, id, attempt] => FactKey::Failure {
            kind: kind.parse().ok()?,
            id: (*id).to_owned(),
            attempt: attempt.parse().ok()?,
        },
        ["done"] => FactKey::Done,
        other => parse_outer_step(other)?,
    };
    Some(Subject { run, key: place })
}

/// Parses the key of a fact of a training on several boxes.
fn parse_outer_step(tokens: &[&str]) -> Option<FactKey> {
    Some(match tokens {
        ["order", "train", pool, cycle, outer, part, attempt] => FactKey::TrainPartOrder {
            pool: pool.parse().ok()?,
            cycle: cycle.parse().ok()?,
            outer: outer.parse().ok()?,
            part: part.parse().ok()?,
            attempt: attempt.parse().ok()?,
        },
        ["slices", cycle, outer] => {
            FactKey::SlicePlan { cycle: cycle.parse().ok()?, outer: outer.parse().ok()? }
        }
        ["delta", cycle, outer, slice] => FactKey::Delta {
            cycle: cycle.parse().ok()?,
            outer: outer.parse().ok()?,
            slice: slice.parse().ok()?,
        },
        ["close", cycle, outer] => {
            FactKey::SliceClose { cycle: cycle.parse().ok()?, outer: outer.parse().ok()? }
        }
        ["merge", cycle, outer] => {
            FactKey::Merge { cycle: cycle.parse().ok()?, outer: outer.parse().ok()? }
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subject_reads_back_and_belongs_to_the_stream() {
        let texts = [
            "flotilla.r1.spec",
            "flotilla.r1.watched",
            "flotilla.r1.control.2",
            "flotilla.stable.channel.2",
            "flotilla.r1.cycle.0.plan",
            "flotilla.r1.cycle.0.done",
            "flotilla.r1.cycle.0.archived",
            "flotilla.r1.order.generate.default.1.j3.1",
            "flotilla.r1.order.train.default.1.2",
            "flotilla.r1.order.train.default.1.3.2.1",
            "flotilla.r1.order.train.default.1.3.merge.1",
            "flotilla.r1.slices.1.3",
            "flotilla.r1.delta.1.3.2",
            "flotilla.r1.close.1.3",
            "flotilla.r1.merge.1.0",
            "flotilla.r1.samples.1.j3",
            "flotilla.r1.declined.1.j3.1.box-3",
            "flotilla.r1.quarantine.box-3.1",
            "flotilla.r1.verdicts.1.j3",
            "flotilla.r1.scores.1.j3",
            "flotilla.r1.selection.1",
            "flotilla.r1.checkpoint.1.24",
            "flotilla.r1.checkpoint.watched.24",
            "flotilla.r1.eval.1.24.heldout",
            "flotilla.r1.eval.1.pass-rates",
            "flotilla.r1.failure.generate.1-j3.2",
            "flotilla.r1.done",
        ];
        for text in texts {
            let subject: Subject = text.parse().expect(text);
            assert_eq!(subject.to_string(), text);
            assert!(STREAM_SUBJECTS.iter().any(|filter| matches(filter, text)), "{text}");
        }
    }

    #[test]
    fn only_bulky_facts_of_one_cycle_are_let_go() {
        let run = RunId::new("r1").unwrap();
        let filters = FactKey::bulky_filters(&run, 1);
        let caught = |text: &str| filters.iter().any(|filter| matches(filter, text));
        for text in [
            "flotilla.r1.order.generate.default.1.j3.1",
            "flotilla.r1.samples.1.j3",
            "flotilla.r1.verdicts.1.j3",
            "flotilla.r1.scores.1.j3",
            "flotilla.r1.order.generate.default.2.j3.1",
            "flotilla.r2.samples.1.j3",
            "flotilla.r1.order.train.default.1.2",
            "flotilla.r1.selection.1",
            "flotilla.r1.cycle.1.plan",
        ] {
            let subject: Subject = text.parse().unwrap();
            let ours = subject.run == run && subject.key.cycle_number() == Some(1);
            assert_eq!(caught(text), ours && subject.key.is_bulky(), "{text}");
        }
    }

    #[test]
    fn subjects_of_no_fact_are_refused() {
        for text in
            ["", "flotilla", "flotilla.r1", "flotilla.r1.specs", "flotilla.r1.samples.01.j1"]
        {
            assert!(text.parse::<Subject>().is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn presence_is_not_captured_by_the_stream() {
        for text in ["flotilla.agent.status.samples", "flotilla.agent.command.done"] {
            assert!(!STREAM_SUBJECTS.iter().any(|filter| matches(filter, text)), "{text}");
        }
    }

    /// Matches as NATS does: `*` is one token, `>` is all that follow.
    fn matches(filter: &str, subject: &str) -> bool {
        let mut tokens = subject.split('.');
        for want in filter.split('.') {
            match (want, tokens.next()) {
                (">", Some(_)) => return true,
                (_, None) => return false,
                (want, Some(token)) if want == "*" || want == token => {}
                _ => return false,
            }
        }
        tokens.next().is_none()
    }
}
