//! Arguments of `flotilla data`: files of prompts and examples.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::VerifierToolArgs;

/// The subcommands of `flotilla data`.
#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Show statistics of prompts or examples, and the first of them.
    Show(DataShowArgs),
    /// Show line counts, fields, duplicates and lengths of files.
    Stats {
        /// Files of prompts or examples, or data sets as hub:ORG/NAME
        files: Vec<PathBuf>,
        #[command(flatten)]
        columns: ColumnArgs,
    },
    /// Split a prompt file into training and held-out prompts, as a run with the same seed does.
    Split {
        /// Prompt file to split, or a data set as hub:ORG/NAME
        file: PathBuf,
        #[command(flatten)]
        columns: ColumnArgs,
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
    /// Write the feedback on a channel as prompts, examples and pairs.
    FromFeedback(FeedbackDataArgs),
    /// Write prompts and answers with a model, from categories with examples.
    Generate(GenerateDataArgs),
    /// Remove prompts that repeat an earlier prompt.
    Dedup {
        /// Prompt file to deduplicate, or a data set as hub:ORG/NAME
        file: PathBuf,
        #[command(flatten)]
        columns: ColumnArgs,
        /// Output file.
        #[arg(long)]
        out: PathBuf,
    },
}

/// Arguments of `flotilla data show`.
#[derive(Debug, Args)]
pub(crate) struct DataShowArgs {
    /// File of prompts or examples, or hub:ORG/NAME[@REVISION][:[CONFIG/]SPLIT]
    pub file: PathBuf,
    /// Use columns, chat settings and base of this spec
    #[arg(long)]
    pub spec: Option<PathBuf>,
    /// Model whose chat template renders conversations: a directory or ORG/NAME
    #[arg(long)]
    pub base: Option<String>,
    /// Number of rows to show
    #[arg(long, default_value_t = 3)]
    pub rows: usize,
    #[command(flatten)]
    pub columns: ColumnArgs,
}

/// The columns from which fields are taken.
#[derive(Debug, Clone, Args)]
pub(crate) struct ColumnArgs {
    /// Take a field from a column, as in prompt=question (repeatable)
    #[arg(long = "column", value_name = "FIELD=COLUMN", value_parser = parse_column)]
    pub mapping: Vec<(String, String)>,
}

fn parse_column(text: &str) -> Result<(String, String), String> {
    let parts =
        text.split_once('=').filter(|(field, column)| !field.is_empty() && !column.is_empty());
    let (field, column) = parts.ok_or("expected FIELD=COLUMN, such as prompt=question")?;
    Ok((field.to_owned(), column.to_owned()))
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

/// Arguments of `flotilla data from-feedback`.
#[derive(Debug, Args)]
pub(crate) struct FeedbackDataArgs {
    /// Name of the channel, as in `flotilla channel list`
    pub channel: String,
    /// Output file: {"id", "prompt", "completion", "answer"} lines, and "chosen" and "rejected"
    /// where users corrected an answer
    #[arg(long)]
    pub out: PathBuf,
    /// Write only prompts with a chosen and a rejected answer
    #[arg(long)]
    pub pairs: bool,
}

/// Arguments of `flotilla data generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateDataArgs {
    /// Generation spec: categories, counts, verifier and limits
    #[arg(value_name = "FILE.yaml")]
    pub spec: PathBuf,
    /// Output directory; the same command continues an interrupted generation
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Model that writes: a channel of the fleet, or a model of the endpoint
    #[arg(long)]
    pub model: String,
    /// API of an OpenAI-compatible server, such as http://HOST:PORT/v1 [default: the
    /// fleet's gateway]
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,
    /// File with the API key of the endpoint
    #[arg(long, value_name = "FILE", requires = "endpoint")]
    pub endpoint_key_file: Option<PathBuf>,
    #[command(flatten)]
    pub tools: VerifierToolArgs,
}
