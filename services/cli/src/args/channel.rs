//! Arguments of `flotilla channel` and `flotilla serve`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// The subcommands of `flotilla channel`.
#[derive(Debug, Subcommand)]
pub(crate) enum ChannelCommand {
    /// List the channels, their models and the agents that serve them.
    List,
    /// List the moves of a channel, oldest first.
    History {
        /// Name of the channel, as in `flotilla channel list`
        channel: String,
    },
    /// Point a channel to another model; a new name creates a channel.
    Move(MoveArgs),
    /// Start runs from the feedback on a channel, and move it to better models.
    Learn(LearnArgs),
    /// Return a channel to its previous model.
    RollBack {
        /// Name of the channel, as in `flotilla channel list`
        channel: String,
        /// Reason, for the history
        #[arg(long, default_value = "", hide_default_value = true)]
        reason: String,
    },
    /// Remove a channel: it is not listed and not served. Its history stays.
    Forget {
        /// Name of the channel, as in `flotilla channel list`
        channel: String,
        /// Reason, for the history
        #[arg(long, default_value = "", hide_default_value = true)]
        reason: String,
    },
}

/// Arguments of `flotilla channel move`.
#[derive(Debug, Args)]
pub(crate) struct MoveArgs {
    /// Name of the channel, such as stable
    pub channel: String,
    #[command(flatten)]
    pub model: ChannelModelArgs,
    #[command(flatten)]
    pub feedback: ChannelFeedbackArgs,
    /// Refuse unless the checkpoint passes more held-out prompts than the channel's current model,
    /// as `flotilla compare` decides
    #[arg(long, requires = "checkpoint")]
    pub if_better: bool,
    /// Reason, for the history
    #[arg(long, default_value = "", hide_default_value = true)]
    pub reason: String,
}

/// The model that a channel is to name.
#[derive(Debug, Args)]
pub(crate) struct ChannelModelArgs {
    /// Checkpoint: RUN (its best), RUN/newest, RUN/CYCLE or RUN/CYCLE/STEP; cycle 0 is the base
    #[arg(long, value_name = "RUN[/CYCLE]", conflicts_with = "base")]
    pub checkpoint: Option<String>,
    /// Model without training: a directory, org/name on the hub, or store:PATH
    #[arg(long, value_name = "MODEL")]
    pub base: Option<String>,
}

/// The use of requests and feedback.
#[derive(Debug, Args)]
pub(crate) struct ChannelFeedbackArgs {
    /// Days for which requests and answers are kept; 0 disables [default: unchanged]
    #[arg(long, value_name = "DAYS")]
    pub keep_days: Option<u32>,
    /// Return to the previous model if users rate the current one lower [default: unchanged]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub auto_roll_back: Option<bool>,
}

/// Arguments of `flotilla channel learn`.
#[derive(Debug, Args)]
pub(crate) struct LearnArgs {
    /// Name of the channel, as in `flotilla channel list`
    pub channel: String,
    /// Run spec whose prompts are `feedback:CHANNEL`
    #[arg(long, value_name = "FILE", required_unless_present = "stop")]
    pub spec: Option<PathBuf>,
    /// Number of requests with new feedback that start a run
    #[arg(long, default_value_t = 100, value_name = "COUNT")]
    pub at_least: u32,
    /// Start no more runs
    #[arg(long, conflicts_with = "spec")]
    pub stop: bool,
}

/// Arguments of `flotilla serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Name of the channel; clients name it as their model
    pub channel: String,
    #[command(flatten)]
    pub model: ChannelModelArgs,
    #[command(flatten)]
    pub feedback: ChannelFeedbackArgs,
    /// Pool whose agents serve it
    #[arg(long, default_value = "default")]
    pub pool: String,
    /// Number of agents that serve it; 0: all that have the role server
    #[arg(long, default_value_t = 0)]
    pub replicas: u32,
    /// Stop serving the channel
    #[arg(long, conflicts_with_all = ["checkpoint", "base"])]
    pub stop: bool,
}
