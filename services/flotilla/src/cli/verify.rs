//! What `flotilla verify` is told, and what an agent is of its verifier.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// What judges: a name such as python, a file of settings, or the settings themselves as the
    /// `verifier` of a run's spec has them, such as '{python: {limits: {timeout_s: 3}}}'.
    #[arg(long, value_name = "NAME|FILE|YAML")]
    pub verifier: String,
    /// Prompts, one JSON object a line, with what the verifier reads of them.
    #[arg(long, value_name = "FILE.jsonl")]
    pub prompts: PathBuf,
    /// Completions, one {"prompt_id", "completion"} a line; "-" is stdin.
    #[arg(long, value_name = "FILE.jsonl")]
    pub completions: PathBuf,
    /// Completions judged at a time. Default: as many as there are cores.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub jobs: Option<u32>,
    #[command(flatten)]
    pub tools: ToolArgs,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ToolArgs {
    /// The Python that solutions are run with. Default: python3 on PATH.
    #[arg(long, value_name = "PYTHON", env = "FLOTILLA_VERIFIER_PYTHON")]
    pub verifier_python: Option<PathBuf>,
}
