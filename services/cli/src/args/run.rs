//! Arguments of the commands about runs: `run`, `checkpoint`, `audit` and `select`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum, builder::PossibleValuesParser};
use config_import::{SourceProgram, TrainingTask};
use control::KeepRules;
use engine::MatrixDtype;
use hub::ModelId;

use super::parse_dtype;

/// Arguments of `flotilla run new`. At a terminal, missing ones are asked for.
#[derive(Debug, Args)]
pub(crate) struct NewRunArgs {
    /// Model to train: a directory, or org/name on the hub
    #[arg(long, conflicts_with = "checkpoint")]
    pub model: Option<String>,
    /// Checkpoint to train in place of a model, not an adapter: RUN or RUN/CYCLE/STEP
    #[arg(long)]
    pub checkpoint: Option<String>,
    /// File of prompts, or hub:ORG/NAME[@REVISION][:[CONFIG/]SPLIT]
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Verifier: the name of a built-in one, or YAML such as 'numeric: {tolerance: 0.01}'
    #[arg(long)]
    pub verifier: Option<String>,
    /// Name of the run and of its spec
    #[arg(long, default_value = "mine")]
    pub name: String,
    /// Pool of the agents that work on the run
    #[arg(long, default_value = "default")]
    pub pool: String,
    /// Number of cycles
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub cycles: u32,
    /// File to write the spec to [default: NAME.yaml]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Overwrite an existing spec
    #[arg(long)]
    pub force: bool,
    /// Ask nothing, and submit
    #[arg(long, short)]
    pub yes: bool,
    /// Write and check the spec without submitting it
    #[arg(long, conflicts_with_all = ["yes", "watch"])]
    pub check_only: bool,
    /// Follow the run until it ends
    #[arg(long)]
    pub watch: bool,
}

/// The subcommands of `flotilla run`.
#[derive(Debug, Subcommand)]
pub(crate) enum RunCommand {
    /// Write the spec of a RAFT run of your own model, check it and submit it.
    New(NewRunArgs),
    /// Submit a run, or a sweep of runs, from a YAML spec; relative file names start at the spec's
    /// directory.
    Submit {
        /// Run spec, a YAML file.
        spec: PathBuf,
        /// Follow the run until it ends.
        #[arg(long)]
        watch: bool,
    },
    /// Start a run that continues another one after a cycle, with other settings.
    Fork(ForkArgs),
    /// Convert a configuration of Axolotl, TRL, LLaMA-Factory, Unsloth or halo-forge into a run
    /// spec, and report what becomes of each key.
    Import(ImportArgs),
    /// Print the JSON Schema of run specs, for completion and checks in editors.
    Schema {
        /// Print the schema of watch specs (`agent --watch-spec`)
        #[arg(long)]
        watch: bool,
        /// Print the schema of generation specs (`data generate`)
        #[arg(long, conflicts_with = "watch")]
        generate: bool,
        /// File to write the schema to [default: stdout]
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Validate a spec and its files without storing or starting anything.
    Check(CheckArgs),
    /// List all runs.
    List,
    /// List the runs that wait in queues, in the order of their turns.
    Queue,
    /// Compare the runs of a sweep.
    Sweep {
        /// Id of the sweep's first run, or of another of its runs
        run: String,
    },
    /// Show the state, cycles and failures of a run.
    Show {
        /// Id of the run, as in `flotilla run list`
        run: String,
    },
    /// Follow a run until it ends.
    Watch {
        /// Id of the run, as in `flotilla run list`
        run: String,
        /// Print only facts after this position of the log.
        #[arg(long, default_value_t = 0)]
        after: u64,
    },
    /// Explain a run: what each cycle sampled, kept, trained and measured, and why samples were
    /// dropped.
    Explain {
        /// Id of the run, as in `flotilla run list`
        run: String,
        /// Cycle whose selection is explained [default: the last one with a selection]
        #[arg(long)]
        cycle: Option<u32>,
        /// Also forecast the run from the log before its submission, and compare
        #[arg(long)]
        forecast: bool,
        /// Price of a kWh for the forecast, in any currency
        #[arg(long, value_name = "PRICE", env = "FLOTILLA_PRICE_PER_KWH")]
        price: Option<f64>,
    },
    /// Show the texts that a cycle drew, with their rewards and outcomes.
    Samples(SamplesArgs),
    /// Compare the settings and results of two runs.
    Diff {
        /// Id of one run
        a: String,
        /// Id of the other run
        b: String,
    },
    /// Train a checkpoint again on this machine and compare the result.
    Reproduce(ReproduceArgs),
    /// Pause a run: finish current work and start nothing new.
    Pause(SteerArgs),
    /// Resume a paused run.
    Resume(SteerArgs),
    /// Cancel a run.
    Cancel(SteerArgs),
}

/// Arguments of `flotilla run import`.
#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// Configuration, a YAML or JSON file
    pub config: PathBuf,
    /// Program of the configuration: axolotl, trl, llama-factory, unsloth or halo-forge [default:
    /// recognized by its keys]
    #[arg(long, value_name = "PROGRAM")]
    pub from: Option<SourceProgram>,
    /// Task: sft, dpo, simpo, orpo, kto, grpo or raft [default: derived from the keys]
    #[arg(long)]
    pub task: Option<TrainingTask>,
    /// File of examples or prompts, in place of those in the configuration
    #[arg(long, value_name = "FILE", visible_alias = "prompts")]
    pub data: Option<String>,
    /// Verifier of a RAFT run: the name of a built-in one, or YAML such as 'numeric: {}'
    #[arg(long)]
    pub verifier: Option<String>,
    /// File to write the spec to [default: stdout]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Arguments of `flotilla run check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// Run spec, a YAML file.
    pub spec: PathBuf,
    /// Forecast duration, energy and memory from earlier runs
    #[arg(long)]
    pub forecast: bool,
    /// Forecast the probability of an end by this time: 18:00, 2026-12-01T18:00 or 8h
    #[arg(long, value_name = "TIME", requires = "forecast")]
    pub by: Option<String>,
    /// Price of a kWh, in any currency
    #[arg(long, value_name = "PRICE", env = "FLOTILLA_PRICE_PER_KWH")]
    pub price: Option<f64>,
    /// First run one small cycle of the spec for at most 60 seconds, to measure the fleet
    #[arg(long, requires = "forecast")]
    pub probe: bool,
}

/// Arguments of `flotilla run fork`.
#[derive(Debug, Args)]
pub(crate) struct ForkArgs {
    /// Run to fork, and the last cycle to take over: RUN@CYCLE
    pub cycle: String,
    /// Setting to change, as in a spec: raft.training.learning_rate=1e-4
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub settings: Vec<String>,
    /// Name of the new run [default: the forked run's]
    #[arg(long)]
    pub name: Option<String>,
    /// Follow the new run until it ends
    #[arg(long)]
    pub watch: bool,
}

/// Arguments of `flotilla run samples`.
#[derive(Debug, Args)]
pub(crate) struct SamplesArgs {
    /// Id of the run, as in `flotilla run list`
    pub run: String,
    /// Cycle that drew the samples [default: the newest with samples]
    #[arg(long)]
    pub cycle: Option<u32>,
    /// Show the samples of held-out prompts, which are never trained on
    #[arg(long)]
    pub heldout: bool,
    /// Show the samples of this prompt suite
    #[arg(long, default_value = "", hide_default_value = true)]
    pub suite: String,
    /// Show only prompts with a sample of this outcome: pass, fail, error, kept, or a reason why
    /// samples were dropped
    #[arg(long, default_value = "", hide_default_value = true)]
    pub outcome: String,
    /// Show only prompts whose text or samples contain this
    #[arg(long, default_value = "", hide_default_value = true)]
    pub text: String,
    /// Number of prompts to skip
    #[arg(long, default_value_t = 0)]
    pub skip: u32,
    /// Number of prompts to show
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub limit: u32,
}

/// Arguments of `flotilla run reproduce`.
#[derive(Debug, Args)]
pub(crate) struct ReproduceArgs {
    /// Checkpoint: RUN (its best), RUN/newest, RUN/CYCLE or RUN/CYCLE/STEP
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
    /// Control all runs of the run's sweep that have not ended
    #[arg(long)]
    pub sweep: bool,
    /// Reason to record in the log
    #[arg(long, default_value = "", hide_default_value = true)]
    pub reason: String,
}

/// The subcommands of `flotilla checkpoint`.
#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List the checkpoints of a run.
    List {
        /// Id of the run, as in `flotilla run list`
        run: String,
    },
    /// Show a checkpoint and its files.
    Get {
        /// Checkpoint: RUN (its best), RUN/newest, RUN/CYCLE or RUN/CYCLE/STEP.
        checkpoint: String,
    },
    /// Explain the origin of a checkpoint: its trainings, samples, verdicts and boxes, back to the
    /// base.
    Explain {
        /// Checkpoint: RUN (its best), RUN/newest, RUN/CYCLE or RUN/CYCLE/STEP.
        checkpoint: String,
        /// Show all samples it was trained on.
        #[arg(long)]
        samples: bool,
    },
    /// Copy the files of a checkpoint to a directory and verify them.
    Export {
        /// Checkpoint: RUN (its best), RUN/newest, RUN/CYCLE or RUN/CYCLE/STEP.
        checkpoint: String,
        /// Directory to copy the files to.
        #[arg(long)]
        out: PathBuf,
        /// Export the last checkpoint of this cycle, as RUN/CYCLE does.
        #[arg(long, conflicts_with = "newest")]
        cycle: Option<u32>,
        /// Export the newest checkpoint instead of the best, as RUN/newest does.
        #[arg(long)]
        newest: bool,
        /// Write into a directory that is not empty, and replace files of the same names.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        convert: ExportFormatArgs,
    },
    /// Upload a checkpoint to the Hugging Face hub, with a model card from the log.
    Push(PushArgs),
    /// Remove the checkpoints and samples of ended runs that no rule keeps.
    Prune(PruneArgs),
}

/// Arguments of `flotilla checkpoint push`.
#[derive(Debug, Args)]
pub(crate) struct PushArgs {
    /// Checkpoint: RUN (its best), RUN/newest, RUN/CYCLE or RUN/CYCLE/STEP
    pub checkpoint: String,
    /// Model on the hub: org/name, or org/name@BRANCH
    pub model: ModelId,
    /// Branch to push to, created if absent [default: main]
    #[arg(long, visible_alias = "revision")]
    pub branch: Option<String>,
    /// Make the repository private if the push creates it
    #[arg(long)]
    pub private: bool,
    /// Message of the commit [default: the checkpoint's name]
    #[arg(long)]
    pub message: Option<String>,
    /// Only print the model card
    #[arg(long, visible_alias = "card")]
    pub dry_run: bool,
    #[command(flatten)]
    pub convert: ExportFormatArgs,
}

/// Arguments of `flotilla checkpoint prune`.
#[derive(Debug, Args)]
pub(crate) struct PruneArgs {
    /// Runs to prune [default: all]
    pub runs: Vec<String>,
    /// Rules that keep a checkpoint: best, promoted, last=NUMBER, days=NUMBER
    #[arg(long, value_name = "RULES", default_value = "best,last=3,promoted,days=30")]
    pub keep: KeepRules,
    /// Remove a run's newest checkpoint too, unless a rule keeps it
    #[arg(long)]
    pub even_newest: bool,
    /// Only list the files to remove (default)
    #[arg(long, conflicts_with = "yes")]
    pub dry_run: bool,
    /// Remove the files
    #[arg(long, short)]
    pub yes: bool,
}

/// The form in which `flotilla checkpoint export` writes a model.
#[derive(Debug, Args)]
pub(crate) struct ExportFormatArgs {
    /// Program to write the model for: the files as stored, a merged Hugging Face directory, or a
    /// GGUF file for llama.cpp, Ollama or Lemonade
    #[arg(long, value_enum, default_value = "files")]
    pub format: ExportFormatArg,
    /// Type of the weights in a GGUF file; llama.cpp makes those from q4_0 on [default: q8_0]
    #[arg(long = "type", value_name = "TYPE",
          value_parser = PossibleValuesParser::new(model_export::WeightType::names().collect::<Vec<_>>()))]
    pub weight_type: Option<String>,
    /// Name of the exported model [default: the run's name]
    #[arg(long)]
    pub name: Option<String>,
    /// Directory of the llama.cpp programs [default: found on PATH or in .tools]
    #[arg(long, value_name = "DIR", env = "FLOTILLA_LLAMA_CPP")]
    pub llama_cpp: Option<PathBuf>,
}

/// A program that loads exported models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportFormatArg {
    #[value(alias = "adapter")]
    Files,
    Merged,
    Gguf,
    Ollama,
    Lemonade,
}

/// Arguments of `flotilla audit`.
#[derive(Debug, Args)]
pub(crate) struct AuditArgs {
    /// Run or channel to check
    pub run: String,
    /// Read and hash all stored bytes, instead of comparing only names and sizes
    #[arg(long)]
    pub deep: bool,
    /// Check only the log, not the store
    #[arg(long, conflicts_with = "deep")]
    pub no_store: bool,
}

/// Arguments of `flotilla select`.
#[derive(Debug, Args)]
pub(crate) struct SelectArgs {
    /// Run whose samples to select from
    #[arg(long)]
    pub run: String,
    /// Cycle whose samples to select from
    #[arg(long)]
    pub cycle: u32,
    /// Selection strategy: raft, rest_em, mixed_prompts, top_percent, or settings as in a spec's
    /// raft.selection, such as '{policy: rest_em, keep_per_prompt: 4}'
    #[arg(long, value_name = "POLICY", default_value = "raft")]
    pub policy: String,
    /// Write {"prompt", "chosen", "rejected"} lines, as TRL reads them: samples of a prompt's
    /// highest reward beside those of its lowest
    #[arg(long, conflicts_with = "policy", requires = "out")]
    pub pairs: bool,
    /// Write the samples that would be kept to a file of {"prompt", "completion"} lines
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}
