//! `flotilla demo --loop`: a served model learns from what its users say of its answers.
//!
//! Uses only what users have: a channel, OpenAI's HTTP API at the gateway, feedback, and a spec from
//! which the channel learns.

use std::{path::Path, time::Duration};

use anyhow::ensure;
use bounded_http::CompletionClient;
use control::{FleetControl, SpecFiles};
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use wire::{RunId, v1};

use crate::{
    demo_task::LoopFiles, fleet::FleetFile, output, progress_meter::ProgressMeter,
    run_submission::await_success,
};

const CHANNEL: &str = "stable";
/// Requests that are open at a time.
const CONCURRENCY: usize = 4;
/// From the last feedback to the start of a run, and from the end of a run to the channel's move.
const KEEPER_LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(200);
const ANSWER_LIMIT: Duration = Duration::from_secs(300);
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// The outcome of the loop.
pub(super) struct LoopReport {
    pub run: RunId,
    pub moves: Vec<v1::Channel>,
    /// Share of right answers to questions that were never trained on, before and after.
    pub before: f64,
    pub after: f64,
}

/// A user of the gateway.
struct GatewayUser {
    client: CompletionClient,
}

/// Serves the base, asks it, gives feedback, and waits until the channel has moved to a better model.
pub(super) async fn run_feedback_loop(
    control: &FleetControl,
    directory: &Path,
    files: &LoopFiles,
    base: &RunId,
) -> anyhow::Result<LoopReport> {
    let user = GatewayUser { client: FleetFile::connect_completions(directory)? };
    let channel: RunId = CHANNEL.parse()?;
    serve_base(control, base).await?;
    let (questions, exam) = (files.questions(), files.exam());
    let before = user.take_exam(&exam).await?;
    output::print_message(&format!("{CHANNEL} serves {base}: {:.0} % right", 100.0 * before));
    let local = SpecFiles::Local(files.directory.clone());
    let at_least = u32::try_from(questions.len())?;
    control
        .learn_channel(&channel, &files.spec_yaml(CHANNEL), &local, at_least, String::new())
        .await?;
    user.ask_and_rate(&questions).await?;
    let run = await_learning_run(control).await?;
    output::print_message(&format!("{at_least} answers have feedback: {run} learns from it"));
    await_success(control, &run).await?;
    let moves = await_promotion(control, &channel, &run).await?;
    let after = user.take_exam(&exam).await?;
    Ok(LoopReport { run, moves, before, after })
}

async fn serve_base(control: &FleetControl, base: &RunId) -> anyhow::Result<()> {
    let request = v1::MoveChannelRequest {
        channel: CHANNEL.to_owned(),
        checkpoint: Some(v1::CheckpointRef { run: base.to_string(), ..Default::default() }),
        serving: Some(control::build_serving("default", 0)?),
        reason: "the base".to_owned(),
        keep_days: Some(1),
        auto_roll_back: Some(true),
        ..Default::default()
    };
    let files = SpecFiles::Attached(std::collections::BTreeMap::new());
    let watch: control::TransferCallback = std::sync::Arc::new(|_| ());
    control.move_channel(request, String::new(), &files, &watch).await?;
    Ok(())
}

impl GatewayUser {
    async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let answer = self.client.post_json(path, body, ANSWER_LIMIT, ANSWER_BYTES_MAX).await?;
        Ok(serde_json::from_slice(&answer)?)
    }

    /// Returns the id and the text of the channel's answer.
    async fn ask(&self, question: &Value) -> anyhow::Result<(String, String)> {
        let body = json!({
            "model": CHANNEL, "prompt": question["prompt"], "max_tokens": 36, "temperature": 0,
        });
        let answer = self.post("/completions", &body).await?;
        let text = answer["choices"][0]["text"].as_str().unwrap_or_default();
        Ok((answer["id"].as_str().unwrap_or_default().to_owned(), text.trim().to_owned()))
    }

    /// Asks all questions, likes right answers and corrects the others.
    async fn ask_and_rate(&self, questions: &[Value]) -> anyhow::Result<()> {
        let (meter, total) = (ProgressMeter::new(), questions.len() as u64);
        let rate = async |question: &Value| -> anyhow::Result<()> {
            let (id, text) = self.ask(question).await?;
            let said = match is_right(&text, question) {
                true => json!({ "model": CHANNEL, "id": id, "rating": "up" }),
                false => json!({ "model": CHANNEL, "id": id, "edit": question["worked"] }),
            };
            self.give_feedback(&said).await
        };
        let mut rated = stream::iter(questions).map(rate).buffer_unordered(CONCURRENCY);
        let mut done = 0;
        while rated.try_next().await?.is_some() {
            done += 1;
            meter.show_progress("asking and rating", "answers", done, total);
        }
        meter.finish_bar();
        Ok(())
    }

    /// An answer is kept a moment after the client has it.
    async fn give_feedback(&self, said: &Value) -> anyhow::Result<()> {
        let deadline = Instant::now() + KEEPER_LIMIT;
        loop {
            match self.post("/feedback", said).await {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => sleep(POLL_INTERVAL).await,
            }
        }
    }

    /// Returns the share of right answers.
    async fn take_exam(&self, questions: &[Value]) -> anyhow::Result<f64> {
        let ask = async |question: &Value| {
            let (_, text) = self.ask(question).await?;
            anyhow::Ok(is_right(&text, question))
        };
        let asked = stream::iter(questions).map(ask).buffer_unordered(CONCURRENCY);
        let right: Vec<bool> = asked.try_collect().await?;
        Ok(right.iter().filter(|it| **it).count() as f64 / right.len().max(1) as f64)
    }
}

/// Returns true if a text ends with the question's sum.
fn is_right(text: &str, question: &Value) -> bool {
    let answer = question["answer"].as_str().unwrap_or_default();
    text.rsplit_once('#').is_some_and(|(_, sum)| sum == answer)
}

/// Returns what `look` finds; fails with `missing` after the keeper's time.
async fn poll_until<T>(
    missing: &str,
    look: impl AsyncFn() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let deadline = Instant::now() + KEEPER_LIMIT;
    loop {
        if let Some(found) = look().await? {
            return Ok(found);
        }
        ensure!(Instant::now() < deadline, "{missing} (A106)");
        sleep(POLL_INTERVAL).await;
    }
}

async fn await_learning_run(control: &FleetControl) -> anyhow::Result<RunId> {
    let learns = |spec: &v1::Spec| spec.promotion.as_ref().is_some_and(|it| it.feedback > 0);
    let look = async || {
        let runs = control.list_runs().await?;
        Ok(runs.into_iter().find(|run| learns(&run.spec)).map(|run| run.id))
    };
    poll_until("no run was started from the feedback", look).await
}

/// Waits until agents serve the run's model on the channel; returns the channel's moves.
async fn await_promotion(
    control: &FleetControl,
    channel: &RunId,
    run: &RunId,
) -> anyhow::Result<Vec<v1::Channel>> {
    let names = |it: &v1::Channel| {
        it.r#move.as_ref().is_some_and(|found| found.run == run.as_str()) && !it.agents.is_empty()
    };
    let look = async || Ok(control.list_channels().await?.iter().any(names).then_some(()));
    let missing =
        format!("{channel} did not move to the model of {run}: it was not shown to be better");
    poll_until(&missing, look).await?;
    Ok(control.list_channel_moves(channel).await?)
}
