//! The trainer's configuration and its engines: the embedded one, or PyTorch in its own program.

use std::time::Duration;

use agent::{ChildCommand, HostDoctor, WorkerLauncher};

use crate::{messages::TrainHostSettings, pytorch::PyTorchProgram};

/// The configuration of the trainer role.
#[derive(Debug, Clone)]
pub struct TrainerConfig {
    pub launch: WorkerLauncher,
    pub engine: TrainingEngine,
    pub doctor: HostDoctor,
    /// The most work that may be lost if a training ends without warning.
    pub save_within: Duration,
    /// The time in which a training must be saved and handed over when its agent drains.
    pub grace: Duration,
}

/// The engine that trains.
#[derive(Debug, Clone)]
pub enum TrainingEngine {
    /// The embedded engine.
    Candle,
    PyTorch(PyTorchProgram),
}

impl TrainingEngine {
    /// Returns the engine's name in the metadata of checkpoints. It has no version for PyTorch,
    /// because a training may continue with another version.
    pub(crate) fn lineage_name(&self) -> &'static str {
        match self {
            Self::Candle => engine::ENGINE,
            Self::PyTorch(_) => "pytorch",
        }
    }

    /// Returns true if the engine saves and ends on SIGTERM.
    pub(crate) fn can_hand_over(&self) -> bool {
        matches!(self, Self::PyTorch(_))
    }

    /// Returns true if the engine can split a step into more passes and still resume from its own
    /// checkpoints.
    pub(crate) fn can_split_passes(&self) -> bool {
        matches!(self, Self::PyTorch(_))
    }

    pub(crate) fn describe_engine(&self) -> String {
        match self {
            Self::Candle => engine::ENGINE.to_owned(),
            Self::PyTorch(pytorch) => pytorch.describe_version(),
        }
    }

    pub(crate) fn worker_command(&self, launch: &WorkerLauncher) -> ChildCommand {
        match self {
            Self::Candle => launch.worker_command("train", "train", []),
            Self::PyTorch(pytorch) => pytorch.worker_command(launch, "train"),
        }
    }
}

impl TrainerConfig {
    /// The embedded engine does not support HIP.
    pub(crate) fn uses_gpu(&self) -> bool {
        matches!(self.engine, TrainingEngine::PyTorch(_)) && !self.launch.profile.is_cpu()
    }

    pub(crate) fn host_settings(&self) -> TrainHostSettings {
        let training = &self.launch.profile.training;
        let attention = match training.attention {
            hardware::AttentionKind::Sdpa => "sdpa",
            hardware::AttentionKind::Eager => "eager",
        };
        TrainHostSettings {
            device: torch_device(&self.launch),
            dtype: training.dtype.name().to_owned(),
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

/// Returns the device in torch's terms, where `cuda` includes HIP. The launcher's device applies to
/// the embedded engine, and to PyTorch only on a CPU profile.
pub(crate) fn torch_device(launch: &WorkerLauncher) -> String {
    if launch.profile.is_cpu() { launch.device.clone() } else { "cuda".to_owned() }
}
