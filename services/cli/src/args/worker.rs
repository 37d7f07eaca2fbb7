//! Arguments of the worker processes that an agent starts.

use std::{ffi::OsString, path::PathBuf};

use clap::Subcommand;
use engine::MatrixDtype;

use super::parse_dtype;

/// The worker processes that an agent starts.
#[derive(Debug, Subcommand)]
pub(crate) enum WorkerCommand {
    /// Run a generator worker.
    Generate {
        #[arg(long)]
        device: String,
        #[arg(long, value_parser = parse_dtype)]
        dtype: MatrixDtype,
        /// A `generator::GeneratorBackend`, as JSON.
        #[arg(long)]
        backend: String,
        #[arg(long)]
        base: Option<PathBuf>,
        #[arg(long, default_value = "")]
        base_key: String,
        #[arg(long)]
        adapter: Option<PathBuf>,
        #[arg(long, default_value = "")]
        adapter_key: String,
        #[arg(long)]
        slots: usize,
    },
    /// Run a verifier worker.
    Verify {
        #[arg(long)]
        device: String,
        #[arg(long, value_parser = parse_dtype)]
        dtype: MatrixDtype,
        #[arg(long)]
        threads: usize,
        /// `verifier::Tools`, as JSON.
        #[arg(long)]
        tools: String,
        /// Paths that programs cannot see.
        #[arg(long)]
        hidden: Vec<PathBuf>,
        /// `verifier::Grants`, as JSON.
        #[arg(long)]
        grants: String,
        /// Programs are contained here.
        #[arg(long)]
        contains: bool,
    },
    /// Runs a program with directories hidden from it: see the sandbox crate.
    Masked {
        #[arg(long)]
        hidden: Vec<PathBuf>,
        #[arg(last = true)]
        argv: Vec<OsString>,
    },
    /// Run a sandbox cell, which confines itself and then runs a program that a model wrote.
    Cell,
    /// Run a trainer worker.
    Train {
        #[arg(long)]
        device: String,
        #[arg(long, value_parser = parse_dtype)]
        dtype: MatrixDtype,
    },
    /// Serve models with the embedded engine.
    Serve {
        #[arg(long)]
        device: String,
        #[arg(long, value_parser = parse_dtype)]
        dtype: MatrixDtype,
        /// A `completion_server::CompletionServerConfig`, as JSON.
        #[arg(long)]
        models: String,
        /// A socket's path; not used if there is a port.
        #[arg(long)]
        host: PathBuf,
        #[arg(long)]
        port: Option<u16>,
        #[arg(long)]
        api_key_file: PathBuf,
    },
    /// Run an evaluator worker.
    Eval {
        #[arg(long)]
        device: String,
        #[arg(long, value_parser = parse_dtype)]
        dtype: MatrixDtype,
    },
}
