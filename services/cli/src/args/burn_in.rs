//! Arguments of `flotilla doctor burn-in`, and of engines that run without an agent.

use std::path::PathBuf;

use clap::Args;

/// Engines and cores of this box, for a command that runs them without an agent.
#[derive(Debug, Args)]
pub(crate) struct BoxEngineArgs {
    /// Directory of llama.cpp's programs [default: searched on PATH]
    #[arg(long, value_name = "DIR", env = "FLOTILLA_LLAMA_CPP")]
    pub llama_cpp: Option<PathBuf>,
    /// Hardware profile to use instead of the detected one: a name or a file
    #[arg(long)]
    pub profile: Option<String>,
    /// CPU cores to use [default: all]
    #[arg(long, env = "FLOTILLA_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
}

/// Arguments of `flotilla doctor burn-in`.
#[derive(Debug, Args)]
pub(crate) struct BurnInArgs {
    /// Model: a directory, or an `org/name` in the Hugging Face cache [default: a small one]
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// File for the report
    #[arg(long, value_name = "FILE", default_value = "burn-in.json")]
    pub out: PathBuf,
    /// Train with PyTorch in this environment: VENV/bin/python [default: on a GPU, that of the stack
    /// in use, or uv; otherwise the embedded engine]
    #[arg(long, value_name = "PATH")]
    pub python: Option<PathBuf>,
    #[command(flatten)]
    pub engines: BoxEngineArgs,
    /// Longest time of one stage, in seconds
    #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub stage_limit: u64,
    /// Longest time of all stages, in seconds
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=36_000))]
    pub limit: u64,
    /// Largest difference between GPU and CPU, in nats per token
    #[arg(long, default_value_t = 0.1)]
    pub tolerance: f64,
    /// Keep the names of box, user and home in the report
    #[arg(long)]
    pub names: bool,
}
