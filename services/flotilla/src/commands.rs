//! One module a subcommand: parse what is left, call the crates, print.

pub(crate) mod agent;
pub(crate) mod agents;
mod audit;
mod backup;
mod checkpoint;
mod convert;
mod coordinator;
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
pub(crate) mod proof;
mod reproduce;
mod run;
mod select;
mod service;
pub(crate) mod topics;
mod up;
mod upgrade;
pub(crate) mod verify;
mod watching;
pub(crate) mod worker;

use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory;

pub(crate) use run::{cycles_table, perplexities_table, succeed};

use crate::{
    bench,
    cli::{Cli, Command},
    demo, output, watch,
};

/// The run failed, or the audit found something.
pub(crate) const FINDINGS: u8 = 3;

pub(crate) async fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let Cli { fleet, json, command, print_config: _ } = cli;
    match command {
        Command::Demo(args) => demo::demo(&fleet, &args, json).await,
        Command::Init(args) => keys::init(&fleet, &args, json),
        Command::Keys(command) => keys::keys(&fleet, command, json).await,
        Command::Backup(args) => backup::backup(&fleet, &args, json).await,
        Command::Restore(args) => backup::restore(&fleet, &args, json).await,
        Command::Up(args) => up::up(&fleet, &args).await,
        Command::Upgrade(args) => upgrade::upgrade(&fleet, &args).await,
        Command::Service(command) => service::service(&fleet, &command).await,
        Command::Down => down::down(&fleet).await,
        Command::Agent(args) => agent::agent(&fleet, args).await,
        Command::Join(args) => members::join::join(&fleet, args).await,
        Command::Discover(args) => discover::discover(&args, json).await,
        Command::Token(command) => members::token(&fleet, command, json).await,
        Command::User(command) => members::user(&fleet, command, json).await,
        Command::Members(command) => members::members(&fleet, command, json).await,
        Command::Coordinator(args) => coordinator::coordinator(&fleet, &args).await,
        Command::Run(command) => run::run(&fleet, command, json).await,
        Command::Eval(command) => eval::eval(&fleet, command, json).await,
        Command::Checkpoint(command) => checkpoint::checkpoint(&fleet, command, json).await,
        Command::Watch(args) => watch::watch(&fleet, args, json).await,
        Command::Feed(command) => feed::feed(&fleet, command, json).await,
        Command::Agents(command) => agents::agents(&fleet, command, json).await,
        Command::Audit(args) => audit::audit(&fleet, &args, json).await,
        Command::Select(args) => select::select(&fleet, &args, json).await,
        Command::Convert(command) => convert::convert(command, json).await,
        Command::Generate(args) => generate::generate(&args, json).await,
        Command::Data(command) => data::data(command, json),
        Command::Verify(args) => {
            tokio::task::spawn_blocking(move || verify::verify(&args, json)).await?
        }
        Command::Doctor(args) => doctor::doctor(&args, json),
        Command::Bench(args) => bench::bench(&fleet, &args, json).await,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "flotilla", &mut script);
            output::print(&String::from_utf8_lossy(&script));
            Ok(ExitCode::SUCCESS)
        }
        Command::Topics { topic } => topics::topics(topic.as_deref(), json),
        Command::Man { directory } => {
            std::fs::create_dir_all(&directory)
                .and_then(|()| clap_mangen::generate_to(Cli::command(), &directory))
                .with_context(|| format!("write manual pages into {}", directory.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Worker(worker) => {
            worker::work(worker)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
