//! One piece of work held under a lease, and what a role needs to do it.

use std::{io::ErrorKind, path::PathBuf, time::Duration};

use bus::{Bus, PublishError, Published};
use conduct::Fault;
use store::{Cache, CacheError, CachedTree, GetError, PutError, Store};
use wire::{Body, Fact, Place, Record, RunId, Subject, v1};

use crate::{WorkerError, presence::Progress};

/// Between tries to write what the bus does not take.
const WRITE_AGAIN: Duration = Duration::from_secs(1);

/// Why a job was not done.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    #[error("{message}")]
    Failed { fault: Fault, message: String, log_tail: String },
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
    /// Another try, perhaps by another agent, may succeed.
    pub fn retry(error: impl Into<anyhow::Error>) -> Self {
        Self::of(Fault::Work, error)
    }

    /// No try will succeed: the order, the data or the model is at fault.
    pub fn fatal(error: impl Into<anyhow::Error>) -> Self {
        Self::of(Fault::Content, error)
    }

    /// A worker died over this job and others: one of them may be at fault.
    #[must_use]
    pub fn in_company(self) -> Self {
        match self {
            Self::Failed { fault: Fault::Work, message, log_tail } => {
                Self::Failed { fault: Fault::Company, message, log_tail }
            }
            other => other,
        }
    }

    /// What all agents share does not answer.
    pub fn away(error: impl Into<anyhow::Error>) -> Self {
        Self::of(Fault::Away, error)
    }

    fn of(fault: Fault, error: impl Into<anyhow::Error>) -> Self {
        let error = error.into();
        let fault = if fault == Fault::Work && is_disk_full(&error) { Fault::Disk } else { fault };
        Self::Failed { fault, message: format!("{error:#}"), log_tail: String::new() }
    }

    /// What a worker said when it refused or died. Another box may fare better: its device,
    /// its memory and its disk are its own.
    pub async fn of_worker(error: WorkerError, worker: &crate::Worker) -> Self {
        let mut failed = Self::retry(error);
        if let Self::Failed { log_tail, .. } = &mut failed {
            *log_tail = worker.log_tail().await;
        }
        failed
    }
}

/// Whether this box lacks space. A worker can only say so in words.
fn is_disk_full(error: &anyhow::Error) -> bool {
    let full = |io: &std::io::Error| {
        matches!(io.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
    };
    let said = ["No space left on device", "Disk quota exceeded"];
    error.chain().any(|cause| cause.downcast_ref().is_some_and(full))
        || said.iter().any(|words| format!("{error:#}").contains(words))
}

impl From<GetError> for JobError {
    /// Damage may have happened on the way: only content that is whole and wrong is final.
    fn from(error: GetError) -> Self {
        match &error {
            GetError::Digest(_)
            | GetError::Path(_)
            | GetError::TooLarge { .. }
            | GetError::Manifest { .. }
            | GetError::NoSuchFile { .. } => Self::fatal(error),
            GetError::Fault(fault) if fault.may_pass() => Self::away(error),
            GetError::Cache(CacheError::DiskFull { .. } | CacheError::Full { .. }) => {
                Self::of(Fault::Disk, error)
            }
            GetError::Corrupt { .. } | GetError::Fault(_) | GetError::Cache(_) => {
                Self::retry(error)
            }
        }
    }
}

impl From<PutError> for JobError {
    fn from(error: PutError) -> Self {
        match &error {
            PutError::Fault(fault) if fault.may_pass() => Self::away(error),
            _ => Self::retry(error),
        }
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
        match self.bus.get(&subject).await.map_err(JobError::away)?.map(|record| record.fact.body) {
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
        Ok(self.bus.get(&subject).await.map_err(JobError::away)?.is_some())
    }

    /// Writes a result, for as long as the bus is away or full: the work is done, and the
    /// lease is kept. That somebody else was first is as good.
    ///
    /// # Errors
    /// When the log refuses it.
    pub async fn write(&self, place: Place, body: Body) -> Result<(), JobError> {
        let fact = Fact { subject: Subject::new(&self.run, place), body };
        let published = loop {
            match self.bus.publish(&fact).await {
                Err(error @ (PublishError::Unacknowledged { .. } | PublishError::Full { .. })) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::warn!(error, "the bus takes nothing; trying on");
                    self.progress.note(&error);
                    tokio::time::sleep(WRITE_AGAIN).await;
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
    pub(crate) async fn write_now(&self, place: Place, body: Body) -> Result<Published, JobError> {
        let fact = Fact { subject: Subject::new(&self.run, place), body };
        self.bus.publish(&fact).await.map_err(JobError::away)
    }
}
