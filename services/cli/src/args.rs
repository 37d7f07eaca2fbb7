//! The command line: the top-level command and the arguments of its subcommands, for clap.
//!
//! Doc comments of fields and variants are the help texts.

mod access;
mod agent;
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

use std::{ops::RangeInclusive, path::PathBuf};

use clap::{
    Args, Parser, Subcommand,
    builder::{PossibleValue, PossibleValuesParser, TypedValueParser},
};
use clap_complete::Shell;
use engine::MatrixDtype;
use formats::{ConversionDtype, FloatDtype};

use crate::{commands::topics, fleet::FleetArgs, version::VERSION};

pub(crate) use {
    access::{BackupArgs, FleetAccessArgs, InitArgs, KeysCommand, RestoreArgs},
    agent::{
        AgentArgs, AgentsCommand, EvaluatorEngine, GeneratorToolArgs, ROLE_NAMES, STOP_GRACE_S,
        TrainerEngine, TrainingWatchArgs,
    },
    convert::{ConvertCommand, ConvertOutputArgs},
    data::{DataCommand, HeldoutArgs},
    doctor::{DoctorArgs, DoctorCommand, EstimateArgs, EstimateMethod},
    eval::{EvalCommand, EvalEngine, EvalFilterArgs, EvalLocalArgs},
    feed::{FeedCommand, FeedRunArgs, TrackerTokenArgs},
    fleet::{CoordinatorArgs, DemoArgs, DiscoverArgs, TuiArgs, UpArgs},
    generate::GenerateArgs,
    host_protection::HostProtectionArgs,
    members::{JoinArgs, MembersCommand, TokenCommand, TokenCreateArgs, UserCommand},
    run::{AuditArgs, CheckpointCommand, ReproduceArgs, RunCommand, SelectArgs, SteerArgs},
    service::{ServiceArgs, ServiceCommand, UpgradeArgs},
    verify::{VerifierToolArgs, VerifyArgs},
    worker::WorkerCommand,
};

/// Fine-tune language models across a fleet of boxes.
#[derive(Debug, Parser)]
#[command(name = "flotilla", version = VERSION, propagate_version = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub global: GlobalArgs,
    #[command(subcommand)]
    pub command: CliCommand,
}

/// Flags of all commands.
#[derive(Debug, Args)]
pub(crate) struct GlobalArgs {
    #[command(flatten)]
    pub fleet: FleetArgs,
    /// Print JSON on stdout instead of text.
    #[arg(long, global = true)]
    pub json: bool,
    /// Print every setting of the command and its source, then exit.
    #[arg(long, global = true)]
    pub print_config: bool,
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
    pub(crate) fn default_log_filter(&self) -> &'static str {
        match self {
            // File notifications are only hints: a change that they miss is found by the next scan.
            Self::Agent(_) => "info,async_nats=warn,notify=error,inotify=error",
            Self::Coordinator(_) | Self::Up(_) => "info,async_nats=warn",
            _ => "warn,async_nats=error",
        }
    }
}

fn float_dtype_parser() -> impl TypedValueParser<Value = FloatDtype> {
    PossibleValuesParser::new(FloatDtype::ALL.map(FloatDtype::name))
        .map(|name| FloatDtype::from_name(&name).expect("it is one of them"))
}

fn conversion_dtype_parser() -> impl TypedValueParser<Value = ConversionDtype> {
    let values = ConversionDtype::ALL.map(|dtype| {
        let value = PossibleValue::new(dtype.name());
        match dtype {
            ConversionDtype::Q8_0 => value.help("8 bits in blocks of 32 values; vectors stay f32"),
            ConversionDtype::F32 | ConversionDtype::F16 | ConversionDtype::Bf16 => value,
        }
    });
    PossibleValuesParser::new(values)
        .map(|name| ConversionDtype::from_name(&name).expect("it is one of them"))
}

fn parse_dtype(text: &str) -> Result<MatrixDtype, String> {
    MatrixDtype::from_name(text)
        .ok_or_else(|| format!("must be one of {}", MatrixDtype::NAMES.join(", ")))
}

fn parse_number(text: &str, range: RangeInclusive<f64>, unit: &str) -> Result<f64, String> {
    text.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| {
        format!("must be a number of {unit} from {} to {}", range.start(), range.end())
    })
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    parse_number(text, 1.0..=3600.0, "seconds")
}

fn parse_hours(text: &str) -> Result<f64, String> {
    parse_number(text, 0.001..=8784.0, "hours")
}

fn parse_gib(text: &str) -> Result<f64, String> {
    parse_number(text, 0.001..=1e6, "GiB")
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
