//! The command line: the top-level command and the arguments of its subcommands, for clap.
//!
//! Doc comments of fields and variants are the help texts.

mod access;
mod data;
mod feed;
mod host_protection;
mod members;
mod select;
mod service;
mod verify;

use std::{ffi::OsString, net::SocketAddr, path::PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use engine::MatrixDtype;

use crate::{commands::topics, fleet::FleetArgs, version::VERSION};

pub(crate) use {
    access::{BackupArgs, FleetAccessArgs, InitArgs, KeysCommand, RestoreArgs},
    data::{DataCommand, HeldoutArgs},
    feed::{FeedCommand, FeedRunArgs, TrackerTokenArgs},
    host_protection::HostProtectionArgs,
    members::{JoinArgs, MembersCommand, TokenCommand, TokenCreateArgs, UserCommand},
    select::SelectArgs,
    service::{ServiceArgs, ServiceCommand, UpgradeArgs},
    verify::{VerifierToolArgs, VerifyArgs},
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
    /// Benchmark this build on this machine.
    Bench(BenchArgs),
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
            // The benchmarks close thousands of connections on purpose.
            Self::Bench(_) => "warn,async_nats=off,bus=error",
            _ => "warn,async_nats=error",
        }
    }
}

/// Arguments of `flotilla watch`.
#[derive(Debug, Args)]
pub(crate) struct TuiArgs {
    /// Run to select first [default: the newest]
    pub run: Option<String>,
}

/// Arguments of `flotilla demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Random seed of the demo
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Number of RAFT cycles
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub cycles: u32,
    /// Number of generator agents
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub generators: u32,
    /// Keep the fleet running; stop it with `flotilla down --dir DIR`
    #[arg(long)]
    pub keep: bool,
}

/// Arguments of `flotilla discover`.
#[derive(Debug, Clone, Args)]
pub(crate) struct DiscoverArgs {
    /// Time to listen, in seconds
    #[arg(long, default_value_t = 3.0, value_parser = parse_seconds)]
    pub wait: f64,
}

/// Arguments of `flotilla up`.
#[derive(Debug, Clone, Args)]
pub(crate) struct UpArgs {
    /// Announce the gateway on this network by multicast DNS
    #[arg(long, env = "FLOTILLA_ANNOUNCE")]
    pub announce: bool,
    /// URL of the object store, file:///DIR or s3://BUCKET/PREFIX [default: a directory below
    /// --dir]
    #[arg(long, env = "FLOTILLA_STORE")]
    pub store: Option<String>,
    /// Listen address of the managed NATS server
    #[arg(long, default_value = "127.0.0.1", env = "FLOTILLA_LISTEN")]
    pub listen: std::net::IpAddr,
    #[command(flatten)]
    pub closed: FleetAccessArgs,
    /// Port of the managed NATS server [default: the previous port, or a free one]
    #[arg(long, env = "FLOTILLA_NATS_PORT")]
    pub port: Option<u16>,
    /// Listen address of the gateway [default: the previous address, or a free port on loopback]
    #[arg(long, env = "FLOTILLA_GATEWAY")]
    pub gateway: Option<SocketAddr>,
    /// Path of the nats-server program [default: found on PATH or in .tools]
    #[arg(long, env = "FLOTILLA_NATS_SERVER")]
    pub nats_server: Option<PathBuf>,
    /// Job lease in seconds; the work of an agent that is silent for longer goes to another agent
    #[arg(long, default_value_t = 30.0, value_parser = parse_seconds)]
    pub lease: f64,
    /// Cycles per run whose samples stay in the log after they are archived: a number, or all
    #[arg(long, default_value = "2", env = "FLOTILLA_KEEP_CYCLES")]
    pub keep_cycles: coordinator::CycleRetention,
    /// Maximum size of the log in GiB; a full log refuses new facts [default for a new log: half of
    /// the free disk space, at most 64]
    #[arg(long, env = "FLOTILLA_LOG_MAX_GIB", value_parser = parse_gib)]
    pub log_max_gib: Option<f64>,
    /// Serve the coordinator's Prometheus /metrics on this address, such as 127.0.0.1:9463
    #[arg(long, value_name = "ADDRESS", env = "FLOTILLA_COORDINATOR_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Agents to start on this machine, by role and count: trainer,generator=2,verifier,evaluator
    #[arg(long, value_delimiter = ',', value_name = "ROLE[=N]")]
    pub agents: Vec<String>,
    /// CPU cores of each agent [default: agents share all cores]
    #[arg(long, env = "FLOTILLA_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Exit when the parent process exits
    #[arg(long, hide = true)]
    pub die_with_parent: bool,
}

/// Arguments of `flotilla agent`.
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// Roles of the agent: trainer, generator, verifier, evaluator [default in a closed fleet: all
    /// roles its join token granted]
    #[arg(long, value_delimiter = ',', env = "FLOTILLA_ROLES")]
    pub roles: Vec<String>,
    #[command(flatten)]
    pub watch: TrainingWatchArgs,
    #[command(flatten)]
    pub care: HostProtectionArgs,
    /// Name of the agent in the fleet [default: this machine's name; with --watch and no roles,
    /// followed by the name of its runs]
    #[arg(long, env = "FLOTILLA_NAME")]
    pub name: Option<String>,
    /// Pool of the agent; agents of one pool share work
    #[arg(long, default_value = "default", env = "FLOTILLA_POOL")]
    pub pool: String,
    /// Directory for the agent's cache, logs and eval history [default: ~/.flotilla/agents/NAME]
    #[arg(long, env = "FLOTILLA_AGENT_DIR")]
    pub agent_dir: Option<PathBuf>,
    /// URL of the object store as this box reaches it, file:///DIR or s3://BUCKET/PREFIX [default:
    /// the fleet's store, or the gateway if that is not reachable from here]
    #[arg(long, env = "FLOTILLA_STORE")]
    pub store: Option<String>,
    /// Listen address for file transfers to other agents of the fleet; port 0 selects a free port
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:0", env = "FLOTILLA_PEERS")]
    pub peers: SocketAddr,
    /// Transfer files only from the store, not to or from other agents
    #[arg(long, env = "FLOTILLA_NO_PEERS")]
    pub no_peers: bool,
    /// CPU cores for the agent's workers [default: all]
    #[arg(long, env = "FLOTILLA_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Sequences that a generator runs at once
    #[arg(long, default_value_t = 64, env = "FLOTILLA_SLOTS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub slots: u32,
    /// Device that runs models: cpu, cuda, cuda:1, metal
    #[arg(long, default_value = "cpu", env = "FLOTILLA_DEVICE")]
    pub device: String,
    /// Weight type of the candle engine: f32, or bf16 for half the memory
    #[arg(long, default_value = "f32", env = "FLOTILLA_DTYPE", value_parser = parse_dtype)]
    pub dtype: MatrixDtype,
    /// Hardware profile: cpu, gfx906, gfx1151, gfx1201, rocm, or a profile file [default: detected]
    #[arg(long, env = "FLOTILLA_PROFILE")]
    pub profile: Option<String>,
    /// Engine that measures perplexity; auto selects llama.cpp on a box with an AMD GPU, otherwise
    /// candle
    #[arg(long, value_enum, default_value = "auto", env = "FLOTILLA_EVALUATOR_ENGINE")]
    pub evaluator_engine: EvaluatorEngine,
    /// Engine that generates samples: auto, candle, llama.cpp, or the URL of an OpenAI-compatible
    /// server
    ///
    /// `auto` selects candle without a GPU, otherwise llama.cpp. Servers such as vLLM, Lemonade or
    /// LM Studio are given by URL, for example http://127.0.0.1:8000/v1. The weights of a server
    /// cannot be checked, so it works only for runs with `raft.accept_unverified_policy: true`.
    #[arg(long, default_value = "auto", value_name = "ENGINE", env = "FLOTILLA_GENERATOR_ENGINE")]
    pub generator_engine: generator::GeneratorEngineChoice,
    /// Name of the model on the OpenAI-compatible server [default: its only model]
    #[arg(long, value_name = "NAME", env = "FLOTILLA_ENDPOINT_MODEL")]
    pub endpoint_model: Option<String>,
    /// File with the API key of the OpenAI-compatible server
    #[arg(long, value_name = "FILE", env = "FLOTILLA_ENDPOINT_KEY_FILE")]
    pub endpoint_key_file: Option<PathBuf>,
    /// Directory of the llama.cpp programs [default: found on PATH or in .tools]
    #[arg(long, value_name = "DIR", env = "FLOTILLA_LLAMA_CPP")]
    pub llama_cpp: Option<PathBuf>,
    /// Engine that trains: the embedded candle engine, or PyTorch in a bundled Python program; auto
    /// selects PyTorch on a box with an AMD GPU
    #[arg(long, value_enum, default_value_t = TrainerEngine::Auto, env = "FLOTILLA_TRAINER_ENGINE")]
    pub trainer_engine: TrainerEngine,
    /// Python interpreter with torch, transformers, peft and accelerate, such as VENV/bin/python
    /// [default: `uv run`, which downloads them, if uv is on PATH]
    #[arg(long, value_name = "PYTHON", env = "FLOTILLA_PYTHON")]
    pub python: Option<PathBuf>,
    /// Maximum seconds between two saves of a training, in addition to the run's schedule; the
    /// first save comes after a tenth of this time
    #[arg(long, value_name = "SECONDS", default_value_t = 600, env = "FLOTILLA_SAVE_WITHIN",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub save_within: u64,
    /// Seconds that a PyTorch training has to save and hand over its state when the agent stops
    #[arg(long, value_name = "SECONDS", default_value_t = STOP_GRACE_S, env = "FLOTILLA_STOP_GRACE",
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub stop_grace: u64,
    /// Memory budget of a training in GiB; a training that needs more goes to another box [default:
    /// GPU memory, less what is in use and what the system needs; no limit on a CPU]
    #[arg(long, value_name = "GIB", env = "FLOTILLA_TRAINING_GIB")]
    pub training_gib: Option<f64>,
    #[command(flatten)]
    pub tools: VerifierToolArgs,
    /// IDs of `flotilla doctor` findings that do not block a role or a training on this box
    #[arg(long, value_delimiter = ',', value_name = "C-28,…", env = "FLOTILLA_IGNORE_DOCTOR")]
    pub ignore_doctor: Vec<String>,
    /// Maximum size of the file cache in GiB; models converted for llama.cpp may take as much again
    #[arg(long, default_value_t = 50.0, env = "FLOTILLA_CACHE_GIB")]
    pub cache_gib: f64,
    /// Directories searched for base models before they are downloaded; the Hugging Face cache is
    /// always searched
    #[arg(long, value_delimiter = ',', value_name = "DIR", env = "FLOTILLA_MODELS")]
    pub models: Vec<PathBuf>,
    /// Cache directory that agents on this machine share [default: below the agent's directory]
    #[arg(long, env = "FLOTILLA_CACHE_DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Program that receives a worker's command line and runs it, such as a script that ends with
    /// `exec nice "$@"`
    ///
    /// The environment variable also applies to the agents of `up`.
    #[arg(long, value_name = "PROGRAM", env = "FLOTILLA_WORKER_WRAPPER")]
    pub worker_wrapper: Option<PathBuf>,
    /// Seconds without output after which a worker counts as hung [default: by kind of work, at
    /// most 30 minutes at first, then adapted to the worker]
    #[arg(long, value_name = "SECONDS", env = "FLOTILLA_WORKER_SILENCE",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub worker_silence: Option<u64>,
    /// Exit when the parent process exits
    #[arg(long, hide = true)]
    pub die_with_parent: bool,
}

/// An engine that measures perplexity, as `--evaluator-engine` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EvaluatorEngine {
    Auto,
    Candle,
    #[value(name = "llama.cpp")]
    LlamaCpp,
}

/// Default of `--stop-grace`, in seconds.
pub(crate) const STOP_GRACE_S: u64 = 30;

/// An engine that trains, as `--trainer-engine` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrainerEngine {
    Auto,
    Candle,
    Pytorch,
}

/// Arguments that publish the checkpoints of a training outside the fleet.
#[derive(Debug, Clone, Args)]
pub(crate) struct TrainingWatchArgs {
    /// Publish the checkpoints that a Hugging Face Trainer saves in this directory (its output_dir)
    /// as a run
    ///
    /// An agent without roles ends with that run.
    #[arg(long, value_name = "DIR", env = "FLOTILLA_WATCH", help_heading = "Watching a training")]
    pub watch: Option<PathBuf>,
    /// Measure each checkpoint on this text file, or on the completions of a `.jsonl` file with
    /// {"prompt", "completion"} lines; repeatable
    #[arg(long, value_name = "FILE", requires = "watch", help_heading = "Watching a training")]
    pub eval: Vec<PathBuf>,
    /// Base model of the adapters [default: the model that the adapters name, a local directory or
    /// a repository in the Hugging Face cache]
    #[arg(
        long,
        value_name = "MODEL",
        requires = "watch",
        env = "FLOTILLA_WATCH_BASE",
        help_heading = "Watching a training"
    )]
    pub watch_base: Option<PathBuf>,
    /// Name prefix of the runs, which become NAME-1, NAME-2, … [default: the directory's name]
    #[arg(
        long,
        value_name = "NAME",
        requires = "watch",
        env = "FLOTILLA_WATCH_NAME",
        help_heading = "Watching a training"
    )]
    pub watch_name: Option<String>,
    /// Last step of the training, if it may end before its planned step
    #[arg(long, value_name = "STEP", requires = "watch", env = "FLOTILLA_WATCH_UNTIL",
          value_parser = clap::value_parser!(u32).range(1..), help_heading = "Watching a training")]
    pub watch_until: Option<u32>,
    /// YAML file with the same settings: name, base, evals (as in run specs) and until
    #[arg(long, value_name = "FILE", requires = "watch", env = "FLOTILLA_WATCH_SPEC",
          conflicts_with_all = ["eval", "watch_base", "watch_name", "watch_until"],
          help_heading = "Watching a training")]
    pub watch_spec: Option<PathBuf>,
}

/// Arguments of `flotilla coordinator`.
#[derive(Debug, Args)]
pub(crate) struct CoordinatorArgs {
    /// URL of the object store, file:///DIR or s3://BUCKET/PREFIX [default: the fleet's store]
    #[arg(long, env = "FLOTILLA_STORE")]
    pub store: Option<String>,
    /// Listen address of the gateway
    #[arg(long, default_value = "127.0.0.1:7070", env = "FLOTILLA_GATEWAY")]
    pub gateway: SocketAddr,
    /// Job lease in seconds; the work of an agent that is silent for longer goes to another agent
    #[arg(long, default_value_t = 30.0, value_parser = parse_seconds)]
    pub lease: f64,
    /// Lifetime of agent credentials in hours; agents renew them at about half of it
    #[arg(long, default_value_t = 24.0, value_name = "HOURS", env = "FLOTILLA_MEMBER_TTL",
          value_parser = parse_hours)]
    pub member_ttl: f64,
    /// Monitoring URL of each NATS server, to check that it writes to disk before it acknowledges
    #[arg(long, value_delimiter = ',', env = "FLOTILLA_MONITOR")]
    pub monitor: Vec<String>,
    /// Cycles per run whose samples stay in the log after they are archived: a number, or all
    #[arg(long, default_value = "2", env = "FLOTILLA_KEEP_CYCLES")]
    pub keep_cycles: coordinator::CycleRetention,
    /// Maximum size of the log in GiB; a full log refuses new facts
    #[arg(long, env = "FLOTILLA_LOG_MAX_GIB", value_parser = parse_gib)]
    pub log_max_gib: Option<f64>,
    /// Maximum size of the log in GiB if it has to be created
    #[arg(long, hide = true, value_parser = parse_gib)]
    pub new_log_max_gib: Option<f64>,
    /// Key directory of a closed fleet, created by `flotilla init` [default: the fleet is open]
    #[arg(long, value_name = "DIR", env = "FLOTILLA_KEYS")]
    pub keys: Option<PathBuf>,
    /// Names or addresses at which joining boxes reach this machine
    #[arg(long = "host", value_name = "HOST", value_delimiter = ',', env = "FLOTILLA_HOST")]
    pub hosts: Vec<String>,
    /// Serve Prometheus /metrics on this address, such as 127.0.0.1:9463
    #[arg(long, value_name = "ADDRESS", env = "FLOTILLA_COORDINATOR_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Number of copies of the log in a NATS cluster
    #[arg(long, default_value_t = 1, env = "FLOTILLA_REPLICAS",
          value_parser = clap::value_parser!(u32).range(1..=5))]
    pub replicas: u32,
    /// Exit when the parent process exits
    #[arg(long, hide = true)]
    pub die_with_parent: bool,
}

/// The subcommands of `flotilla run`.
#[derive(Debug, Subcommand)]
pub(crate) enum RunCommand {
    /// Submit a run from a YAML spec; relative file names start at the spec's directory.
    Submit {
        /// Run spec, a YAML file.
        spec: PathBuf,
        /// Follow the run until it ends.
        #[arg(long)]
        watch: bool,
    },
    /// Convert a halo-forge 1 configuration into a run spec and report the status of each key.
    Import {
        /// Configuration file of halo-forge 1.
        config: PathBuf,
        /// Prompt file to use instead of the one in the configuration.
        #[arg(long, value_name = "FILE")]
        prompts: Option<String>,
        /// File to write the spec to [default: stdout]
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Validate a spec and its files without storing or starting anything.
    Check {
        /// Run spec, a YAML file.
        spec: PathBuf,
    },
    /// List all runs.
    List,
    /// Show the state, cycles and failures of a run.
    Show { run: String },
    /// Follow a run until it ends.
    Watch {
        run: String,
        /// Print only facts after this position of the log.
        #[arg(long, default_value_t = 0)]
        after: u64,
    },
    /// Explain a run: what each cycle sampled, kept, trained and measured, and why samples were
    /// dropped.
    Explain {
        run: String,
        /// Cycle whose selection is explained [default: the last one with a selection]
        #[arg(long)]
        cycle: Option<u32>,
    },
    /// Compare the settings and results of two runs.
    Diff { a: String, b: String },
    /// Train a checkpoint again on this machine and compare the result.
    Reproduce(ReproduceArgs),
    /// Pause a run: finish current work and start nothing new.
    Pause(SteerArgs),
    /// Resume a paused run.
    Resume(SteerArgs),
    /// Cancel a run.
    Cancel(SteerArgs),
}

/// Arguments of `flotilla run reproduce`.
#[derive(Debug, Args)]
pub(crate) struct ReproduceArgs {
    /// Checkpoint: RUN (its newest), RUN/CYCLE or RUN/CYCLE/STEP
    pub checkpoint: String,
    /// Device of the candle engine: cpu, cuda, cuda:1, metal
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Base weight type of the candle engine: f32, or bf16 for half the memory
    #[arg(long, default_value = "f32", value_parser = parse_dtype)]
    pub dtype: MatrixDtype,
    /// Python interpreter with torch, transformers, peft and accelerate, for checkpoints that
    /// PyTorch trained [default: an environment made by uv]
    #[arg(long, env = "FLOTILLA_PYTHON")]
    pub python: Option<PathBuf>,
    /// Hardware profile: a name or a file [default: detected]
    #[arg(long, env = "FLOTILLA_PROFILE")]
    pub profile: Option<String>,
    /// CPU cores to train with [default: all]
    #[arg(long, env = "FLOTILLA_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Directory searched for base models, as in `flotilla agent`; repeatable
    #[arg(long)]
    pub models: Vec<PathBuf>,
}

/// Arguments of `flotilla run pause`, `resume` and `cancel`.
#[derive(Debug, Args)]
pub(crate) struct SteerArgs {
    /// Run to control
    pub run: String,
    /// Reason to record in the log
    #[arg(long, default_value = "")]
    pub reason: String,
}

/// The subcommands of `flotilla eval`.
#[derive(Debug, Subcommand)]
pub(crate) enum EvalCommand {
    /// List all evaluation results.
    History(EvalFilterArgs),
    /// Print past evaluation results, then new ones as they arrive.
    Watch {
        #[command(flatten)]
        filter: EvalFilterArgs,
        /// Print only facts after this position of the log.
        #[arg(long, default_value_t = 0)]
        after: u64,
    },
    /// Measure the perplexity of a local model, without a fleet.
    Local(EvalLocalArgs),
}

/// Filters of `flotilla eval history` and `flotilla eval watch`.
#[derive(Debug, Args)]
pub(crate) struct EvalFilterArgs {
    /// Show only results of this run
    pub run: Option<String>,
    /// Show only results of this suite
    #[arg(long, default_value = "")]
    pub suite: String,
}

/// Arguments of `flotilla eval local`.
#[derive(Debug, Args)]
pub(crate) struct EvalLocalArgs {
    /// Model: a directory, an `org/name` in the Hugging Face cache, or a .gguf file
    #[arg(long)]
    pub model: PathBuf,
    /// Adapter: a PEFT directory, or a .gguf file for llama.cpp
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Text file, or a `.jsonl` file with {"prompt", "completion"} lines whose completions are
    /// scored
    #[arg(long)]
    pub text: PathBuf,
    /// Context length in tokens
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(8..))]
    pub n_ctx: u32,
    /// Maximum number of chunks; 0 means all
    #[arg(long, default_value_t = 0)]
    pub chunks: u32,
    /// Step of the sliding window in tokens; 0 scores the second half of disjoint chunks
    #[arg(long, default_value_t = 0)]
    pub stride: u32,
    /// Device of the candle engine: cpu, cuda, cuda:1, metal
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// Engine that measures; quantised .gguf files require llama.cpp
    #[arg(long, value_enum, default_value = "candle")]
    pub engine: EvalEngine,
    /// Directory of the llama.cpp programs [default: found on PATH or in .tools]
    #[arg(long, value_name = "DIR", env = "FLOTILLA_LLAMA_CPP")]
    pub llama_cpp: Option<PathBuf>,
    /// Weight type: f32, or bf16 for half the memory; llama.cpp also supports f16 and q8_0
    #[arg(long, value_enum, default_value = "f32")]
    pub dtype: EvalDtype,
    /// Hardware profile for llama.cpp: cpu, gfx906, gfx1151, gfx1201, rocm, or a profile file
    /// [default: detected]
    #[arg(long, env = "FLOTILLA_PROFILE")]
    pub profile: Option<String>,
    /// Threads of llama.cpp [default: all cores]
    #[arg(long, env = "FLOTILLA_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
}

/// An engine of `flotilla eval local`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EvalEngine {
    Candle,
    #[value(name = "llama.cpp")]
    LlamaCpp,
}

/// A weight type of `flotilla eval local`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EvalDtype {
    F32,
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
}

/// Arguments of `flotilla audit`.
#[derive(Debug, Args)]
pub(crate) struct AuditArgs {
    /// Run to check
    pub run: String,
    /// Read and hash all stored bytes, instead of comparing only names and sizes
    #[arg(long)]
    pub deep: bool,
    /// Check only the log, not the store
    #[arg(long, conflicts_with = "deep")]
    pub no_store: bool,
}

/// The subcommands of `flotilla checkpoint`.
#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List the checkpoints of a run.
    List { run: String },
    /// Show a checkpoint and its files.
    Get {
        /// Checkpoint: RUN (its newest), RUN/CYCLE or RUN/CYCLE/STEP.
        checkpoint: String,
    },
    /// Explain the origin of a checkpoint: its trainings, samples, verdicts and boxes, back to the
    /// base.
    Explain {
        /// Checkpoint: RUN (its newest), RUN/CYCLE or RUN/CYCLE/STEP.
        checkpoint: String,
        /// Show all samples it was trained on.
        #[arg(long)]
        samples: bool,
    },
    /// Copy the files of a checkpoint to a directory and verify them.
    Export {
        /// Checkpoint: RUN (its newest), RUN/CYCLE or RUN/CYCLE/STEP.
        checkpoint: String,
        /// Directory to copy the files to.
        #[arg(long)]
        out: PathBuf,
    },
}

/// The subcommands of `flotilla agents`.
#[derive(Debug, Subcommand)]
pub(crate) enum AgentsCommand {
    /// List agents and what they are doing.
    List,
    /// Drain an agent: it finishes its jobs, takes no new ones and exits.
    Drain { agent: String },
    /// Revoke an agent's access immediately and permanently.
    Revoke { agent: String },
}

/// Arguments of `flotilla generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// Model: a directory, or an `org/name` in the Hugging Face cache
    #[arg(long)]
    pub model: PathBuf,
    /// PEFT adapter directory
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Prompt text
    #[arg(long)]
    pub prompt: String,
    /// Number of samples
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub n: u32,
    /// Random seed
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Sampling temperature from 0 to 10; 0 is greedy
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    /// Sample from the k most likely tokens; 0 means all
    #[arg(long, default_value_t = 0)]
    pub top_k: u32,
    /// Sample from the most likely tokens up to this total probability; 1 means all
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f64,
    /// Maximum number of tokens of a sample
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_new_tokens: u32,
    /// Engine that generates: candle, llama.cpp, or the URL of an OpenAI-compatible server
    #[arg(long, default_value = "candle", value_name = "ENGINE")]
    pub engine: generator::GeneratorEngineChoice,
    /// Name of the model on the OpenAI-compatible server [default: its only model]
    #[arg(long, value_name = "NAME", env = "FLOTILLA_ENDPOINT_MODEL")]
    pub endpoint_model: Option<String>,
    /// File with the API key of the OpenAI-compatible server
    #[arg(long, value_name = "FILE", env = "FLOTILLA_ENDPOINT_KEY_FILE")]
    pub endpoint_key_file: Option<PathBuf>,
    /// Directory of the llama.cpp programs [default: found on PATH or in .tools]
    #[arg(long, value_name = "DIR", env = "FLOTILLA_LLAMA_CPP")]
    pub llama_cpp: Option<PathBuf>,
    /// Hardware profile for llama.cpp: a name or a file [default: detected]
    #[arg(long, env = "FLOTILLA_PROFILE")]
    pub profile: Option<String>,
    /// Weight type: f32 or bf16 for candle; f32, f16 or bf16 for llama.cpp, where f32 also computes
    /// in f32 [default: f32 for candle, the profile's type for llama.cpp]
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<generator::BaseDtype>,
    /// CPU cores of llama.cpp [default: all]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Device of the candle engine: cpu, cuda, cuda:1, metal
    #[arg(long, default_value = "cpu")]
    pub device: String,
}

/// The subcommands of `flotilla convert`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConvertCommand {
    /// Convert a PEFT LoRA adapter to a GGUF file for llama.cpp's --lora.
    Lora {
        /// Base model of the adapter: a directory, or an `org/name` in the Hugging Face cache.
        #[arg(long)]
        base: PathBuf,
        /// PEFT LoRA adapter directory.
        #[arg(long)]
        adapter: PathBuf,
        /// Tensor type of the output.
        #[arg(long, default_value = "f32")]
        dtype: AdapterDtype,
        #[command(flatten)]
        out: ConvertOutputArgs,
    },
    /// Convert a Hugging Face model directory, with its tokenizer, to a GGUF file.
    Model {
        /// Model: a directory, or an `org/name` in the Hugging Face cache.
        #[arg(long)]
        model: PathBuf,
        /// Tensor type of the output.
        #[arg(long)]
        dtype: ModelDtype,
        #[command(flatten)]
        out: ConvertOutputArgs,
    },
    /// Merge a PEFT LoRA adapter into its base and write a model directory in the base's dtype.
    Merge {
        /// Base model of the adapter: a directory, or an `org/name` in the Hugging Face cache.
        #[arg(long)]
        base: PathBuf,
        /// PEFT LoRA adapter directory.
        #[arg(long)]
        adapter: PathBuf,
        /// Output directory, which must not exist.
        #[arg(long)]
        out: PathBuf,
    },
    /// Show the contents of a GGUF or safetensors file, or of a model or adapter directory.
    Show { path: PathBuf },
}

/// The output file of a conversion.
#[derive(Debug, Args)]
pub(crate) struct ConvertOutputArgs {
    /// Output file, which appears only when it is complete
    #[arg(long)]
    pub out: PathBuf,
    /// Overwrite an existing file
    #[arg(long)]
    pub force: bool,
}

/// A tensor type of `flotilla convert lora`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum AdapterDtype {
    F32,
    F16,
    Bf16,
}

/// A tensor type of `flotilla convert model`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ModelDtype {
    F32,
    F16,
    Bf16,
    /// 8 bits in blocks of 32 values; vectors stay f32
    #[value(name = "q8_0")]
    Q8_0,
}

/// Arguments of `flotilla doctor`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct DoctorArgs {
    /// Also save the readings to a file for a bug report, such as box.tar.zst
    #[arg(long, value_name = "FILE", conflicts_with = "from")]
    pub capture: Option<PathBuf>,
    /// Check a capture file instead of this box
    #[arg(long, value_name = "FILE")]
    pub from: Option<PathBuf>,
    /// Show only findings that affect this role: trainer, generator, verifier or evaluator
    #[arg(long, value_parser = ["trainer", "generator", "verifier", "evaluator"])]
    pub role: Option<String>,
    /// Also check the Python environment of a trainer, without starting it: VENV/bin/python
    #[arg(long, value_name = "PATH", conflicts_with = "from")]
    pub python: Option<PathBuf>,
    /// Hardware profile to use instead of the detected one: a name or a file
    #[arg(long)]
    pub profile: Option<String>,
    /// Also check a training: a run spec, or Hugging Face TrainingArguments as JSON or YAML
    #[arg(long, value_name = "FILE")]
    pub run: Option<PathBuf>,
    /// Number of training examples, or a file with one example per line
    #[arg(long, requires = "run")]
    pub examples: Option<String>,
    /// Model of the TrainingArguments: its directory, or its config.json
    #[arg(long, requires = "run")]
    pub model: Option<PathBuf>,
    /// Measured duration of a training step, in seconds
    #[arg(long, requires = "run")]
    pub step_seconds: Option<f64>,
    #[command(subcommand)]
    pub command: Option<DoctorCommand>,
}

/// The subcommands of `flotilla doctor`.
#[derive(Debug, Subcommand)]
pub(crate) enum DoctorCommand {
    /// Estimate the memory of a training and check which boxes fit it.
    Estimate(EstimateArgs),
    /// Print a hardware profile, to edit and pass as --profile FILE.
    Profile {
        /// Name of the profile [default: that of this box]
        name: Option<String>,
    },
}

/// Arguments of `flotilla doctor estimate`.
#[derive(Debug, Args)]
pub(crate) struct EstimateArgs {
    /// Model directory, or its config.json
    #[arg(long)]
    pub model: PathBuf,
    /// Training method
    #[arg(long, default_value = "lora")]
    pub method: EstimateMethod,
    /// LoRA rank, on all seven projections
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    pub rank: u32,
    /// Sequences per pass
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub batch: u32,
    /// Tokens per sequence
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub seq: u32,
    /// Weight type
    #[arg(long, default_value = "bf16")]
    pub dtype: EstimateDtype,
    /// Recompute activations instead of storing them
    #[arg(long)]
    pub checkpointing: bool,
    /// Use eager attention, which stores the matrix of attention scores
    #[arg(long)]
    pub eager: bool,
    /// Sequences generated at once
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub sequences: u32,
    /// Tokens per generated sequence, prompt included [default: twice --seq]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub tokens: Option<u32>,
    /// Also check the box of a file written by `flotilla doctor --capture`
    #[arg(long, value_name = "FILE")]
    pub from: Option<PathBuf>,
}

/// A training method of `flotilla doctor estimate`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum EstimateMethod {
    Lora,
    Full,
}

/// A weight type of `flotilla doctor estimate`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum EstimateDtype {
    F32,
    F16,
    Bf16,
}

/// Arguments of `flotilla bench`.
#[derive(Debug, Clone, Args)]
pub(crate) struct BenchArgs {
    /// Benchmarks to run [default: all except engine, eval, fleet and raft, which take minutes]
    pub what: Vec<BenchTarget>,
    /// Engine: CPU cores of each engine [default: 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Engine: Python interpreter with torch, transformers and peft, to compare with
    #[arg(long, env = "FLOTILLA_TORCH_PYTHON")]
    pub python: Option<PathBuf>,
    /// Engine: path of llama.cpp's convert_hf_to_gguf.py, to compare with; requires --python
    #[arg(long, requires = "python")]
    pub converter: Option<PathBuf>,
    /// Engine: directory of the llama.cpp programs [default: found on PATH or in .tools]
    #[arg(long, env = "FLOTILLA_LLAMA_CPP")]
    pub llama_cpp: Option<PathBuf>,
    /// Run no benchmark; generate docs/PERFORMANCE.md from files of `--json` output
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "what")]
    pub page: Vec<PathBuf>,
    /// Store: bucket to benchmark, s3://BUCKET/PREFIX with AWS_* variables; written objects stay
    /// there
    #[arg(long, value_name = "URL")]
    pub s3: Option<String>,
    /// Store: path of s5cmd, to compare with [default: found on PATH]
    #[arg(long, value_name = "FILE", env = "FLOTILLA_S5CMD")]
    pub s5cmd: Option<PathBuf>,
    /// Store: size of the transferred file, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024,
          value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub store_mib: u32,
    /// RAFT: number of base models, each with its own seed
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(2..=100))]
    pub seeds: u32,
    /// RAFT: cycles of each run that compares selection strategies
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub cycles: u32,
}

/// A benchmark of `flotilla bench`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchTarget {
    /// Replay 100 000 facts through the coordinator's core
    Fold,
    /// Compare a simulated generate phase on four boxes with the sum of their speeds
    Share,
    /// Load a real bus with a thousand boxes, and measure the overhead of the demo's cycles
    Fleet,
    /// Write and read facts, compared with plain messages on the same server
    Bus,
    /// Time from a checkpoint's fact to the process that evaluates it
    Start,
    /// Memory of an idle agent, and the size of this program
    Idle,
    /// Time of a doctor check of this box
    Doctor,
    /// Run short programs inside and outside the sandbox
    Sandbox,
    /// Verify short Python programs in the sandbox, compared with a plain Python loop
    Verify,
    /// Transfer files to and from the store, compared with cp and s5cmd, and an adapter to eight
    /// boxes over 1 Gb/s links (requires root)
    Store,
    /// Latency of the web page and of a /metrics scrape
    Look,
    /// Cost of TLS and tokens, and a thousand agents in a closed fleet
    Closed,
    /// Compare the embedded engine with llama.cpp and PyTorch, as in docs/PERFORMANCE.md
    #[value(alias = "engines")]
    Engine,
    /// Time of a perplexity measurement in its own process, compared with llama-perplexity
    Eval,
    /// Effect of selection, more cycles and early sampling on a run, as in docs/RAFT-FIGURES.md
    Raft,
}

/// The worker processes that an agent or the bench starts.
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
    /// Run an evaluator worker.
    Eval {
        #[arg(long)]
        device: String,
        #[arg(long, value_parser = parse_dtype)]
        dtype: MatrixDtype,
    },
    /// Run one box of `flotilla bench store`.
    Swarm {
        #[arg(long)]
        part: String,
    },
    /// Run one measurement of `flotilla bench engine`.
    Bench {
        #[arg(long)]
        task: String,
        #[arg(long)]
        model: PathBuf,
        #[arg(long)]
        text: PathBuf,
    },
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
