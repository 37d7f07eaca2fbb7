//! What the agent asks of its training worker, and what it is told on the way.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use wire::v1;

/// Checkpoints saved and not yet published; the worker waits when there are more.
pub(crate) const UNPUBLISHED_MAX: usize = 2;

/// In a saved step's directory: what is published as its checkpoint.
pub(crate) const CHECKPOINT: &str = "checkpoint";

/// Beside it, and not for the last step: what the optimizer remembers.
pub(crate) const STATE: &str = "state";

/// Train, and save into numbered directories below `out`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Train {
    pub base: PathBuf,
    /// What an adapter calls its base: the same on every machine.
    pub base_name: String,
    pub random_init: bool,
    pub adapter: Option<PathBuf>,
    pub dataset: PathBuf,
    pub training: v1::Training,
    pub seed: u64,
    pub out: PathBuf,
    pub resume: Option<Resume>,
    /// The text whose log-probabilities the last step tells; empty when nobody asks.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub canary: String,
    #[serde(default)]
    pub policy: Policy,
}

/// How this box wants the training to be done, whatever the order says.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Policy {
    pub device: String,
    /// Of the frozen base; adapters are f32.
    pub dtype: String,
    pub attention: String,
    pub gradient_checkpointing: bool,
    pub dataloader_workers: u32,
    pub pin_memory: bool,
    /// Where the order leaves it open.
    pub micro_batch_tokens: u32,
    /// So often the tokens of a pass are halved, whoever set them: it ran out of memory before.
    #[serde(default)]
    pub halvings: u32,
    /// Of the memory the device shows, where the system's own is shared.
    pub memory_fraction: Option<f64>,
    /// What is lost at most when it ends without warning.
    pub save_s: f64,
}

/// A checkpoint of the same training to go on from, and what had become of it by then.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Resume {
    pub checkpoint: PathBuf,
    pub state: PathBuf,
    pub step: u32,
    pub tokens: u64,
    pub trained_tokens: u64,
    pub wall_s: f64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Progress {
    Begun(Begun),
    Step(Step),
    /// Something that may take long goes on.
    Busy,
}

/// Everything is loaded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Begun {
    /// 0, or the checkpoint's that it goes on from.
    pub step: u32,
    /// Why it does not go on from the checkpoint it was given.
    pub refused: Option<String>,
    /// What trains, with its versions.
    pub engine: String,
    /// Examples left out, being too long.
    pub skipped: u32,
}

/// After a step.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Step {
    pub step: u32,
    pub steps: u32,
    /// Mean over the steps since the last saved one.
    pub loss: f64,
    pub learning_rate: f64,
    /// Of the gradient before it was clipped, mean and largest since the last saved step; 0 where
    /// it overflowed in all of them.
    pub grad_norm: f64,
    pub grad_norm_max: f64,
    /// Tokens passed through the model since step 0.
    pub tokens: u64,
    /// Of them, those whose prediction was scored.
    pub trained_tokens: u64,
    /// Tokens by places computed, since the last saved step.
    pub packing: f64,
    /// Spent since step 0, without what was lost in between.
    pub wall_s: f64,
    /// The directory of what was saved of this step, if anything was.
    pub saved: Option<PathBuf>,
    /// Of the last step, if they were asked for.
    #[serde(default)]
    pub canary: Vec<f32>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Trained {
    /// Where it ended because it was asked to; all before is saved.
    pub stopped_at: Option<u32>,
}

/// Try whether training could work at all.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ask {
    Probe { device: String, dtype: String },
}

/// What a probe is at.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Stage {
    pub stage: String,
}

/// What a probe found.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Probed {
    pub torch: String,
    pub hip: Option<String>,
    pub transformers: String,
    pub peft: String,
    #[serde(default)]
    pub device: Option<String>,
    /// As torch sees the device.
    #[serde(default)]
    pub gfx: Option<String>,
    /// Relative, of a matrix product against the CPU's.
    pub error: f64,
}

/// Reads a value as each message in turn, for tests with hostile input.
#[doc(hidden)]
pub fn fuzz(value: &serde_json::Value) {
    // Whether it is one is of no interest.
    let _ = Train::deserialize(value);
    let _ = Progress::deserialize(value);
    let _ = Probed::deserialize(value);
    let _ = Trained::deserialize(value);
}
