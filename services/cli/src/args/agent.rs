//! Arguments of `flotilla agent` and `flotilla agents`.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use engine::MatrixDtype;

use super::{ConverterArgs, HostProtectionArgs, StackPlaceArgs, VerifierToolArgs, parse_dtype};

pub(crate) const ROLE_NAMES: [&str; 6] =
    ["trainer", "generator", "verifier", "scorer", "evaluator", SERVER_ROLE];

/// The role that answers requests to models. It takes no jobs.
pub(crate) const SERVER_ROLE: &str = "server";

/// Arguments of `flotilla agent`.
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// Roles of the agent: trainer, generator, verifier, scorer, evaluator, server [default in a
    /// closed fleet: all roles its join token granted]
    #[arg(long, value_delimiter = ',', env = "FLOTILLA_ROLES")]
    pub roles: Vec<String>,
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
    /// Requests that a server answers at once
    #[arg(long, value_name = "N", default_value_t = 8, env = "FLOTILLA_SERVE_SLOTS",
          value_parser = clap::value_parser!(u32).range(1..=256))]
    pub serve_slots: u32,
    /// Maximum tokens of a request to a server, answer included; the model's limit applies too
    #[arg(long, value_name = "TOKENS", default_value_t = 8192, env = "FLOTILLA_SERVE_CONTEXT",
          value_parser = clap::value_parser!(u32).range(64..=1_048_576))]
    pub serve_context: u32,
    /// Engine that serves models: auto (llama.cpp if found, otherwise candle), candle, llama.cpp
    #[arg(long, default_value = "auto", value_name = "ENGINE", env = "FLOTILLA_SERVER_ENGINE")]
    pub server_engine: model_server::ServingEngineChoice,
    /// Device of the candle engine: cpu, cuda, cuda:1, metal
    #[arg(long, default_value = "cpu", env = "FLOTILLA_DEVICE")]
    pub device: String,
    /// Weight type of the candle engine: f32, bf16 for half the memory, or q8_0 for a quarter on
    /// the CPU; training takes bf16 instead of q8_0
    #[arg(long, default_value = "f32", env = "FLOTILLA_DTYPE", value_parser = parse_dtype)]
    pub dtype: MatrixDtype,
    /// Hardware profile: cpu, cuda, gfx906, gfx1151, gfx1201, rocm, or a profile file
    /// [default: detected; of several AMD GPUs, the one that FLOTILLA_GPU names]
    #[arg(long, env = "FLOTILLA_PROFILE")]
    pub profile: Option<String>,
    /// Engine that measures perplexity; auto selects llama.cpp on a box with an AMD GPU, otherwise
    /// candle
    #[arg(long, value_enum, default_value = "auto", env = "FLOTILLA_EVALUATOR_ENGINE")]
    pub evaluator_engine: EvaluatorEngine,
    /// Engine that generates samples: auto, candle, llama.cpp, or the URL of an OpenAI-compatible
    /// server
    ///
    /// `auto` selects the fastest engine on a box with a GPU, otherwise candle. Servers such as
    /// vLLM, Lemonade or LM Studio are given by URL, for example http://127.0.0.1:8000/v1. The
    /// weights of a server cannot be checked, so it works only for runs with
    /// `raft.accept_unverified_policy: true`.
    #[arg(long, default_value = "auto", value_name = "ENGINE", env = "FLOTILLA_GENERATOR_ENGINE")]
    pub generator_engine: generator::GeneratorEngineChoice,
    /// Time all engines, devices and weight types of this box on each base, also those timed
    /// before, and generate with the fastest; on a box with a GPU, `auto` does so once
    #[arg(long, env = "FLOTILLA_CALIBRATE")]
    pub calibrate: bool,
    #[command(flatten)]
    pub generator_tools: GeneratorToolArgs,
    #[command(flatten)]
    pub stacks: StackPlaceArgs,
    /// Engine that trains: the embedded candle engine, or PyTorch in a bundled Python program; auto
    /// selects PyTorch on a box with an AMD GPU
    #[arg(long, value_enum, default_value_t = TrainerEngine::Auto, env = "FLOTILLA_TRAINER_ENGINE")]
    pub trainer_engine: TrainerEngine,
    #[command(flatten)]
    pub converters: ConverterArgs,
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
    // Last, because the options after a section would be in it.
    #[command(flatten)]
    pub watch: TrainingWatchArgs,
    #[command(flatten)]
    pub care: HostProtectionArgs,
}

/// Flags of the engines that generate samples.
#[derive(Debug, Args)]
pub(crate) struct GeneratorToolArgs {
    /// Name of the model on the OpenAI-compatible server [default: its only model]
    #[arg(long, value_name = "NAME", env = "FLOTILLA_ENDPOINT_MODEL")]
    pub endpoint_model: Option<String>,
    /// File with the API key of the OpenAI-compatible server
    #[arg(long, value_name = "FILE", env = "FLOTILLA_ENDPOINT_KEY_FILE")]
    pub endpoint_key_file: Option<PathBuf>,
    /// Directory of the llama.cpp programs [default: found on PATH or in .tools]
    #[arg(long, value_name = "DIR", env = "FLOTILLA_LLAMA_CPP")]
    pub llama_cpp: Option<PathBuf>,
}

impl GeneratorToolArgs {
    pub(crate) fn engine_options<'a>(
        &'a self,
        choice: &'a generator::GeneratorEngineChoice,
    ) -> generator::GeneratorEngineOptions<'a> {
        generator::GeneratorEngineOptions {
            choice,
            llama_cpp: self.llama_cpp.as_deref(),
            endpoint_model: self.endpoint_model.as_deref(),
            endpoint_key_file: self.endpoint_key_file.as_deref(),
        }
    }
}

/// An engine that measures perplexity, as `--evaluator-engine` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EvaluatorEngine {
    Auto,
    Candle,
    #[value(name = "llama.cpp")]
    LlamaCpp,
}

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
#[command(next_help_heading = "Watching a training")]
pub(crate) struct TrainingWatchArgs {
    /// Publish the checkpoints that a Hugging Face Trainer saves in this directory (its output_dir)
    /// as a run
    ///
    /// An agent without roles ends with that run.
    #[arg(long, value_name = "DIR", env = "FLOTILLA_WATCH")]
    pub watch: Option<PathBuf>,
    /// Measure each checkpoint on this text file, or on the completions of a `.jsonl` file with
    /// {"prompt", "completion"} lines; repeatable
    #[arg(long, value_name = "FILE", requires = "watch")]
    pub eval: Vec<PathBuf>,
    /// Base model of the adapters [default: the model that the adapters name, a local directory or
    /// a repository in the Hugging Face cache]
    #[arg(long, value_name = "MODEL", requires = "watch", env = "FLOTILLA_WATCH_BASE")]
    pub watch_base: Option<PathBuf>,
    /// Name prefix of the runs, which become NAME-1, NAME-2, … [default: the directory's name]
    #[arg(long, value_name = "NAME", requires = "watch", env = "FLOTILLA_WATCH_NAME")]
    pub watch_name: Option<String>,
    /// Last step of the training, if it may end before its planned step
    #[arg(long, value_name = "STEP", requires = "watch", env = "FLOTILLA_WATCH_UNTIL",
          value_parser = clap::value_parser!(u32).range(1..))]
    pub watch_until: Option<u32>,
    /// YAML file with the same settings: name, base, evals (as in run specs) and until
    #[arg(long, value_name = "FILE", requires = "watch", env = "FLOTILLA_WATCH_SPEC",
          conflicts_with_all = ["eval", "watch_base", "watch_name", "watch_until"])]
    pub watch_spec: Option<PathBuf>,
}

/// The subcommands of `flotilla agents`.
#[derive(Debug, Subcommand)]
pub(crate) enum AgentsCommand {
    /// List agents and what they are doing.
    List,
    /// Drain an agent: it finishes its jobs, takes no new ones and exits.
    Drain {
        /// Name of the agent, as in `flotilla agents list`
        agent: String,
    },
    /// Revoke an agent's access immediately and permanently.
    Revoke {
        /// Name of the agent, as in `flotilla agents list`
        agent: String,
    },
}
