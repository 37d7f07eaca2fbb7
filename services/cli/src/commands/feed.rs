//! `flotilla feed`: exports of runs to trackers.

use std::collections::BTreeSet;

use anyhow::{Context, bail};
use exporters::{
    ExportOptions, FileExporter, MlflowExporter, OtlpExporter, RunExporter, TensorBoardExporter,
    TrackioExporter, WebhookExporter,
};
use serde_json::json;
use wire::RunId;

use crate::{
    args::{FeedCommand, FeedRunArgs, GlobalArgs, TrackerTokenArgs},
    output,
    progress_meter::ProgressMeter,
    signals,
};

pub(crate) async fn handle_feed(flags: &GlobalArgs, command: FeedCommand) -> anyhow::Result<()> {
    match command {
        FeedCommand::Mlflow { url, experiment, token, what } => {
            let sink = MlflowExporter::new(parse_http_url(&url)?, experiment, read_token(&token)?)?;
            export_runs(flags, sink, &what, false).await
        }
        FeedCommand::Tensorboard { logdir, what } => {
            export_runs(flags, TensorBoardExporter::new(logdir), &what, false).await
        }
        FeedCommand::Trackio { url, project, token, what } => {
            let sink = TrackioExporter::new(parse_http_url(&url)?, project, read_token(&token)?)?;
            export_runs(flags, sink, &what, false).await
        }
        FeedCommand::Otlp { url, state, mut headers, token, what } => {
            let token = read_token(&token)?;
            headers.extend(token.map(|token| ("authorization".into(), format!("Bearer {token}"))));
            let sink = OtlpExporter::new(parse_http_url(&url)?, &headers, state)?;
            export_runs(flags, sink, &what, true).await
        }
        FeedCommand::Webhook { url, state, everything, token, what } => {
            let sink = WebhookExporter::new(parse_http_url(&url)?, read_token(&token)?, state)?;
            export_runs(flags, sink, &what, everything).await
        }
        FeedCommand::Files { directory, everything, what } => {
            export_runs(flags, FileExporter::new(directory)?, &what, everything).await
        }
    }
}

async fn export_runs(
    flags: &GlobalArgs,
    sink: impl RunExporter,
    what: &FeedRunArgs,
    everything: bool,
) -> anyhow::Result<()> {
    let runs = what.runs.iter().map(|run| RunId::new(run.as_str())).collect::<Result<_, _>>()?;
    let options = ExportOptions { runs, everything, once: what.once };
    let stop = signals::stop_token()?;
    let control = flags.fleet.connect_control().await?;
    let (meter, mut exported, mut runs) = (ProgressMeter::new(), 0, BTreeSet::new());
    let fed = |run: &RunId, cursor: u64, facts: usize| {
        exported += facts as u64;
        runs.insert(run.clone());
        if flags.json {
            // Stdout may be closed; the export continues.
            let _ = output::print_json(&json!({ "run": run.as_str(), "cursor": cursor }));
        } else {
            meter.show_progress("export", "facts", exported, 0);
        }
    };
    let outcome = exporters::export_runs(control.bus(), sink, &options, &stop, fed).await;
    meter.finish_bar();
    outcome?;
    output::print_message(&format!("exported {exported} facts of {} runs", runs.len()));
    Ok(())
}

fn parse_http_url(url: &str) -> anyhow::Result<exporters::Url> {
    let parsed: exporters::Url = url.parse().with_context(|| format!("{url:?} is not a URL"))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        bail!("{url}: the URL must begin with http:// or https:// (A101)");
    }
    Ok(parsed)
}

fn read_token(token: &TrackerTokenArgs) -> anyhow::Result<Option<String>> {
    let Some(path) = &token.token_file else { return Ok(None) };
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("--token-file {}", path.display()))?;
    Ok(Some(text.trim().to_owned()))
}
