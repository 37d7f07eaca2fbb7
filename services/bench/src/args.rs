//! The command line of the benchmarks.
//!
//! Doc comments of fields and variants are the help texts.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use cli::VERSION;

/// Benchmark this build on this machine.
#[derive(Debug, Clone, Parser)]
#[command(name = "flotilla-bench", version = VERSION)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
pub(crate) struct BenchArgs {
    /// Benchmarks to run [default: all except engine, eval, fleet, serve, raft, objectives and across, which
    /// take minutes or need llama.cpp]
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
    /// RAFT, objectives, across: number of base models, each with its own seed
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(2..=100))]
    pub seeds: u32,
    /// Forecast: number of simulated fleets
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub fleets: u32,
    /// Forecast: seed of the fleets
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// RAFT: cycles of each run that compares selection strategies
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub cycles: u32,
    /// RAFT, objectives, across: directory of the fleets and models [default: a temporary one]
    #[arg(long, env = "FLOTILLA_DIR")]
    pub dir: Option<PathBuf>,
    /// Objectives, across: directory of the files of results; what is there is not measured again,
    /// but refused if this build has other settings [default: that of --dir]
    #[arg(long)]
    pub results: Option<PathBuf>,
    /// Print JSON on stdout instead of text.
    #[arg(long)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
}

/// A benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchTarget {
    /// Replay 100 000 facts through the coordinator's core
    Fold,
    /// Compare a simulated generate phase on four boxes with the sum of their speeds
    Share,
    /// Forecast runs of simulated fleets, compared with their durations
    Forecast,
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
    /// Verify with a Python program that keeps running, compared with one process per completion
    Served,
    /// Transfer files to and from the store, compared with cp and s5cmd, and an adapter to eight
    /// boxes over 1 Gb/s links (requires root)
    Store,
    /// Latency of the web page and of a /metrics scrape
    Look,
    /// Cost of TLS and tokens, and a thousand agents in a closed fleet
    Closed,
    /// Delay of a model that answers through the gateway, compared with its llama-server
    Serve,
    /// Compare the embedded engine with llama.cpp and PyTorch, as in docs/PERFORMANCE.md
    #[value(alias = "engines")]
    Engine,
    /// Time of a perplexity measurement in its own process, compared with llama-perplexity
    Eval,
    /// Effect of selection, more cycles and early sampling on a run, as in docs/RAFT-FIGURES.md
    Raft,
    /// Compare training objectives, distillation and the ranking of `flotilla court` with RAFT, as
    /// in docs/RAFT-FIGURES.md; takes hours with --seeds 10
    Objectives,
    /// Train one adapter on several boxes, compared with one box and the goals, as in
    /// docs/RAFT-FIGURES.md; takes minutes a seed
    Across,
}

impl BenchTarget {
    /// Returns true if others would disturb the measurement.
    pub(crate) fn is_alone(&self) -> bool {
        matches!(self, Self::Engine | Self::Raft | Self::Objectives | Self::Across)
    }
}

/// A subcommand.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum BenchCommand {
    /// Run a worker process of a benchmark.
    #[command(hide = true, subcommand)]
    Worker(WorkerCommand),
    /// Compare two files of `--json` output; fails if a figure became worse.
    Compare {
        /// The earlier report
        old: PathBuf,
        /// The later report
        new: PathBuf,
        /// Share of the old value by which a figure may be worse
        #[arg(long, default_value_t = 0.1)]
        tolerance: f64,
    },
}

/// The worker processes that the benchmarks start.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum WorkerCommand {
    /// Run one box of `flotilla-bench store`.
    Swarm {
        #[arg(long)]
        part: String,
    },
    /// Run one measurement of `flotilla-bench engine`.
    Bench {
        #[arg(long)]
        task: String,
        #[arg(long)]
        model: PathBuf,
        #[arg(long)]
        text: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        BenchArgs::command().debug_assert();
        let worker = ["flotilla-bench", "worker", "swarm", "--part", "{}"];
        let args = BenchArgs::try_parse_from(worker).unwrap();
        assert!(args.what.is_empty() && args.command.is_some(), "{args:?}");
        let args = BenchArgs::try_parse_from(["flotilla-bench", "bus", "store"]).unwrap();
        assert_eq!(args.what, [BenchTarget::Bus, BenchTarget::Store]);
    }
}
