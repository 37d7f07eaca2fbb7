//! Writing what went wrong with a job.

use bus::Published;
use conduct::{Blow, Then};
use wire::{Body, Place, WorkKind, v1};

use crate::{Job, JobError};

/// Others who write a failure of the same job at the same moment.
const WRITE_TRIES: usize = 8;

/// Writes a failure for each fact the job owes. The answer is what becomes of the job.
pub(crate) async fn record(kind: WorkKind, job: &Job, error: &JobError) -> Result<Then, JobError> {
    let JobError::Failed { fault, message, log_tail } = error else {
        return Err(JobError::Stopped);
    };
    let blow = Blow { run: &job.run, kind, agent: &job.agent, fault: *fault, message, log_tail };
    let mut failures = Vec::new();
    for id in owed(job).await? {
        failures.extend(write_next(job, &blow, &id).await?);
    }
    Ok(conduct::then(&failures))
}

/// The last failure of what the job owes, if it failed before.
pub(crate) async fn last_of(kind: WorkKind, job: &Job) -> Result<Option<v1::Failure>, JobError> {
    match owed(job).await?.first() {
        Some(id) => last(job, kind, id).await,
        None => Ok(None),
    }
}

/// The ids of the facts the job still owes.
async fn owed(job: &Job) -> Result<Vec<String>, JobError> {
    let place = &job.record.fact.subject.place;
    let suites = match place {
        Place::Checkpoint { .. } => job.spec().await?.suites,
        _ => Vec::new(),
    };
    let mut ids = Vec::new();
    for (id, result) in conduct::owed(place, &suites) {
        let written = match result {
            Some(result) => job.is_written(result).await?,
            None => false,
        };
        ids.extend((!written).then_some(id));
    }
    Ok(ids)
}

async fn last(job: &Job, kind: WorkKind, id: &str) -> Result<Option<v1::Failure>, JobError> {
    let subject = format!("flotilla.{}.failure.{kind}.{id}.*", job.run);
    let record = job.bus.get(&subject).await.map_err(JobError::away)?;
    Ok(record.and_then(|record| match record.fact.body {
        Body::Failure(failure) => Some(failure),
        _ => None,
    }))
}

/// Writes the next failure of an id, behind those others may be writing. The answer is the
/// last word on it, if there is one.
async fn write_next(job: &Job, blow: &Blow<'_>, id: &str) -> Result<Option<v1::Failure>, JobError> {
    let kind = blow.kind;
    for _ in 0..WRITE_TRIES {
        let last = last(job, kind, id).await?;
        if last.as_ref().is_some_and(|last| last.r#final) {
            return Ok(last);
        }
        let Some(failure) = conduct::failure(blow, id, last.as_ref()) else { return Ok(last) };
        let place = Place::Failure { kind, id: id.to_owned(), attempt: failure.attempt };
        match job.write_now(place, Body::Failure(failure.clone())).await? {
            Published::AlreadyThere { same: false, .. } => {}
            Published::New { .. } | Published::AlreadyThere { same: true, .. } => {
                return Ok(Some(failure));
            }
        }
    }
    Err(JobError::retry(anyhow::anyhow!("too many others write failures of {kind} {id} (R105)")))
}
