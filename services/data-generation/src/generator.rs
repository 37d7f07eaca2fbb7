//! The shell of a generation: asks an endpoint, verifies, and writes the log and the files.

use std::{path::Path, sync::Arc, time::Duration};

use bounded_http::{ChatReply, CompletionClient};
use futures::{StreamExt, future::BoxFuture, stream::FuturesUnordered};
use serde_json::{Value, json};
use spec::GenerationLimits;
use tokio::time::{Instant, sleep, timeout_at};
use wire::{PROMPT_BYTES_MAX, PromptEntry, v1::verdicts};

use crate::{
    dataset::{GeneratedData, build_data},
    error::GenerationError,
    generation::{Generation, GenerationCommand, GenerationEvent, SampleOutcome},
    plan::GenerationPlan,
    progress_log::ProgressLog,
    prompt_list::parse_prompt_list,
    report::GenerationReport,
};

/// Judges a completion of a prompt with the plan's verifier of an index. Blocks its thread.
pub type VerifySample = Arc<dyn Fn(usize, &PromptEntry, String) -> verdicts::Verdict + Send + Sync>;

const ANSWER_BYTES_MAX: usize = 4 << 20;
const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// Refusals of requests, or errors of the verifier, in a row that end a command: the next ones
/// would fail too.
const TROUBLES_MAX: u32 = 8;

/// Characters of a verdict's detail that are kept.
const DETAIL_CHARS_MAX: usize = 500;

/// Generates what the plan wants and the directory lacks, and writes `train.jsonl`, `heldout.jsonl`
/// and `report.json` there. `show` is called with the numbers of kept and wanted samples.
///
/// # Errors
/// The directory has samples of another plan, the endpoint does not answer, or refuses everything.
/// The directory then keeps what was generated.
pub async fn generate_data(
    plan: GenerationPlan,
    client: &CompletionClient,
    directory: &Path,
    verify: &VerifySample,
    show: &dyn Fn(u64, u64),
) -> Result<GenerationReport, GenerationError> {
    let worker =
        CommandWorker { client: client.clone(), plan: plan.clone(), verify: verify.clone() };
    let (mut generation, mut log) = open_progress(plan, directory)?;
    let stopped = run_commands(&worker, &mut generation, &mut log, show).await?;
    log.sync()?;
    let GeneratedData { train, heldout, categories } = build_data(&generation);
    let report = GenerationReport {
        model: worker.plan.model_name().to_owned(),
        categories,
        requests: generation.requests(),
        tokens: generation.tokens(),
        stopped: stopped.or_else(|| generation.reached_limit()),
    };
    let json = serde_json::to_vec_pretty(&report).expect("a report is JSON");
    for (name, bytes) in [
        ("train.jsonl", train.as_bytes()),
        ("heldout.jsonl", heldout.as_bytes()),
        ("report.json", &json),
    ] {
        let path = directory.join(name);
        durable_files::replace_file(&path, bytes, 0o644)
            .map_err(|source| GenerationError::Write { path, source })?;
    }
    Ok(report)
}

/// Replays the log of the directory, and appends the plan if it has new parts.
fn open_progress(
    plan: GenerationPlan,
    directory: &Path,
) -> Result<(Generation, ProgressLog), GenerationError> {
    let now = plan.part_digests();
    let (mut generation, mut known) = (Generation::new(plan), None);
    let mut changed: Vec<String> = Vec::new();
    let opened = ProgressLog::open(directory, |event| {
        if let GenerationEvent::Plan { parts } = event {
            let is_changed = |(name, part): &(&String, &String)| now.get(*name) != Some(*part);
            changed = parts.iter().filter(is_changed).map(|(name, _)| name.clone()).collect();
            known = Some(parts.clone());
        }
        // Events of another plan have other categories and duplicates.
        if changed.is_empty() { generation.apply_event(event) } else { Ok(()) }
    });
    let mut log = opened?;
    if !changed.is_empty() {
        let (directory, parts) = (directory.to_owned(), changed.join(", "));
        return Err(GenerationError::OtherPlan { directory, parts });
    }
    if known.as_ref() != Some(&now) {
        log.append_event(&GenerationEvent::Plan { parts: now })?;
    }
    Ok((generation, log))
}

/// Runs commands until there are none, or time is up, and returns the limit that was reached then.
/// Open requests are dropped at that time.
async fn run_commands(
    worker: &CommandWorker,
    generation: &mut Generation,
    log: &mut ProgressLog,
    show: &dyn Fn(u64, u64),
) -> Result<Option<String>, GenerationError> {
    let GenerationLimits { concurrency, time_s, .. } = *worker.limits();
    let deadline = Instant::now() + Duration::from_secs_f64(time_s);
    let mut running: FuturesUnordered<BoxFuture<'_, Result<CommandResult, GenerationError>>> =
        FuturesUnordered::new();
    let (mut refusals, mut errors) = (0, 0);
    loop {
        while running.len() < concurrency as usize
            && let Some(command) = generation.next_command()
        {
            running.push(Box::pin(worker.run_command(command)));
        }
        let Ok(next) = timeout_at(deadline, running.next()).await else {
            return Ok(Some(format!("limits.time_s ({time_s}) is reached")));
        };
        let Some(result) = next else { return Ok(None) };
        let CommandResult { event, trouble } = result?;
        log.append_event(&event)?;
        generation.apply_event(&event).expect("the event of a command that was decided");
        let (kept, wanted) = generation.count_samples();
        show(kept, wanted);
        let count = if matches!(event, GenerationEvent::Verdict { .. }) {
            &mut errors
        } else {
            &mut refusals
        };
        *count = if trouble.is_some() { *count + 1 } else { 0 };
        match trouble {
            Some(message) if errors >= TROUBLES_MAX => {
                return Err(GenerationError::Verifier { message });
            }
            Some(message) if refusals >= TROUBLES_MAX => {
                return Err(GenerationError::Refused { message });
            }
            _ => {}
        }
    }
}

/// The event of a command, and the reason why the endpoint or the verifier did not do it.
struct CommandResult {
    event: GenerationEvent,
    trouble: Option<String>,
}

/// Runs commands, many at a time.
struct CommandWorker {
    client: CompletionClient,
    plan: GenerationPlan,
    verify: VerifySample,
}

impl CommandWorker {
    fn limits(&self) -> &GenerationLimits {
        &self.plan.spec.limits
    }

    async fn run_command(
        &self,
        command: GenerationCommand,
    ) -> Result<CommandResult, GenerationError> {
        match command {
            GenerationCommand::WritePrompts { category, request, wanted, body } => {
                let reply = self.ask_model(&body).await?;
                let list = reply.text.as_deref().unwrap_or_default();
                let prompts = parse_prompt_list(list, wanted as usize);
                let tokens = reply.tokens;
                let trouble = reply.text.err().filter(|_| reply.is_refused);
                let event = GenerationEvent::Prompts { category, request, wanted, prompts, tokens };
                Ok(CommandResult { event, trouble })
            }
            GenerationCommand::WriteAnswer { category, number, body } => {
                let reply = self.ask_model(&body).await?;
                let (tokens, is_refused) = (reply.tokens, reply.is_refused);
                Ok(match self.check_completion(reply) {
                    Ok(completion) => CommandResult {
                        event: GenerationEvent::Answer { category, number, completion, tokens },
                        trouble: None,
                    },
                    Err(problem) => {
                        let trouble = is_refused.then(|| problem.clone());
                        let event = GenerationEvent::Unusable { category, number, problem, tokens };
                        CommandResult { event, trouble }
                    }
                })
            }
            GenerationCommand::Verify { category, number, verifier, prompt, completion } => {
                let verdict =
                    self.judge_sample(&category, number, verifier, prompt, completion).await;
                let (outcome, detail) = read_verdict(verdict);
                let trouble = (outcome == SampleOutcome::Error).then(|| detail.clone());
                let event = GenerationEvent::Verdict { category, number, outcome, detail };
                Ok(CommandResult { event, trouble })
            }
        }
    }

    /// Returns the text of an answer, or the reason why it is no training data.
    fn check_completion(&self, reply: ChatReply) -> Result<String, String> {
        let text = reply.text?;
        let problem = if text.is_empty() {
            "empty"
        } else if reply.is_cut {
            "cut off at answers.sampling.max_new_tokens"
        } else if text.len() > PROMPT_BYTES_MAX {
            "too long"
        } else if self.plan.is_refusal(&text) {
            "refused"
        } else if self.plan.extract_answer(&text).is_none() {
            "answers.extract finds nothing"
        } else {
            return Ok(text);
        };
        Err(problem.to_owned())
    }

    async fn judge_sample(
        &self,
        category: &str,
        number: u32,
        verifier: usize,
        prompt: String,
        completion: String,
    ) -> Result<verdicts::Verdict, tokio::task::JoinError> {
        let fields = [("category".to_owned(), json!(category))].into_iter().collect();
        let id = format!("{category}-{number}");
        // Without an answer: the model's own would confirm itself.
        let entry = PromptEntry { id, prompt, answer: None, fields };
        let verify = self.verify.clone();
        tokio::task::spawn_blocking(move || verify(verifier, &entry, completion)).await
    }

    /// Asks the endpoint, and retries after a backoff if it does not answer or has no room. A
    /// request that it refuses has a reply with the reason.
    async fn ask_model(&self, body: &Value) -> Result<ChatReply, GenerationError> {
        let GenerationLimits { retries, backoff_s, request_timeout_s, .. } = *self.limits();
        let limit = Duration::from_secs_f64(request_timeout_s);
        let mut backoff = Duration::from_secs_f64(backoff_s);
        let mut tries = 1;
        loop {
            let answer =
                self.client.post_json("/chat/completions", body, limit, ANSWER_BYTES_MAX).await;
            let error = match answer {
                Ok(body) => return Ok(ChatReply::parse(&body)),
                Err(error) => error,
            };
            if let Some(reason) = error.refusal_reason() {
                return Ok(ChatReply::refused_request(reason));
            }
            if !error.is_transient() || tries > retries {
                return Err(GenerationError::Endpoint { tries, source: error });
            }
            let error = wire::format_error_chain(&error);
            tracing::warn!(error, ?backoff, "asking the endpoint again");
            sleep(backoff).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
            tries += 1;
        }
    }
}

fn read_verdict(
    verdict: Result<verdicts::Verdict, tokio::task::JoinError>,
) -> (SampleOutcome, String) {
    let Ok(verdict) = verdict else {
        return (SampleOutcome::Error, "the verifier panicked".to_owned());
    };
    let outcome = match verdict.outcome() {
        verdicts::Outcome::Pass => SampleOutcome::Pass,
        verdicts::Outcome::Fail => SampleOutcome::Fail,
        verdicts::Outcome::Error | verdicts::Outcome::Unspecified => SampleOutcome::Error,
    };
    (outcome, verdict.detail.chars().take(DETAIL_CHARS_MAX).collect())
}
