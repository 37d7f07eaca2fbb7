//! The reasons why a job was not done, and their causes.

use std::io::ErrorKind;

use agent_core::JobFault;
use hardware::{FaultEvidence, KnownFault, RetryAdvice};
use store::{CacheError, GetError, PutError};
use wire::ErrorCode;

use crate::{WorkerError, WorkerProcess};

/// The reason why a job was not done. The fault of a failure decides about retry, backoff and
/// quarantine.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The job failed; `log_tail` is the end of its worker's log.
    #[error("{message}")]
    Failed { fault: JobFault, message: String, log_tail: String },
    /// The run is over, the agent stops, or its results would not count (quarantine).
    #[error("stopped (A108)")]
    Stopped,
    /// The named agent, which is idle and has enough memory, should do the job.
    #[error("handed to {0} (A108)")]
    HandedOver(String),
}

impl JobError {
    /// Creates a failure that another attempt, perhaps by another agent, may avoid. A full disk
    /// anywhere in the error's chain is recognised and recorded as the fault.
    pub fn retryable_failure(error: impl Into<anyhow::Error>) -> Self {
        Self::from_fault(JobFault::WorkFailed, error)
    }

    /// Creates a failure that no attempt can avoid: the order, the data or the model is invalid.
    pub fn fatal_failure(error: impl Into<anyhow::Error>) -> Self {
        Self::from_fault(JobFault::InvalidInput, error)
    }

    /// Changes the fault to a worker shared by several jobs, any of which may have caused the
    /// failure. Applies to failed work, transient crashes and lack of memory; errors with any other
    /// fault are unchanged.
    #[must_use]
    pub fn blame_shared_worker(self) -> Self {
        self.replace_fault(JobFault::SharedWorker)
    }

    /// Creates a failure because a dependency that all agents share (the bus, the store) is down:
    /// it is retried and does not count against the job.
    pub(crate) fn dependency_down(error: impl Into<anyhow::Error>) -> Self {
        Self::from_fault(JobFault::DependencyDown, error)
    }

    /// Creates a failure of a job that this host cannot or must not do, but other hosts can.
    pub fn host_unfit(error: impl Into<anyhow::Error>) -> Self {
        Self::from_fault(JobFault::NeedsUnmet, error)
    }

    /// Creates a failure because another host has published other bytes for the same result. It is
    /// written even if the result is in the log.
    pub fn result_differs(error: impl Into<anyhow::Error>) -> Self {
        Self::from_fault(JobFault::ResultDiffers, error)
    }

    /// Creates a failure that every job on this host would have, so that its role is quarantined.
    pub fn host_broken(error: impl Into<anyhow::Error>) -> Self {
        Self::from_fault(JobFault::HostBroken, error)
    }

    pub(crate) fn no_room(message: String) -> Self {
        Self::Failed { fault: JobFault::Unschedulable, message, log_tail: String::new() }
    }

    /// Adds an error code to the message if it has none.
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

    /// Creates a failure with a fault and a message that the worker itself reported, and the end of
    /// its log.
    pub async fn from_worker(fault: JobFault, message: String, worker: &WorkerProcess) -> Self {
        let mut failed = Self::from_fault(fault, anyhow::anyhow!(message));
        if let Self::Failed { log_tail, .. } = &mut failed {
            *log_tail = worker.log_tail().await;
        }
        failed
    }

    /// Creates a retryable failure from a worker that refused a call or died, with the end of its
    /// log.
    pub async fn from_worker_error(
        error: impl Into<anyhow::Error>,
        worker: &WorkerProcess,
    ) -> Self {
        Self::from_worker(JobFault::WorkFailed, format!("{:#}", error.into()), worker).await
    }

    /// Creates a failure as `from_worker_error` does. If the kernel log, the worker's log or the
    /// message shows a known cause of the worker's death, the message gets cause and remedy, and
    /// the fault is that of the cause.
    pub async fn from_model_worker(
        error: impl Into<anyhow::Error>,
        worker: &WorkerProcess,
    ) -> Self {
        Self::from_worker_error(error, worker)
            .await
            .with_known_cause(&worker.read_kernel_log().await)
    }

    /// Adds the known cause of a worker's death and its remedy to the message, and changes the
    /// fault accordingly. The cause is found in `kernel` (the kernel's messages since the worker's
    /// start), in the failure's log tail and in its message, which contains the exit status.
    /// Unchanged without a known cause, and with any fault other than failed work.
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

    /// Changes the fault to this host, because the job had no part in it: the failure then does not
    /// count against the job. Applies to failed work, transient crashes and lack of memory; errors
    /// with any other fault are unchanged.
    #[must_use]
    pub fn blame_host(self) -> Self {
        self.replace_fault(JobFault::HostUnfit)
    }

    fn replace_fault(self, fault: JobFault) -> Self {
        match self {
            Self::Failed {
                fault: JobFault::WorkFailed | JobFault::Transient(_) | JobFault::OutOfMemory,
                message,
                log_tail,
            } => Self::Failed { fault, message, log_tail },
            other => other,
        }
    }
}

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

/// A worker reports a full disk only as text, so known messages are searched as well.
fn is_disk_full(error: &anyhow::Error) -> bool {
    let full = |io: &std::io::Error| {
        matches!(io.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
    };
    let messages = ["No space left on device", "Disk quota exceeded"];
    error.chain().any(|cause| cause.downcast_ref().is_some_and(full))
        || messages.iter().any(|message| format!("{error:#}").contains(message))
}

impl From<GetError> for JobError {
    /// Damage may have happened in transit, so only complete and invalid content is fatal.
    fn from(error: GetError) -> Self {
        match &error {
            GetError::Digest(_)
            | GetError::Path(_)
            | GetError::TooLarge { .. }
            | GetError::Manifest { .. }
            | GetError::Removed { .. }
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
    fn the_cause_of_a_worker_s_death_decides_the_fault() {
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
    fn known_causes_are_added_and_other_faults_are_unchanged() {
        let silent = JobError::retryable_failure(anyhow::anyhow!("the worker was silent for 4s"));
        let explained = silent.with_known_cause("").to_string();
        assert!(
            explained.contains("[hang: ") && explained.contains("HSA_ENABLE_INTERRUPT"),
            "{explained}"
        );
        let disk = JobError::retryable_failure(anyhow::anyhow!(
            "No space left on device; GPU reset begin!"
        ));
        let explained = disk.with_known_cause("GPU reset begin!");
        assert!(matches!(explained, JobError::Failed { fault: JobFault::DiskFull, .. }));
    }
}
