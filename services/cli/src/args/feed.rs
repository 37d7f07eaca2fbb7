//! Arguments of `flotilla feed`: the tracker to export to, and the runs to export.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// The subcommands of `flotilla feed`, one per tracker.
#[derive(Debug, Subcommand)]
pub(crate) enum FeedCommand {
    /// Export to an MLflow tracking server, or to a server with its REST API.
    Mlflow {
        /// URL of the server, such as http://127.0.0.1:5000.
        url: String,
        /// MLflow experiment.
        #[arg(long, default_value = "flotilla")]
        experiment: String,
        #[command(flatten)]
        token: TrackerTokenArgs,
        #[command(flatten)]
        what: FeedRunArgs,
    },
    /// Write TensorBoard event files, one directory per run.
    Tensorboard {
        /// Directory of event files, as for `tensorboard --logdir`.
        logdir: PathBuf,
        #[command(flatten)]
        what: FeedRunArgs,
    },
    /// Export to a self-hosted trackio server.
    Trackio {
        /// URL of the server, such as http://127.0.0.1:7860.
        url: String,
        /// trackio project.
        #[arg(long, default_value = "flotilla")]
        project: String,
        #[command(flatten)]
        token: TrackerTokenArgs,
        #[command(flatten)]
        what: FeedRunArgs,
    },
    /// Export traces by OTLP over HTTP to Jaeger, Tempo, MLflow or an OpenTelemetry collector.
    Otlp {
        /// URL of the receiver, such as http://127.0.0.1:4318.
        url: String,
        /// File that stores the cursor of the export.
        #[arg(long, value_name = "FILE")]
        state: PathBuf,
        /// HTTP header that the receiver requires; repeatable.
        #[arg(long = "header", value_name = "NAME=VALUE", value_parser = parse_header)]
        headers: Vec<(String, String)>,
        #[command(flatten)]
        token: TrackerTokenArgs,
        #[command(flatten)]
        what: FeedRunArgs,
    },
    /// POST each fact as JSON to a URL.
    Webhook {
        /// URL that receives the facts.
        url: String,
        /// File that stores the cursor of the export.
        #[arg(long, value_name = "FILE")]
        state: PathBuf,
        /// Also export orders, samples, verdicts and scores that are still in the log.
        #[arg(long)]
        everything: bool,
        #[command(flatten)]
        token: TrackerTokenArgs,
        #[command(flatten)]
        what: FeedRunArgs,
    },
    /// Write one file per run, with one fact per line.
    Files {
        /// Output directory.
        directory: PathBuf,
        /// Also export orders, samples, verdicts and scores that are still in the log.
        #[arg(long)]
        everything: bool,
        #[command(flatten)]
        what: FeedRunArgs,
    },
}

/// The access token of a tracker.
#[derive(Debug, Args)]
pub(crate) struct TrackerTokenArgs {
    /// File with the access token of the tracker
    #[arg(long, value_name = "FILE", env = "FLOTILLA_FEED_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
}

/// The runs that are exported, and for how long.
#[derive(Debug, Args)]
pub(crate) struct FeedRunArgs {
    /// Export only this run; repeatable [default: all present and future runs]
    #[arg(long = "run", value_name = "RUN")]
    pub runs: Vec<String>,
    /// Exit when all present facts are exported
    #[arg(long)]
    pub once: bool,
}

fn parse_header(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').ok_or("NAME=VALUE, as authorization=Basic …")?;
    Ok((pair.0.to_owned(), pair.1.to_owned()))
}
