//! One piece of work held under a lease, and what a role needs to do it.

use std::{collections::VecDeque, io::ErrorKind, path::PathBuf, time::Duration};

use bus::{Bus, Followed, PublishError, Published};
use conduct::Fault;
use futures::StreamExt;
use hardware::{Evidence, Known, Retry};
use store::{Cache, CacheError, CachedTree, GetError, PutError, Store};
use wire::{Body, ErrorCode, Fact, Place, Record, RunId, Subject, WorkKind, v1};

use crate::{
    WorkerError, failure, placing,
    presence::Progress,
    watch::{Share, Span, Watch},
    work,
};

/// Between tries to write what the bus does not take.
const WRITE_AGAIN: Duration = Duration::from_secs(1);

/// Why a job was not done.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    #[error("{message}")]
    Failed { fault: Fault, message: String, log_tail: String },
    /// The run was cancelled or the agent is leaving.
    #[error("stopped (A108)")]
    Stopped,
    /// Another agent has the room for it, and is idle.
    #[error("handed to {0} (A108)")]
    PassedOn(String),
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
    pub(crate) kind: WorkKind,
    pub(crate) watch: Watch,
    pub(crate) share: Share,
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
            Self::Failed {
                fault: Fault::Work | Fault::Passing(_) | Fault::TooLarge,
                message,
                log_tail,
            } => Self::Failed { fault: Fault::Company, message, log_tail },
            other => other,
        }
    }

    /// What all agents share does not answer.
    pub fn away(error: impl Into<anyhow::Error>) -> Self {
        Self::of(Fault::Away, error)
    }

    /// This box may not do it, or would do it wrongly; others can.
    pub fn not_here(error: impl Into<anyhow::Error>) -> Self {
        Self::of(Fault::Box, error)
    }

    /// Whatever this box is handed would end the same.
    pub fn broken(error: impl Into<anyhow::Error>) -> Self {
        Self::of(Fault::Broken, error)
    }

    /// No box that is there has room for it.
    pub(crate) fn no_room(message: String) -> Self {
        Self::Failed { fault: Fault::NoRoom, message, log_tail: String::new() }
    }

    fn of(fault: Fault, error: impl Into<anyhow::Error>) -> Self {
        let error = error.into();
        let fault = if fault == Fault::Work && is_disk_full(&error) { Fault::Disk } else { fault };
        let mut message = format!("{error:#}");
        if ErrorCode::in_text(&message).is_none() {
            let code = ErrorCode::of(error.as_ref()).unwrap_or(ErrorCode::JOB);
            message = format!("{message} ({code})");
        }
        Self::Failed { fault, message, log_tail: String::new() }
    }

    /// What a worker that knows what is at fault said of it.
    pub async fn said_by_worker(fault: Fault, message: String, worker: &crate::Worker) -> Self {
        let mut failed = Self::of(fault, anyhow::anyhow!(message));
        if let Self::Failed { log_tail, .. } = &mut failed {
            *log_tail = worker.log_tail().await;
        }
        failed
    }

    /// What a worker said when it refused or died. Another box may fare better: its device,
    /// its memory and its disk are its own.
    pub async fn of_worker(error: impl Into<anyhow::Error>, worker: &crate::Worker) -> Self {
        Self::said_by_worker(Fault::Work, format!("{:#}", error.into()), worker).await
    }

    /// As [`JobError::of_worker`], of one that runs a model: much of how these die is known.
    pub async fn of_model_worker(error: impl Into<anyhow::Error>, worker: &crate::Worker) -> Self {
        Self::of_worker(error, worker).await.explained(&worker.kernel_log().await)
    }

    /// Adds what the kernel's log, the worker's and its last words are known to mean.
    #[must_use]
    pub fn explained(self, kernel: &str) -> Self {
        let Self::Failed { fault: Fault::Work, message, log_tail } = self else { return self };
        let evidence = Evidence { kernel, log: &log_tail, exit: &message };
        let Some(known) = hardware::classify(&evidence) else {
            return Self::Failed { fault: Fault::Work, message, log_tail };
        };
        let message = format!("{message} [{}: {}]", known.class, known.remedy);
        Self::Failed { fault: meaning(&known), message, log_tail }
    }

    /// Whatever it was, the work had no part in it.
    #[must_use]
    pub fn of_the_box(self) -> Self {
        match self {
            Self::Failed {
                fault: Fault::Work | Fault::Passing(_) | Fault::TooLarge,
                message,
                log_tail,
            } => Self::Failed { fault: Fault::Box, message, log_tail },
            other => other,
        }
    }
}

/// Whose fault a known way to die is.
fn meaning(known: &Known) -> Fault {
    match known.retry {
        _ if known.content => Fault::Content,
        Retry::Never => Fault::Broken,
        Retry::Once => Fault::Passing(known.class),
        Retry::Smaller => Fault::TooLarge,
        Retry::Wait => Fault::Box,
        Retry::Again => Fault::Work,
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
            GetError::Nowhere { may_pass: true, .. } => Self::away(error),
            GetError::Cache(CacheError::DiskFull { .. } | CacheError::Full { .. }) => {
                Self::of(Fault::Disk, error)
            }
            // Another box may have it.
            GetError::Nowhere { .. }
            | GetError::Corrupt { .. }
            | GetError::Fault(_)
            | GetError::Cache(_) => Self::retry(error),
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
            _ => Err(JobError::fatal(anyhow::anyhow!("the log holds no {subject} (E111)"))),
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

    /// The facts of a subject, which may hold wildcards, as far as the log holds them now; at
    /// most `most`, the newest.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn facts(&self, subject: &str, most: usize) -> Result<Vec<Record>, JobError> {
        let mut facts = self.bus.follow(vec![subject.to_owned()], 0);
        let mut found = VecDeque::new();
        while let Some(followed) = facts.next().await {
            match followed.map_err(JobError::away)? {
                Followed::Record(record) => {
                    found.push_back(record);
                    if found.len() > most {
                        found.pop_front();
                    }
                }
                Followed::Unreadable { .. } => {}
                Followed::CaughtUp => break,
            }
        }
        Ok(found.into())
    }

    /// The others that do the same work and are there, whatever their pool.
    ///
    /// # Errors
    /// When the bus does not answer.
    pub async fn others(&self) -> Result<Vec<v1::AgentStatus>, JobError> {
        let role = work::role_name(self.kind);
        let mut statuses = self.bus.statuses().await.map_err(JobError::away)?;
        statuses.retain(|status| placing::is_there(status, &self.agent, role));
        Ok(statuses)
    }

    /// Whether a result that holds errors of this box is to be written all the same, for enough
    /// agents have tried. `others` are there and could.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn errors_stand(&self, others: &[String]) -> Result<bool, JobError> {
        let last = failure::last_of(self.kind, self).await?;
        Ok(conduct::errors_stand(last.as_ref(), &self.agent, others))
    }

    /// Whether the log already holds a fact.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn is_written(&self, place: Place) -> Result<bool, JobError> {
        let subject = Subject::new(&self.run, place).to_string();
        Ok(self.bus.get(&subject).await.map_err(JobError::away)?.is_some())
    }

    /// What failed because its worker was ended for the box's sake, named so.
    #[must_use]
    pub fn blame(&self, error: JobError) -> JobError {
        self.watch.blame(self.kind, error)
    }

    /// What its box took for it so far; `None` where nobody measures.
    pub fn joules(&self) -> Option<f64> {
        self.share.joules()
    }

    /// Counts TLB shootdowns from now on.
    pub fn span(&self) -> Span {
        self.watch.span()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(kernel: &str, log: &str, message: &str) -> Fault {
        let failed =
            JobError::Failed { fault: Fault::Work, message: message.into(), log_tail: log.into() };
        match failed.explained(kernel) {
            JobError::Failed { fault, .. } => fault,
            JobError::Stopped | JobError::PassedOn(_) => panic!("it failed"),
        }
    }

    #[test]
    fn how_a_worker_died_says_whose_fault_it_was() {
        let nil = "Memory access fault by GPU node-1 on address (nil)";
        assert_eq!(fault("", nil, "the worker died: signal: 6 (SIGABRT)"), Fault::Broken);
        assert_eq!(fault("", "", "the worker was silent for 4s"), Fault::Passing("hang"));
        assert_eq!(fault("", "", "HIP out of memory. Tried"), Fault::TooLarge);
        assert_eq!(fault("GPU reset begin!", "", "the worker died"), Fault::Box);
        assert_eq!(fault("", "", "the loss of step 3 is nan; lower it"), Fault::Content);
        assert_eq!(fault("", "", "the worker died: signal: 9 (SIGKILL)"), Fault::Work);
        assert_eq!(fault("", "", "something new"), Fault::Work);
    }

    #[test]
    fn what_is_known_is_said_and_other_faults_stay_what_they_are() {
        let silent = JobError::retry(anyhow::anyhow!("the worker was silent for 4s"));
        let said = silent.explained("").to_string();
        assert!(said.contains("[hang: ") && said.contains("HSA_ENABLE_INTERRUPT"), "{said}");
        let disk = JobError::retry(anyhow::anyhow!("No space left on device; GPU reset begin!"));
        let explained = disk.explained("GPU reset begin!");
        assert!(matches!(explained, JobError::Failed { fault: Fault::Disk, .. }));
    }
}
