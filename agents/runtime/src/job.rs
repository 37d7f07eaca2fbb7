//! One piece of work held under a lease, and what a role needs to do it.

use std::path::PathBuf;

use bus::{Bus, PublishError, Published};
use store::{Cache, CachedTree, GetError, PutError, Store};
use wire::{Body, Fact, Place, Record, RunId, Subject, v1};

use crate::{WorkerError, presence::Progress};

/// Why a job was not done.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// Another try, perhaps by another agent, may succeed.
    #[error("{message}")]
    Retry { message: String, log_tail: String },
    /// No try will succeed: the order, the data or the model is at fault.
    #[error("{message}")]
    Final { message: String, log_tail: String },
    /// The run was cancelled or the agent is leaving.
    #[error("stopped")]
    Stopped,
}

/// A job and its surroundings.
#[derive(Debug, Clone)]
pub struct Job {
    pub run: RunId,
    pub record: Record,
    pub agent: String,
    pub bus: Bus,
    pub store: Store,
    pub cache: Cache,
    /// The agent's own directory.
    pub directory: PathBuf,
    pub progress: Progress,
}

impl JobError {
    pub fn retry(error: impl Into<anyhow::Error>) -> Self {
        Self::Retry { message: chain(error), log_tail: String::new() }
    }

    pub fn fatal(error: impl Into<anyhow::Error>) -> Self {
        Self::Final { message: chain(error), log_tail: String::new() }
    }

    /// What a worker said when it refused or died. Another box may fare better: its device,
    /// its memory and its disk are its own.
    pub async fn of_worker(error: WorkerError, worker: &crate::Worker) -> Self {
        let log_tail = worker.log_tail().await;
        Self::Retry { message: chain(error), log_tail }
    }

    pub(crate) fn log_tail(&self) -> &str {
        match self {
            Self::Retry { log_tail, .. } | Self::Final { log_tail, .. } => log_tail,
            Self::Stopped => "",
        }
    }
}

/// The whole chain of causes in one line.
fn chain(error: impl Into<anyhow::Error>) -> String {
    format!("{:#}", error.into())
}

impl From<GetError> for JobError {
    /// Final when the content itself is at fault; a refusal or a full disk may be this box's.
    fn from(error: GetError) -> Self {
        match error {
            GetError::Digest(_)
            | GetError::Path(_)
            | GetError::Corrupt { .. }
            | GetError::TooLarge { .. }
            | GetError::Manifest { .. }
            | GetError::NoSuchFile { .. } => Self::fatal(error),
            GetError::Fault(_) | GetError::Cache(_) => Self::retry(error),
        }
    }
}

impl From<PutError> for JobError {
    fn from(error: PutError) -> Self {
        Self::retry(error)
    }
}

impl From<WorkerError> for JobError {
    fn from(error: WorkerError) -> Self {
        Self::retry(error)
    }
}

impl Job {
    /// What the user asked for.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn spec(&self) -> Result<v1::Spec, JobError> {
        let subject = Subject::new(&self.run, Place::Spec).to_string();
        match self.bus.get(&subject).await.map_err(JobError::retry)?.map(|record| record.fact.body)
        {
            Some(Body::Spec(spec)) => Ok(spec),
            _ => Err(JobError::fatal(anyhow::anyhow!("the log holds no {subject}"))),
        }
    }

    /// A tree in the cache, if there is one to fetch.
    ///
    /// # Errors
    /// When it cannot be fetched.
    pub async fn tree_if(&self, tree: Option<&v1::Tree>) -> Result<Option<CachedTree>, JobError> {
        match tree {
            Some(tree) => Ok(Some(self.cache.tree(&self.store, tree).await?)),
            None => Ok(None),
        }
    }

    /// Whether the log already holds a fact.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn is_written(&self, place: Place) -> Result<bool, JobError> {
        let subject = Subject::new(&self.run, place).to_string();
        Ok(self.bus.get(&subject).await.map_err(JobError::retry)?.is_some())
    }

    /// Writes a result, for as long as the bus is away: the work is done. That somebody else
    /// was first is as good.
    ///
    /// # Errors
    /// When the log refuses it.
    pub async fn write(&self, place: Place, body: Body) -> Result<(), JobError> {
        let fact = Fact { subject: Subject::new(&self.run, place), body };
        let published = loop {
            match self.bus.publish(&fact).await {
                Err(error @ PublishError::Unacknowledged { .. }) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::warn!(error, "the bus is away; trying on");
                }
                other => break other.map_err(JobError::retry)?,
            }
        };
        if let Published::AlreadyThere { same: false, sequence } = published {
            tracing::info!(subject = %fact.subject, sequence, "somebody else was first");
        }
        Ok(())
    }

    /// Writes a fact, giving up when the bus stays away.
    pub(crate) async fn write_once(&self, place: Place, body: Body) -> Result<(), JobError> {
        let fact = Fact { subject: Subject::new(&self.run, place), body };
        self.bus.publish(&fact).await.map_err(JobError::retry)?;
        Ok(())
    }
}
