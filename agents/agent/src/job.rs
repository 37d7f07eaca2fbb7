//! One job held under a lease, and the operations that a role needs to do it.

use std::{collections::VecDeque, path::PathBuf, time::Duration};

use bus::{Bus, LogEvent, PublishError, PublishOutcome};
use futures::StreamExt;
use store::{CachedTree, FileCache, Store};
use wire::{Fact, FactBody, FactKey, Record, RunId, Subject, WorkKind, v1};

use crate::{
    JobError,
    live_status::JobProgress,
    memory_placement,
    role_name::role_name,
    telemetry::{EnergyShare, ShootdownSpan, TelemetryHandle},
};

const WRITE_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A job under a lease, with the connections and directories that a role needs to do it.
#[derive(Debug, Clone)]
pub struct LeasedJob {
    pub run: RunId,
    /// The fact that orders the job, and its place in the log.
    pub record: Record,
    /// The id of this agent.
    pub agent: String,
    pub bus: Bus,
    pub store: Store,
    pub cache: FileCache,
    /// The agent's own directory.
    pub directory: PathBuf,
    /// The job's entry in the agent's status.
    pub progress: JobProgress,
    pub(crate) kind: WorkKind,
    pub(crate) telemetry: TelemetryHandle,
    pub(crate) energy_share: EnergyShare,
}

impl LeasedJob {
    /// Reads the spec of the job's run from the log. A missing spec is a fatal failure; an
    /// unreachable bus is a dependency that is down.
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

    /// Returns the local copy of a tree in the cache, after fetching files that are missing or
    /// damaged; `None` if `tree` is `None`.
    pub async fn fetch_optional_tree(
        &self,
        tree: Option<&v1::Tree>,
    ) -> Result<Option<CachedTree>, JobError> {
        match tree {
            Some(tree) => Ok(Some(self.cache.fetch_tree(&self.store, tree).await?)),
            None => Ok(None),
        }
    }

    /// Reads the facts that the log now contains for a subject, which may have wildcards: the
    /// newest `most` ones, in log order. Unreadable entries are skipped.
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

    /// Lists the statuses of the other agents that have this job's role, are ready and were seen in
    /// the last 30 s, in any pool.
    pub async fn list_other_agents(&self) -> Result<Vec<v1::AgentStatus>, JobError> {
        let role = role_name(self.kind);
        let mut statuses = self.bus.list_statuses().await.map_err(JobError::dependency_down)?;
        statuses.retain(|status| memory_placement::is_available(status, &self.agent, role));
        Ok(statuses)
    }

    /// Returns true if the log already contains the fact with this key in the job's run.
    pub async fn is_written(&self, place: FactKey) -> Result<bool, JobError> {
        Ok(self.read_fact(place).await?.is_some())
    }

    /// Reads the fact with this key in the job's run; `None` if the log does not contain it.
    pub async fn read_fact(&self, place: FactKey) -> Result<Option<FactBody>, JobError> {
        let subject = Subject::new(&self.run, place).to_string();
        let record = self.bus.get_fact(&subject).await.map_err(JobError::dependency_down)?;
        Ok(record.map(|record| record.fact.body))
    }

    /// Replaces the error of a job whose worker was killed in the last 10 s to protect the host by
    /// that reason. Other errors, and failures of invalid input, are unchanged.
    #[must_use]
    pub fn explain_termination(&self, error: JobError) -> JobError {
        self.telemetry.explain_termination(self.kind, error)
    }

    /// Returns the host's energy, in joules, attributed to the job so far; `None` if the host's
    /// power is not measured.
    pub fn energy_joules(&self) -> Option<f64> {
        self.energy_share.energy_joules()
    }

    /// Starts to count the host's TLB shootdowns during one piece of the job's work;
    /// [`ShootdownSpan::finish_span`] ends it.
    pub fn start_shootdown_span(&self) -> ShootdownSpan {
        self.telemetry.start_shootdown_span()
    }

    /// Writes a result fact of the job's run. Retries while the bus is unreachable or full: the
    /// work is done, and the lease is renewed meanwhile. A result that another agent wrote first
    /// counts as success; any other refusal is a retryable failure.
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

    /// Writes a fact with a single publish call. Without an acknowledgement it fails as a
    /// dependency that is down.
    pub(crate) async fn try_write_fact(
        &self,
        place: FactKey,
        body: FactBody,
    ) -> Result<PublishOutcome, JobError> {
        let fact = Fact { subject: Subject::new(&self.run, place), body };
        self.bus.publish_fact(&fact).await.map_err(JobError::dependency_down)
    }
}
