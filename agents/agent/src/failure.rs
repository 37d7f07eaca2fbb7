//! The failure facts of a job: reads the last one and writes the next. Decisions are in
//! `agent-core`.

use agent_core::{FailedAttempt, RetryDecision};
use bus::PublishOutcome;
use wire::{FactBody, FactKey, WorkKind, v1};

use crate::{JobError, LeasedJob};

/// Attempts to write a failure while other agents write failures of the same job.
const WRITE_TRIES: usize = 8;

impl LeasedJob {
    /// Reads the job's newest failure from the log, and returns true if a result with errors of
    /// this host is written as final, because enough agents have tried. `others` are the other
    /// available agents that could try.
    pub async fn errors_are_final(&self, others: &[String]) -> Result<bool, JobError> {
        let last = last_failure(self.kind, self).await?;
        Ok(agent_core::errors_are_final(last.as_ref(), &self.agent, others))
    }
}

/// Writes a failure for each result that the job has not produced, and for all if they differ from
/// those of another host.
pub(crate) async fn record_failure(
    kind: WorkKind,
    job: &LeasedJob,
    error: &JobError,
) -> Result<RetryDecision, JobError> {
    let JobError::Failed { fault, message, log_tail } = error else {
        return Err(JobError::Stopped);
    };
    let attempt =
        FailedAttempt { run: &job.run, kind, agent: &job.agent, fault: *fault, message, log_tail };
    let mut failures = Vec::new();
    for (id, is_written) in list_results(job).await? {
        if is_written && !fault.concerns_written_results() {
            continue;
        }
        failures.extend(append_failure(job, &attempt, &id).await?);
    }
    Ok(agent_core::decide_retry(&failures))
}

/// Returns the last failure of the job's first missing result.
pub(crate) async fn last_failure(
    kind: WorkKind,
    job: &LeasedJob,
) -> Result<Option<v1::Failure>, JobError> {
    let results = list_results(job).await?;
    match results.iter().find(|(_, is_written)| !is_written) {
        Some((id, _)) => read_last_failure(job, kind, id).await,
        None => Ok(None),
    }
}

/// Returns the id of each result of the job, and true if it is in the log.
async fn list_results(job: &LeasedJob) -> Result<Vec<(String, bool)>, JobError> {
    let place = &job.record.fact.subject.key;
    let suites = match place.checkpoint_position() {
        Some(_) => job.read_spec().await?.suites,
        None => Vec::new(),
    };
    let mut results = Vec::new();
    for (id, result) in agent_core::expected_results(place, &suites) {
        let is_written = match result {
            Some(result) => job.is_written(result).await?,
            None => false,
        };
        results.push((id, is_written));
    }
    Ok(results)
}

async fn read_last_failure(
    job: &LeasedJob,
    kind: WorkKind,
    id: &str,
) -> Result<Option<v1::Failure>, JobError> {
    let subject = format!("flotilla.{}.failure.{kind}.{id}.*", job.run);
    let record = job.bus.get_fact(&subject).await.map_err(JobError::dependency_down)?;
    Ok(record.and_then(|record| match record.fact.body {
        FactBody::Failure(failure) => Some(failure),
        _ => None,
    }))
}

/// Writes the next failure of one result id, after those that other agents write meanwhile. Returns
/// the id's last failure: the one written, unless an earlier one is final or the new one adds
/// nothing.
async fn append_failure(
    job: &LeasedJob,
    attempt: &FailedAttempt<'_>,
    id: &str,
) -> Result<Option<v1::Failure>, JobError> {
    let kind = attempt.kind;
    for _ in 0..WRITE_TRIES {
        let last = read_last_failure(job, kind, id).await?;
        if last.as_ref().is_some_and(|last| last.r#final) {
            return Ok(last);
        }
        let Some(failure) = agent_core::build_failure(attempt, id, last.as_ref()) else {
            return Ok(last);
        };
        let place = FactKey::Failure { kind, id: id.to_owned(), attempt: failure.attempt };
        match job.try_write_fact(place, FactBody::Failure(failure.clone())).await? {
            PublishOutcome::AlreadyWritten { same: false, .. } => {}
            PublishOutcome::New { .. } | PublishOutcome::AlreadyWritten { same: true, .. } => {
                return Ok(Some(failure));
            }
        }
    }
    Err(JobError::retryable_failure(anyhow::anyhow!(
        "could not record the failure of {kind} {id}: too many concurrent writers; the job is \
         retried (R105)"
    )))
}
