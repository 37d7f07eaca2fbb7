//! The subcommands, one module each: they parse the remaining arguments, call the crates and print.

mod adopt;
pub(crate) mod agent;
pub(crate) mod agents;
mod audit;
mod backup;
mod channel;
mod checkpoint;
mod compare;
mod convert;
mod coordinator;
mod court;
mod cycle_figures;
mod data;
mod discover;
mod doctor;
mod down;
mod eval;
mod explain;
mod feed;
mod first_spec;
mod forecast;
mod generate;
mod generate_data;
mod import;
mod keys;
mod members;
mod new_run;
mod objective;
pub(crate) mod open;
mod reproduce;
mod run;
mod samples;
mod select;
mod service;
mod stack;
mod status;
mod sweep;
pub(crate) mod topics;
mod up;
mod upgrade;
pub(crate) mod verify;
pub(crate) mod worker;

use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory;

pub(crate) use cycle_figures::{cycles_table, perplexities_table};

use crate::{
    args::{Cli, CliCommand, MembersCommand},
    demo, output, tui,
};

/// Says which credentials a user needs whose own may not write what the command writes.
fn explain_denial(error: anyhow::Error) -> anyhow::Error {
    if format!("{error:#}").contains("(B108)") {
        return anyhow::anyhow!(
            "these credentials may not do that; an admin makes others with `flotilla user create \
             NAME --scope operator --out DIR` (K104)"
        );
    }
    error
}

/// Runs a subcommand and returns its exit code.
pub(crate) async fn run_command(cli: Cli) -> anyhow::Result<ExitCode> {
    let Cli { global, command } = cli;
    let (fleet, json) = (&global.fleet, global.json);
    match command {
        CliCommand::Agent(args) => return agent::run_agent(fleet, args).await,
        CliCommand::Run(command) => {
            return run::handle_run_command(&global, command).await.map_err(explain_denial);
        }
        CliCommand::Audit(args) => return audit::audit_run(&global, &args).await,
        CliCommand::Doctor(args) => return doctor::run_doctor(fleet, &args, json).await,
        CliCommand::Stack(command) => return stack::handle_stacks(command, json).await,
        CliCommand::Verify(args) => {
            let judge = move || verify::verify_completions(&args, json);
            return tokio::task::spawn_blocking(judge).await?;
        }
        CliCommand::Demo(args) => demo::run_demo(&global, &args).await?,
        CliCommand::Init(args) => keys::init_keys(&global, &args)?,
        CliCommand::Keys(command) => keys::handle_keys(&global, command).await?,
        CliCommand::Backup(args) => backup::back_up_fleet(&global, &args).await?,
        CliCommand::Restore(args) => backup::restore_fleet(&global, &args).await?,
        CliCommand::Up(args) => up::run_fleet(fleet, &args).await?,
        CliCommand::Upgrade(args) => upgrade::upgrade_program(fleet, &args).await?,
        CliCommand::Service(command) => service::run_service_command(fleet, &command).await?,
        CliCommand::Down => down::stop_fleet(fleet, json).await?,
        CliCommand::Open(args) => open::open_page(&global, args).await?,
        CliCommand::Status => return status::show_status(&global).await,
        CliCommand::Join(args) => members::join::join_fleet(fleet, args).await?,
        CliCommand::Discover(args) => discover::list_announced_fleets(&args, json).await?,
        CliCommand::Token(command) => members::handle_tokens(&global, command).await?,
        CliCommand::User(command) => members::handle_users(&global, command).await?,
        CliCommand::Members(MembersCommand::List) => members::list_members(&global).await?,
        CliCommand::Coordinator(args) => coordinator::run_coordinator(fleet, &args).await?,
        CliCommand::Eval(command) => eval::handle_evals(&global, command).await?,
        CliCommand::Checkpoint(command) => {
            checkpoint::handle_checkpoints(&global, command).await?;
        }
        CliCommand::Watch(args) => tui::run_tui(&global, args).await?,
        CliCommand::Feed(command) => feed::handle_feed(&global, command).await?,
        CliCommand::Agents(command) => {
            agents::handle_agents(&global, command).await.map_err(explain_denial)?;
        }
        CliCommand::Select(args) => select::preview_selection(&global, &args).await?,
        CliCommand::Court(args) => court::run_court(&global, &args).await?,
        CliCommand::Serve(args) => {
            channel::serve_channel(&global, args).await.map_err(explain_denial)?;
        }
        CliCommand::Channel(command) => {
            channel::handle_channels(&global, command).await.map_err(explain_denial)?;
        }
        CliCommand::Compare(args) => compare::compare_models(&global, &args).await?,
        CliCommand::Convert(command) => convert::run_convert_command(command, json).await?,
        CliCommand::Generate(args) => generate::generate_samples(&args, json).await?,
        CliCommand::Data(command) => {
            data::run_data_command(&global, command).await.map_err(explain_denial)?;
        }
        CliCommand::Objective(command) => objective::run_objective(&command, json)?,
        CliCommand::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "flotilla", &mut script);
            output::print_text(&String::from_utf8_lossy(&script));
        }
        CliCommand::Topics { topic } => topics::print_topics(topic.as_deref(), json)?,
        CliCommand::Man { directory } => std::fs::create_dir_all(&directory)
            .and_then(|()| clap_mangen::generate_to(Cli::command(), &directory))
            .with_context(|| format!("write manual pages into {}", directory.display()))?,
        CliCommand::Worker(worker) => worker::run_worker(worker)?,
    }
    Ok(ExitCode::SUCCESS)
}
