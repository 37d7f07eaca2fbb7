//! Arguments of `flotilla eval`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use formats::ConversionDtype;

use super::{ColumnArgs, ConverterArgs, conversion_dtype_parser};

/// The subcommands of `flotilla eval`.
#[derive(Debug, Subcommand)]
pub(crate) enum EvalCommand {
    /// List all evaluation results.
    History(EvalFilterArgs),
    /// Print past evaluation results, then new ones as they arrive.
    Watch {
        #[command(flatten)]
        filter: EvalFilterArgs,
        /// Print only facts after this position of the log.
        #[arg(long, default_value_t = 0)]
        after: u64,
    },
    /// Measure the perplexity of a local model, without a fleet.
    Local(EvalLocalArgs),
}

/// Filters of `flotilla eval history` and `flotilla eval watch`.
#[derive(Debug, Args)]
pub(crate) struct EvalFilterArgs {
    /// Show only results of this run
    pub run: Option<String>,
    /// Show only results of this suite
    #[arg(long, default_value = "", hide_default_value = true)]
    pub suite: String,
}

/// Arguments of `flotilla eval local`.
#[derive(Debug, Args)]
pub(crate) struct EvalLocalArgs {
    /// Model: a directory, an `org/name` in the Hugging Face cache, or a .gguf file
    #[arg(long)]
    pub model: PathBuf,
    /// Adapter: a PEFT directory, or a .gguf file for llama.cpp
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Text file, or rows of examples whose completions are scored: JSON lines, JSON, CSV or
    /// parquet, or hub:ORG/NAME
    #[arg(long)]
    pub text: PathBuf,
    #[command(flatten)]
    pub columns: ColumnArgs,
    /// Context length in tokens
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(8..))]
    pub n_ctx: u32,
    /// Maximum number of chunks; 0 means all
    #[arg(long, default_value_t = 0)]
    pub chunks: u32,
    /// Step of the sliding window in tokens; 0 scores the second half of disjoint chunks
    #[arg(long, default_value_t = 0)]
    pub stride: u32,
    /// Device of the candle engine: cpu, cuda, cuda:1, metal
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Engine that measures; quantised .gguf files require llama.cpp
    #[arg(long, value_enum, default_value = "candle")]
    pub engine: EvalEngine,
    /// Directory of the llama.cpp programs [default: found on PATH or in .tools]
    #[arg(long, value_name = "DIR", env = "FLOTILLA_LLAMA_CPP")]
    pub llama_cpp: Option<PathBuf>,
    #[command(flatten)]
    pub converters: ConverterArgs,
    /// Weight type: f32, bf16 for half the memory, or q8_0 for a quarter; llama.cpp also supports
    /// f16
    #[arg(long, default_value = "f32", value_parser = conversion_dtype_parser())]
    pub dtype: ConversionDtype,
    /// Hardware profile for llama.cpp: cpu, gfx906, gfx1151, gfx1201, rocm, or a profile file
    /// [default: detected]
    #[arg(long, env = "FLOTILLA_PROFILE")]
    pub profile: Option<String>,
    /// Threads of llama.cpp [default: all cores]
    #[arg(long, env = "FLOTILLA_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
}

/// An engine of `flotilla eval local`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EvalEngine {
    Candle,
    #[value(name = "llama.cpp")]
    LlamaCpp,
}
