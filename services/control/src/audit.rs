//! The audit of a run: `cycle` re-derives the run from its log, then the objects that the facts
//! name are checked in the store. Checks that could not be made are listed separately and are not
//! findings. The audit of a channel compares its moves with the runs that they name.

mod archive_merge;
mod channel_moves;
mod store_check;

use std::collections::{BTreeMap, BTreeSet};

use bus::{LogEvent, ReadError};
use cycle::{AuditCounts, RunAuditor};
use futures::StreamExt;
use serde::Serialize;
use wire::{FactBody, FactKey, PromptEntry, Record, RunId, Subject, v1};

use crate::{FleetControl, RunError};
use archive_merge::ArchiveMerge;
use store_check::ReferencedObjects;

/// Further findings are only counted.
const FINDINGS_MAX: usize = 1000;

const PROMPTS_BYTES_MAX: u64 = 1 << 30;

/// The stage of an audit that only channels have.
const CHANNEL_STAGE: &str = "moves";

/// The depth of an audit. Each level includes the previous ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AuditDepth {
    Log,
    /// Names, sizes and manifests of objects in the store.
    Files,
    /// Content of every object.
    Bytes,
}

/// The progress of a long operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskProgress {
    /// `files` or `bytes`.
    pub unit: &'static str,
    pub done: u64,
    pub total: u64,
}

pub(crate) type ProgressCallback<'a> = &'a (dyn Fn(TaskProgress) + Send + Sync);

/// The place of a finding: the log or the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FindingSource {
    Log,
    Store,
}

impl FindingSource {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Store => "store",
        }
    }
}

/// One difference between a run and its log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AuditFinding {
    #[serde(rename = "where")]
    pub place: FindingSource,
    pub what: String,
    /// Subject of the fact at fault, or of the fact that names the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// Log position of that fact.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
pub struct AuditReport {
    pub run: String,
    #[serde(flatten)]
    pub tally: AuditCounts,
    /// Finished stages, in order: `lineage`, or `moves` of a channel; `files`, `bytes`.
    pub checked: Vec<&'static str>,
    /// Each with its reason.
    pub not_checked: Vec<String>,
    /// Properties that hold only because the spec permits them; no findings.
    pub caveats: Vec<String>,
    /// Unusual properties that are intended.
    pub notes: Vec<String>,
    pub findings: Vec<AuditFinding>,
    /// Findings beyond the 1 000 listed ones.
    pub findings_left_out: u64,
}

/// A failure to audit a run.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error("there is no run {0}; `flotilla run list` lists all (R101)")]
    Unknown(RunId),
    #[error("read the log")]
    Read(#[from] ReadError),
    #[error(transparent)]
    Run(#[from] RunError),
}

impl AuditReport {
    fn new(run: &RunId, stage: &'static str) -> Self {
        Self {
            run: run.to_string(),
            tally: AuditCounts::default(),
            checked: vec![stage],
            not_checked: Vec::new(),
            caveats: Vec::new(),
            notes: Vec::new(),
            findings: Vec::new(),
            findings_left_out: 0,
        }
    }

    /// Returns the counts of a run as a line; of a channel, those of its moves.
    pub fn describe_counts(&self) -> String {
        let AuditReport { run, tally, .. } = self;
        if self.checked.contains(&CHANNEL_STAGE) {
            return format!("channel {run}: {} moves", tally.facts);
        }
        format!(
            "{run}: {} facts; samples: {} planned, {} accepted, {} judged, {} kept; \
             {} checkpoints, {} evals",
            tally.facts,
            tally.planned_samples,
            tally.accepted_samples,
            tally.judged_samples,
            tally.kept_samples,
            tally.checkpoints,
            tally.evals
        )
    }

    /// Returns true if the audit has no findings.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }

    /// Only counts the finding if [`FINDINGS_MAX`] are listed already.
    pub(crate) fn add_finding(&mut self, finding: AuditFinding) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        } else {
            self.findings_left_out += 1;
        }
    }
}

impl AuditFinding {
    pub(crate) fn for_log(what: String, subject: Option<String>, sequence: Option<u64>) -> Self {
        let place = FindingSource::Log;
        Self { place, what, subject, sequence, url: None, expected: None, found: None }
    }
}

impl From<cycle::LogContradiction> for AuditFinding {
    fn from(found: cycle::LogContradiction) -> Self {
        Self::for_log(found.description, found.subject, found.sequence)
    }
}

struct AuditState {
    auditor: RunAuditor,
    report: AuditReport,
    objects: ReferencedObjects,
    /// Log positions of the run's first and last entry.
    sequence_range: Option<(u64, u64)>,
}

impl FleetControl {
    /// Audits a run, or the moves of a channel, to the given depth: replays its log with archived facts at their positions,
    /// checks for lost entries and the origin of the base, then checks the store if `depth` asks
    /// for it.
    ///
    /// Fails if the run does not exist or the log cannot be read. Problems with the store are part
    /// of the report.
    pub async fn audit_run(
        &self,
        run: &RunId,
        depth: AuditDepth,
        watch: ProgressCallback<'_>,
    ) -> Result<AuditReport, AuditError> {
        if let Some(report) = self.audit_channel(run, depth, watch).await? {
            return Ok(report);
        }
        let mut reading = AuditState::new(run);
        self.replay_log(run, depth, &mut reading).await?;
        self.find_lost_entries(&mut reading).await?;
        self.check_base_origin(&mut reading).await?;
        if let Some((finding, note)) = self.check_fork_origin(run).await? {
            reading.report.findings.extend(finding);
            reading.report.notes.push(note);
        }
        let promotion = reading.auditor.current_run().and_then(|it| it.spec.promotion.as_ref());
        if let Some(v1::spec::Promotion { channel, .. }) = promotion {
            let note = format!("its promotion is checked by `flotilla audit {channel}`");
            reading.report.notes.push(note);
        }
        let AuditState { auditor, mut report, objects: held, .. } = reading;
        let audit = auditor.finish_audit().ok_or_else(|| AuditError::Unknown(run.clone()))?;
        report.tally = audit.counts;
        report.caveats = audit.caveats;
        report.findings_left_out += audit.findings_left_out;
        let unread = std::mem::take(&mut report.findings);
        let mut findings: Vec<AuditFinding> =
            audit.findings.into_iter().map(AuditFinding::from).collect();
        findings.extend(unread);
        findings.sort_by_key(|finding| finding.sequence.unwrap_or(u64::MAX));
        findings.into_iter().for_each(|finding| report.add_finding(finding));
        self.check_store(&held, depth, watch, &mut report).await;
        Ok(report)
    }

    /// Checks the objects that facts name, if `depth` asks for it.
    async fn check_store(
        &self,
        held: &ReferencedObjects,
        depth: AuditDepth,
        watch: ProgressCallback<'_>,
        report: &mut AuditReport,
    ) {
        if depth > AuditDepth::Log {
            match self.open_store().await {
                Ok(store) => store_check::check_objects(store, held, depth, watch, report).await,
                Err(error) => report.not_checked.push(error_chain(&error)),
            }
        }
    }

    /// Reads the run's log into `reading`, merged with its archives. A fact that both contain must
    /// be the same in both. The archive of a cycle is opened at the cycle's plan, if the log no
    /// longer has the samples or the depth includes the store.
    async fn replay_log(
        &self,
        run: &RunId,
        depth: AuditDepth,
        reading: &mut AuditState,
    ) -> Result<(), AuditError> {
        let mut facts = std::pin::pin!(self.bus.follow_facts(vec![format!("flotilla.{run}.>")], 0));
        let mut archives = ArchiveMerge::new(self.archived_cycles(run).await?);
        while let Some(followed) = facts.next().await {
            match followed? {
                LogEvent::Record(record) => {
                    while let Some(archived) = archives.next_before(record.sequence).await {
                        reading.add_archived(archived);
                    }
                    match archives.take_at(record.sequence).await {
                        Some(other) if other != record => {
                            let what = "its cycle's archive holds another fact";
                            let subject = record.fact.subject.to_string();
                            let finding = AuditFinding::for_log(
                                what.into(),
                                Some(subject),
                                Some(record.sequence),
                            );
                            reading.report.add_finding(finding);
                        }
                        Some(_) | None => {}
                    }
                    if let (FactBody::Spec(spec), true) =
                        (&record.fact.body, depth > AuditDepth::Log)
                    {
                        self.check_prompt_sets(spec, &record, reading).await;
                    }
                    reading.add_record(&record);
                    if let (FactKey::Plan { cycle }, FactBody::Plan(plan)) =
                        (&record.fact.subject.key, &record.fact.body)
                    {
                        let store = if depth > AuditDepth::Log {
                            self.open_store().await.ok()
                        } else {
                            None
                        };
                        let whole =
                            plan.jobs.is_empty() || self.log_has_orders(run, *cycle).await?;
                        if store.is_some() || !whole {
                            archives.open_archive(*cycle, record.sequence, store, reading).await;
                        }
                    }
                }
                LogEvent::Unreadable { sequence, subject, error } => {
                    reading.extend_range(sequence);
                    let what = format!("it cannot be read: {}", error_chain(&error));
                    let finding = AuditFinding::for_log(what, Some(subject), Some(sequence));
                    reading.report.add_finding(finding);
                }
                LogEvent::CaughtUp => break,
            }
        }
        while let Some(archived) = archives.next_before(u64::MAX).await {
            reading.add_archived(archived);
        }
        archives.report_failures(reading);
        Ok(())
    }

    /// Returns true if the log has the generate orders of a cycle. Of the facts that are purged
    /// after a cycle they are the first to go, and only coordinators write them, so no late result
    /// of an agent makes a purged cycle look whole.
    async fn log_has_orders(&self, run: &RunId, cycle: u32) -> Result<bool, ReadError> {
        let [orders, ..] = FactKey::bulky_filters(run, cycle);
        match self.bus.get_fact(&orders).await {
            Ok(found) => Ok(found.is_some()),
            Err(ReadError::Unreadable { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }

    async fn archived_cycles(&self, run: &RunId) -> Result<BTreeMap<u32, v1::Archived>, ReadError> {
        let records = self.read_records(vec![format!("flotilla.{run}.cycle.*.archived")]).await?;
        let archived = records.into_iter().filter_map(|record| match record.fact.body {
            FactBody::Archived(archived) => Some((archived.cycle, archived)),
            _ => None,
        });
        Ok(archived.collect())
    }

    /// Adds a finding for each prompts file whose number of prompts differs from the spec. Files
    /// that cannot be read are skipped; the check of the store reports them.
    async fn check_prompt_sets(&self, spec: &v1::Spec, record: &Record, reading: &mut AuditState) {
        let Some(v1::spec::Kind::Raft(raft)) = &spec.kind else { return };
        for set in raft.prompt_sets() {
            let Some(prompts) = self.load_prompts(set.file).await else { continue };
            if prompts.len() != set.count as usize {
                let name = match (set.purpose, set.suite) {
                    (v1::Purpose::Heldout, "") => "held-out prompts".to_owned(),
                    (v1::Purpose::Heldout, suite) => format!("prompts of suite {suite}"),
                    _ => "prompts".to_owned(),
                };
                let (count, there) = (set.count, prompts.len());
                let what = format!("it counts {count} {name}, the file has {there}");
                let subject = record.fact.subject.to_string();
                let finding = AuditFinding::for_log(what, Some(subject), Some(record.sequence));
                reading.report.add_finding(finding);
            }
            reading.auditor.add_prompts(set.purpose, set.suite, prompts);
        }
    }

    /// Returns the prompts of a file in the store; `None` if they cannot be read.
    pub(crate) async fn load_prompts(&self, blob: Option<&v1::Blob>) -> Option<Vec<PromptEntry>> {
        let bytes = self.open_store().await.ok()?.get_blob(blob?, PROMPTS_BYTES_MAX).await.ok()?;
        // Parsing a large file takes seconds.
        tokio::task::spawn_blocking(move || PromptEntry::parse_all(&bytes)).await.ok()?.ok()
    }

    /// Skips the check once any cycle was archived, because entries are then missing on purpose. A
    /// fact missing by mistake then shows in the facts that should follow from it.
    async fn find_lost_entries(&self, reading: &mut AuditState) -> Result<(), AuditError> {
        let Some((first, last)) = reading.sequence_range else { return Ok(()) };
        let lost = self.bus.find_lost_entries().await?;
        if lost.count == 0 || self.has_archives().await? {
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
        reading.report.add_finding(AuditFinding::for_log(what, None, within.first().copied()));
        Ok(())
    }

    async fn has_archives(&self) -> Result<bool, AuditError> {
        match self.bus.get_fact("flotilla.*.cycle.*.archived").await {
            Ok(found) => Ok(found.is_some()),
            Err(ReadError::Unreadable { .. }) => Ok(true),
            Err(error) => Err(error.into()),
        }
    }

    /// Adds a finding if the base lies in another run's directory but is no checkpoint of that run.
    async fn check_base_origin(&self, reading: &mut AuditState) -> Result<(), AuditError> {
        let Some(run) = reading.auditor.current_run() else { return Ok(()) };
        let start = run.spec.base.as_ref();
        let Some(base) = start.and_then(|base| base.adapter.clone().or(base.tree.clone())) else {
            return Ok(());
        };
        let Some(origin) = origin_run(&base).filter(|origin| *origin != run.id) else {
            return Ok(());
        };
        let checkpoints = match self.list_checkpoints(&origin).await {
            Err(RunError::Unknown(_)) => Vec::new(),
            found => found?,
        };
        let made = checkpoints
            .iter()
            .filter_map(|info| info.checkpoint.as_ref()?.tree.as_ref())
            .any(|tree| *tree == base);
        if !made {
            let what = format!("its base {} is not a checkpoint of run {origin}", base.path);
            let place = if run.is_watched() { FactKey::WatchedSpec } else { FactKey::Spec };
            let subject = Subject::new(&run.id, place).to_string();
            reading.report.add_finding(AuditFinding::for_log(what, Some(subject), None));
        }
        Ok(())
    }
}

fn origin_run(tree: &v1::Tree) -> Option<RunId> {
    RunId::new(tree.path.strip_prefix("runs/")?.split('/').next()?).ok()
}

impl AuditState {
    fn new(run: &RunId) -> Self {
        Self {
            auditor: RunAuditor::default(),
            report: AuditReport::new(run, "lineage"),
            objects: ReferencedObjects::default(),
            sequence_range: None,
        }
    }

    fn add_record(&mut self, record: &Record) {
        self.extend_range(record.sequence);
        self.auditor.audit_record(record);
        self.objects.add_record(record);
    }

    fn add_archived(&mut self, record: Record) {
        self.auditor.audit_record(&record);
    }

    fn add_unreadable(&mut self, cycle: u32, why: &str) {
        self.auditor.mark_unreadable(cycle);
        self.report.not_checked.push(format!("the archived facts of cycle {cycle}: {why}"));
    }

    /// The check of the store notes why.
    fn add_removed(&mut self, cycle: u32) {
        self.auditor.mark_unreadable(cycle);
    }

    fn extend_range(&mut self, sequence: u64) {
        let (first, _) = self.sequence_range.unwrap_or((sequence, sequence));
        self.sequence_range = Some((first, sequence));
    }
}

/// Joins the messages of an error and its causes with `: `, without repetitions.
pub(crate) fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
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
