//! Sampling with a `llama-server` that this worker runs: the base from the cache of converted
//! models, the adapter converted for it, prompts and completions through the worker's own
//! tokenizer.

use std::{
    cell::{Cell, RefCell},
    fs,
    path::{Path, PathBuf},
    rc::Rc,
    time::Duration,
};

use anyhow::Context;
use bounded_http::CompletionClient;
use engine::{CanaryText, ModelTokenizer, TokenSequence};
use formats::{FloatDtype, GgufModel, ModelOutline, is_gguf};
use futures::{
    StreamExt, TryStreamExt,
    future::{FutureExt, LocalBoxFuture},
    stream,
};
use llama::{
    LlamaServer, ServedModel, ServerAddress,
    completion::{self, CompletionStop, LlamaCompletion, LlamaSampling},
    scoring::{self, ScoringError},
};
use serde_json::Value;
use wire::v1;

use super::{
    WorkerConfig,
    pending_calls::DrawnSample,
    sample_task::{
        HttpPrompt, PreparedRequest, SampleError, SampleTask, TOKEN_TIME_MAX, WantedLogprobs,
    },
    slot_planner::SlotId,
    token_record::TokenRecord,
    turn_prompt::{TurnLimits, TurnPrompt},
};
use crate::{
    ConvertedBase, LlamaCppGenerator,
    messages::{SampleToScore, ScoreRequest},
};

/// For a request that the server answers between two of its steps.
const PING_TIMEOUT: Duration = Duration::from_secs(60);
const PING_BYTES_MAX: usize = 16 * 1024 * 1024;

/// For scoring one token after a short text. For the first, a GPU's driver may compile.
const SCORE_TIMEOUT: Duration = Duration::from_secs(300);
const SCORE_BYTES_MAX: usize = 64 * 1024;

/// For writing or reading the state of a slot, between two of the server's steps.
const COPY_TIMEOUT: Duration = Duration::from_secs(120);

const COMPLETION_PATH: &str = "/completion";

/// The smallest context, in positions a sequence, that a server is started with; most orders then
/// fit.
const CONTEXT_MIN: usize = 512;

/// Added to the context, because llama-server stops a sequence this many positions before its end.
const CONTEXT_SPARE: usize = 2;

/// A `llama-server` with one policy, started when the first sample needs it, restarted when a
/// sample needs a larger context, and replaced by another when the adapter changes.
pub(super) struct LlamaServerBackend {
    config: LlamaCppGenerator,
    model: PathBuf,
    model_key: String,
    adapter: Option<PathBuf>,
    /// The base and adapter that the server loads, once they are converted.
    converted: Option<ConvertedPolicy>,
    tokenizer: ModelTokenizer,
    outline: ModelOutline,
    max_positions: usize,
    eos_tokens: Vec<u32>,
    slots: u32,
    running: Option<RunningServer>,
    /// A server that was replaced and is ending.
    replaced: Option<LlamaServer>,
    /// The servers started so far.
    started: usize,
}

struct ConvertedPolicy {
    base: ConvertedBase,
    adapter: Option<PathBuf>,
}

/// The directories that servers use in turn, because two may run while one replaces the other.
const SERVER_DIRECTORIES: [&str; 2] = ["a", "b"];

struct RunningServer {
    server: LlamaServer,
    http: CompletionClient,
    /// The positions that each sequence may use.
    context: usize,
}

impl LlamaServerBackend {
    /// Starts no server yet, because the first call determines the length of the sequences.
    pub(super) fn new(
        llama: &LlamaCppGenerator,
        config: &WorkerConfig,
        slots: u32,
    ) -> anyhow::Result<Self> {
        let model = match is_gguf(&config.base) {
            true => GgufModel::open(&config.base)?.model_config().clone().into(),
            false => ModelOutline::from_dir(&config.base)?,
        };
        let tokenizer = ModelTokenizer::load_tokenizer(&config.base)?;
        reset_directory(&llama.directory)
            .with_context(|| format!("prepare {}", llama.directory.display()))?;
        Ok(Self {
            config: llama.clone(),
            model: config.base.clone(),
            model_key: config.base_key.clone(),
            adapter: config.adapter.clone(),
            converted: None,
            tokenizer,
            max_positions: model.max_positions,
            eos_tokens: model.eos_tokens.clone(),
            outline: model,
            slots,
            running: None,
            replaced: None,
            started: 0,
        })
    }

    /// Encodes a prompt and limits the new tokens to the model's positions. Fails if the prompt is
    /// empty or too long.
    pub(super) fn prepare_request(
        &self,
        text: &str,
        sampling: &LlamaSampling,
        wanted: WantedLogprobs,
    ) -> Result<PreparedRequest, String> {
        let prompt = self.tokenizer.encode_prompt(text).map_err(|error| error.to_string())?;
        self.prepare_tokens(prompt, sampling, wanted)
    }

    /// Encodes the prompt of an episode's turn. Returns `None` if it has no room for a token.
    pub(super) fn prepare_turn(
        &self,
        context: &[u32],
        text: &str,
        sampling: &LlamaSampling,
        wanted: WantedLogprobs,
    ) -> Result<Option<PreparedRequest>, String> {
        let limits =
            TurnLimits { max_new_tokens: sampling.max_new_tokens, positions: self.max_positions };
        let turn = TurnPrompt::encode_turn(&self.tokenizer, context, text, limits);
        let Some(turn) = turn.map_err(|error| error.to_string())? else { return Ok(None) };
        let sampling = LlamaSampling { max_new_tokens: turn.max_new_tokens, ..*sampling };
        self.prepare_tokens(turn.tokens, &sampling, wanted).map(Some)
    }

    fn prepare_tokens(
        &self,
        prompt: Vec<u32>,
        sampling: &LlamaSampling,
        wanted: WantedLogprobs,
    ) -> Result<PreparedRequest, String> {
        let (tokens, positions) = (prompt.len(), self.max_positions);
        if tokens == 0 {
            return Err(
                "it has no tokens, and this model has no start token; add some text".to_owned()
            );
        }
        if tokens >= positions {
            return Err(format!(
                "it has {tokens} tokens, but the model's {positions} positions must also hold a \
                 new one; shorten it"
            ));
        }
        let room = u32::try_from(positions - tokens).unwrap_or(u32::MAX);
        let max_new_tokens = sampling.max_new_tokens.min(room);
        Ok(PreparedRequest {
            prompt: HttpPrompt::Tokens(prompt),
            sampling: LlamaSampling { max_new_tokens, ..*sampling },
            positions: tokens + max_new_tokens as usize,
            wanted,
        })
    }

    pub(super) fn fits_context(&self, positions: usize) -> bool {
        self.running.as_ref().is_some_and(|running| positions <= running.context)
    }

    /// Draws with another adapter on the same base from now on. A server with it replaces the
    /// running one: if there is memory for both, it starts before that one ends.
    pub(super) fn swap_adapter(
        &mut self,
        adapter: Option<PathBuf>,
        on_heartbeat: &mut dyn FnMut(),
    ) -> anyhow::Result<()> {
        self.adapter = adapter;
        let converted = self.convert_own_adapter(on_heartbeat)?;
        if let Some(policy) = &mut self.converted {
            policy.adapter = converted;
        }
        let Some(RunningServer { server, context, .. }) = self.running.take() else {
            return Ok(());
        };
        // One that was replaced before must be gone, because the new server takes its directory.
        self.replaced = None;
        if server.has_room_for_second() {
            self.start_server(context, on_heartbeat)?;
            server.request_stop();
            self.replaced = Some(server);
            return Ok(());
        }
        drop(server);
        self.start_server(context, on_heartbeat)
    }

    /// Starts the server with at least this many positions a sequence, and ends the one that runs.
    /// Calls `on_heartbeat` while it waits.
    pub(super) fn enlarge_context(
        &mut self,
        positions: usize,
        on_heartbeat: &mut dyn FnMut(),
    ) -> anyhow::Result<()> {
        // The new server needs the memory of the old one.
        self.running = None;
        self.start_server(positions, on_heartbeat)
    }

    fn start_server(
        &mut self,
        positions: usize,
        on_heartbeat: &mut dyn FnMut(),
    ) -> anyhow::Result<()> {
        self.convert_policy(on_heartbeat)?;
        let converted = self.converted.as_ref().context("nothing was converted")?;
        let directory = self.config.directory.join(self.server_directory());
        let states = self.state_directory();
        let most = self.max_positions.max(positions);
        let context = positions.next_power_of_two().max(CONTEXT_MIN).min(most);
        let serve = ServedModel {
            base: &converted.base.path,
            adapters: converted.adapter.as_slice(),
            adapter_by_request: false,
            alias: None,
            slots: self.slots,
            context: u32::try_from(context + CONTEXT_SPARE)?,
            exact: self.config.dtype == FloatDtype::F32,
            directory: &directory,
            states: &states,
        };
        self.started += 1;
        let mut server = LlamaServer::start(&self.config.server, &serve)?;
        server.wait_ready(self.config.ready_limit, on_heartbeat)?;
        let http = match server.listen_address() {
            ServerAddress::Socket(path) => CompletionClient::for_socket(path, server.api_key())?,
            ServerAddress::Port(port) => CompletionClient::for_url(
                &format!("http://127.0.0.1:{port}"),
                Some(server.api_key().to_owned()),
            )?,
        };
        tracing::info!(context, slots = self.slots, "llama-server is ready");
        self.running = Some(RunningServer { server, http, context });
        Ok(())
    }

    /// Converts the base and the adapter to GGUF, once.
    fn convert_policy(&mut self, on_heartbeat: &mut dyn FnMut()) -> anyhow::Result<()> {
        if self.converted.is_some() {
            return Ok(());
        }
        let adapter = self.convert_own_adapter(on_heartbeat)?;
        let base = self.config.convert_base(&self.model_key, &self.model, on_heartbeat)?;
        self.converted = Some(ConvertedPolicy { base, adapter });
        Ok(())
    }

    /// Returns the name of the directory of the next server.
    fn server_directory(&self) -> &'static str {
        SERVER_DIRECTORIES[self.started % SERVER_DIRECTORIES.len()]
    }

    /// Converts the adapter for the next server.
    fn convert_own_adapter(
        &self,
        on_heartbeat: &mut dyn FnMut(),
    ) -> anyhow::Result<Option<PathBuf>> {
        let name = format!("adapter-{}.gguf", self.server_directory());
        let converted = self.config.directory.join(name);
        let adapter = self.adapter.as_deref();
        let convert =
            |adapter| self.config.convert_adapter(&self.model, adapter, converted, on_heartbeat);
        adapter.map(convert).transpose()
    }

    pub(super) fn draw_sample(
        &self,
        task: SampleTask,
    ) -> impl Future<Output = Result<DrawnSample, SampleError>> + use<> {
        let http = self.client();
        let (tokenizer, ends) = (self.tokenizer.clone(), self.eos_tokens.clone());
        async move {
            let SampleTask { seed, request, slot, .. } = &task;
            let body = completion::build_request(
                prompt_tokens(request)?,
                &request.sampling,
                *seed,
                request.wanted.any(),
                Some(*slot),
            );
            let (limit, bytes_max) = request.answer_limits(request.sampling.max_new_tokens);
            let answer = post(&http?, COMPLETION_PATH, &body, (limit, bytes_max)).await?;
            let completion =
                completion::parse_completion(&answer).map_err(|error| sample_error(&error))?;
            parse_sample(completion, &task, &tokenizer, &ends)
        }
    }

    /// Computes a prompt on the first of some idle slots and copies its state to the others.
    /// Returns the slots that hold it: only the first if the build cannot copy.
    pub(super) fn prefill_prompt(
        &self,
        request: Rc<PreparedRequest>,
        slots: Vec<SlotId>,
    ) -> impl Future<Output = Result<Vec<SlotId>, SampleError>> + use<> {
        let http = self.client();
        let directory = self.state_directory();
        async move {
            let (http, Some((first, others))) = (http?, slots.split_first()) else {
                return Ok(Vec::new());
            };
            let limits = request.answer_limits(1);
            let body = completion::build_prefill(prompt_tokens(&request)?, *first);
            post(&http, COMPLETION_PATH, &body, limits).await?;
            let file = format!("slot-{first}");
            let copied = copy_state(&http, *first, others, &file).await;
            // A server without the state of a slot has written no file.
            let _ = fs::remove_file(directory.join(&file));
            if let Err(error) = copied {
                tracing::warn!(error = error.message, "llama-server cannot copy a prompt's state");
                return Ok(vec![*first]);
            }
            Ok(slots)
        }
    }

    /// Returns the directory to which the server writes the state of slots.
    fn state_directory(&self) -> PathBuf {
        self.config.directory.join("slots")
    }

    fn client(&self) -> Result<CompletionClient, SampleError> {
        let running = self.running.as_ref().map(|running| running.http.clone());
        running.ok_or_else(|| sample_error("llama-server was not started"))
    }

    /// Sends one request for each token, because the server reports no more at a time.
    pub(super) async fn score_canary(
        &self,
        text: &str,
        on_heartbeat: &mut dyn FnMut(),
    ) -> Result<Vec<f32>, SampleError> {
        let http = self.client()?;
        let CanaryText { tokens, scored } =
            CanaryText::from_text(&self.tokenizer, &self.outline, text, wire::CANARY_TOKENS_MAX)
                .map_err(|error| sample_error(&format!("{:#}", anyhow::Error::from(error))))?;
        let mut canary = Vec::with_capacity(scored.len());
        for place in scored {
            let request = scoring::build_request(&tokens[..place], tokens[place], None);
            let limits = (SCORE_TIMEOUT, SCORE_BYTES_MAX);
            let answer = post(&http, COMPLETION_PATH, &request, limits).await?;
            let scored = scoring::parse_logprob(&answer, tokens[place]);
            canary.push(scored.map_err(|error| sample_error(&error))?);
            on_heartbeat();
        }
        Ok(canary)
    }

    /// Returns the tokens of samples to score, and starts a server that they fit. `None` for a
    /// sample that the model cannot score. Calls `on_heartbeat` while it waits.
    pub(super) fn prepare_scoring(
        &mut self,
        request: &ScoreRequest,
        on_heartbeat: &mut dyn FnMut(),
    ) -> anyhow::Result<Vec<Option<TokenSequence>>> {
        let encode = |sample: &SampleToScore| -> anyhow::Result<Option<TokenSequence>> {
            let vocab_size = self.outline.vocab_size;
            let example = sample.to_example(&self.tokenizer, vocab_size, request.end_token);
            let Some(example) = example else { return Ok(None) };
            let text = TokenSequence::from_example(&self.tokenizer, &self.outline, &example)?;
            Ok(Some(text).filter(|text| text.tokens.len() <= self.max_positions))
        };
        let texts = request.samples.iter().map(encode).collect::<anyhow::Result<Vec<_>>>()?;
        let longest = texts.iter().flatten().map(|text| text.tokens.len()).max();
        if let Some(longest) = longest.filter(|longest| !self.fits_context(*longest)) {
            self.enlarge_context(longest, on_heartbeat)?;
        }
        Ok(texts)
    }

    /// Returns the log-probabilities of the tokens of texts, empty for one that cannot be scored:
    /// one request for each token, as many texts at once as there are slots. `on_heartbeat`
    /// receives the number of scored texts.
    pub(super) fn score_texts(
        &self,
        texts: Vec<Option<TokenSequence>>,
        on_heartbeat: impl Fn(u32) + 'static,
    ) -> LocalBoxFuture<'static, Result<Vec<Vec<f64>>, SampleError>> {
        let (running, slots) = (self.client(), self.slots);
        async move {
            if texts.iter().all(Option::is_none) {
                return Ok(vec![Vec::new(); texts.len()]);
            }
            let http = running?;
            let free = RefCell::new((0..slots).collect::<Vec<SlotId>>());
            let (scored, reported) = (Cell::new(0), Cell::new(false));
            let of_text = async |(place, text): (usize, Option<TokenSequence>)| {
                let Some(text) = text else { return Ok((place, Vec::new())) };
                let slot = free.borrow_mut().pop();
                let found = score_tokens(&http, &text, slot, &reported).await;
                free.borrow_mut().extend(slot);
                scored.set(scored.get() + 1);
                on_heartbeat(scored.get());
                found.map(|logprobs| (place, logprobs))
            };
            let all = stream::iter(texts.into_iter().enumerate().map(&of_text));
            let mut scores: Vec<(usize, Vec<f64>)> =
                all.buffer_unordered(slots as usize).try_collect().await?;
            if !reported.get() {
                return Err(sample_error(
                    "llama-server reported no probability of any token; use a build of 2025 or \
                     later, or the embedded engine (E102)",
                ));
            }
            scores.sort_by_key(|(place, _)| *place);
            Ok(scores.into_iter().map(|(_, logprobs)| logprobs).collect())
        }
        .boxed_local()
    }

    /// Sends a request that the server's loop answers between two of its steps.
    pub(super) fn check_alive(&self) -> LocalBoxFuture<'static, bool> {
        let http = self.running.as_ref().map(|running| running.http.clone());
        async move {
            match http {
                Some(http) => match http.get("/slots", PING_TIMEOUT, PING_BYTES_MAX).await {
                    Ok(_) => true,
                    // A build without this path responds with an error, which shows that it is
                    // alive.
                    Err(error) => !error.is_transport(),
                },
                None => false,
            }
        }
        .boxed_local()
    }

    /// Describes how the server ended, if it did.
    pub(super) fn describe_server_exit(&mut self) -> Option<String> {
        if self.replaced.as_mut().is_some_and(|replaced| replaced.poll_exit().is_some()) {
            self.replaced = None;
        }
        let (ending, output) = self.running.as_mut()?.server.poll_exit()?;
        Some(format!("llama-server ended ({ending}); last output: {output}"))
    }
}

/// Returns the log-probabilities of the scored tokens of a text. Empty if a token is only part of a
/// character, which the server does not report, or has a probability of 0. Sets `reported` if the
/// server reports any.
async fn score_tokens(
    http: &CompletionClient,
    text: &TokenSequence,
    slot: Option<SlotId>,
    reported: &Cell<bool>,
) -> Result<Vec<f64>, SampleError> {
    let mut logprobs = Vec::with_capacity(text.scored_count());
    for place in text.scored_positions() {
        let (before, token) = (&text.tokens[..place], text.tokens[place]);
        let request = scoring::build_request(before, token, slot);
        // Only the first request of a text computes more than one position.
        let positions = u32::try_from(before.len()).unwrap_or(u32::MAX);
        let limit = TOKEN_TIME_MAX.saturating_mul(positions).max(SCORE_TIMEOUT);
        let answer = post(http, COMPLETION_PATH, &request, (limit, SCORE_BYTES_MAX)).await?;
        match scoring::parse_logprob(&answer, token) {
            Ok(logprob) => {
                reported.set(true);
                if !logprob.is_finite() {
                    return Ok(Vec::new());
                }
                logprobs.push(f64::from(logprob));
            }
            Err(error @ ScoringError::Missing(_)) => {
                tracing::debug!(%error, "a sample is not scored");
                return Ok(Vec::new());
            }
            Err(error) => return Err(sample_error(&error)),
        }
    }
    Ok(logprobs)
}

fn prompt_tokens(request: &PreparedRequest) -> Result<&[u32], SampleError> {
    match &request.prompt {
        HttpPrompt::Tokens(tokens) => Ok(tokens),
        HttpPrompt::Text(_) => Err(sample_error("the prompt has no tokens")),
    }
}

/// Copies the state of a slot to others through a file.
async fn copy_state(
    http: &CompletionClient,
    from: SlotId,
    to: &[SlotId],
    file: &str,
) -> Result<(), SampleError> {
    let (path, body) = completion::build_state_save(from, file);
    post(http, &path, &body, (COPY_TIMEOUT, SCORE_BYTES_MAX)).await?;
    for slot in to {
        let (path, body) = completion::build_state_restore(*slot, file);
        post(http, &path, &body, (COPY_TIMEOUT, SCORE_BYTES_MAX)).await?;
    }
    Ok(())
}

async fn post(
    http: &CompletionClient,
    path: &str,
    body: &Value,
    (limit, bytes_max): (Duration, usize),
) -> Result<Vec<u8>, SampleError> {
    http.post_json(path, body, limit, bytes_max).await.map_err(|error| {
        let connection_lost = error.is_transport();
        let message = format!("{:#}", anyhow::Error::from(error));
        SampleError { message, connection_lost }
    })
}

fn sample_error(error: &(impl ToString + ?Sized)) -> SampleError {
    SampleError { message: error.to_string(), connection_lost: false }
}

/// Builds the sample in the form of the embedded engine: without the end token, cut at the token
/// limit and at every end token of the model's configuration.
fn parse_sample(
    completion: LlamaCompletion,
    task: &SampleTask,
    tokenizer: &ModelTokenizer,
    ends: &[u32],
) -> Result<DrawnSample, SampleError> {
    use v1::samples::Finish;
    let LlamaCompletion { mut tokens, text, count, stop, logprobs } = completion;
    let mut finish = match stop {
        CompletionStop::End => Finish::Stop,
        CompletionStop::Limit => Finish::Length,
    };
    let nth = task.nth;
    if tokens.is_empty() {
        let (tokens, ids) = (count, Vec::new());
        return Ok(DrawnSample { nth, text, tokens, finish, logprob: None, record: None, ids });
    }
    // A character that was incomplete at the limit may have added a token.
    tokens.truncate(task.request.sampling.max_new_tokens as usize);
    // The model's configuration may name end tokens that its GGUF file lacks.
    if let Some(end) = tokens.iter().position(|token| ends.contains(token)) {
        tokens.truncate(end + 1);
        finish = Finish::Stop;
    }
    let spoken = match (finish, tokens.split_last()) {
        (Finish::Stop, Some((_, spoken))) => spoken,
        _ => &tokens[..],
    };
    let text = tokenizer.decode_tokens(spoken).map_err(|error| sample_error(&error))?;
    let logprobs = logprobs.get(..tokens.len());
    let logprob = logprobs.map(|each| each.iter().sum());
    let recorded = logprobs.filter(|_| task.request.wanted == WantedLogprobs::OfTokens);
    let record = recorded.map(|logprobs| {
        let end = ends.first().copied();
        TokenRecord::new(tokenizer, end, (&text, finish), &tokens, logprobs.to_vec())
    });
    let (ids, tokens) = (tokens.clone(), u32::try_from(tokens.len()).unwrap_or(u32::MAX));
    Ok(DrawnSample { nth, text, tokens, finish, logprob, record, ids })
}

fn reset_directory(directory: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::create_dir_all(directory)
}
