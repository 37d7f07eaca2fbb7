//! Whether a run is what its log says: the log re-derived by `cycle`, then what it names
//! looked up in the store. What cannot be looked at is said, and is not a finding.

mod archives;
mod store;

use std::collections::{BTreeMap, BTreeSet};

use bus::{Followed, ReadError};
use cycle::{Auditor, Tally};
use futures::StreamExt;
use serde::Serialize;
use wire::{Body, Place, Prompt, Record, RunId, Subject, v1};

use crate::Control;
use archives::Archives;
use store::Held;

/// Findings beyond these are only counted.
const FINDINGS_MAX: usize = 1000;

/// Largest prompts file.
const PROMPTS_BYTES_MAX: u64 = 1 << 30;

/// How far an audit looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Depth {
    /// The log alone.
    Log,
    /// And the store's names, sizes and manifests.
    Files,
    /// And every byte.
    Bytes,
}

/// How far something has come that takes its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// `files` or `bytes`.
    pub unit: &'static str,
    pub done: u64,
    pub total: u64,
}

/// Told of progress.
pub(crate) type Watch<'a> = &'a (dyn Fn(Progress) + Send + Sync);

/// Where a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Where {
    Log,
    Store,
}

impl Where {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Store => "store",
        }
    }
}

/// One thing that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    #[serde(rename = "where")]
    pub place: Where,
    pub what: String,
    /// The fact at fault, or the one that names the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
}

/// What an audit looked at and found.
#[derive(Debug, Clone, Serialize)]
pub struct AuditReport {
    pub run: String,
    #[serde(flatten)]
    pub tally: Tally,
    /// `lineage`, then `files`, then `bytes`, as far as it got.
    pub checked: Vec<&'static str>,
    /// What should have been looked at and could not be, and why.
    pub not_checked: Vec<String>,
    /// What holds by the spec's leave alone: no findings.
    pub caveats: Vec<String>,
    /// What a reader may wonder at and is meant so.
    pub notes: Vec<String>,
    pub findings: Vec<Finding>,
    /// Beyond those that are named.
    pub findings_left_out: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error("there is no run {0}; `flotilla run list` shows which there are (R101)")]
    Unknown(RunId),
    #[error("read the log")]
    Read(#[from] ReadError),
}

impl AuditReport {
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }

    pub(crate) fn find(&mut self, finding: Finding) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        } else {
            self.findings_left_out += 1;
        }
    }
}

impl Finding {
    fn in_log(what: String, subject: Option<String>, sequence: Option<u64>) -> Self {
        let place = Where::Log;
        Self { place, what, subject, sequence, url: None, expected: None, found: None }
    }
}

impl From<cycle::Finding> for Finding {
    fn from(found: cycle::Finding) -> Self {
        Self::in_log(found.what, found.subject, found.sequence)
    }
}

/// An audit while it reads the log.
struct Reading {
    auditor: Auditor,
    report: AuditReport,
    held: Held,
    /// Of the first and the last entry of the run.
    span: Option<(u64, u64)>,
}

impl Control {
    /// Audits a run as far as `depth`.
    ///
    /// # Errors
    /// When there is no such run, or the log cannot be read. Trouble with the store is in the
    /// report.
    pub async fn audit(
        &self,
        run: &RunId,
        depth: Depth,
        watch: Watch<'_>,
    ) -> Result<AuditReport, AuditError> {
        let mut reading = Reading::new(run);
        self.read_log(run, depth, &mut reading).await?;
        self.find_losses(&mut reading).await?;
        self.find_origin(&mut reading).await?;
        let Reading { auditor, mut report, held, .. } = reading;
        let audit = auditor.finish().ok_or_else(|| AuditError::Unknown(run.clone()))?;
        report.tally = audit.tally;
        report.caveats = audit.caveats;
        let unread = std::mem::take(&mut report.findings);
        let mut findings: Vec<Finding> = audit.findings.into_iter().map(Finding::from).collect();
        findings.extend(unread);
        findings.sort_by_key(|finding| finding.sequence.unwrap_or(u64::MAX));
        findings.into_iter().for_each(|finding| report.find(finding));
        if depth > Depth::Log {
            match self.store().await {
                Ok(store) => store::check(store, &held, depth, watch, &mut report).await,
                Err(error) => report.not_checked.push(explain(&error)),
            }
        }
        Ok(report)
    }

    async fn read_log(
        &self,
        run: &RunId,
        depth: Depth,
        reading: &mut Reading,
    ) -> Result<(), AuditError> {
        let mut facts = std::pin::pin!(self.bus.follow(vec![format!("flotilla.{run}.>")], 0));
        let mut archives = Archives::new(self.archived(run).await?);
        while let Some(followed) = facts.next().await {
            match followed? {
                Followed::Record(record) => {
                    while let Some(archived) = archives.before(record.sequence).await {
                        reading.archived(archived);
                    }
                    match archives.standing_at(record.sequence).await {
                        Some(other) if other != record => {
                            let what = "its cycle's archive holds another fact";
                            let subject = record.fact.subject.to_string();
                            let finding =
                                Finding::in_log(what.into(), Some(subject), Some(record.sequence));
                            reading.report.find(finding);
                        }
                        Some(_) | None => {}
                    }
                    if let (Body::Spec(spec), true) = (&record.fact.body, depth > Depth::Log) {
                        self.read_prompts(spec, &record, reading).await;
                    }
                    reading.take(&record);
                    if let (Place::Plan { cycle }, Body::Plan(plan)) =
                        (&record.fact.subject.place, &record.fact.body)
                    {
                        let store = if depth > Depth::Log { self.store().await.ok() } else { None };
                        let whole = plan.jobs.is_empty() || self.holds_samples(run, *cycle).await?;
                        if store.is_some() || !whole {
                            archives.open(*cycle, record.sequence, store, reading).await;
                        }
                    }
                }
                Followed::Unreadable { sequence, subject, error } => {
                    reading.extend_span(sequence);
                    let what = format!("it cannot be read: {}", explain(&error));
                    let finding = Finding::in_log(what, Some(subject), Some(sequence));
                    reading.report.find(finding);
                }
                Followed::CaughtUp => break,
            }
        }
        while let Some(archived) = archives.before(u64::MAX).await {
            reading.archived(archived);
        }
        archives.close(reading);
        Ok(())
    }

    /// Whether the log has not let go of a cycle, archived or not.
    async fn holds_samples(&self, run: &RunId, cycle: u32) -> Result<bool, ReadError> {
        match self.bus.get(&format!("flotilla.{run}.samples.{cycle}.*")).await {
            Ok(found) => Ok(found.is_some()),
            Err(ReadError::Unreadable { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// The archives of a run's cycles.
    async fn archived(&self, run: &RunId) -> Result<BTreeMap<u32, v1::Archived>, ReadError> {
        let records = self.read_all(vec![format!("flotilla.{run}.cycle.*.archived")]).await?;
        let archived = records.into_iter().filter_map(|record| match record.fact.body {
            Body::Archived(archived) => Some((archived.cycle, archived)),
            _ => None,
        });
        Ok(archived.collect())
    }

    /// Trouble with the files shows when the store is looked at.
    async fn read_prompts(&self, spec: &v1::Spec, record: &Record, reading: &mut Reading) {
        let Some(v1::spec::Kind::Raft(raft)) = &spec.kind else { return };
        for set in raft.prompt_sets() {
            let Some(prompts) = self.known_prompts(set.file).await else { continue };
            if prompts.len() != set.count as usize {
                let name = match (set.purpose, set.suite) {
                    (v1::Purpose::Heldout, "") => "held-out prompts".to_owned(),
                    (v1::Purpose::Heldout, suite) => format!("prompts of suite {suite}"),
                    _ => "prompts".to_owned(),
                };
                let (count, there) = (set.count, prompts.len());
                let what = format!("it counts {count} {name}, the file has {there}");
                let subject = record.fact.subject.to_string();
                let finding = Finding::in_log(what, Some(subject), Some(record.sequence));
                reading.report.find(finding);
            }
            reading.auditor.know_prompts(set.purpose, set.suite, prompts);
        }
    }

    async fn known_prompts(&self, blob: Option<&v1::Blob>) -> Option<Vec<Prompt>> {
        let bytes = self.store().await.ok()?.get_blob(blob?, PROMPTS_BYTES_MAX).await.ok()?;
        Prompt::parse_all(&bytes).ok()
    }

    /// Entries that the log knows it has lost. Once anything was archived, entries are gone on
    /// purpose; a fact that is missed shows in what should follow from it.
    async fn find_losses(&self, reading: &mut Reading) -> Result<(), AuditError> {
        let Some((first, last)) = reading.span else { return Ok(()) };
        let lost = self.bus.lost().await?;
        if lost.count == 0 || self.anything_archived().await? {
            return Ok(());
        }
        let within: Vec<u64> =
            lost.sequences.iter().copied().filter(|at| (first..=last).contains(at)).collect();
        let what = match within.first() {
            Some(first) => format!(
                "{} entries are gone from the log since the run began, the first at sequence {first}",
                within.len()
            ),
            None if lost.sequences.is_empty() => {
                format!("{} entries are gone from the log", lost.count)
            }
            None => return Ok(()),
        };
        reading.report.find(Finding::in_log(what, None, within.first().copied()));
        Ok(())
    }

    async fn anything_archived(&self) -> Result<bool, AuditError> {
        match self.bus.get("flotilla.*.cycle.*.archived").await {
            Ok(found) => Ok(found.is_some()),
            Err(ReadError::Unreadable { .. }) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// A base that lies among another run's checkpoints is one of them.
    async fn find_origin(&self, reading: &mut Reading) -> Result<(), AuditError> {
        let Some(run) = reading.auditor.run() else { return Ok(()) };
        let Some(base) = run.spec.base.as_ref().and_then(|base| base.tree.clone()) else {
            return Ok(());
        };
        let Some(origin) = origin(&base).filter(|origin| *origin != run.id) else { return Ok(()) };
        let checkpoints = self.checkpoints(&origin).await?;
        let made = checkpoints
            .iter()
            .filter_map(|info| info.checkpoint.as_ref()?.tree.as_ref())
            .any(|tree| *tree == base);
        if !made {
            let what = format!("its base {} is no checkpoint of run {origin}", base.path);
            let subject = Subject::new(&run.id, Place::Spec).to_string();
            reading.report.find(Finding::in_log(what, Some(subject), None));
        }
        Ok(())
    }
}

/// The run in whose directory a tree lies.
fn origin(tree: &v1::Tree) -> Option<RunId> {
    RunId::new(tree.path.strip_prefix("runs/")?.split('/').next()?).ok()
}

impl Reading {
    fn new(run: &RunId) -> Self {
        let report = AuditReport {
            run: run.to_string(),
            tally: Tally::default(),
            checked: vec!["lineage"],
            not_checked: Vec::new(),
            caveats: Vec::new(),
            notes: Vec::new(),
            findings: Vec::new(),
            findings_left_out: 0,
        };
        Self { auditor: Auditor::default(), report, held: Held::default(), span: None }
    }

    fn take(&mut self, record: &Record) {
        self.extend_span(record.sequence);
        self.auditor.take(record);
        self.held.take(record);
    }

    /// A fact that only an archive holds.
    fn archived(&mut self, record: Record) {
        self.auditor.take(&record);
    }

    /// Says that a cycle's archive cannot be read, and why.
    fn unread(&mut self, cycle: u32, why: &str) {
        self.auditor.cannot_read(cycle);
        self.report.not_checked.push(format!("the archived facts of cycle {cycle}: {why}"));
    }

    fn extend_span(&mut self, sequence: u64) {
        let (first, _) = self.span.unwrap_or((sequence, sequence));
        self.span = Some((first, sequence));
    }
}

/// An error and its causes, one after the other.
pub(crate) fn explain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut seen = BTreeSet::from([text.clone()]);
    let mut next = error.source();
    while let Some(source) = next {
        let cause = source.to_string();
        if seen.insert(cause.clone()) {
            text = format!("{text}: {cause}");
        }
        next = source.source();
    }
    text
}
