//! Arguments of `flotilla verify`, and the flags that describe a verifier's tools.

use std::path::PathBuf;

use clap::Args;

/// Arguments of `flotilla verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// Verifier: a name such as python, a settings file, or settings as in a run spec's `verifier`,
    /// such as '{python: {limits: {timeout_s: 3}}}'
    #[arg(long, value_name = "NAME|FILE|YAML")]
    pub verifier: String,
    /// Prompt file, one JSON object per line with the fields that the verifier reads
    #[arg(long, value_name = "FILE.jsonl")]
    pub prompts: PathBuf,
    /// Completions file, one {"prompt_id", "completion"} object per line; "-" reads stdin
    #[arg(long, value_name = "FILE.jsonl")]
    pub completions: PathBuf,
    /// Completions judged at once [default: number of CPU cores]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub jobs: Option<u32>,
    #[command(flatten)]
    pub tools: VerifierToolArgs,
}

/// Flags that name the programs a verifier uses.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct VerifierToolArgs {
    /// Python interpreter that runs solutions [default: python3 on PATH]
    #[arg(long, value_name = "PYTHON", env = "FLOTILLA_VERIFIER_PYTHON")]
    pub verifier_python: Option<PathBuf>,
    /// Directory or file that sandboxed `command` verifiers may read if a run's spec requests it or
    /// their executable is in it; may be repeated. Do not name one with secrets: all members who
    /// may submit runs can read it
    #[arg(long, value_name = "DIR", value_delimiter = ',', env = "FLOTILLA_VERIFIER_PATH")]
    pub verifier_path: Vec<PathBuf>,
    /// Executable that `command` verifiers may run outside the sandbox, with the network and with
    /// any arguments that a run's spec gives it; an absolute path, not a shell or interpreter; may
    /// be repeated
    #[arg(long, value_name = "PROGRAM", value_delimiter = ',', env = "FLOTILLA_ALLOW_COMMAND")]
    pub allow_command: Vec<PathBuf>,
}
