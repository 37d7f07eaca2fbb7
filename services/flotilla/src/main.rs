//! The `flotilla` binary: parses the command line, starts logging and runs one subcommand.
//!
//! Stdout carries data, stderr carries messages for people. Exit codes: 0 done, 1 a failure, 2
//! wrong usage, 3 the run failed or the audit has findings.

mod agent_lock;
mod args;
mod bench;
mod commands;
mod demo;
mod demo_task;
mod discovery;
mod fleet;
mod fleet_keys;
mod local_models;
mod output;
mod print_config;
mod progress_meter;
mod run_progress;
mod service_notify;
mod signals;
mod supervisor;
mod systemd;
mod tui;
mod upgrade_plan;
mod version;
mod work_directory;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

use crate::args::Cli;

/// Worker threads of the async runtime. Two are enough: it only moves messages, and child processes
/// do the computing.
const ASYNC_THREADS: usize = 2;

fn main() -> ExitCode {
    output::install_panic_hook();
    let command = Cli::command();
    let matches = command.clone().try_get_matches().unwrap_or_else(|error| exit_with_usage(&error));
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| exit_with_usage(&error));
    if cli.print_config {
        return report_outcome(print_config::print_settings(&command, &matches, cli.json));
    }
    output::start_logging(cli.command.default_log_filter());
    if let args::CliCommand::Worker(worker) = cli.command {
        return report_outcome(commands::worker::run_worker(worker));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_THREADS)
        .enable_all()
        .build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(commands::run_command(cli)),
        Err(error) => Err(anyhow::Error::from(error).context("start the async runtime")),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            output::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

/// Prints the requested help or the usage error of clap, and exits with clap's exit code.
fn exit_with_usage(error: &clap::Error) -> ! {
    output::print_usage_error(error);
    std::process::exit(error.exit_code())
}

/// Returns the exit code of an outcome, and prints the error of a failed one.
fn report_outcome(outcome: anyhow::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::print_error(&error);
            ExitCode::FAILURE
        }
    }
}
