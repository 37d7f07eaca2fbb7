//! Arguments of `flotilla checkpoint`.

use std::path::PathBuf;

use clap::Subcommand;

/// The subcommands of `flotilla checkpoint`.
#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List the checkpoints of a run.
    List { run: String },
    /// Show a checkpoint and its files.
    Get {
        /// Checkpoint: RUN (its newest), RUN/CYCLE or RUN/CYCLE/STEP.
        checkpoint: String,
    },
    /// Explain the origin of a checkpoint: its trainings, samples, verdicts and boxes, back to the
    /// base.
    Explain {
        /// Checkpoint: RUN (its newest), RUN/CYCLE or RUN/CYCLE/STEP.
        checkpoint: String,
        /// Show all samples it was trained on.
        #[arg(long)]
        samples: bool,
    },
    /// Copy the files of a checkpoint to a directory and verify them.
    Export {
        /// Checkpoint: RUN (its newest), RUN/CYCLE or RUN/CYCLE/STEP.
        checkpoint: String,
        /// Directory to copy the files to.
        #[arg(long)]
        out: PathBuf,
    },
}
