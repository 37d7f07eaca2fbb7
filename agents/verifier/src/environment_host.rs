//! Environments on a host that draws samples.

use std::sync::Arc;

use agent::{JobError, WorkerError, WorkerLauncher};
use anyhow::anyhow;
use futures::future::ready;
use tokio::sync::OnceCell;
use wire::v1;

use crate::{
    Toolchain,
    calls::{ActRequest, VerifierCall},
    environment::EpisodeStep,
    episode::EnvironmentAnswer,
    tools::ToolNeed,
    warm_worker::{SILENCE_LIMIT, WarmWorker},
};

type ToolchainSource = Arc<dyn Fn() -> anyhow::Result<Toolchain> + Send + Sync>;

/// Runs environments for a role that draws samples, in a worker that stays up. The toolchain is
/// looked for when the first environment is opened.
pub struct EnvironmentHost {
    find_toolchain: ToolchainSource,
    toolchain: OnceCell<Toolchain>,
    worker: WarmWorker,
}

/// An environment that this host may run.
pub struct OpenEnvironment<'a> {
    host: &'a EnvironmentHost,
    toolchain: &'a Toolchain,
    settings: &'a v1::verifier::Environment,
}

/// The reason why an action got no answer.
#[derive(Debug)]
pub enum ActionError {
    /// The environment failed: perhaps because of this action, perhaps because of all.
    Environment(JobError),
    /// The worker that runs environments failed.
    Worker(JobError),
}

impl EnvironmentHost {
    /// Creates a host without a worker. `find_toolchain` may take seconds.
    pub fn new(
        launch: WorkerLauncher,
        find_toolchain: impl Fn() -> anyhow::Result<Toolchain> + Send + Sync + 'static,
    ) -> Self {
        Self {
            find_toolchain: Arc::new(find_toolchain),
            toolchain: OnceCell::new(),
            worker: WarmWorker::new(launch, "environment"),
        }
    }

    /// Opens an environment; its executable is started with the first action.
    ///
    /// # Errors
    /// When this host cannot or must not run the executable.
    pub async fn open_environment<'a>(
        &'a self,
        settings: &'a v1::verifier::Environment,
    ) -> Result<OpenEnvironment<'a>, JobError> {
        let toolchain = self
            .toolchain
            .get_or_try_init(|| test_toolchain(Arc::clone(&self.find_toolchain)))
            .await?;
        let need = ToolNeed::Command {
            program: settings.argv.first().cloned().unwrap_or_default(),
            paths: settings.paths.clone(),
        };
        match toolchain.missing_needs([&need]).first() {
            Some((_, lacking)) => Err(JobError::host_unfit(anyhow!(
                "this box lacks {lacking}; samples with this environment are left to others (E117)"
            ))),
            None => Ok(OpenEnvironment { host: self, toolchain, settings }),
        }
    }
}

/// Fails without blame for a job if the owner's settings are wrong, such as a path that does not
/// exist.
async fn test_toolchain(find: ToolchainSource) -> Result<Toolchain, JobError> {
    let tested = tokio::task::spawn_blocking(move || find().map(|found| found.test_host().0));
    tested.await.map_err(JobError::retryable_failure)?.map_err(JobError::host_unfit)
}

impl OpenEnvironment<'_> {
    /// Returns the environment's answer to an action.
    ///
    /// # Errors
    /// When the environment cannot be started, ends, hangs, or answers something else.
    pub async fn answer_action(
        &self,
        step: EpisodeStep<'_>,
    ) -> Result<EnvironmentAnswer, ActionError> {
        let EnvironmentHost { worker, .. } = self.host;
        let process = worker.ensure_running(self.toolchain).map_err(ActionError::Worker)?;
        let call = VerifierCall::Act(ActRequest {
            environment: self.settings.clone(),
            request: step.to_request(),
        });
        let mut silence = worker.launch().silence_timeout(SILENCE_LIMIT, SILENCE_LIMIT);
        let answered = process.call_with_progress(&call, &mut silence, |_| ready(())).await;
        match answered {
            Ok(answer) => Ok(answer),
            Err(WorkerError::Refused(problem)) => Err(ActionError::Environment(
                JobError::retryable_failure(anyhow!("the environment failed: {problem} (V106)")),
            )),
            Err(error) => {
                // The worker hangs or violates the protocol: the next action starts another.
                process.kill_group();
                Err(ActionError::Worker(JobError::from_worker_error(error, &process).await))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_settings_of_a_box_do_not_count_against_a_job() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let find: ToolchainSource =
            Arc::new(|| Err(anyhow!("--verifier-path: no such directory (V104)")));
        let error = runtime.block_on(test_toolchain(find)).err().unwrap();
        assert!(format!("{error:?}").contains("NeedsUnmet"), "{error:?}");
        assert!(error.to_string().contains("--verifier-path"), "{error}");
    }
}
