//! The command line: the top-level command and the arguments of its subcommands, for clap.
//!
//! Doc comments of fields and variants are the help texts.

mod access;
mod agent;
mod burn_in;
mod channel;
mod compare;
mod convert;
mod converters;
mod court;
mod data;
mod doctor;
mod eval;
mod feed;
mod fleet;
mod generate;
mod host_protection;
mod members;
mod objective;
mod run;
mod service;
mod stack;
mod verify;
mod worker;

use std::{fmt::Write, ops::RangeInclusive, path::PathBuf};

use clap::{
    Args, CommandFactory, Parser, Subcommand,
    builder::{PossibleValue, PossibleValuesParser, Styles, TypedValueParser},
};
use clap_complete::Shell;
use engine::MatrixDtype;
use formats::{ConversionDtype, FloatDtype};

use crate::{
    commands::topics,
    fleet::{CONNECTION_HEADING, FleetArgs},
    version::VERSION,
};

pub(crate) use {
    access::{BackupArgs, FleetAccessArgs, InitArgs, KeysCommand, RestoreArgs},
    agent::{
        AgentArgs, AgentsCommand, EvaluatorEngine, GeneratorToolArgs, ROLE_NAMES, SERVER_ROLE,
        STOP_GRACE_S, TrainerEngine, TrainingWatchArgs,
    },
    burn_in::BurnInArgs,
    channel::{
        ChannelCommand, ChannelFeedbackArgs, ChannelModelArgs, LearnArgs, MoveArgs, ServeArgs,
    },
    compare::CompareArgs,
    convert::{ConvertCommand, ConvertOutputArgs},
    converters::ConverterArgs,
    court::CourtArgs,
    data::{
        ColumnArgs, DataCommand, DataShowArgs, FeedbackDataArgs, GenerateDataArgs, HeldoutArgs,
    },
    doctor::{DoctorArgs, DoctorCommand, EstimateArgs, EstimateMethod, SpeedArgs},
    eval::{EvalCommand, EvalEngine, EvalFilterArgs, EvalLocalArgs},
    feed::{FeedCommand, FeedRunArgs, TrackerTokenArgs},
    fleet::{CoordinatorArgs, DemoArgs, DiscoverArgs, OpenArgs, TuiArgs, UpArgs},
    generate::GenerateArgs,
    host_protection::HostProtectionArgs,
    members::{JoinArgs, MembersCommand, TokenCommand, TokenCreateArgs, UserCommand},
    objective::{ObjectiveCommand, WeightsArgs},
    run::{
        AuditArgs, CheckArgs, CheckpointCommand, ExportFormatArg, ExportFormatArgs, ForkArgs,
        ImportArgs, NewRunArgs, PruneArgs, PushArgs, ReproduceArgs, RunCommand, SamplesArgs,
        SelectArgs, SteerArgs,
    },
    service::{ServiceArgs, ServiceCommand, UpgradeArgs},
    stack::{StackCommand, StackInstallArgs, StackPlaceArgs, StackUseArgs},
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
    /// Print JSON on stdout instead of text, and errors as JSON on stderr.
    #[arg(long, global = true, help_heading = OUTPUT_HEADING)]
    pub json: bool,
    /// Show all columns of tables, however narrow the terminal is.
    #[arg(long, global = true, help_heading = OUTPUT_HEADING)]
    pub wide: bool,
    /// Print jobs and transfers too, where a terminal shows only changes of state.
    #[arg(long, short, global = true, help_heading = OUTPUT_HEADING)]
    pub verbose: bool,
    /// Print every setting of the command and its source, then exit.
    #[arg(long, global = true, help_heading = OUTPUT_HEADING)]
    pub print_config: bool,
}

const OUTPUT_HEADING: &str = "Output options";

/// A subcommand of `flotilla`.
#[derive(Debug, Subcommand)]
#[expect(clippy::large_enum_variant, reason = "there is one, made once")]
pub(crate) enum CliCommand {
    /// Start a complete fleet on this machine and train a small model.
    Demo(DemoArgs),
    /// Create the keys of a closed fleet, and the spec of a first run.
    Init(InitArgs),
    /// Show and rotate the keys of a closed fleet.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Back up the log, members and keys of a running fleet.
    Backup(BackupArgs),
    /// Restore a fleet from a backup into a new directory.
    Restore(RestoreArgs),
    /// Start a fleet here: NATS server, coordinator, gateway, agents.
    Up(UpArgs),
    /// Stop the fleet in --dir.
    Down,
    /// Open the web page by a link that signs in once.
    Open(OpenArgs),
    /// Show whether the fleet is healthy, and what to do next.
    Status,
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
    /// Run a fleet's coordinator and gateway on an existing NATS server.
    Coordinator(CoordinatorArgs),
    /// Install this box's agent as a systemd service.
    #[command(subcommand)]
    Service(ServiceCommand),
    /// Replace the program on this box, and restart its agents.
    Upgrade(UpgradeArgs),
    /// Submit, watch and control runs.
    #[command(subcommand)]
    Run(RunCommand),
    /// Show evaluation results.
    #[command(subcommand)]
    Eval(EvalCommand),
    /// List, inspect, export and remove checkpoints.
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// Watch the fleet and its runs in the terminal.
    Watch(TuiArgs),
    /// Export runs to MLflow, TensorBoard, trackio, OTLP and others.
    #[command(subcommand)]
    Feed(FeedCommand),
    /// List, drain and revoke agents.
    #[command(subcommand)]
    Agents(AgentsCommand),
    /// Check the log of a run or channel against its rules and the store.
    Audit(AuditArgs),
    /// Preview what another selection strategy would keep of a cycle.
    Select(SelectArgs),
    /// Compare training objectives on the samples of a cycle.
    Court(CourtArgs),
    /// Let agents answer requests to a model, with the API of OpenAI.
    Serve(ServeArgs),
    /// List and move channels: names that point to a model.
    #[command(subcommand)]
    Channel(ChannelCommand),
    /// Compare two checkpoints, or a file of paired scores.
    Compare(CompareArgs),
    /// Generate samples with a local model, without a fleet.
    Generate(GenerateArgs),
    /// Judge completions from a file, without a fleet.
    Verify(VerifyArgs),
    /// Inspect, split and deduplicate files of prompts and examples.
    #[command(subcommand)]
    Data(DataCommand),
    /// List training objectives, and compute the weights of tokens.
    #[command(subcommand)]
    Objective(ObjectiveCommand),
    /// Check this box for problems and suggest remedies.
    Doctor(DoctorArgs),
    /// Install, try and roll back versions of llama.cpp and PyTorch.
    #[command(subcommand)]
    Stack(StackCommand),
    /// Convert models and adapters between formats.
    #[command(subcommand)]
    Convert(ConvertCommand),
    /// Read the documentation: list all topics, or print one.
    #[command(after_help = topics::list_topics())]
    Topics {
        /// Name of a topic, or code of an error
        topic: Option<String>,
    },
    /// Print a completion script for a shell.
    Completions {
        /// Name of the shell
        shell: Shell,
    },
    /// Write manual pages of all commands to a directory.
    Man {
        /// Directory for the pages; created if missing
        directory: PathBuf,
    },
    /// Run a worker process of an agent.
    #[command(hide = true, subcommand)]
    Worker(WorkerCommand),
}

/// The sections of the list of commands.
const COMMAND_GROUPS: [(&str, &[&str]); 6] = [
    ("Start here", &["demo", "up", "open", "status", "down", "watch", "topics"]),
    ("Runs", &["run", "checkpoint", "eval", "select", "court", "data"]),
    ("Use models", &["serve", "channel", "compare"]),
    ("Look inside", &["agents", "audit", "doctor", "feed"]),
    (
        "Build a fleet",
        &[
            "init",
            "token",
            "join",
            "agent",
            "discover",
            "user",
            "members",
            "keys",
            "service",
            "upgrade",
            "stack",
            "backup",
            "restore",
            "coordinator",
        ],
    ),
    (
        "Tools without a fleet",
        &["generate", "verify", "objective", "convert", "completions", "man"],
    ),
];

/// Commands that connect to no fleet, whose help therefore lacks the connection options.
const WITHOUT_FLEET: [&str; 10] = [
    "generate",
    "verify",
    "data",
    "objective",
    "doctor",
    "stack",
    "convert",
    "topics",
    "completions",
    "man",
];

impl Cli {
    /// Returns the definition of the command line, with a list of commands in sections.
    pub(crate) fn build_command() -> clap::Command {
        let mut command = Self::command();
        let template = format!(
            "{{about}}\n\n{{usage-heading}} {{usage}}\n{}\n{{all-args}}\n",
            list_commands(&command)
        );
        let is_connection = |arg: &&clap::Arg| arg.get_help_heading() == Some(CONNECTION_HEADING);
        let connection: Vec<clap::Arg> = command
            .get_arguments()
            .filter(is_connection)
            .map(|arg| arg.clone().hide(true))
            .collect();
        for name in WITHOUT_FLEET {
            // A command's own option takes the place of the one of all commands.
            command = command.mut_subcommand(name, |it| it.args(connection.clone()));
        }
        let shown: Vec<String> = command.get_subcommands().map(|it| it.get_name().into()).collect();
        for name in shown {
            command = command.mut_subcommand(name, |it| it.hide(true));
        }
        command.help_template(template).override_usage("flotilla [OPTIONS] <COMMAND>")
    }
}

/// Lists the commands with their descriptions, in the sections of [`COMMAND_GROUPS`].
fn list_commands(command: &clap::Command) -> String {
    let heading = *Styles::styled().get_header();
    let literal = *Styles::styled().get_literal();
    let mut text = String::new();
    for (title, names) in COMMAND_GROUPS {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{heading}{title}:{heading:#}\n");
        for name in names {
            let about = command.find_subcommand(name).and_then(clap::Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(text, "  {literal}{name:<12}{literal:#} {about}");
        }
    }
    text
}

impl CliCommand {
    /// Returns the filter of the log. A person at a terminal reads changes of state; a log file has
    /// the jobs and transfers too, as has a terminal with --verbose.
    pub(crate) fn default_log_filter(&self, has_reader: bool) -> &'static str {
        match self {
            // File notifications are only hints: a change that they miss is found by the next scan.
            Self::Agent(_) if has_reader => {
                "info,agent=warn,generator=warn,verifier=warn,trainer=warn,evaluator=warn,\
                 store=warn,async_nats=warn,notify=error,inotify=error"
            }
            Self::Agent(_) => "info,async_nats=warn,notify=error,inotify=error",
            Self::Coordinator(_) | Self::Up(_) => "info,async_nats=warn",
            // A refusal of the server becomes the error of the command.
            _ => "warn,async_nats=error,async_nats::connector=off,bus::server_error=error",
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
    use std::collections::BTreeSet;

    use clap::FromArgMatches;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
        Cli::build_command().debug_assert();
    }

    #[test]
    fn each_command_is_in_one_section_of_the_help() {
        let command = Cli::command();
        let all = command.get_subcommands().filter(|it| !it.is_hide_set());
        let all: BTreeSet<&str> = all.map(clap::Command::get_name).collect();
        let listed: Vec<&str> =
            COMMAND_GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        assert_eq!(listed.len(), all.len(), "{listed:?}");
        assert_eq!(listed.into_iter().collect::<BTreeSet<&str>>(), all);
        let help = Cli::build_command().render_help().to_string();
        assert!(help.contains("Start here:\n  demo         Start a complete fleet"), "{help}");
        let mut list = help.lines().take_while(|line| !line.starts_with("Options:"));
        assert!(list.all(|line| line.chars().count() <= 80), "{help}");
    }

    #[test]
    fn options_of_all_commands_are_read_after_each() {
        for line in [
            "doctor --json --dir fleet",
            "generate --model m --prompt a --dir fleet -v --json",
            "run list --json",
        ] {
            let words = ["flotilla"].into_iter().chain(line.split(' '));
            let matches = Cli::build_command().try_get_matches_from(words);
            let cli = Cli::from_arg_matches(&matches.unwrap()).unwrap();
            assert!(cli.global.json, "{line}");
            let directory = line.contains("--dir").then(|| PathBuf::from("fleet"));
            assert_eq!(cli.global.fleet.dir, directory, "{line}");
        }
    }

    #[test]
    fn only_the_last_options_of_an_agent_are_in_sections() {
        let mut command = Cli::build_command();
        command.build();
        let agent = command.find_subcommand("agent").unwrap();
        let heading = |id: &str| {
            let found = agent.get_arguments().find(|arg| arg.get_id() == id).unwrap();
            found.get_help_heading().map(ToOwned::to_owned)
        };
        assert_eq!(heading("worker_silence"), None);
        assert_eq!(heading("on_storm").as_deref(), Some("Host protection"));
    }

    #[test]
    fn connection_options_are_in_a_section_of_commands_that_connect() {
        let help = |path: &[&str]| {
            let mut command = Cli::build_command();
            command.build();
            for name in path {
                command = command.find_subcommand(name).unwrap_or_else(|| panic!("{name}")).clone();
            }
            command.render_help().to_string()
        };
        let list = help(&["run", "list"]);
        assert!(list.contains("Connection options:\n      --dir <DIR>"), "{list}");
        for path in [&["generate"][..], &["verify"], &["doctor", "estimate"], &["data", "stats"]] {
            let help = help(path);
            assert!(!help.contains("--nats"), "{help}");
        }
    }

    /// Collects the visible arguments and commands without a description.
    fn collect_undescribed(command: &clap::Command, path: &str, found: &mut Vec<String>) {
        let path = format!("{path} {}", command.get_name());
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            if arg.get_help().is_none_or(|help| help.to_string().trim().is_empty()) {
                found.push(format!("{path}: {}", arg.get_id()));
            }
        }
        for inner in command.get_subcommands() {
            if !inner.is_hide_set() && inner.get_about().is_none() {
                found.push(format!("{path} {}", inner.get_name()));
            }
            collect_undescribed(inner, &path, found);
        }
    }

    #[test]
    fn every_command_and_argument_is_described() {
        let command = Cli::command().mut_subcommand("worker", |worker| {
            // Internal.
            clap::Command::new("worker").about("").hide(worker.is_hide_set())
        });
        let mut found = Vec::new();
        collect_undescribed(&command, "", &mut found);
        assert!(found.is_empty(), "{found:#?}");
    }
}
