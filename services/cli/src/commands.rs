//! The subcommands, one module each: they parse the remaining arguments, call the crates and print.

mod adopt;
pub(crate) mod agent;
pub(crate) mod agents;
mod audit;
mod backup;
pub(crate) mod canary_report;
mod checkpoint;
mod convert;
mod coordinator;
mod cycle_figures;
mod data;
mod discover;
mod doctor;
mod down;
mod eval;
mod explain;
mod feed;
mod generate;
mod keys;
mod members;
mod reproduce;
mod run;
mod select;
mod service;
pub(crate) mod topics;
mod up;
mod upgrade;
pub(crate) mod verify;
pub(crate) mod worker;

use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory;

pub(crate) use cycle_figures::{cycles_table, perplexities_table};
pub use run::run_to_success;

use crate::{
    args::{Cli, CliCommand},
    demo, output, tui,
};

/// Exit code if a run failed or an audit has findings.
pub(crate) const EXIT_FINDINGS: u8 = 3;

/// Runs a subcommand and returns its exit code.
pub(crate) async fn run_command(cli: Cli) -> anyhow::Result<ExitCode> {
    let Cli { fleet, json, command, print_config: _ } = cli;
    match command {
        CliCommand::Demo(args) => demo::run_demo(&fleet, &args, json).await,
        CliCommand::Init(args) => keys::init_keys(&fleet, &args, json),
        CliCommand::Keys(command) => keys::run_keys_command(&fleet, command, json).await,
        CliCommand::Backup(args) => backup::back_up_fleet(&fleet, &args, json).await,
        CliCommand::Restore(args) => backup::restore_fleet(&fleet, &args, json).await,
        CliCommand::Up(args) => up::run_fleet(&fleet, &args).await,
        CliCommand::Upgrade(args) => upgrade::upgrade_program(&fleet, &args).await,
        CliCommand::Service(command) => service::run_service_command(&fleet, &command).await,
        CliCommand::Down => down::stop_fleet(&fleet).await,
        CliCommand::Agent(args) => agent::run_agent(&fleet, args).await,
        CliCommand::Join(args) => members::join::join_fleet(&fleet, args).await,
        CliCommand::Discover(args) => discover::list_announced_fleets(&args, json).await,
        CliCommand::Token(command) => members::run_token_command(&fleet, command, json).await,
        CliCommand::User(command) => members::run_user_command(&fleet, command, json).await,
        CliCommand::Members(command) => members::list_members(&fleet, command, json).await,
        CliCommand::Coordinator(args) => coordinator::run_coordinator(&fleet, &args).await,
        CliCommand::Run(command) => run::handle_run_command(&fleet, command, json).await,
        CliCommand::Eval(command) => eval::run_eval_command(&fleet, command, json).await,
        CliCommand::Checkpoint(command) => {
            checkpoint::run_checkpoint_command(&fleet, command, json).await
        }
        CliCommand::Watch(args) => tui::run_tui(&fleet, args, json).await,
        CliCommand::Feed(command) => feed::run_feed_command(&fleet, command, json).await,
        CliCommand::Agents(command) => agents::run_agents_command(&fleet, command, json).await,
        CliCommand::Audit(args) => audit::audit_run(&fleet, &args, json).await,
        CliCommand::Select(args) => select::preview_selection(&fleet, &args, json).await,
        CliCommand::Convert(command) => convert::run_convert_command(command, json).await,
        CliCommand::Generate(args) => generate::generate_samples(&args, json).await,
        CliCommand::Data(command) => data::run_data_command(command, json),
        CliCommand::Verify(args) => {
            tokio::task::spawn_blocking(move || verify::verify_completions(&args, json)).await?
        }
        CliCommand::Doctor(args) => doctor::run_doctor(&args, json),
        CliCommand::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "flotilla", &mut script);
            output::print_text(&String::from_utf8_lossy(&script));
            Ok(ExitCode::SUCCESS)
        }
        CliCommand::Topics { topic } => topics::print_topics(topic.as_deref(), json),
        CliCommand::Man { directory } => {
            std::fs::create_dir_all(&directory)
                .and_then(|()| clap_mangen::generate_to(Cli::command(), &directory))
                .with_context(|| format!("write manual pages into {}", directory.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        CliCommand::Worker(worker) => worker::run_worker(worker),
    }
}
