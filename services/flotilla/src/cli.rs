//! The command line.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::fleet::FleetArgs;

/// Fine-tune language models across a homelab fleet.
#[derive(Debug, Parser)]
#[command(name = "flotilla", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub fleet: FleetArgs,
    /// Print JSON on stdout instead of text for people.
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a whole fleet on this machine and watch a small model learn.
    Demo(DemoArgs),
    /// Start a fleet's services here: NATS server, coordinator, gateway, and agents if asked.
    Up(UpArgs),
    /// Stop the fleet that is up in --dir.
    Down,
    /// Work for a fleet.
    Agent(AgentArgs),
    /// Coordinate a fleet whose NATS server is already there, and serve its gRPC API.
    Coordinator(CoordinatorArgs),
    /// Submit, watch and steer runs.
    #[command(subcommand)]
    Run(RunCommand),
    /// What was measured of checkpoints.
    #[command(subcommand)]
    Eval(EvalCommand),
    /// What runs made.
    #[command(subcommand)]
    Checkpoint(CheckpointCommand),
    /// The fleet's machines.
    #[command(subcommand)]
    Agents(AgentsCommand),
    /// Re-derive a run from its log, compare the store with it, and report every contradiction.
    Audit(AuditArgs),
    /// Generate from a model directory, without a fleet.
    Generate(GenerateArgs),
    /// Measure this build on this machine against the design's limits.
    Bench(BenchArgs),
    /// Write completions for a shell.
    Completions { shell: Shell },
    /// A worker process of an agent.
    #[command(hide = true, subcommand)]
    Worker(WorkerCommand),
}

impl Command {
    pub(crate) fn default_log(&self) -> &'static str {
        match self {
            Self::Agent(_) | Self::Coordinator(_) | Self::Up(_) => "info,async_nats=warn",
            _ => "warn,async_nats=error",
        }
    }
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
pub(crate) struct UpArgs {
    /// Where files live: file:///DIR or s3://BUCKET/PREFIX. Default: a directory below --dir.
    #[arg(long, env = "FLOTILLA_STORE")]
    pub store: Option<String>,
    /// Address the managed NATS server listens on.
    #[arg(long, default_value = "127.0.0.1")]
    pub listen: std::net::IpAddr,
    /// Port of the managed NATS server. Default: the one it had, or a free one.
    #[arg(long)]
    pub port: Option<u16>,
    /// Address of the gRPC gateway. Default: the one it had, or a free port on loopback.
    #[arg(long)]
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
    /// Agents to start here, by role and number: trainer,generator=2,verifier,evaluator.
    #[arg(long, value_delimiter = ',', value_name = "ROLE[=N]")]
    pub agents: Vec<String>,
    /// End when the process that started it does.
    #[arg(long, hide = true)]
    pub die_with_parent: bool,
}

#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// What it does: trainer, generator, verifier, evaluator.
    #[arg(long, value_delimiter = ',', required = true, env = "FLOTILLA_ROLES")]
    pub roles: Vec<String>,
    /// Its name in the fleet. Default: this machine's.
    #[arg(long, env = "FLOTILLA_NAME")]
    pub name: Option<String>,
    /// Agents of one pool share work.
    #[arg(long, default_value = "default", env = "FLOTILLA_POOL")]
    pub pool: String,
    /// Its own files: cache, logs, eval history. Default: ~/.flotilla/agents/NAME.
    #[arg(long, env = "FLOTILLA_AGENT_DIR")]
    pub agent_dir: Option<PathBuf>,
    /// Cores its workers may use. Default: all.
    #[arg(long, env = "FLOTILLA_THREADS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Sequences a generator runs at once.
    #[arg(long, default_value_t = 64, env = "FLOTILLA_SLOTS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub slots: u32,
    /// Where models run: cpu, cuda, cuda:1, metal.
    #[arg(long, default_value = "cpu", env = "FLOTILLA_DEVICE")]
    pub device: String,
    /// What fetched files may take of the disk, in GiB.
    #[arg(long, default_value_t = 50.0, env = "FLOTILLA_CACHE_GIB")]
    pub cache_gib: f64,
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

#[derive(Debug, Args)]
pub(crate) struct CoordinatorArgs {
    /// Where files live. Default: what the fleet says.
    #[arg(long, env = "FLOTILLA_STORE")]
    pub store: Option<String>,
    /// Address of the gRPC gateway.
    #[arg(long, default_value = "127.0.0.1:7070")]
    pub gateway: SocketAddr,
    /// Seconds after which the work of a silent agent is given to another.
    #[arg(long, default_value_t = 30.0, value_parser = seconds)]
    pub lease: f64,
    /// Monitoring URL of each NATS server, to check that it writes to disk before it acknowledges.
    #[arg(long, value_delimiter = ',')]
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
    /// Copies of the log in a NATS cluster.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=5))]
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
    /// Start nothing new; what is being worked on is finished.
    Pause(SteerArgs),
    Resume(SteerArgs),
    Cancel(SteerArgs),
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
    #[arg(long)]
    pub model: PathBuf,
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
    #[arg(long, default_value = "cpu")]
    pub device: String,
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
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
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
    #[arg(long, default_value = "cpu")]
    pub device: String,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// What to measure. Default: everything.
    pub what: Vec<BenchWhat>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchWhat {
    /// The coordinator's core folding 100 000 facts.
    Fold,
    /// A generate phase on four boxes, simulated, against their speeds added up.
    Share,
    /// From a checkpoint's fact to its evaluating process.
    Start,
    /// Memory of an agent that has nothing to do, and the size of this program.
    Idle,
}

#[derive(Debug, Subcommand)]
pub(crate) enum WorkerCommand {
    Generate {
        #[arg(long)]
        device: String,
        #[arg(long)]
        base: PathBuf,
        #[arg(long)]
        adapter: Option<PathBuf>,
        #[arg(long)]
        slots: usize,
    },
    Verify {
        #[arg(long)]
        device: String,
        #[arg(long)]
        threads: usize,
    },
    Train {
        #[arg(long)]
        device: String,
    },
    Eval {
        #[arg(long)]
        device: String,
    },
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (1.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number of seconds from 1 to 3600".into()),
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
