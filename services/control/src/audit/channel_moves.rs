//! The audit of a channel: its moves, and the runs that move it.

use std::collections::BTreeSet;

use bus::{LogEvent, ReadError};
use cycle::ChannelAuditor;
use futures::StreamExt;
use wire::{FactBody, Record, RunId, v1};

use super::{
    AuditDepth, AuditError, AuditFinding, AuditReport, CHANNEL_STAGE, ProgressCallback,
    ReferencedObjects, error_chain,
};
use crate::{FleetControl, parse_channel_name};

/// The facts of a channel up to one position of the log.
#[derive(Debug, Default)]
struct ChannelLog {
    moves: Vec<Record>,
    /// The runs that the moves name, or that promote to the channel.
    runs: BTreeSet<RunId>,
    /// The last position that was read; facts after it may name runs that are not listed.
    end: u64,
    unreadable: Vec<AuditFinding>,
}

impl ChannelLog {
    fn add_record(&mut self, channel: &RunId, record: Record) {
        self.end = record.sequence;
        match &record.fact.body {
            FactBody::Channel(named) => {
                self.runs
                    .extend([&named.run, &named.promotion].into_iter().flat_map(|it| it.parse()));
                self.runs.extend(named.evidence.iter().flat_map(|it| it.run.parse()));
                self.moves.push(record);
            }
            FactBody::Spec(v1::Spec { promotion: Some(promotion), .. })
                if promotion.channel == channel.as_str() =>
            {
                self.runs.insert(record.fact.subject.run);
            }
            _ => {}
        }
    }
}

impl FleetControl {
    /// Audits the moves of a channel against the runs that they name, and the files of its present
    /// model if `depth` asks for it. `None` if there is no such channel.
    pub(super) async fn audit_channel(
        &self,
        channel: &RunId,
        depth: AuditDepth,
        watch: ProgressCallback<'_>,
    ) -> Result<Option<AuditReport>, AuditError> {
        if parse_channel_name(channel.as_str()).is_err() {
            return Ok(None);
        }
        let ChannelLog { moves, runs, end, unreadable } = self.read_channel_log(channel).await?;
        let Some(last) = moves.last().cloned() else { return Ok(None) };
        let mut report = AuditReport::new(channel, CHANNEL_STAGE);
        report.tally.facts = moves.len() as u64;
        let mut records = moves;
        for run in &runs {
            let found = self.records_without_samples(run).await?;
            records.extend(found.into_iter().filter(|record| record.sequence <= end));
        }
        records.sort_by_key(|record| record.sequence);
        let mut auditor = ChannelAuditor::new(channel.clone());
        records.iter().for_each(|record| auditor.audit_record(record));
        let (findings, left_out) = auditor.finish_audit();
        report.findings_left_out = left_out;
        let findings = findings.into_iter().map(AuditFinding::from).chain(unreadable);
        findings.for_each(|finding| report.add_finding(finding));
        let mut held = ReferencedObjects::default();
        // Models of earlier moves may be removed.
        held.add_record(&last);
        self.check_store(&held, depth, watch, &mut report).await;
        Ok(Some(report))
    }

    async fn read_channel_log(&self, channel: &RunId) -> Result<ChannelLog, ReadError> {
        let filters = vec![format!("flotilla.{channel}.channel.*"), "flotilla.*.spec".to_owned()];
        let mut facts = std::pin::pin!(self.bus.follow_facts(filters, 0));
        let mut log = ChannelLog::default();
        let ours = format!("flotilla.{channel}.");
        while let Some(followed) = facts.next().await {
            match followed? {
                LogEvent::Record(record) => log.add_record(channel, record),
                LogEvent::Unreadable { sequence, subject, error } if subject.starts_with(&ours) => {
                    let what = format!("it cannot be read: {}", error_chain(&error));
                    log.unreadable.push(AuditFinding::for_log(what, Some(subject), Some(sequence)));
                }
                LogEvent::Unreadable { .. } => {}
                LogEvent::CaughtUp => break,
            }
        }
        Ok(log)
    }
}
