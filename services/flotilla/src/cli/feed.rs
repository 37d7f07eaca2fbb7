//! Which tracker is told of which runs.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum FeedCommand {
    /// An MLflow tracking server, or what speaks its REST API.
    Mlflow {
        /// Such as http://127.0.0.1:5000.
        url: String,
        #[arg(long, default_value = "flotilla")]
        experiment: String,
        #[command(flatten)]
        token: TrackerTokenArgs,
        #[command(flatten)]
        what: FedArgs,
    },
    /// Event files for TensorBoard, in a directory a run.
    Tensorboard {
        /// What `tensorboard --logdir` is given.
        logdir: PathBuf,
        #[command(flatten)]
        what: FedArgs,
    },
    /// A self-hosted trackio server.
    Trackio {
        /// Such as http://127.0.0.1:7860.
        url: String,
        #[arg(long, default_value = "flotilla")]
        project: String,
        #[command(flatten)]
        token: TrackerTokenArgs,
        #[command(flatten)]
        what: FedArgs,
    },
    /// What takes traces by OTLP over HTTP: Jaeger, Tempo, MLflow, an OpenTelemetry collector.
    Otlp {
        /// Such as http://127.0.0.1:4318.
        url: String,
        /// Remembers how far it is.
        #[arg(long, value_name = "FILE")]
        state: PathBuf,
        /// NAME=VALUE, as the receiver asks for; may be given several times.
        #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
        headers: Vec<(String, String)>,
        #[command(flatten)]
        token: TrackerTokenArgs,
        #[command(flatten)]
        what: FedArgs,
    },
    /// An address that takes a POST of each fact, as JSON.
    Webhook {
        url: String,
        /// Remembers how far it is.
        #[arg(long, value_name = "FILE")]
        state: PathBuf,
        /// Orders, samples and verdicts as well, as far as the log still has them.
        #[arg(long)]
        everything: bool,
        #[command(flatten)]
        token: TrackerTokenArgs,
        #[command(flatten)]
        what: FedArgs,
    },
    /// A file a run, of a fact a line.
    Files {
        directory: PathBuf,
        /// Orders, samples and verdicts as well, as far as the log still has them.
        #[arg(long)]
        everything: bool,
        #[command(flatten)]
        what: FedArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct TrackerTokenArgs {
    /// A file with the token that the tracker asks for.
    #[arg(long, value_name = "FILE", env = "FLOTILLA_FEED_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct FedArgs {
    /// Only this run; may be given several times. Default: all there are, and all that will be.
    #[arg(long = "run", value_name = "RUN")]
    pub runs: Vec<String>,
    /// End when all there is has been told.
    #[arg(long)]
    pub once: bool,
}

fn header(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').ok_or("NAME=VALUE, as authorization=Basic …")?;
    Ok((pair.0.to_owned(), pair.1.to_owned()))
}
