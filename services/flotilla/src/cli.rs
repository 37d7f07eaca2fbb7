//! The command line.

mod care;
mod closed;
mod data;
mod feed;
mod members;
mod select;
mod service;
mod verify;

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use engine::Dtype;

use crate::{commands::topics, fleet::FleetArgs, version::VERSION};

pub(crate) use {
    care::CareArgs,
    closed::{BackupArgs, ClosedArgs, InitArgs, KeysCommand, RestoreArgs},
    data::{DataCommand, HeldArgs},
    feed::{FedArgs, FeedCommand, TrackerTokenArgs},
    members::{JoinArgs, MembersCommand, TokenArgs, TokenCommand, UserCommand},
    select::SelectArgs,
    service::{ServiceArgs, ServiceCommand, UpgradeArgs},
    verify::{ToolArgs, VerifyArgs},
};

/// Fine-tune language models across a homelab fleet.
#[derive(Debug, Parser)]
#[command(name = "flotilla", version = VERSION, propagate_version = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub fleet: FleetArgs,
    /// Print JSON on stdout instead of text for people.
    #[arg(long, global = true)]
    pub json: bool,
    /// Print what the command would run with, and where each setting comes from, and do nothing.
    #[arg(long, global = true)]
    pub print_config: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
#[expect(clippy::large_enum_variant, reason = "there is one, made once")]
pub(crate) enum Command {
    /// Start a whole fleet on this machine and watch a small model learn.
    Demo(DemoArgs),
    /// Make the keys of a closed fleet, which `up` does for a new one by itself.
    Init(InitArgs),
    /// A fleet's keys.
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Copy a fleet's log, members and keys, while it works.
    Backup(BackupArgs),
    /// Make a fleet of a backup, in a new directory.
    Restore(RestoreArgs),
    /// Start a fleet's services here: NATS server, coordinator, gateway, and agents if asked.
    Up(UpArgs),
    /// Stop the fleet that is up in --dir.
    Down,
    /// Work for a fleet.
    Agent(AgentArgs),
    /// Become a member of a closed fleet with a join token, and work for it.
    Join(JoinArgs),
    /// Which fleets are announced on this network.
    Discover(DiscoverArgs),
    /// Join tokens of a closed fleet.
    #[command(subcommand)]
    Token(TokenCommand),
    /// People who may use a closed fleet.
    #[command(subcommand)]
    User(UserCommand),
    /// Who belongs to a closed fleet.
    #[command(subcommand)]
    Members(MembersCommand),
    /// Coordinate a fleet whose NATS server is already there, and serve its gRPC API.
    Coordinator(CoordinatorArgs),
    /// This box's agent as a systemd service.
    #[command(subcommand)]
    Service(ServiceCommand),
    /// Replace this box's program by another, with its agents drained before and back after.
    Upgrade(UpgradeArgs),
    /// Submit, watch and steer runs.
    #[command(subcommand)]
    Run(RunCommand),
    /// What was measured of checkpoints.
    #[command(subcommand)]
    Eval(EvalCommand),
    /// What runs made.
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// The fleet and its runs, in a terminal.
    Watch(LookArgs),
    /// Tell trackers of runs: MLflow, TensorBoard, trackio, a webhook, files.
    #[command(subcommand)]
    Feed(FeedCommand),
    /// The fleet's machines.
    #[command(subcommand)]
    Agents(AgentsCommand),
    /// Re-derive a run from its log, compare the store with it, and report every contradiction.
    Audit(AuditArgs),
    /// Select again from the samples of a cycle: what another policy would have kept.
    Select(SelectArgs),
    /// Generate from a model directory, without a fleet.
    Generate(GenerateArgs),
    /// Judge completions in a file, without a fleet.
    Verify(VerifyArgs),
    /// Files of prompts and examples, without a fleet.
    #[command(subcommand)]
    Data(DataCommand),
    /// What is wrong with this box, and what to do about it.
    Doctor(DoctorArgs),
    /// Models and adapters from one format to another.
    #[command(subcommand)]
    Convert(ConvertCommand),
    /// Measure this build on this machine against the design's limits.
    Bench(BenchArgs),
    /// Read the documentation: all topics, or one.
    #[command(after_help = topics::list())]
    Topics { topic: Option<String> },
    /// Write completions for a shell.
    Completions { shell: Shell },
    /// Write a manual page for every command into a directory.
    Man { directory: PathBuf },
    /// A worker process of an agent.
    #[command(hide = true, subcommand)]
    Worker(WorkerCommand),
}

impl Command {
    pub(crate) fn default_log(&self) -> &'static str {
        match self {
            // The kernel's word is only a hint: what it cannot say is found by looking.
            Self::Agent(_) => "info,async_nats=warn,notify=error,inotify=error",
            Self::Coordinator(_) | Self::Up(_) => "info,async_nats=warn",
            // Connections are ended there on purpose, thousands of them.
            Self::Bench(_) => "warn,async_nats=off,bus=error",
            _ => "warn,async_nats=error",
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct LookArgs {
    /// The run to look at. Default: the newest.
    pub run: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Everything random follows from it.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// RAFT cycles.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub cycles: u32,
    /// Generator agents.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub generators: u32,
    /// Leave the fleet up; `flotilla down --dir DIR` stops it.
    #[arg(long)]
    pub keep: bool,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct DiscoverArgs {
    /// Seconds to listen.
    #[arg(long, default_value_t = 3.0, value_parser = seconds)]
    pub wait: f64,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct UpArgs {
    /// Say on this network, by multicast DNS, where the gateway is.
    #[arg(long, env = "FLOTILLA_ANNOUNCE")]
    pub announce: bool,
    /// Where files live: file:///DIR or s3://BUCKET/PREFIX. Default: a directory below --dir.
    #[arg(long, env = "FLOTILLA_STORE")]
    pub store: Option<String>,
    /// Address the managed NATS server listens on.
    #[arg(long, default_value = "127.0.0.1", env = "FLOTILLA_LISTEN")]
    pub listen: std::net::IpAddr,
    #[command(flatten)]
    pub closed: ClosedArgs,
    /// Port of the managed NATS server. Default: the one it had, or a free one.
    #[arg(long, env = "FLOTILLA_NATS_PORT")]
    pub port: Option<u16>,
    /// Address of the gRPC gateway. Default: the one it had, or a free port on loopback.
    #[arg(long, env = "FLOTILLA_GATEWAY")]
    pub gateway: Option<SocketAddr>,
    /// The nats-server to run. Default: found on PATH or in .tools.
    #[arg(long, env = "FLOTILLA_NATS_SERVER")]
    pub nats_server: Option<PathBuf>,
    /// Seconds after which the work of a silent agent is given to another.
    #[arg(long, default_value_t = 30.0, value_parser = seconds)]
    pub lease: f64,
    /// Cycles of each run whose samples stay in the log after they are archived: a number, or all.
    #[arg(long, default_value = "2", env = "FLOTILLA_KEEP_CYCLES")]
    pub keep_cycles: coordinator::Keep,
    /// What the log may take of the disk, in GiB; a full log refuses new facts. Default for a
    /// new log: half of what is free, at most 64.
    #[arg(long, env = "FLOTILLA_LOG_MAX_GIB", value_parser = gib)]
    pub log_max_gib: Option<f64>,
    /// Serve the coordinator's /metrics for Prometheus here, such as 127.0.0.1:9463.
    #[arg(long, value_name = "ADDRESS", env = "FLOTILLA_COORDINATOR_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Agents to start here, by role and number: trainer,generator=2,verifier,evaluator.
    #[arg(long, value_delimiter = ',', value_name = "ROLE[=N]")]
    pub agents: Vec<String>,
    /// Cores each of them may use. Default: they share this machine's.
    #[arg(long, env = "FLOTILLA_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// End when the process that started it does.
    #[arg(long, hide = true)]
    pub die_with_parent: bool,
}

#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// What it does: trainer, generator, verifier, evaluator. Default: what it was let in for, in a
    /// closed fleet.
    #[arg(long, value_delimiter = ',', env = "FLOTILLA_ROLES")]
    pub roles: Vec<String>,
    #[command(flatten)]
    pub watch: WatchArgs,
    #[command(flatten)]
    pub care: CareArgs,
    /// Its name in the fleet. Default: this machine's; of one that only watches, with the
    /// directory's.
    #[arg(long, env = "FLOTILLA_NAME")]
    pub name: Option<String>,
    /// Agents of one pool share work.
    #[arg(long, default_value = "default", env = "FLOTILLA_POOL")]
    pub pool: String,
    /// Its own files: cache, logs, eval history. Default: ~/.flotilla/agents/NAME.
    #[arg(long, env = "FLOTILLA_AGENT_DIR")]
    pub agent_dir: Option<PathBuf>,
    /// Where the fleet's files are from here, file:///DIR or s3://BUCKET/PREFIX. Default: where the
    /// fleet says, or through its gateway where that cannot be used from here.
    #[arg(long, env = "FLOTILLA_STORE")]
    pub store: Option<String>,
    /// Where other agents get files from this one that they are fetching too, ADDRESS:PORT; port 0
    /// is any. Only members of the fleet get any.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:0", env = "FLOTILLA_PEERS")]
    pub peers: SocketAddr,
    /// Get files from the store alone, and give none to other agents.
    #[arg(long, env = "FLOTILLA_NO_PEERS")]
    pub no_peers: bool,
    /// Cores its workers may use. Default: all.
    #[arg(long, env = "FLOTILLA_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Sequences a generator runs at once.
    #[arg(long, default_value_t = 64, env = "FLOTILLA_SLOTS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub slots: u32,
    /// Where models run: cpu, cuda, cuda:1, metal.
    #[arg(long, default_value = "cpu", env = "FLOTILLA_DEVICE")]
    pub device: String,
    /// What candle holds weights as: f32, or bf16 in half the memory.
    #[arg(long, default_value = "f32", env = "FLOTILLA_DTYPE", value_parser = dtype)]
    pub dtype: Dtype,
    /// How the box's accelerator is treated: cpu, gfx906, gfx1151, gfx1201, rocm, or a file in
    /// their format. Default: found out.
    #[arg(long, env = "FLOTILLA_PROFILE")]
    pub profile: Option<String>,
    /// What perplexities are measured with. auto: llama.cpp on a box with an AMD GPU, else candle.
    #[arg(long, value_enum, default_value = "auto", env = "FLOTILLA_EVALUATOR_ENGINE")]
    pub evaluator_engine: EvaluatorEngine,
    /// What a generator draws samples with: auto, candle, llama.cpp, or the URL of a running
    /// OpenAI-compatible server (vLLM, Lemonade, LM Studio), such as http://127.0.0.1:8000/v1.
    /// auto is candle without a GPU, else llama.cpp. An endpoint's weights cannot be checked: it
    /// works for runs that say `raft.accept_unverified_policy: true`.
    #[arg(long, default_value = "auto", value_name = "ENGINE", env = "FLOTILLA_GENERATOR_ENGINE")]
    pub generator_engine: generator::Choice,
    /// What the endpoint calls the model. Default: the only one it has.
    #[arg(long, value_name = "NAME", env = "FLOTILLA_ENDPOINT_MODEL")]
    pub endpoint_model: Option<String>,
    /// File with the endpoint's key.
    #[arg(long, value_name = "FILE", env = "FLOTILLA_ENDPOINT_KEY_FILE")]
    pub endpoint_key_file: Option<PathBuf>,
    /// Directory of llama.cpp's programs. Default: found on PATH or in .tools.
    #[arg(long, value_name = "DIR", env = "FLOTILLA_LLAMA_CPP")]
    pub llama_cpp: Option<PathBuf>,
    /// What trains: the embedded engine, or PyTorch in a Python program that comes with this one.
    /// `auto` is PyTorch where there is an AMD GPU.
    #[arg(long, value_enum, default_value_t = TrainerEngine::Auto, env = "FLOTILLA_TRAINER_ENGINE")]
    pub trainer_engine: TrainerEngine,
    /// Python of an environment with torch, transformers, peft and accelerate, such as
    /// VENV/bin/python. Default: `uv run`, which fetches them, where uv is on PATH.
    #[arg(long, value_name = "PYTHON", env = "FLOTILLA_PYTHON")]
    pub python: Option<PathBuf>,
    /// What a training may lose when its box dies: it is saved at least every so many seconds,
    /// beside the steps the run asks for, and for the first time after a tenth of it.
    #[arg(long, value_name = "SECONDS", default_value_t = 600, env = "FLOTILLA_SAVE_WITHIN",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub save_within: u64,
    /// Seconds a PyTorch training has to be saved and handed over when its agent leaves.
    #[arg(long, value_name = "SECONDS", default_value_t = STOP_GRACE_S, env = "FLOTILLA_STOP_GRACE",
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub stop_grace: u64,
    /// What a training may plan with, in GiB: one that needs more goes to another box. Default:
    /// what the GPU has, less what is taken and the system needs; on a CPU anything is tried.
    #[arg(long, value_name = "GIB", env = "FLOTILLA_TRAINING_GIB")]
    pub training_gib: Option<f64>,
    #[command(flatten)]
    pub tools: ToolArgs,
    /// Findings of `flotilla doctor` that keep no role and no training from this box, by id.
    #[arg(long, value_delimiter = ',', value_name = "C-28,…", env = "FLOTILLA_IGNORE_DOCTOR")]
    pub ignore_doctor: Vec<String>,
    /// What fetched files may take of the disk, in GiB; models converted for llama.cpp may take
    /// as much again.
    #[arg(long, default_value_t = 50.0, env = "FLOTILLA_CACHE_GIB")]
    pub cache_gib: f64,
    /// Directories with models this machine has already: base models are found there, and in the
    /// cache of Hugging Face's tools, before they are fetched.
    #[arg(long, value_delimiter = ',', value_name = "DIR", env = "FLOTILLA_MODELS")]
    pub models: Vec<PathBuf>,
    /// A cache directory that agents of this machine share. Default: below the agent's own.
    #[arg(long, env = "FLOTILLA_CACHE_DIR")]
    pub cache_dir: Option<PathBuf>,
    /// A program that is given a worker's command line and runs it, such as a script that ends
    /// with `exec nice "$@"`. From the environment it also reaches the agents of `up`.
    #[arg(long, value_name = "PROGRAM", env = "FLOTILLA_WORKER_WRAPPER")]
    pub worker_wrapper: Option<PathBuf>,
    /// A worker that says nothing for so many seconds is hung [default: by the kind of work, up
    /// to 30 minutes at first, then by the worker's own rhythm].
    #[arg(long, value_name = "SECONDS", env = "FLOTILLA_WORKER_SILENCE",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub worker_silence: Option<u64>,
    /// End when the process that started it does.
    #[arg(long, hide = true)]
    pub die_with_parent: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EvaluatorEngine {
    Auto,
    Candle,
    #[value(name = "llama.cpp")]
    LlamaCpp,
}

pub(crate) const STOP_GRACE_S: u64 = 30;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrainerEngine {
    Auto,
    Candle,
    Pytorch,
}

/// A training that knows nothing of the fleet.
#[derive(Debug, Clone, Args)]
pub(crate) struct WatchArgs {
    /// Publish the checkpoints a Hugging Face Trainer saves in this directory, its output_dir,
    /// as a run of their own. Ends with that run, unless it has roles as well.
    #[arg(long, value_name = "DIR", env = "FLOTILLA_WATCH", help_heading = "Watching a training")]
    pub watch: Option<PathBuf>,
    /// Measure each checkpoint on this text, or `.jsonl` with {"prompt", "completion"} lines of
    /// which completions are scored. May be repeated.
    #[arg(long, value_name = "FILE", requires = "watch", help_heading = "Watching a training")]
    pub eval: Vec<PathBuf>,
    /// The model its adapters belong to. Default: the one they name, a directory here or a
    /// repository in the Hugging Face cache.
    #[arg(
        long,
        value_name = "MODEL",
        requires = "watch",
        env = "FLOTILLA_WATCH_BASE",
        help_heading = "Watching a training"
    )]
    pub watch_base: Option<PathBuf>,
    /// Runs are called NAME-1, NAME-2, … Default: the directory's name.
    #[arg(
        long,
        value_name = "NAME",
        requires = "watch",
        env = "FLOTILLA_WATCH_NAME",
        help_heading = "Watching a training"
    )]
    pub watch_name: Option<String>,
    /// The last step, where training may end before it planned to.
    #[arg(long, value_name = "STEP", requires = "watch", env = "FLOTILLA_WATCH_UNTIL",
          value_parser = clap::value_parser!(u32).range(1..), help_heading = "Watching a training")]
    pub watch_until: Option<u32>,
    /// All of that in a YAML file: name, base, evals (as in run specs) and until.
    #[arg(long, value_name = "FILE", requires = "watch", env = "FLOTILLA_WATCH_SPEC",
          conflicts_with_all = ["eval", "watch_base", "watch_name", "watch_until"],
          help_heading = "Watching a training")]
    pub watch_spec: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CoordinatorArgs {
    /// Where files live. Default: what the fleet says.
    #[arg(long, env = "FLOTILLA_STORE")]
    pub store: Option<String>,
    /// Address of the gRPC gateway.
    #[arg(long, default_value = "127.0.0.1:7070", env = "FLOTILLA_GATEWAY")]
    pub gateway: SocketAddr,
    /// Seconds after which the work of a silent agent is given to another.
    #[arg(long, default_value_t = 30.0, value_parser = seconds)]
    pub lease: f64,
    /// Hours for which agents are let in; they renew it at half of that.
    #[arg(long, default_value_t = 24.0, value_name = "HOURS", env = "FLOTILLA_MEMBER_TTL",
          value_parser = hours)]
    pub member_ttl: f64,
    /// Monitoring URL of each NATS server, to check that it writes to disk before it acknowledges.
    #[arg(long, value_delimiter = ',', env = "FLOTILLA_MONITOR")]
    pub monitor: Vec<String>,
    /// Cycles of each run whose samples stay in the log after they are archived: a number, or all.
    #[arg(long, default_value = "2", env = "FLOTILLA_KEEP_CYCLES")]
    pub keep_cycles: coordinator::Keep,
    /// What the log may take of the disks, in GiB; a full log refuses new facts.
    #[arg(long, env = "FLOTILLA_LOG_MAX_GIB", value_parser = gib)]
    pub log_max_gib: Option<f64>,
    /// The same, if the log is yet to be created.
    #[arg(long, hide = true, value_parser = gib)]
    pub new_log_max_gib: Option<f64>,
    /// The keys of a closed fleet: a directory `flotilla init` made. Default: the fleet is open.
    #[arg(long, value_name = "DIR", env = "FLOTILLA_KEYS")]
    pub keys: Option<PathBuf>,
    /// Names or addresses by which boxes that join reach this one.
    #[arg(long = "host", value_name = "HOST", value_delimiter = ',', env = "FLOTILLA_HOST")]
    pub hosts: Vec<String>,
    /// Serve /metrics for Prometheus here, such as 127.0.0.1:9463.
    #[arg(long, value_name = "ADDRESS", env = "FLOTILLA_COORDINATOR_METRICS")]
    pub metrics: Option<SocketAddr>,
    /// Copies of the log in a NATS cluster.
    #[arg(long, default_value_t = 1, env = "FLOTILLA_REPLICAS",
          value_parser = clap::value_parser!(u32).range(1..=5))]
    pub replicas: u32,
    /// End when the process that started it does.
    #[arg(long, hide = true)]
    pub die_with_parent: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RunCommand {
    /// Start the run a YAML spec describes; files it names are looked up beside it.
    Submit {
        spec: PathBuf,
        /// Stay and show how it goes.
        #[arg(long)]
        watch: bool,
    },
    /// Write a run spec from a configuration of halo-forge 1, and tell what became of each key.
    Import {
        config: PathBuf,
        /// The prompts, in place of those the configuration names.
        #[arg(long, value_name = "FILE")]
        prompts: Option<String>,
        /// Default: stdout.
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Read the files a spec names and tell of them; nothing is stored or started.
    Check {
        spec: PathBuf,
    },
    List,
    Show {
        run: String,
    },
    /// Follow a run until it ends.
    Watch {
        run: String,
        /// Only what came after this position of the log.
        #[arg(long, default_value_t = 0)]
        after: u64,
    },
    /// Tell why it went as it did: what each cycle sampled, kept, trained and measured, and why no
    /// more was kept.
    Explain {
        run: String,
        /// Of which cycle to say why no more was kept; the last that selected.
        #[arg(long)]
        cycle: Option<u32>,
    },
    /// What two runs were asked differently, and what became of each.
    Diff {
        a: String,
        b: String,
    },
    /// Train a checkpoint again, here, from what the log and the store have of it, and compare.
    Reproduce(ReproduceArgs),
    /// Start nothing new; what is being worked on is finished.
    Pause(SteerArgs),
    Resume(SteerArgs),
    Cancel(SteerArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ReproduceArgs {
    /// RUN (its newest), RUN/CYCLE or RUN/CYCLE/STEP.
    pub checkpoint: String,
    /// Where candle computes: cpu, cuda, cuda:1, metal.
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// What candle holds the base's weights as: f32, or bf16 in half the memory.
    #[arg(long, default_value = "f32", value_parser = dtype)]
    pub dtype: Dtype,
    /// A Python with torch, transformers, peft and accelerate, for what PyTorch trained. Default:
    /// uv, which makes one.
    #[arg(long, env = "FLOTILLA_PYTHON")]
    pub python: Option<PathBuf>,
    /// How the box's accelerator is treated. Default: found out.
    #[arg(long, env = "FLOTILLA_PROFILE")]
    pub profile: Option<String>,
    /// Cores to train with. Default: all.
    #[arg(long, env = "FLOTILLA_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// A directory with models by name, as `flotilla agent` takes it; may be repeated.
    #[arg(long)]
    pub models: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct SteerArgs {
    pub run: String,
    /// Kept in the log.
    #[arg(long, default_value = "")]
    pub reason: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum EvalCommand {
    /// Every eval so far.
    History(EvalFilterArgs),
    /// Past evals, then new ones as they are measured.
    Watch {
        #[command(flatten)]
        filter: EvalFilterArgs,
        /// Only what came after this position of the log.
        #[arg(long, default_value_t = 0)]
        after: u64,
    },
    /// Measure a model directory here, without a fleet.
    Local(EvalLocalArgs),
}

#[derive(Debug, Args)]
pub(crate) struct EvalFilterArgs {
    /// Of this run only.
    pub run: Option<String>,
    /// Of this suite only.
    #[arg(long, default_value = "")]
    pub suite: String,
}

#[derive(Debug, Args)]
pub(crate) struct EvalLocalArgs {
    /// A model directory, `org/name` of Hugging Face's cache, or a .gguf file.
    #[arg(long)]
    pub model: PathBuf,
    /// A PEFT adapter directory, or a .gguf file (for llama.cpp).
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// A text, or `.jsonl` with {"prompt", "completion"} lines of which completions are scored.
    #[arg(long)]
    pub text: PathBuf,
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(8..))]
    pub n_ctx: u32,
    /// At most so many chunks; 0 means all.
    #[arg(long, default_value_t = 0)]
    pub chunks: u32,
    /// 0: disjoint chunks whose second half is scored. Otherwise a sliding window.
    #[arg(long, default_value_t = 0)]
    pub stride: u32,
    /// Where candle computes: cpu, cuda, cuda:1, metal.
    #[arg(long, default_value = "cpu")]
    pub device: String,
    /// What measures. Quantised .gguf files are llama.cpp's alone.
    #[arg(long, value_enum, default_value = "candle")]
    pub engine: LocalEngine,
    /// Directory of llama.cpp's programs. Default: found on PATH or in .tools.
    #[arg(long, value_name = "DIR", env = "FLOTILLA_LLAMA_CPP")]
    pub llama_cpp: Option<PathBuf>,
    /// What weights are held as: f32, or bf16 in half the memory; llama.cpp takes f16 and q8_0 too.
    #[arg(long, value_enum, default_value = "f32")]
    pub dtype: LocalDtype,
    /// How the box's accelerator is treated by llama.cpp: cpu, gfx906, gfx1151, gfx1201, rocm, or
    /// a file in their format. Default: found out.
    #[arg(long, env = "FLOTILLA_PROFILE")]
    pub profile: Option<String>,
    /// Threads of llama.cpp. Default: all cores.
    #[arg(long, env = "FLOTILLA_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LocalEngine {
    Candle,
    #[value(name = "llama.cpp")]
    LlamaCpp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LocalDtype {
    F32,
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
}

#[derive(Debug, Args)]
pub(crate) struct AuditArgs {
    pub run: String,
    /// Read and hash every byte the run's facts name, not only names and sizes.
    #[arg(long)]
    pub deep: bool,
    /// The log alone.
    #[arg(long, conflicts_with = "deep")]
    pub no_store: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    List {
        run: String,
    },
    /// One checkpoint and its files.
    Get {
        /// RUN, RUN/CYCLE or RUN/CYCLE/STEP.
        checkpoint: String,
    },
    /// What made it: trainings, samples, verdicts and boxes, back to the base.
    Explain {
        /// RUN, RUN/CYCLE or RUN/CYCLE/STEP.
        checkpoint: String,
        /// Every sample it was trained on, too.
        #[arg(long)]
        samples: bool,
    },
    /// Copy a checkpoint's files into a directory, verified.
    Export {
        /// RUN, RUN/CYCLE or RUN/CYCLE/STEP.
        checkpoint: String,
        #[arg(long)]
        out: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum AgentsCommand {
    List,
    /// Let an agent finish what it holds, take nothing new, and leave.
    Drain {
        agent: String,
    },
    /// Cut an agent off, at once and for good; nobody else notices.
    Revoke {
        agent: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// A model directory, or `org/name` of Hugging Face's cache.
    #[arg(long)]
    pub model: PathBuf,
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    #[arg(long)]
    pub prompt: String,
    /// Samples.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub n: u32,
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// 0 is greedy.
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    /// 0 keeps the whole vocabulary.
    #[arg(long, default_value_t = 0)]
    pub top_k: u32,
    /// 1 keeps the whole distribution.
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f64,
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_new_tokens: u32,
    /// candle, llama.cpp, or an OpenAI-compatible server's URL.
    #[arg(long, default_value = "candle", value_name = "ENGINE")]
    pub engine: generator::Choice,
    /// What the endpoint calls the model. Default: the only one it has.
    #[arg(long, value_name = "NAME", env = "FLOTILLA_ENDPOINT_MODEL")]
    pub endpoint_model: Option<String>,
    /// File with the endpoint's key.
    #[arg(long, value_name = "FILE", env = "FLOTILLA_ENDPOINT_KEY_FILE")]
    pub endpoint_key_file: Option<PathBuf>,
    /// Directory of llama.cpp's programs. Default: found on PATH or in .tools.
    #[arg(long, value_name = "DIR", env = "FLOTILLA_LLAMA_CPP")]
    pub llama_cpp: Option<PathBuf>,
    /// llama.cpp: how the box's accelerator is treated. Default: found out.
    #[arg(long, env = "FLOTILLA_PROFILE")]
    pub profile: Option<String>,
    /// Type of the weights: f32 or bf16 (in half the memory) for candle, which takes f32; for
    /// llama.cpp also f16, and the profile's by default. There f32 computes all in f32.
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<generator::BaseDtype>,
    /// llama.cpp: cores.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// candle: cpu, cuda, cuda:1, metal.
    #[arg(long, default_value = "cpu")]
    pub device: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConvertCommand {
    /// A PEFT LoRA adapter to a GGUF file for llama.cpp's --lora.
    Lora {
        /// The model it was trained on: a directory, or `org/name` of Hugging Face's cache.
        #[arg(long)]
        base: PathBuf,
        #[arg(long)]
        adapter: PathBuf,
        #[arg(long, default_value = "f32")]
        dtype: AdapterDtype,
        #[command(flatten)]
        out: OutArgs,
    },
    /// A Hugging Face model directory to a GGUF file, tokenizer included.
    Model {
        /// A directory, or `org/name` of Hugging Face's cache.
        #[arg(long)]
        model: PathBuf,
        #[arg(long)]
        dtype: ModelDtype,
        #[command(flatten)]
        out: OutArgs,
    },
    /// A PEFT LoRA adapter merged into its base, as a model directory in the base's dtype.
    Merge {
        /// A directory, or `org/name` of Hugging Face's cache.
        #[arg(long)]
        base: PathBuf,
        #[arg(long)]
        adapter: PathBuf,
        /// A directory that is not there yet.
        #[arg(long)]
        out: PathBuf,
    },
    /// What is in a GGUF or safetensors file, or in the directory of a model or adapter.
    Show { path: PathBuf },
}

#[derive(Debug, Args)]
pub(crate) struct OutArgs {
    /// The file to write; it appears under this name when it is whole.
    #[arg(long)]
    pub out: PathBuf,
    /// Replace a file that is there.
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum AdapterDtype {
    F32,
    F16,
    Bf16,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ModelDtype {
    F32,
    F16,
    Bf16,
    /// 8 bits in blocks of 32; vectors stay f32.
    #[value(name = "q8_0")]
    Q8_0,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct DoctorArgs {
    /// Also pack what was read into a file, for a bug report: box.tar.zst.
    #[arg(long, value_name = "FILE", conflicts_with = "from")]
    pub capture: Option<PathBuf>,
    /// Look at a capture in place of this box.
    #[arg(long, value_name = "FILE")]
    pub from: Option<PathBuf>,
    /// Only what matters to this role: trainer, generator, verifier or evaluator.
    #[arg(long, value_parser = ["trainer", "generator", "verifier", "evaluator"])]
    pub role: Option<String>,
    /// Also a Python that trains, read without starting it: VENV/bin/python.
    #[arg(long, value_name = "PATH", conflicts_with = "from")]
    pub python: Option<PathBuf>,
    /// Another hardware profile than the box's: a name or a file.
    #[arg(long)]
    pub profile: Option<String>,
    /// Also a training: one of our run specs, or Hugging Face's TrainingArguments as JSON or YAML.
    #[arg(long, value_name = "FILE")]
    pub run: Option<PathBuf>,
    /// Of a training: how many examples, or the file with one a line.
    #[arg(long, requires = "run")]
    pub examples: Option<String>,
    /// Of TrainingArguments: the model's directory, or its config.json alone.
    #[arg(long, requires = "run")]
    pub model: Option<PathBuf>,
    /// Of a training: seconds of a step, where they were measured.
    #[arg(long, requires = "run")]
    pub step_seconds: Option<f64>,
    #[command(subcommand)]
    pub command: Option<DoctorCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DoctorCommand {
    /// Whether a training will fit into memory.
    Estimate(EstimateArgs),
    /// A hardware profile's file, to change and pass as --profile FILE.
    Profile {
        /// Default: this box's.
        name: Option<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct EstimateArgs {
    /// A model's directory, or its config.json alone.
    #[arg(long)]
    pub model: PathBuf,
    #[arg(long, default_value = "lora")]
    pub method: EstimateMethod,
    /// Of the adapter, on all seven projections.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    pub rank: u32,
    /// Sequences of one pass.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub batch: u32,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub seq: u32,
    #[arg(long, default_value = "bf16")]
    pub dtype: EstimateDtype,
    /// Recompute activations instead of keeping them.
    #[arg(long)]
    pub checkpointing: bool,
    /// Attention by explicit matrices of scores.
    #[arg(long)]
    pub eager: bool,
    /// Of generating: sequences at once.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub sequences: u32,
    /// Of generating: tokens of a sequence, prompt and completion. Default: twice --seq.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub tokens: Option<u32>,
    /// Also a box that was captured by --capture.
    #[arg(long, value_name = "FILE")]
    pub from: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum EstimateMethod {
    Lora,
    Full,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum EstimateDtype {
    F32,
    F16,
    Bf16,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct BenchArgs {
    /// What to measure. Default: everything but engine, eval, fleet and raft, which take minutes.
    pub what: Vec<BenchWhat>,
    /// Engine: cores each may use [default: 2].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Engine: a Python that has torch, transformers and peft, to compare with.
    #[arg(long, env = "FLOTILLA_TORCH_PYTHON")]
    pub python: Option<PathBuf>,
    /// Engine: llama.cpp's convert_hf_to_gguf.py, to compare with; needs --python.
    #[arg(long, requires = "python")]
    pub converter: Option<PathBuf>,
    /// Engine: directory of llama.cpp's programs. Default: found on PATH or in .tools.
    #[arg(long, env = "FLOTILLA_LLAMA_CPP")]
    pub llama_cpp: Option<PathBuf>,
    /// Measure nothing: write the page that docs/PERFORMANCE.md is from what `--json` printed.
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "what")]
    pub page: Vec<PathBuf>,
    /// Store: a bucket to measure, s3://BUCKET/PREFIX with AWS_*; what is written stays there.
    #[arg(long, value_name = "URL")]
    pub s3: Option<String>,
    /// Store: s5cmd, to compare with. Default: found on PATH.
    #[arg(long, value_name = "FILE", env = "FLOTILLA_S5CMD")]
    pub s5cmd: Option<PathBuf>,
    /// Store: of the file that is put and got.
    #[arg(long, value_name = "MIB", default_value_t = 1024,
          value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub store_mib: u32,
    /// RAFT: as many bases, each from a seed of its own.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(2..=100))]
    pub seeds: u32,
    /// RAFT: cycles of each run that compares policies.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub cycles: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchWhat {
    /// The coordinator's core folding 100 000 facts.
    Fold,
    /// A generate phase on four boxes, simulated, against their speeds added up.
    Share,
    /// The same, a thousand boxes on a real bus, and what the demo's cycles take beside computing.
    Fleet,
    /// Facts written and read back, beside plain messages on the same server.
    Bus,
    /// From a checkpoint's fact to its evaluating process.
    Start,
    /// Memory of an agent that has nothing to do, and the size of this program.
    Idle,
    /// The doctor's look at this box.
    Doctor,
    /// Short programs in the sandbox, beside the same without it.
    Sandbox,
    /// Verifying short Python programs, contained, against a bare python loop.
    Verify,
    /// Files into a directory or a bucket and back, beside cp and s5cmd, and an adapter to eight
    /// boxes at once over links of 1 Gb/s, which takes root.
    Store,
    /// Until a page hears of a fact, what it is drawn from first, and a scrape of /metrics.
    Look,
    /// What TLS and tokens cost beside an open server, and a thousand agents on a closed one.
    Closed,
    /// The embedded engine beside llama.cpp and PyTorch, as docs/PERFORMANCE.md has it.
    #[value(alias = "engines")]
    Engine,
    /// Perplexity of a model by a process of its own, load included, beside llama-perplexity.
    Eval,
    /// What selection, more cycles and sampling ahead do for a run, as docs/RAFT-FIGURES.md has it.
    Raft,
}

#[derive(Debug, Subcommand)]
pub(crate) enum WorkerCommand {
    Generate {
        #[arg(long)]
        device: String,
        #[arg(long, value_parser = dtype)]
        dtype: Dtype,
        /// A `generator::Backend`, as JSON.
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
    Verify {
        #[arg(long)]
        device: String,
        #[arg(long, value_parser = dtype)]
        dtype: Dtype,
        #[arg(long)]
        threads: usize,
        /// `verifier::Tools`, as JSON.
        #[arg(long)]
        tools: String,
        /// What no program sees.
        #[arg(long)]
        hidden: Vec<PathBuf>,
    },
    /// Contains itself and runs what a model wrote: see the sandbox crate.
    Cell,
    Train {
        #[arg(long)]
        device: String,
        #[arg(long, value_parser = dtype)]
        dtype: Dtype,
    },
    Eval {
        #[arg(long)]
        device: String,
        #[arg(long, value_parser = dtype)]
        dtype: Dtype,
    },
    /// A box of `bench store`.
    Swarm {
        #[arg(long)]
        part: String,
    },
    Bench {
        #[arg(long)]
        task: String,
        #[arg(long)]
        model: PathBuf,
        #[arg(long)]
        text: PathBuf,
    },
}

fn dtype(text: &str) -> Result<Dtype, String> {
    Dtype::from_name(text).ok_or_else(|| format!("must be one of {}", Dtype::NAMES.join(", ")))
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (1.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number of seconds from 1 to 3600".into()),
    }
}

fn hours(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(hours) if (0.001..=24.0 * 366.0).contains(&hours) => Ok(hours),
        _ => Err("must be a number of hours from 0.001 to 8784".into()),
    }
}

fn gib(text: &str) -> Result<f64, String> {
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
