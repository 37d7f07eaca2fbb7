//! The command line of the `flotilla` program: parses it, starts logging and runs one subcommand.
//!
//! Stdout carries data, stderr carries messages for people. Exit codes: 0 done, 1 a failure, 2
//! wrong usage, 3 the run failed or the audit has findings.
//!
//! [`run_program`] is the whole program. The other public items serve the benchmarks.

mod args;
mod commands;
mod demo;
pub mod demo_task;
mod exit_codes;
pub mod fleet;
mod fleet_keys;
pub mod local_models;
mod print_config;
mod progress_meter;
mod python_runner;
mod run_progress;
mod run_submission;
mod service_notify;
pub mod signals;
pub mod supervisor;
mod this_machine;
mod tui;
mod upgrade_plan;
mod version;
pub mod work_directory;

use std::process::ExitCode;

use anyhow::Context;
use clap::FromArgMatches;

use crate::{
    args::{Cli, CliCommand},
    output::{exit_with_usage, report_outcome},
};
pub use crate::{
    run_submission::{await_success, run_to_success, submit_run},
    version::VERSION,
};
pub use terminal_output as output;

/// Worker threads of the async runtime. Two are enough: it only moves messages, and child processes
/// do the computing.
const ASYNC_THREADS: usize = 2;

/// Runs the program with the arguments of this process and returns its exit code.
pub fn run_program() -> ExitCode {
    output::install_panic_hook();
    let command = Cli::build_command().term_width(output::help_width());
    let matches =
        command.clone().try_get_matches().unwrap_or_else(|mut error| exit_with_usage(&mut error));
    let cli =
        Cli::from_arg_matches(&matches).unwrap_or_else(|mut error| exit_with_usage(&mut error));
    if cli.global.print_config {
        return report_outcome(
            print_config::print_settings(&command, &matches, cli.global.json)
                .map(|()| ExitCode::SUCCESS),
        );
    }
    if cli.global.json {
        output::print_errors_as_json();
    }
    if cli.global.wide {
        output::show_all_columns();
    }
    let has_reader = output::stderr_is_terminal() && !cli.global.verbose;
    output::start_logging(cli.command.default_log_filter(has_reader));
    match cli.command {
        CliCommand::Worker(worker) => {
            report_outcome(commands::worker::run_worker(worker).map(|()| ExitCode::SUCCESS))
        }
        _ => block_on_command(commands::run_command(cli)),
    }
}

/// Runs a command on an async runtime and returns its exit code. Prints the error of a failed one.
pub fn block_on_command(command: impl Future<Output = anyhow::Result<ExitCode>>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(ASYNC_THREADS)
        .enable_all()
        .build();
    let runtime = runtime.context("start the async runtime");
    report_outcome(runtime.and_then(|runtime| runtime.block_on(command)))
}
