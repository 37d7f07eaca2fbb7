//! Files of prompts and examples.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// How many lines, fields, duplicates, and how long they are.
    Stats { files: Vec<PathBuf> },
    /// Hold some prompts of a file out, as a run with that seed would.
    Split {
        file: PathBuf,
        #[command(flatten)]
        held: HeldArgs,
        #[arg(long, default_value_t = 0)]
        seed: u64,
        #[arg(long)]
        out_train: PathBuf,
        #[arg(long)]
        out_heldout: PathBuf,
    },
    /// Leave out prompts that ask what an earlier one does.
    Dedup {
        file: PathBuf,
        #[arg(long)]
        out: PathBuf,
    },
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct HeldArgs {
    /// Of the prompts, 0 to 1.
    #[arg(long)]
    pub share: Option<f64>,
    /// So many prompts.
    #[arg(long)]
    pub count: Option<u32>,
}
