//! Where each fact stands: `flotilla.<run>.<kind>.…`, one subject a fact.

use std::{fmt, str::FromStr};

use crate::{AgentId, JobId, Pool, RunId, SuiteName};

/// What the stream captures. Everything else under `flotilla.` is not a fact. In a closed fleet
/// each subject has one more token: its author's name.
pub const STREAM_SUBJECTS: [&str; 23] = [
    "flotilla.*.spec",
    "flotilla.*.spec.*",
    "flotilla.*.control.*",
    "flotilla.*.control.*.*",
    "flotilla.*.cycle.*.*",
    "flotilla.*.cycle.*.*.*",
    "flotilla.*.order.>",
    "flotilla.*.samples.*.*",
    "flotilla.*.samples.*.*.*",
    "flotilla.*.verdicts.*.*",
    "flotilla.*.verdicts.*.*.*",
    "flotilla.*.selection.*",
    "flotilla.*.selection.*.*",
    "flotilla.*.checkpoint.*.*",
    "flotilla.*.checkpoint.*.*.*",
    "flotilla.*.eval.*.*.*",
    "flotilla.*.eval.*.*.*.*",
    "flotilla.*.failure.*.*.*",
    "flotilla.*.failure.*.*.*.*",
    "flotilla.*.quarantine.*.*",
    "flotilla.*.quarantine.*.*.*",
    "flotilla.*.done",
    "flotilla.*.done.*",
];

/// The filters under which the facts of `filter` stand, with and without their authors.
pub fn with_authors(filter: &str) -> Vec<String> {
    let mut filters = vec![filter.to_owned()];
    if !filter.ends_with('>') {
        filters.push(format!("{filter}.*"));
    }
    filters
}

/// A fact's subject, taken apart.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    pub run: RunId,
    pub place: Place,
}

/// The part of a subject after the run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    Spec,
    Control { number: u64 },
    Plan { cycle: u32 },
    GenerateOrder { pool: Pool, cycle: u32, job: JobId, attempt: u32 },
    Samples { cycle: u32, job: JobId },
    Quarantine { agent: AgentId, number: u32 },
    Verdicts { cycle: u32, job: JobId },
    Selection { cycle: u32 },
    TrainOrder { pool: Pool, cycle: u32, attempt: u32 },
    Checkpoint { cycle: u32, step: u32 },
    Eval { cycle: u32, step: u32, suite: SuiteName },
    Failure { kind: WorkKind, id: String, attempt: u32 },
    CycleDone { cycle: u32 },
    Archived { cycle: u32 },
    Done,
}

impl Place {
    /// The cycle of a fact that belongs to one; failures name theirs only in their id.
    pub fn cycle(&self) -> Option<u32> {
        match self {
            Self::Plan { cycle }
            | Self::GenerateOrder { cycle, .. }
            | Self::Samples { cycle, .. }
            | Self::Verdicts { cycle, .. }
            | Self::Selection { cycle }
            | Self::TrainOrder { cycle, .. }
            | Self::Checkpoint { cycle, .. }
            | Self::Eval { cycle, .. }
            | Self::CycleDone { cycle }
            | Self::Archived { cycle } => Some(*cycle),
            Self::Spec
            | Self::Control { .. }
            | Self::Quarantine { .. }
            | Self::Failure { .. }
            | Self::Done => None,
        }
    }

    /// What the log lets go of once its cycle is archived.
    pub fn is_bulky(&self) -> bool {
        matches!(self, Self::GenerateOrder { .. } | Self::Samples { .. } | Self::Verdicts { .. })
    }

    /// The filters of a cycle's bulky facts.
    pub fn bulky_filters(run: &RunId, cycle: u32) -> [String; 3] {
        [
            format!("flotilla.{run}.order.generate.*.{cycle}.>"),
            format!("flotilla.{run}.samples.{cycle}.>"),
            format!("flotilla.{run}.verdicts.{cycle}.>"),
        ]
    }
}

/// The kinds of work an agent can do, which are also the kinds of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkKind {
    Generate,
    Verify,
    Train,
    Eval,
}

impl WorkKind {
    pub const ALL: [Self; 4] = [Self::Generate, Self::Verify, Self::Train, Self::Eval];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Generate => "generate",
            Self::Verify => "verify",
            Self::Train => "train",
            Self::Eval => "eval",
        }
    }

    /// The facts that call for this work, as a subject filter.
    pub fn filter(self, pool: &Pool) -> String {
        match self {
            Self::Generate => format!("flotilla.*.order.generate.{pool}.>"),
            Self::Verify => "flotilla.*.samples.>".to_owned(),
            Self::Train => format!("flotilla.*.order.train.{pool}.>"),
            Self::Eval => "flotilla.*.checkpoint.>".to_owned(),
        }
    }

    /// The queue from which agents take it. Verify and eval work is not divided by pool.
    pub fn queue(self, pool: &Pool) -> String {
        match self {
            Self::Generate | Self::Train => format!("{self}-{pool}"),
            Self::Verify | Self::Eval => self.to_string(),
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
    pub fn new(run: &RunId, place: Place) -> Self {
        Self { run: run.clone(), place }
    }

    /// Where a fact stands in the log, with its author's name at the end.
    pub fn authored(&self, author: &AgentId) -> String {
        format!("{self}.{author}")
    }

    /// Reads where a fact stands, with or without its author.
    ///
    /// # Errors
    /// When no fact stands there.
    pub fn of_log(text: &str) -> Result<(Self, Option<AgentId>), SubjectError> {
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
        match &self.place {
            Place::Spec => write!(f, "spec"),
            Place::Control { number } => write!(f, "control.{number}"),
            Place::Plan { cycle } => write!(f, "cycle.{cycle}.plan"),
            Place::GenerateOrder { pool, cycle, job, attempt } => {
                write!(f, "order.generate.{pool}.{cycle}.{job}.{attempt}")
            }
            Place::Samples { cycle, job } => write!(f, "samples.{cycle}.{job}"),
            Place::Quarantine { agent, number } => write!(f, "quarantine.{agent}.{number}"),
            Place::Verdicts { cycle, job } => write!(f, "verdicts.{cycle}.{job}"),
            Place::Selection { cycle } => write!(f, "selection.{cycle}"),
            Place::TrainOrder { pool, cycle, attempt } => {
                write!(f, "order.train.{pool}.{cycle}.{attempt}")
            }
            Place::Checkpoint { cycle, step } => write!(f, "checkpoint.{cycle}.{step}"),
            Place::Eval { cycle, step, suite } => write!(f, "eval.{cycle}.{step}.{suite}"),
            Place::Failure { kind, id, attempt } => write!(f, "failure.{kind}.{id}.{attempt}"),
            Place::CycleDone { cycle } => write!(f, "cycle.{cycle}.done"),
            Place::Archived { cycle } => write!(f, "cycle.{cycle}.archived"),
            Place::Done => write!(f, "done"),
        }
    }
}

impl FromStr for Subject {
    type Err = SubjectError;

    fn from_str(text: &str) -> Result<Self, SubjectError> {
        // One spelling a place: `samples.01.j1` would be a second subject for `samples.1.j1`.
        let canonical = |subject: &Self| subject.to_string() == text;
        parse(text).filter(canonical).ok_or_else(|| SubjectError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<Subject> {
    let mut tokens = text.strip_prefix("flotilla.")?.split('.');
    let run = tokens.next()?.parse().ok()?;
    let rest: Vec<&str> = tokens.collect();
    let place = match rest.as_slice() {
        ["spec"] => Place::Spec,
        ["control", number] => Place::Control { number: number.parse().ok()? },
        ["cycle", cycle, "plan"] => Place::Plan { cycle: cycle.parse().ok()? },
        ["cycle", cycle, "done"] => Place::CycleDone { cycle: cycle.parse().ok()? },
        ["cycle", cycle, "archived"] => Place::Archived { cycle: cycle.parse().ok()? },
        ["order", "generate", pool, cycle, job, attempt] => Place::GenerateOrder {
            pool: pool.parse().ok()?,
            cycle: cycle.parse().ok()?,
            job: job.parse().ok()?,
            attempt: attempt.parse().ok()?,
        },
        ["order", "train", pool, cycle, attempt] => Place::TrainOrder {
            pool: pool.parse().ok()?,
            cycle: cycle.parse().ok()?,
            attempt: attempt.parse().ok()?,
        },
        ["samples", cycle, job] => {
            Place::Samples { cycle: cycle.parse().ok()?, job: job.parse().ok()? }
        }
        ["quarantine", agent, number] => {
            Place::Quarantine { agent: agent.parse().ok()?, number: number.parse().ok()? }
        }
        ["verdicts", cycle, job] => {
            Place::Verdicts { cycle: cycle.parse().ok()?, job: job.parse().ok()? }
        }
        ["selection", cycle] => Place::Selection { cycle: cycle.parse().ok()? },
        ["checkpoint", cycle, step] => {
            Place::Checkpoint { cycle: cycle.parse().ok()?, step: step.parse().ok()? }
        }
        ["eval", cycle, step, suite] => Place::Eval {
            cycle: cycle.parse().ok()?,
            step: step.parse().ok()?,
            suite: suite.parse().ok()?,
        },
        ["failure", kind, id, attempt] => Place::Failure {
            kind: kind.parse().ok()?,
            id: (*id).to_owned(),
            attempt: attempt.parse().ok()?,
        },
        ["done"] => Place::Done,
        _ => return None,
    };
    Some(Subject { run, place })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subject_reads_back_and_belongs_to_the_stream() {
        let texts = [
            "flotilla.r1.spec",
            "flotilla.r1.control.2",
            "flotilla.r1.cycle.0.plan",
            "flotilla.r1.cycle.0.done",
            "flotilla.r1.cycle.0.archived",
            "flotilla.r1.order.generate.default.1.j3.1",
            "flotilla.r1.order.train.default.1.2",
            "flotilla.r1.samples.1.j3",
            "flotilla.r1.quarantine.box-3.1",
            "flotilla.r1.verdicts.1.j3",
            "flotilla.r1.selection.1",
            "flotilla.r1.checkpoint.1.24",
            "flotilla.r1.eval.1.24.heldout",
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
    fn only_orders_samples_and_verdicts_of_one_cycle_are_let_go() {
        let run = RunId::new("r1").unwrap();
        let filters = Place::bulky_filters(&run, 1);
        let caught = |text: &str| filters.iter().any(|filter| matches(filter, text));
        for text in [
            "flotilla.r1.order.generate.default.1.j3.1",
            "flotilla.r1.samples.1.j3",
            "flotilla.r1.verdicts.1.j3",
            "flotilla.r1.order.generate.default.2.j3.1",
            "flotilla.r2.samples.1.j3",
            "flotilla.r1.order.train.default.1.2",
            "flotilla.r1.selection.1",
            "flotilla.r1.cycle.1.plan",
        ] {
            let subject: Subject = text.parse().unwrap();
            let ours = subject.run == run && subject.place.cycle() == Some(1);
            assert_eq!(caught(text), ours && subject.place.is_bulky(), "{text}");
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

    /// NATS matching: `*` is one token, `>` is all that follow.
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
