//! The messages between the agent and its training worker.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use wire::v1;

/// Checkpoints that are saved and not yet published; the worker waits before it saves more.
pub(crate) const UNPUBLISHED_MAX: usize = 2;

/// The subdirectory of a saved step that is published as its checkpoint.
pub(crate) const CHECKPOINT_DIR: &str = "checkpoint";

/// The subdirectory of a saved step with the optimizer's state. The last step has none.
pub(crate) const STATE_DIR: &str = "state";

/// A request to train, and to save into numbered directories below `out`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TrainRequest {
    pub base: PathBuf,
    /// The name of the base in the adapter's configuration, the same on every host.
    pub base_name: String,
    /// True to start from random weights of the base's shape.
    pub random_init: bool,
    /// The adapter to continue; `None` to start a new one or to train the whole model.
    pub adapter: Option<PathBuf>,
    /// One JSON object a line.
    pub dataset: PathBuf,
    pub training: v1::Training,
    pub seed: u64,
    /// The directory for saved steps.
    pub out: PathBuf,
    pub resume: Option<ResumeCheckpoint>,
    /// The steps to take, in a training on several boxes; `None` for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slice: Option<TrainSlice>,
    /// The text whose log-probabilities the last step reports; empty for none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub canary: String,
    #[serde(default)]
    pub policy: TrainHostSettings,
}

/// The settings of the host for a training. They do not depend on the order.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct TrainHostSettings {
    pub device: String,
    /// The number format of the frozen base; adapters are f32.
    pub dtype: String,
    pub attention: String,
    pub gradient_checkpointing: bool,
    pub dataloader_workers: u32,
    pub pin_memory: bool,
    /// The tokens of one pass, if the order does not set them.
    pub micro_batch_tokens: u32,
    /// The number of times that the tokens of a pass are halved, because the training ran out of
    /// memory before.
    #[serde(default)]
    pub halvings: u32,
    /// The share of the device's memory that may be used, for devices that share the system's
    /// memory.
    pub memory_fraction: Option<f64>,
    /// The most seconds of work that may be lost if the training ends without warning.
    pub save_s: f64,
}

/// A checkpoint of the same training to resume from, with the counts up to it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ResumeCheckpoint {
    pub checkpoint: PathBuf,
    /// The directory of the optimizer's state.
    pub state: PathBuf,
    pub step: u32,
    pub tokens: u64,
    pub trained_tokens: u64,
    pub wall_s: f64,
}

/// A range of steps. The last one is saved with the optimizer's state.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct TrainSlice {
    /// The number of steps before the first one.
    pub first: u32,
    /// 0 to save the weights at the start.
    pub steps: u32,
    /// The adapter to start from; `None` to create a new one.
    pub start: Option<PathBuf>,
    /// The directory of the optimizer's state; `None` for a new state.
    pub state: Option<PathBuf>,
    /// True if the learning rate rises and falls within the slice.
    #[serde(default)]
    pub own_schedule: bool,
    /// The file with completions of which the start's likelihood is measured, instead of training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heldout: Option<PathBuf>,
    /// True to score the order's canary with the start, instead of training.
    #[serde(default)]
    pub canary: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TrainProgress {
    /// The first message: everything is loaded.
    Begun(TrainingBegun),
    Step(TrainStep),
    /// The mean negative log-likelihood of the held-out completions, in nats per token; `None` if it
    /// is not finite, or all are too long.
    Heldout(Option<f64>),
    /// The log-probabilities of the canary's tokens with the start of a slice.
    Canary(Vec<f32>),
    /// A heartbeat during work that may take long.
    Busy,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TrainingBegun {
    /// The step from which training continues; 0 at the start.
    pub step: u32,
    /// The reason why the worker does not resume from the given checkpoint, or does not use the
    /// state of its slice; `None` if it does, or none was given.
    pub refused: Option<String>,
    /// The engine that trains, with its versions.
    pub engine: String,
    /// The number of examples left out because they are too long.
    pub skipped: u32,
    /// The number of steps of the whole training.
    #[serde(default)]
    pub steps: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TrainStep {
    pub step: u32,
    pub steps: u32,
    /// The mean loss of the steps since the last saved one.
    pub loss: f64,
    pub learning_rate: f64,
    /// The mean norm of the gradient before clipping, since the last saved step; 0 if it always
    /// overflowed.
    pub grad_norm: f64,
    /// The largest norm of the gradient before clipping since the last saved step; 0 if it always
    /// overflowed.
    pub grad_norm_max: f64,
    /// The tokens passed through the model since step 0.
    pub tokens: u64,
    /// The part of `tokens` whose prediction was scored.
    pub trained_tokens: u64,
    /// The share of computed positions that held tokens, since the last saved step.
    pub packing: f64,
    /// The seconds spent since step 0, without work that was lost to interruptions.
    pub wall_s: f64,
    /// The directory of the saved step.
    pub saved: Option<PathBuf>,
    /// The log-probabilities of the canary's tokens, with the last step, if requested.
    #[serde(default)]
    pub canary: Vec<f32>,
    /// The weights of tokens since the last saved step; `None` if all are the same.
    #[serde(default)]
    pub weighting: Option<v1::checkpoint::Weighting>,
    /// The most memory that the process has taken: of its GPU, or resident without one; 0 if
    /// unknown.
    #[serde(default)]
    pub peak_memory_bytes: u64,
}

/// The reply when the training has ended.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct TrainOutcome {
    /// The step at which it ended on request; everything before is saved. `None` if it is complete.
    pub stopped_at: Option<u32>,
}

/// A request to check that training works on this host.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ProbeRequest {
    Probe { device: String, dtype: String },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ProbeStage {
    pub stage: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ProbeReport {
    pub torch: String,
    /// The version of HIP; `None` without it.
    pub hip: Option<String>,
    pub transformers: String,
    pub peft: String,
    /// True if bitsandbytes is installed.
    #[serde(default)]
    pub bitsandbytes: bool,
    #[serde(default)]
    pub device: Option<String>,
    /// The architecture of the GPU as torch reports it.
    #[serde(default)]
    pub gfx: Option<String>,
    /// The relative error of a matrix product against the CPU's.
    pub error: f64,
}

/// Parses a value as each message in turn, for tests with hostile input.
#[doc(hidden)]
pub fn fuzz_messages(value: &serde_json::Value) {
    // The results do not matter; only a panic would.
    let _ = TrainRequest::deserialize(value);
    let _ = TrainProgress::deserialize(value);
    let _ = ProbeReport::deserialize(value);
    let _ = TrainOutcome::deserialize(value);
}
