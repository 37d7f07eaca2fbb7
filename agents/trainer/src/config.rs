//! What trains: the embedded engine, or PyTorch in a program of its own.

use std::time::Duration;

use runtime::{Command, Doctor, Launch};

use crate::{calls::Policy, pytorch::PyTorch};

/// How the trainer role works.
#[derive(Debug, Clone)]
pub struct Config {
    pub launch: Launch,
    pub engine: Engine,
    pub doctor: Doctor,
    /// What a training may lose when it ends without warning.
    pub save_within: Duration,
    /// What a training may take to be saved and handed over when its agent leaves.
    pub grace: Duration,
}

#[derive(Debug, Clone)]
pub enum Engine {
    /// Embedded.
    Candle,
    PyTorch(PyTorch),
}

impl Engine {
    /// What a checkpoint's lineage calls it. Trainings go on across versions of PyTorch.
    pub(crate) fn family(&self) -> &'static str {
        match self {
            Self::Candle => engine::ENGINE,
            Self::PyTorch(_) => "pytorch",
        }
    }

    /// Whether it saves and ends when it is told to.
    pub(crate) fn hands_over(&self) -> bool {
        matches!(self, Self::PyTorch(_))
    }

    /// Whether it can do a step in more passes and still go on from its own checkpoints.
    pub(crate) fn halves(&self) -> bool {
        matches!(self, Self::PyTorch(_))
    }

    /// For people.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Candle => engine::ENGINE.to_owned(),
            Self::PyTorch(pytorch) => pytorch.describe(),
        }
    }

    pub(crate) fn command(&self, launch: &Launch) -> Command {
        match self {
            Self::Candle => launch.worker("train", "train", []),
            Self::PyTorch(pytorch) => pytorch.command(launch, "train"),
        }
    }
}

impl Config {
    /// The embedded engine has no HIP.
    pub(crate) fn uses_gpu(&self) -> bool {
        matches!(self.engine, Engine::PyTorch(_)) && !self.launch.profile.is_cpu()
    }

    pub(crate) fn policy(&self) -> Policy {
        let training = &self.launch.profile.training;
        let attention = match training.attention {
            hardware::Attention::Sdpa => "sdpa",
            hardware::Attention::Eager => "eager",
        };
        Policy {
            device: device(&self.launch),
            dtype: dtype(training.dtype).to_owned(),
            attention: attention.to_owned(),
            gradient_checkpointing: training.gradient_checkpointing,
            dataloader_workers: training.dataloader_workers,
            pin_memory: training.pin_memory,
            micro_batch_tokens: training.micro_batch_tokens,
            halvings: 0,
            memory_fraction: training.memory_fraction,
            save_s: self.save_within.as_secs_f64(),
        }
    }
}

/// As torch names it: its `cuda` is HIP as well. `--device` speaks of the embedded engine, which
/// has no HIP.
pub(crate) fn device(launch: &Launch) -> String {
    if launch.profile.is_cpu() { launch.device.clone() } else { "cuda".to_owned() }
}

pub(crate) fn dtype(dtype: hardware::Dtype) -> &'static str {
    match dtype {
        hardware::Dtype::F32 => "f32",
        hardware::Dtype::F16 => "f16",
        hardware::Dtype::Bf16 => "bf16",
    }
}
