//! `flotilla feed`: the log, retold to trackers.

use std::{collections::BTreeSet, path::Path, process::ExitCode};

use anyhow::{Context, bail};
use bus::Bus;
use feeds::{File, MlFlow, Options, Otlp, Sink, TensorBoard, Trackio, Webhook};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use wire::RunId;

use crate::{
    cli::{FedArgs, FeedCommand, TrackerTokenArgs},
    fleet::FleetArgs,
    meter::Meter,
    output, signals,
};

pub(crate) async fn feed(
    fleet: &FleetArgs,
    command: FeedCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let stop = signals::stop_token()?;
    let feeding = Feeding { fleet, json, stop };
    match command {
        FeedCommand::Mlflow { url, experiment, token, what } => {
            let sink = MlFlow::new(parse(&url)?, experiment, read(&token)?)?;
            feeding.feed(sink, &what, false).await
        }
        FeedCommand::Tensorboard { logdir, what } => {
            feeding.feed(TensorBoard::new(logdir), &what, false).await
        }
        FeedCommand::Trackio { url, project, token, what } => {
            let sink = Trackio::new(parse(&url)?, project, read(&token)?)?;
            feeding.feed(sink, &what, false).await
        }
        FeedCommand::Otlp { url, state, mut headers, token, what } => {
            let token = read(&token)?;
            headers.extend(token.map(|token| ("authorization".into(), format!("Bearer {token}"))));
            let sink = Otlp::new(parse(&url)?, &headers, state)?;
            feeding.feed(sink, &what, true).await
        }
        FeedCommand::Webhook { url, state, everything, token, what } => {
            let sink = Webhook::new(parse(&url)?, read(&token)?, state)?;
            feeding.feed(sink, &what, everything).await
        }
        FeedCommand::Files { directory, everything, what } => {
            feeding.feed(File::new(directory)?, &what, everything).await
        }
    }
}

struct Feeding<'a> {
    fleet: &'a FleetArgs,
    json: bool,
    stop: CancellationToken,
}

impl Feeding<'_> {
    async fn feed(
        self,
        sink: impl Sink,
        what: &FedArgs,
        everything: bool,
    ) -> anyhow::Result<ExitCode> {
        let runs =
            what.runs.iter().map(|run| RunId::new(run.as_str())).collect::<Result<_, _>>()?;
        let options = Options { runs, everything, once: what.once };
        let bus: Bus = self.fleet.control().await?.bus().clone();
        let (meter, mut told, mut runs) = (Meter::new(), 0, BTreeSet::new());
        let fed = |run: &RunId, cursor: u64, facts: usize| {
            told += facts as u64;
            runs.insert(run.clone());
            if self.json {
                // Who reads it may be gone; the tracker is told all the same.
                let _ = output::print_json(&json!({ "run": run.as_str(), "cursor": cursor }));
            } else {
                meter.show("told", "facts", told, 0);
            }
        };
        let outcome = feeds::feed(&bus, sink, &options, &self.stop, fed).await;
        meter.end();
        outcome?;
        output::say(&format!("told {told} facts of {} runs", runs.len()));
        Ok(ExitCode::SUCCESS)
    }
}

fn parse(url: &str) -> anyhow::Result<feeds::Url> {
    let parsed: feeds::Url = url.parse().with_context(|| format!("{url:?} is no address"))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        bail!("{url}: the address begins with http:// or https:// (A101)");
    }
    Ok(parsed)
}

fn read(token: &TrackerTokenArgs) -> anyhow::Result<Option<String>> {
    let read = |path: &Path| {
        let text = std::fs::read_to_string(path);
        text.with_context(|| format!("--token-file {}", path.display()))
    };
    let text = token.token_file.as_deref().map(read).transpose()?;
    Ok(text.map(|text| text.trim().to_owned()))
}
