//! What all trainings in worker processes share: timeouts, progress, a directory.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use agent::{JobError, LeasedJob};
use anyhow::Context;

use crate::{
    messages::{TrainProgress, TrainStep, TrainingBegun},
    training_check::StepStats,
};

/// The longest time without a message after which any worker counts as hung.
pub(crate) const SILENCE_LIMIT: Duration = Duration::from_secs(1800);

/// The lower bound of the adaptive timeout, even for quick steps.
pub(crate) const SILENCE_LIMIT_MIN: Duration = Duration::from_secs(60);

/// Forwards a progress message to the log and to the agent's status. Returns the step, if it is
/// one.
pub(crate) fn handle_progress(
    job: &LeasedJob,
    progress: serde_json::Value,
    stats: &mut StepStats,
) -> Option<TrainStep> {
    match serde_json::from_value(progress).ok()? {
        TrainProgress::Begun(TrainingBegun { step, refused, engine, skipped, .. }) => {
            *stats = StepStats::new(engine, skipped);
            if skipped > 0 {
                tracing::warn!(run = %job.run, skipped, "examples longer than training.max_tokens are left out");
            }
            match refused {
                None => tracing::info!(run = %job.run, step, "training begins after a step"),
                Some(error) => {
                    tracing::warn!(run = %job.run, step, error, "a checkpoint was refused; starting over");
                }
            }
            None
        }
        TrainProgress::Step(step) => {
            job.progress.set_progress(step.step, step.steps, format!("loss {:.4}", step.loss));
            stats.record_step(&step);
            Some(step)
        }
        TrainProgress::Heldout(_) | TrainProgress::Canary(_) | TrainProgress::Busy => None,
    }
}

/// The directory of one training, removed when it ends.
pub(crate) struct TrainingDir(pub(crate) PathBuf);

impl TrainingDir {
    /// `part` identifies the training in its run.
    pub(crate) fn create_for(job: &LeasedJob, part: &str) -> Result<Self, JobError> {
        let path = job.directory.join("work").join(format!("{}-c{part}", job.run));
        let create = |path: &Path| -> std::io::Result<()> {
            // Files of an agent that died here are useless.
            let _ = std::fs::remove_dir_all(path);
            std::fs::create_dir_all(path)
        };
        create(&path)
            .with_context(|| format!("create {}", path.display()))
            .map_err(JobError::retryable_failure)?;
        Ok(Self(path))
    }
}

impl Drop for TrainingDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
