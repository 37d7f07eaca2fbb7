//! Arguments of `flotilla doctor`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use formats::FloatDtype;

use super::{BurnInArgs, ROLE_NAMES, StackPlaceArgs, burn_in::BoxEngineArgs, float_dtype_parser};

/// Arguments of `flotilla doctor`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct DoctorArgs {
    /// Also save the readings to a file for a bug report, such as box.tar.gz
    #[arg(long, value_name = "FILE", conflicts_with = "from")]
    pub capture: Option<PathBuf>,
    /// Check a capture file instead of this box
    #[arg(long, value_name = "FILE")]
    pub from: Option<PathBuf>,
    /// Show only findings that affect this role
    #[arg(long, value_parser = ROLE_NAMES)]
    pub role: Option<String>,
    /// Also check the Python environment of a trainer, without starting it: VENV/bin/python
    #[arg(long, value_name = "PATH", conflicts_with = "from")]
    pub python: Option<PathBuf>,
    /// Hardware profile to use instead of the detected one: a name or a file
    #[arg(long)]
    pub profile: Option<String>,
    /// Also check a training: a run spec, or Hugging Face TrainingArguments as JSON or YAML
    #[arg(long, value_name = "FILE")]
    pub run: Option<PathBuf>,
    /// Number of training examples, or a file with one example per line
    #[arg(long, requires = "run")]
    pub examples: Option<String>,
    /// Model, if --run names none on this machine: a directory, its config.json, or org/name
    #[arg(long, requires = "run")]
    pub model: Option<PathBuf>,
    /// Measured duration of a training step, in seconds
    #[arg(long, requires = "run")]
    pub step_seconds: Option<f64>,
    /// Show remedies that can be undone, and apply them after confirmation
    #[arg(long, conflicts_with_all = ["capture", "from", "run"])]
    pub fix: bool,
    /// Undo the changes of --fix
    #[arg(long, conflicts_with_all = ["fix", "capture", "from", "run"])]
    pub undo: bool,
    /// Do not ask for confirmation
    #[arg(long)]
    pub yes: bool,
    #[command(subcommand)]
    pub command: Option<DoctorCommand>,
}

/// The subcommands of `flotilla doctor`.
#[derive(Debug, Subcommand)]
pub(crate) enum DoctorCommand {
    /// Estimate the memory of a training and check which boxes fit it.
    Estimate(EstimateArgs),
    /// Time this box's engines, devices and weight types on a model, and compare their results.
    Speed(SpeedArgs),
    /// Do all kinds of work of this box once, and write a report.
    BurnIn {
        #[command(flatten)]
        burn_in: BurnInArgs,
        #[command(flatten)]
        stacks: StackPlaceArgs,
    },
    /// Print a hardware profile, to edit and pass as --profile FILE.
    Profile {
        /// Name of the profile [default: this box's]
        name: Option<String>,
    },
}

/// Arguments of `flotilla doctor estimate`.
#[derive(Debug, Args)]
pub(crate) struct EstimateArgs {
    /// Model directory, its config.json, or a hub model as org/name
    #[arg(long)]
    pub model: PathBuf,
    /// Training method
    #[arg(long, default_value = "lora")]
    pub method: EstimateMethod,
    /// LoRA rank, on all seven projections
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    pub rank: u32,
    /// Sequences per pass
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub batch: u32,
    /// Tokens per sequence
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub seq: u32,
    /// Weight type
    #[arg(long, default_value = "bf16", value_parser = float_dtype_parser())]
    pub dtype: FloatDtype,
    /// Recompute activations instead of storing them
    #[arg(long)]
    pub checkpointing: bool,
    /// Use eager attention, which stores the matrix of attention scores
    #[arg(long)]
    pub eager: bool,
    /// Sequences generated at once
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub sequences: u32,
    /// Tokens per generated sequence, prompt included [default: twice --seq]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub tokens: Option<u32>,
    /// Also check the box of a file written by `flotilla doctor --capture`
    #[arg(long, value_name = "FILE")]
    pub from: Option<PathBuf>,
}

/// A training method of `flotilla doctor estimate`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum EstimateMethod {
    Lora,
    Full,
}

/// Arguments of `flotilla doctor speed`.
#[derive(Debug, Args)]
pub(crate) struct SpeedArgs {
    /// Model: a directory, or an `org/name` in the Hugging Face cache
    #[arg(long)]
    pub model: PathBuf,
    #[command(flatten)]
    pub engines: BoxEngineArgs,
    /// Largest difference in log-probability that counts as the same policy, in nats per token
    #[arg(long, default_value_t = wire::CANARY_TOLERANCE)]
    pub tolerance: f64,
}
