//! The command line: the top-level command and the arguments of its subcommands, for clap.
//!
//! Doc comments of fields and variants are the help texts.

mod access;
mod agent;
mod checkpoint;
mod convert;
mod data;
mod doctor;
mod eval;
mod feed;
mod fleet;
mod generate;
mod host_protection;
mod members;
mod run;
mod service;
mod verify;
mod worker;

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use clap_complete::Shell;
use engine::MatrixDtype;

use crate::{commands::topics, fleet::FleetArgs, version::VERSION};

pub(crate) use {
    access::{BackupArgs, FleetAccessArgs, InitArgs, KeysCommand, RestoreArgs},
    agent::{
        AgentArgs, AgentsCommand, EvaluatorEngine, ROLE_NAMES, STOP_GRACE_S, TrainerEngine,
        TrainingWatchArgs,
    },
    checkpoint::CheckpointCommand,
    convert::{ConvertCommand, ConvertOutputArgs, FloatDtype, ModelDtype},
    data::{DataCommand, HeldoutArgs},
    doctor::{DoctorArgs, DoctorCommand, EstimateArgs, EstimateMethod},
    eval::{EvalCommand, EvalDtype, EvalEngine, EvalFilterArgs, EvalLocalArgs},
    feed::{FeedCommand, FeedRunArgs, TrackerTokenArgs},
    fleet::{CoordinatorArgs, DemoArgs, DiscoverArgs, TuiArgs, UpArgs},
    generate::GenerateArgs,
    host_protection::HostProtectionArgs,
    members::{JoinArgs, MembersCommand, TokenCommand, TokenCreateArgs, UserCommand},
    run::{AuditArgs, ReproduceArgs, RunCommand, SelectArgs, SteerArgs},
    service::{ServiceArgs, ServiceCommand, UpgradeArgs},
    verify::{VerifierToolArgs, VerifyArgs},
    worker::WorkerCommand,
};

/// Fine-tune language models across a fleet of boxes.
#[derive(Debug, Parser)]
#[command(name = "flotilla", version = VERSION, propagate_version = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub fleet: FleetArgs,
    /// Print JSON on stdout instead of text.
    #[arg(long, global = true)]
    pub json: bool,
    /// Print every setting of the command and its source, then exit.
    #[arg(long, global = true)]
    pub print_config: bool,
    #[command(subcommand)]
    pub command: CliCommand,
}

/// A subcommand of `flotilla`.
#[derive(Debug, Subcommand)]
#[expect(clippy::large_enum_variant, reason = "there is one, made once")]
pub(crate) enum CliCommand {
    /// Start a complete fleet on this machine and train a small model.
    Demo(DemoArgs),
    /// Create the keys of a closed fleet; `up` does this by itself for a new fleet.
    Init(InitArgs),
    /// Show and rotate the keys of a closed fleet.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Back up the log, members and keys of a running fleet.
    Backup(BackupArgs),
    /// Restore a fleet from a backup into a new directory.
    Restore(RestoreArgs),
    /// Start a fleet on this machine: NATS server, coordinator, gateway and optional agents.
    Up(UpArgs),
    /// Stop the fleet in --dir.
    Down,
    /// Run an agent that works for a fleet.
    Agent(AgentArgs),
    /// Join a closed fleet with a join token and start an agent.
    Join(JoinArgs),
    /// List the fleets announced on this network.
    Discover(DiscoverArgs),
    /// Create, list and revoke join tokens of a closed fleet.
    #[command(subcommand)]
    Token(TokenCommand),
    /// Create, list and revoke users of a closed fleet.
    #[command(subcommand)]
    User(UserCommand),
    /// List the members of a closed fleet.
    #[command(subcommand)]
    Members(MembersCommand),
    /// Run the coordinator and gateway of a fleet on an existing NATS server.
    Coordinator(CoordinatorArgs),
    /// Install this box's agent as a systemd service.
    #[command(subcommand)]
    Service(ServiceCommand),
    /// Replace the flotilla program on this box, draining its agents first and restarting them
    /// after.
    Upgrade(UpgradeArgs),
    /// Submit, watch and control runs.
    #[command(subcommand)]
    Run(RunCommand),
    /// Show evaluation results.
    #[command(subcommand)]
    Eval(EvalCommand),
    /// List, inspect and export checkpoints.
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Watch the fleet and its runs in the terminal.
    Watch(TuiArgs),
    /// Export runs to trackers: MLflow, TensorBoard, trackio, OTLP, a webhook or files.
    #[command(subcommand)]
    Feed(FeedCommand),
    /// List, drain and revoke agents.
    #[command(subcommand)]
    Agents(AgentsCommand),
    /// Check a run: replay its log, compare it with the store and report every contradiction.
    Audit(AuditArgs),
    /// Preview what another selection strategy would keep of a cycle.
    Select(SelectArgs),
    /// Generate samples with a local model, without a fleet.
    Generate(GenerateArgs),
    /// Judge completions from a file, without a fleet.
    Verify(VerifyArgs),
    /// Inspect, split and deduplicate files of prompts and examples, without a fleet.
    #[command(subcommand)]
    Data(DataCommand),
    /// Check this box for problems and suggest remedies.
    Doctor(DoctorArgs),
    /// Convert models and adapters between formats.
    #[command(subcommand)]
    Convert(ConvertCommand),
    /// Read the documentation: list all topics, or print one.
    #[command(after_help = topics::list_topics())]
    Topics { topic: Option<String> },
    /// Print a completion script for a shell.
    Completions { shell: Shell },
    /// Write manual pages of all commands to a directory.
    Man { directory: PathBuf },
    /// Run a worker process of an agent.
    #[command(hide = true, subcommand)]
    Worker(WorkerCommand),
}

impl CliCommand {
    /// Returns the log filter of the command when `RUST_LOG` is not set: daemons log info, other
    /// commands only warnings.
    pub(crate) fn default_log_filter(&self) -> &'static str {
        match self {
            // File notifications are only hints: a change that they miss is found by the next scan.
            Self::Agent(_) => "info,async_nats=warn,notify=error,inotify=error",
            Self::Coordinator(_) | Self::Up(_) => "info,async_nats=warn",
            _ => "warn,async_nats=error",
        }
    }
}

/// Parses a candle weight type.
fn parse_dtype(text: &str) -> Result<MatrixDtype, String> {
    MatrixDtype::from_name(text)
        .ok_or_else(|| format!("must be one of {}", MatrixDtype::NAMES.join(", ")))
}

/// Parses a number of seconds from 1 to 3600.
fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (1.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number of seconds from 1 to 3600".into()),
    }
}

/// Parses a number of hours from 0.001 to 8784 (366 days).
fn parse_hours(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(hours) if (0.001..=24.0 * 366.0).contains(&hours) => Ok(hours),
        _ => Err("must be a number of hours from 0.001 to 8784".into()),
    }
}

/// Parses a size from 0.001 to 1 000 000 GiB.
fn parse_gib(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(gib) if (0.001..=1e6).contains(&gib) => Ok(gib),
        _ => Err("must be a number of GiB from 0.001 to 1000000".into()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
