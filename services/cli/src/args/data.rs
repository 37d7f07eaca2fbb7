//! Arguments of `flotilla data`: files of prompts and examples.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// The subcommands of `flotilla data`.
#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Show line counts, fields, duplicates and lengths of files.
    Stats {
        /// Files of prompts, examples or texts
        files: Vec<PathBuf>,
    },
    /// Split a prompt file into training and held-out prompts, as a run with that seed does.
    Split {
        /// Prompt file to split.
        file: PathBuf,
        #[command(flatten)]
        held: HeldoutArgs,
        /// Seed of the run.
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Output file for training prompts.
        #[arg(long)]
        out_train: PathBuf,
        /// Output file for held-out prompts.
        #[arg(long)]
        out_heldout: PathBuf,
    },
    /// Remove prompts that repeat an earlier prompt.
    Dedup {
        /// Prompt file to deduplicate.
        file: PathBuf,
        /// Output file.
        #[arg(long)]
        out: PathBuf,
    },
}

/// The number of prompts to hold out, as a share or a count.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct HeldoutArgs {
    /// Share of the prompts to hold out, from 0 to 1
    #[arg(long)]
    pub share: Option<f64>,
    /// Number of prompts to hold out
    #[arg(long)]
    pub count: Option<u32>,
}
