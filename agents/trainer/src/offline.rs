//! A training without a fleet, by a worker as an agent runs it.

use std::{
    future::ready,
    path::{Path, PathBuf},
};

use agent::{JobError, WorkerProcess};
use anyhow::bail;
use wire::v1;

use crate::{
    config::TrainerConfig,
    messages::{CHECKPOINT_DIR, TrainOutcome, TrainProgress, TrainRequest, TrainStep},
    training_check::{self, StepStats},
    training_process::{SILENCE_LIMIT, SILENCE_LIMIT_MIN},
    weight_delta::InitialWeights,
};

/// A training of local files, which only its last step saves.
#[derive(Debug, Clone)]
pub struct OfflineTraining<'a> {
    /// A model's directory; only its configuration and tokenizer count with `random_init`.
    pub base: &'a Path,
    pub random_init: bool,
    /// Examples with prompt and completion, one JSON object a line.
    pub dataset: &'a Path,
    pub training: v1::Training,
    pub seed: u64,
    /// An empty directory for the files of the training.
    pub out: &'a Path,
}

/// The result of an offline training, checked as an agent checks what it publishes.
#[derive(Debug, Clone)]
pub struct OfflineCheckpoint {
    /// The directory of the model or adapter.
    pub directory: PathBuf,
    /// The engine that trained, with its versions.
    pub engine: String,
    pub steps: u32,
    /// The loss of the first and of the last step, in nats per token.
    pub losses: (f64, f64),
    /// The tokens that passed through the model.
    pub tokens: u64,
    /// Seconds of training, loading included.
    pub wall_s: f64,
    /// The relative change of the weights, if it is known.
    pub weight_change: Option<f64>,
}

impl OfflineTraining<'_> {
    /// Trains in a process of its own and checks that the weights changed. `progress` receives each
    /// step and the number of steps.
    ///
    /// # Errors
    /// When the worker refuses the training, hangs or dies (with a known cause, if its log shows
    /// one), or the result did not train.
    pub async fn train(
        &self,
        config: &TrainerConfig,
        mut progress: impl FnMut(u32, u32) + Send,
    ) -> anyhow::Result<OfflineCheckpoint> {
        let request = self.build_request(config);
        let worker = WorkerProcess::start(&config.engine.worker_command(&config.launch))?;
        let mut patience = config.launch.silence_timeout(SILENCE_LIMIT, SILENCE_LIMIT_MIN);
        let mut stats = StepStats::new(config.engine.describe_engine(), 0);
        let (mut last, mut first_loss, mut total_before) = (None::<TrainStep>, None, 0.0);
        let training =
            worker.call_with_progress::<TrainOutcome, _>(&request, &mut patience, |message| {
                match serde_json::from_value(message) {
                    Ok(TrainProgress::Begun(begun)) => {
                        stats = StepStats::new(begun.engine, begun.skipped);
                    }
                    Ok(TrainProgress::Step(step)) => {
                        stats.record_step(&step);
                        progress(step.step, step.steps);
                        first_loss.get_or_insert(step.loss);
                        total_before = last.as_ref().map_or(0.0, total_loss);
                        last = Some(step);
                    }
                    Ok(
                        TrainProgress::Heldout(_) | TrainProgress::Canary(_) | TrainProgress::Busy,
                    )
                    | Err(_) => {}
                }
                ready(())
            });
        if let Err(error) = training.await {
            return Err(JobError::from_model_worker(error, &worker).await.into());
        }
        let Some((step, saved)) = last.and_then(|step| Some((step.clone(), step.saved?))) else {
            bail!("the training ended without a saved step (E112)")
        };
        let directory = saved.join(CHECKPOINT_DIR);
        let start = InitialWeights::from_request(&request);
        let weight_change =
            training_check::check_saved_step(&directory, &start, &step, &stats).await?;
        Ok(OfflineCheckpoint {
            directory,
            engine: stats.engine,
            steps: step.steps,
            losses: (first_loss.unwrap_or(step.loss), total_loss(&step) - total_before),
            tokens: step.tokens,
            wall_s: step.wall_s,
            weight_change,
        })
    }

    fn build_request(&self, config: &TrainerConfig) -> TrainRequest {
        TrainRequest {
            base: self.base.to_owned(),
            base_name: "local".to_owned(),
            random_init: self.random_init,
            adapter: None,
            dataset: self.dataset.to_owned(),
            training: self.training.clone(),
            seed: self.seed,
            out: self.out.to_owned(),
            resume: None,
            slice: None,
            canary: String::new(),
            policy: config.host_settings(),
        }
    }
}

/// Returns the sum of the losses of all steps so far: nothing was saved before, so a step reports
/// their mean.
fn total_loss(step: &TrainStep) -> f64 {
    step.loss * f64::from(step.step)
}
