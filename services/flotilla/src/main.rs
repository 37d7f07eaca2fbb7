//! The one binary: `flotilla <subcommand>`. Wires the crates together and knows terminals.
//!
//! stdout is data, stderr is for people. Exit codes: 0 done, 1 something failed, 2 wrong
//! usage, 3 the run failed or the audit found something.

mod bench;
mod cli;
mod commands;
mod config;
mod demo;
mod directory;
mod discovery;
mod fleet;
mod keys;
mod local;
mod meter;
mod notify;
mod occupant;
mod output;
mod progress;
mod service;
mod signals;
mod sums;
mod supervise;
mod upgrade;
mod version;
mod watch;

use std::{io::IsTerminal, process::ExitCode};

use clap::{CommandFactory, FromArgMatches};
use tracing_subscriber::EnvFilter;

use crate::cli::Cli;

/// Threads of the async runtime: it only moves messages, the work is done by children.
const ASYNC_THREADS: usize = 2;

fn main() -> ExitCode {
    let command = Cli::command();
    let matches = command.clone().try_get_matches().unwrap_or_else(|error| misused(&error));
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| misused(&error));
    if cli.print_config {
        return done(config::print(&command, &matches, cli.json));
    }
    start_logging(cli.command.default_log());
    if let cli::Command::Worker(worker) = cli.command {
        return done(commands::worker::work(worker));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_THREADS)
        .enable_all()
        .build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(commands::run(cli)),
        Err(error) => Err(anyhow::Error::from(error).context("start the async runtime")),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            output::complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Help that was asked for, or wrong usage.
fn misused(error: &clap::Error) -> ! {
    // What cannot be printed was not wanted.
    let _ = error.print();
    if error.use_stderr() {
        output::say("\nmore: flotilla topics A100");
    }
    std::process::exit(error.exit_code())
}

fn done(outcome: anyhow::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// `RUST_LOG` wins; otherwise daemons say what a person wants to know and commands only warn.
/// The hub's client logs each error that it returns as well.
fn start_logging(default: &str) {
    let default = format!("{default},hf_hub=off");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
}
