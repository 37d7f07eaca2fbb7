//! One job held under a lease, and the operations that a role needs to do it.

use std::{collections::VecDeque, io::ErrorKind, path::PathBuf, time::Duration};

use agent_core::JobFault;
use bus::{Bus, LogEvent, PublishError, PublishOutcome};
use futures::StreamExt;
use hardware::{FaultEvidence, KnownFault, RetryAdvice};
use store::{CacheError, CachedTree, FileCache, GetError, PutError, Store};
use wire::{ErrorCode, Fact, FactBody, FactKey, Record, RunId, Subject, WorkKind, v1};

use crate::{
    WorkerError, failure,
    live_status::JobProgress,
    memory_placement, role_runner,
    telemetry::{EnergyShare, ShootdownSpan, TelemetryHandle},
};

/// The interval between attempts to write a result that the bus does not accept.
const WRITE_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The reason why a job was not done. A failure has a cause (`Fault`), which decides about retry,
/// backoff and quarantine.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The job failed. `log_tail` contains the last lines of its worker's log.
    #[error("{message}")]
    Failed { fault: JobFault, message: String, log_tail: String },
    /// The run is over, the agent is stopping, or its samples would not count (quarantine).
    #[error("stopped (A108)")]
    Stopped,
    /// Another agent, which is idle and has enough memory, should do the job.
    #[error("handed to {0} (A108)")]
    HandedOver(String),
}

/// A job under a lease, with the connections and directories that a role needs to do it.
#[derive(Debug, Clone)]
pub struct LeasedJob {
    /// The run that the job belongs to.
    pub run: RunId,
    /// The fact that orders the job, and its place in the log.
    pub record: Record,
    /// The id of this agent.
    pub agent: String,
    /// The connection to the log.
    pub bus: Bus,
    /// The object store.
    pub store: Store,
    /// The local cache of files from the store.
    pub cache: FileCache,
    /// The agent's own directory.
    pub directory: PathBuf,
    /// The job's entry in the agent's status.
    pub progress: JobProgress,
    pub(crate) kind: WorkKind,
    pub(crate) telemetry: TelemetryHandle,
    pub(crate) energy_share: EnergyShare,
}

impl JobError {
    /// Creates a failure that another attempt, perhaps by another agent, may avoid. A full disk is
    /// recognised and recorded as the cause.
    pub fn retryable_failure(error: impl Into<anyhow::Error>) -> Self {
        Self::from_fault(JobFault::WorkFailed, error)
    }

    /// Creates a failure that no attempt can avoid: the order, the data or the model is at fault.
    pub fn fatal_failure(error: impl Into<anyhow::Error>) -> Self {
        Self::from_fault(JobFault::InvalidInput, error)
    }

    /// Marks a failure as that of a worker that served several jobs: any of them may be at fault.
    #[must_use]
    pub fn blame_shared_worker(self) -> Self {
        match self {
            Self::Failed {
                fault: JobFault::WorkFailed | JobFault::Transient(_) | JobFault::OutOfMemory,
                message,
                log_tail,
            } => Self::Failed { fault: JobFault::SharedWorker, message, log_tail },
            other => other,
        }
    }

    /// Creates a failure for a dependency that all agents share (the bus, the store) and that does
    /// not respond.
    pub fn dependency_down(error: impl Into<anyhow::Error>) -> Self {
        Self::from_fault(JobFault::DependencyDown, error)
    }

    /// Creates a failure for a job that this host cannot do correctly, or must not do; other hosts
    /// can.
    pub fn host_unfit(error: impl Into<anyhow::Error>) -> Self {
        Self::from_fault(JobFault::NeedsUnmet, error)
    }

    /// Creates a failure that every job on this host would have.
    pub fn host_broken(error: impl Into<anyhow::Error>) -> Self {
        Self::from_fault(JobFault::HostBroken, error)
    }

    /// Creates a failure for a job that no available host has memory for.
    pub(crate) fn no_room(message: String) -> Self {
        Self::Failed { fault: JobFault::Unschedulable, message, log_tail: String::new() }
    }

    /// Creates a failure with a cause. Adds an error code to the message if it has none.
    fn from_fault(fault: JobFault, error: impl Into<anyhow::Error>) -> Self {
        let error = error.into();
        let fault = if fault == JobFault::WorkFailed && is_disk_full(&error) {
            JobFault::DiskFull
        } else {
            fault
        };
        let mut message = format!("{error:#}");
        if ErrorCode::find_in_text(&message).is_none() {
            let code =
                ErrorCode::from_error(error.as_ref()).unwrap_or(ErrorCode::UNCODED_JOB_FAILURE);
            message = format!("{message} ({code})");
        }
        Self::Failed { fault, message, log_tail: String::new() }
    }

    /// Creates a failure whose cause the worker itself reported, with the end of the worker's log.
    pub async fn from_worker(
        fault: JobFault,
        message: String,
        worker: &crate::WorkerProcess,
    ) -> Self {
        let mut failed = Self::from_fault(fault, anyhow::anyhow!(message));
        if let Self::Failed { log_tail, .. } = &mut failed {
            *log_tail = worker.log_tail().await;
        }
        failed
    }

    /// Creates a failure from a worker that refused a call or died, with the end of its log. It is
    /// retryable, because the device, memory and disk of another host differ.
    pub async fn from_worker_error(
        error: impl Into<anyhow::Error>,
        worker: &crate::WorkerProcess,
    ) -> Self {
        Self::from_worker(JobFault::WorkFailed, format!("{:#}", error.into()), worker).await
    }

    /// Creates a failure from a worker that runs a model, as `from_worker_error` does, and adds the
    /// known cause of its death.
    pub async fn from_model_worker(
        error: impl Into<anyhow::Error>,
        worker: &crate::WorkerProcess,
    ) -> Self {
        Self::from_worker_error(error, worker)
            .await
            .with_known_cause(&worker.read_kernel_log().await)
    }

    /// Adds the known cause of a worker's death and its remedy, found in the kernel's log, the
    /// worker's log and its exit status. Other failures are unchanged.
    #[must_use]
    pub fn with_known_cause(self, kernel: &str) -> Self {
        let Self::Failed { fault: JobFault::WorkFailed, message, log_tail } = self else {
            return self;
        };
        let evidence = FaultEvidence { kernel, log: &log_tail, exit: &message };
        let Some(known) = hardware::classify_fault(&evidence) else {
            return Self::Failed { fault: JobFault::WorkFailed, message, log_tail };
        };
        let message = format!("{message} [{}: {}]", known.class, known.remedy);
        Self::Failed { fault: classify_fault(&known), message, log_tail }
    }

    /// Marks a failure as the host's: the job had no part in it. Failures with other known causes
    /// are unchanged.
    #[must_use]
    pub fn blame_host(self) -> Self {
        match self {
            Self::Failed {
                fault: JobFault::WorkFailed | JobFault::Transient(_) | JobFault::OutOfMemory,
                message,
                log_tail,
            } => Self::Failed { fault: JobFault::HostUnfit, message, log_tail },
            other => other,
        }
    }
}

/// Returns the failure cause for a known way in which workers die.
fn classify_fault(known: &KnownFault) -> JobFault {
    match known.retry {
        _ if known.content => JobFault::InvalidInput,
        RetryAdvice::Never => JobFault::HostBroken,
        RetryAdvice::Once => JobFault::Transient(known.class),
        RetryAdvice::Smaller => JobFault::OutOfMemory,
        RetryAdvice::Wait => JobFault::HostUnfit,
        RetryAdvice::Again => JobFault::WorkFailed,
    }
}

/// Returns true if this host lacks disk space. A worker reports it only as text, so known messages
/// are searched as well.
fn is_disk_full(error: &anyhow::Error) -> bool {
    let full = |io: &std::io::Error| {
        matches!(io.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
    };
    let said = ["No space left on device", "Disk quota exceeded"];
    error.chain().any(|cause| cause.downcast_ref().is_some_and(full))
        || said.iter().any(|words| format!("{error:#}").contains(words))
}

impl From<GetError> for JobError {
    /// Converts a store error. Damage may have happened in transit, so only content that is
    /// complete and invalid is fatal.
    fn from(error: GetError) -> Self {
        match &error {
            GetError::Digest(_)
            | GetError::Path(_)
            | GetError::TooLarge { .. }
            | GetError::Manifest { .. }
            | GetError::NoSuchFile { .. } => Self::fatal_failure(error),
            GetError::Storage(fault) if fault.is_transient() => Self::dependency_down(error),
            GetError::Unavailable { may_pass: true, .. } => Self::dependency_down(error),
            GetError::Cache(CacheError::DiskFull { .. } | CacheError::Full { .. }) => {
                Self::from_fault(JobFault::DiskFull, error)
            }
            // Another host may have the file.
            GetError::Unavailable { .. }
            | GetError::Corrupt { .. }
            | GetError::Storage(_)
            | GetError::Cache(_) => Self::retryable_failure(error),
        }
    }
}

impl From<PutError> for JobError {
    fn from(error: PutError) -> Self {
        match &error {
            PutError::Storage(fault) if fault.is_transient() => Self::dependency_down(error),
            _ => Self::retryable_failure(error),
        }
    }
}

impl From<WorkerError> for JobError {
    fn from(error: WorkerError) -> Self {
        Self::retryable_failure(error)
    }
}

impl LeasedJob {
    /// Reads the run's spec from the log.
    ///
    /// # Errors
    /// When the log cannot be read, or contains no spec.
    pub async fn read_spec(&self) -> Result<v1::Spec, JobError> {
        let record = self.bus.find_spec(&self.run).await.map_err(JobError::dependency_down)?;
        match record.map(|record| record.fact.body) {
            Some(FactBody::Spec(spec)) => Ok(spec),
            _ => {
                let run = &self.run;
                Err(JobError::fatal_failure(anyhow::anyhow!(
                    "the log holds no spec of run {run} (E111)"
                )))
            }
        }
    }

    /// Returns a tree in the cache, fetched if it is missing. Returns `None` without a tree.
    ///
    /// # Errors
    /// When it cannot be fetched.
    pub async fn fetch_optional_tree(
        &self,
        tree: Option<&v1::Tree>,
    ) -> Result<Option<CachedTree>, JobError> {
        match tree {
            Some(tree) => Ok(Some(self.cache.fetch_tree(&self.store, tree).await?)),
            None => Ok(None),
        }
    }

    /// Reads the facts that the log now contains for a subject, which may have wildcards; only the
    /// newest `most`. Unreadable entries are skipped.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn read_facts(&self, subject: &str, most: usize) -> Result<Vec<Record>, JobError> {
        let mut facts = self.bus.follow_facts(vec![subject.to_owned()], 0);
        let mut found = VecDeque::new();
        while let Some(followed) = facts.next().await {
            match followed.map_err(JobError::dependency_down)? {
                LogEvent::Record(record) => {
                    found.push_back(record);
                    if found.len() > most {
                        found.pop_front();
                    }
                }
                LogEvent::Unreadable { .. } => {}
                LogEvent::CaughtUp => break,
            }
        }
        Ok(found.into())
    }

    /// Lists the statuses of the other available agents of this role, in any pool.
    ///
    /// # Errors
    /// When the bus does not respond.
    pub async fn list_other_agents(&self) -> Result<Vec<v1::AgentStatus>, JobError> {
        let role = role_runner::role_name(self.kind);
        let mut statuses = self.bus.list_statuses().await.map_err(JobError::dependency_down)?;
        statuses.retain(|status| memory_placement::is_available(status, &self.agent, role));
        Ok(statuses)
    }

    /// Reports whether a result with errors of this host is written as final because enough agents
    /// have tried. `others` are the other available agents that could try.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn errors_are_final(&self, others: &[String]) -> Result<bool, JobError> {
        let last = failure::last_failure(self.kind, self).await?;
        Ok(agent_core::errors_are_final(last.as_ref(), &self.agent, others))
    }

    /// Returns true if the log already contains a fact at this place of the run.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub async fn is_written(&self, place: FactKey) -> Result<bool, JobError> {
        let subject = Subject::new(&self.run, place).to_string();
        Ok(self.bus.get_fact(&subject).await.map_err(JobError::dependency_down)?.is_some())
    }

    /// Replaces the error of a job whose worker was just killed to protect the host by that reason.
    /// Other errors are unchanged.
    #[must_use]
    pub fn explain_termination(&self, error: JobError) -> JobError {
        self.telemetry.explain_termination(self.kind, error)
    }

    /// Returns the host's energy, in joules, attributed to the job so far. Returns `None` if the
    /// host's power is not measured.
    pub fn energy_joules(&self) -> Option<f64> {
        self.energy_share.energy_joules()
    }

    /// Starts to count TLB shootdowns.
    pub fn start_shootdown_span(&self) -> ShootdownSpan {
        self.telemetry.start_shootdown_span()
    }

    /// Writes a result. Retries while the bus is unreachable or full: the work is done and the
    /// lease is renewed meanwhile. A result that another agent wrote first counts as success.
    ///
    /// # Errors
    /// When the log refuses it.
    pub async fn write_result(&self, place: FactKey, body: FactBody) -> Result<(), JobError> {
        let fact = Fact { subject: Subject::new(&self.run, place), body };
        let published = loop {
            match self.bus.publish_fact(&fact).await {
                Err(error @ (PublishError::Unacknowledged { .. } | PublishError::Full { .. })) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::warn!(error, "publish failed; retrying");
                    self.progress.set_note(&error);
                    tokio::time::sleep(WRITE_RETRY_INTERVAL).await;
                }
                other => break other.map_err(JobError::retryable_failure)?,
            }
        };
        if let PublishOutcome::AlreadyWritten { same: false, sequence } = published {
            tracing::info!(subject = %fact.subject, sequence, "another agent published first");
        }
        Ok(())
    }

    /// Writes a fact with a single publish call, unlike `write_result`.
    ///
    /// # Errors
    /// When the bus does not acknowledge it; reported as a dependency that is down.
    pub(crate) async fn try_write_fact(
        &self,
        place: FactKey,
        body: FactBody,
    ) -> Result<PublishOutcome, JobError> {
        let fact = Fact { subject: Subject::new(&self.run, place), body };
        self.bus.publish_fact(&fact).await.map_err(JobError::dependency_down)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(kernel: &str, log: &str, message: &str) -> JobFault {
        let failed = JobError::Failed {
            fault: JobFault::WorkFailed,
            message: message.into(),
            log_tail: log.into(),
        };
        match failed.with_known_cause(kernel) {
            JobError::Failed { fault, .. } => fault,
            JobError::Stopped | JobError::HandedOver(_) => panic!("it failed"),
        }
    }

    #[test]
    fn how_a_worker_died_says_whose_fault_it_was() {
        let nil = "Memory access fault by GPU node-1 on address (nil)";
        assert_eq!(fault("", nil, "the worker died: signal: 6 (SIGABRT)"), JobFault::HostBroken);
        assert_eq!(fault("", "", "the worker was silent for 4s"), JobFault::Transient("hang"));
        assert_eq!(fault("", "", "HIP out of memory. Tried"), JobFault::OutOfMemory);
        assert_eq!(fault("GPU reset begin!", "", "the worker died"), JobFault::HostUnfit);
        assert_eq!(fault("", "", "the loss of step 3 is nan; lower it"), JobFault::InvalidInput);
        assert_eq!(fault("", "", "the worker died: signal: 9 (SIGKILL)"), JobFault::WorkFailed);
        assert_eq!(fault("", "", "something new"), JobFault::WorkFailed);
    }

    #[test]
    fn what_is_known_is_said_and_other_faults_stay_what_they_are() {
        let silent = JobError::retryable_failure(anyhow::anyhow!("the worker was silent for 4s"));
        let said = silent.with_known_cause("").to_string();
        assert!(said.contains("[hang: ") && said.contains("HSA_ENABLE_INTERRUPT"), "{said}");
        let disk = JobError::retryable_failure(anyhow::anyhow!(
            "No space left on device; GPU reset begin!"
        ));
        let explained = disk.with_known_cause("GPU reset begin!");
        assert!(matches!(explained, JobError::Failed { fault: JobFault::DiskFull, .. }));
    }
}
