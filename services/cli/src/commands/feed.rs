//! `flotilla feed`: exports of runs to trackers.

use std::{collections::BTreeSet, path::Path, process::ExitCode};

use anyhow::{Context, bail};
use bus::Bus;
use exporters::{
    ExportOptions, FileExporter, MlflowExporter, OtlpExporter, RunExporter, TensorBoardExporter,
    TrackioExporter, WebhookExporter,
};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use wire::RunId;

use crate::{
    args::{FeedCommand, FeedRunArgs, TrackerTokenArgs},
    fleet::FleetArgs,
    output,
    progress_meter::ProgressMeter,
    signals,
};

/// Runs a `flotilla feed` subcommand.
pub(crate) async fn run_feed_command(
    fleet: &FleetArgs,
    command: FeedCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let stop = signals::stop_token()?;
    let feeding = FeedSession { fleet, json, stop };
    match command {
        FeedCommand::Mlflow { url, experiment, token, what } => {
            let sink = MlflowExporter::new(parse_http_url(&url)?, experiment, read_token(&token)?)?;
            feeding.export_runs(sink, &what, false).await
        }
        FeedCommand::Tensorboard { logdir, what } => {
            feeding.export_runs(TensorBoardExporter::new(logdir), &what, false).await
        }
        FeedCommand::Trackio { url, project, token, what } => {
            let sink = TrackioExporter::new(parse_http_url(&url)?, project, read_token(&token)?)?;
            feeding.export_runs(sink, &what, false).await
        }
        FeedCommand::Otlp { url, state, mut headers, token, what } => {
            let token = read_token(&token)?;
            headers.extend(token.map(|token| ("authorization".into(), format!("Bearer {token}"))));
            let sink = OtlpExporter::new(parse_http_url(&url)?, &headers, state)?;
            feeding.export_runs(sink, &what, true).await
        }
        FeedCommand::Webhook { url, state, everything, token, what } => {
            let sink = WebhookExporter::new(parse_http_url(&url)?, read_token(&token)?, state)?;
            feeding.export_runs(sink, &what, everything).await
        }
        FeedCommand::Files { directory, everything, what } => {
            feeding.export_runs(FileExporter::new(directory)?, &what, everything).await
        }
    }
}

/// An export of runs to one tracker.
struct FeedSession<'a> {
    fleet: &'a FleetArgs,
    json: bool,
    stop: CancellationToken,
}

impl FeedSession<'_> {
    /// Exports runs until stopped, or until all present facts are exported with `--once`.
    async fn export_runs(
        self,
        sink: impl RunExporter,
        what: &FeedRunArgs,
        everything: bool,
    ) -> anyhow::Result<ExitCode> {
        let runs =
            what.runs.iter().map(|run| RunId::new(run.as_str())).collect::<Result<_, _>>()?;
        let options = ExportOptions { runs, everything, once: what.once };
        let bus: Bus = self.fleet.connect_control().await?.bus().clone();
        let (meter, mut told, mut runs) = (ProgressMeter::new(), 0, BTreeSet::new());
        let fed = |run: &RunId, cursor: u64, facts: usize| {
            told += facts as u64;
            runs.insert(run.clone());
            if self.json {
                // Stdout may be closed; the export continues.
                let _ = output::print_json(&json!({ "run": run.as_str(), "cursor": cursor }));
            } else {
                meter.show_progress("told", "facts", told, 0);
            }
        };
        let outcome = exporters::export_runs(&bus, sink, &options, &self.stop, fed).await;
        meter.finish_bar();
        outcome?;
        output::print_message(&format!("exported {told} facts of {} runs", runs.len()));
        Ok(ExitCode::SUCCESS)
    }
}

/// Parses an `http` or `https` URL.
fn parse_http_url(url: &str) -> anyhow::Result<exporters::Url> {
    let parsed: exporters::Url = url.parse().with_context(|| format!("{url:?} is not a URL"))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        bail!("{url}: the URL must begin with http:// or https:// (A101)");
    }
    Ok(parsed)
}

/// Reads the access token from its file, if one is given.
fn read_token(token: &TrackerTokenArgs) -> anyhow::Result<Option<String>> {
    let read = |path: &Path| {
        let text = std::fs::read_to_string(path);
        text.with_context(|| format!("--token-file {}", path.display()))
    };
    let text = token.token_file.as_deref().map(read).transpose()?;
    Ok(text.map(|text| text.trim().to_owned()))
}
