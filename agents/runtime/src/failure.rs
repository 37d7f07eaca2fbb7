//! What is written when a job is not done, and when it is given up.

use bus::Delivery;
use wire::{Body, Place, SuiteName, WorkKind, v1};

use crate::{Job, JobError};

/// So many failures of one job, wherever, and it is given up.
const FAILURES_MAX: u32 = 5;

/// A job handed out so often without a word of failure takes its agents down with it.
const DELIVERIES_MAX: u64 = 20;

/// The facts a job owes, as failures name them: `failure.<kind>.<id>.<attempt>`.
async fn owed(job: &Job) -> Result<Vec<String>, JobError> {
    Ok(match &job.record.fact.subject.place {
        Place::GenerateOrder { cycle, job, attempt, .. } => {
            vec![format!("{cycle}-{job}-{attempt}")]
        }
        Place::Samples { cycle, job } => vec![format!("{cycle}-{job}")],
        Place::TrainOrder { cycle, attempt, .. } => vec![format!("{cycle}-{attempt}")],
        Place::Checkpoint { cycle, step } => {
            let mut owed = Vec::new();
            for suite in job.spec().await?.suites {
                let Ok(name) = SuiteName::new(suite.name) else { continue };
                let id = format!("{cycle}-{step}-{name}");
                if !job.is_written(Place::Eval { cycle: *cycle, step: *step, suite: name }).await? {
                    owed.push(id);
                }
            }
            owed
        }
        _ => Vec::new(),
    })
}

/// Whether a job was handed out too often to be tried once more.
pub(crate) fn poison(delivery: &Delivery) -> Option<JobError> {
    (delivery.delivered > DELIVERIES_MAX).then(|| JobError::Final {
        message: format!(
            "handed out {} times and never done; it seems to end the agents that try",
            delivery.delivered
        ),
        log_tail: String::new(),
    })
}

/// Writes a failure for each fact the job owes. The answer is how often it has failed, or
/// `None` when nobody should try again.
pub(crate) async fn record(
    kind: WorkKind,
    job: &Job,
    error: &JobError,
) -> Result<Option<u32>, JobError> {
    let mut attempts = 1;
    for id in owed(job).await? {
        let before = format!("flotilla.{}.failure.{kind}.{id}.*", job.run);
        let before = job.bus.get(&before).await.map_err(JobError::retry)?;
        let attempt = match before.map(|record| record.fact.body) {
            Some(Body::Failure(failure)) => failure.attempt + 1,
            _ => 1,
        };
        attempts = attempts.max(attempt);
        let last = matches!(error, JobError::Final { .. }) || attempt >= FAILURES_MAX;
        let failure = v1::Failure {
            run: job.run.to_string(),
            kind: kind.to_string(),
            id: id.clone(),
            attempt,
            agent: job.agent.clone(),
            message: error.to_string(),
            log_tail: error.log_tail().to_owned(),
            r#final: last,
            cause: v1::failure::Cause::Work.into(),
        };
        job.write_once(Place::Failure { kind, id, attempt }, Body::Failure(failure)).await?;
    }
    let last = matches!(error, JobError::Final { .. }) || attempts >= FAILURES_MAX;
    Ok((!last).then_some(attempts))
}
