//! Turns a request into work for the batch, and the batch's events into an answer.

use std::{
    fs::File,
    io::{self, Read},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use chat_template::{ChatError, ChatTemplate, TemplateError};
use engine::{ModelTokenizer, PromptInput, SamplingParameters, ScoreOptions, TokenizerError};
use hyper::{StatusCode, body::Bytes};
use serde_json::{Map, Value, json};
use tokio::sync::{
    Semaphore,
    mpsc::{Receiver, Sender},
    watch,
};

use crate::{
    answer::AnswerWriter,
    batch::{BatchRequest, ChoiceEvent, ChoicePiece, PromptTokens, open_event_channel},
    request::{ApiKind, ApiRequest, AskedPrompt, RequestFieldError},
};

/// Maximum number of bytes of a request's body; gateways accept less.
pub(crate) const BODY_BYTES_MAX: usize = 8 << 20;

/// The log-probabilities of an answer, with those of likely tokens. Each takes up to half a kilobyte.
pub(crate) const LOGPROBS_MAX: usize = 1 << 19;

/// Bytes of a text for each token of the context. No text of so many has fewer tokens, but its tokens
/// would take much memory.
const TOKEN_BYTES_MAX: usize = 128;

/// Requests that are read at a time; others wait.
const READERS_MAX: usize = 4;

/// The indices of a server's models in its batch.
#[derive(Debug, Clone)]
pub(crate) struct ModelIndices {
    /// `None` if the base alone is not served.
    pub base: Option<usize>,
    pub adapters: Vec<usize>,
}

/// The limits of a server's models.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ModelLimits {
    /// Maximum number of tokens of a prompt with its answer, without the last token.
    pub context: usize,
    pub vocab_size: usize,
}

/// Answers requests with the models of a batch.
pub(crate) struct CompletionApi {
    alias: String,
    indices: ModelIndices,
    tokenizer: Arc<ModelTokenizer>,
    /// The base's chat template, or the error for requests that need it.
    template: Result<ChatTemplate, String>,
    limits: ModelLimits,
    requests: Sender<BatchRequest>,
    /// True while the batch has no request; changes with each of its steps.
    batch_idle: watch::Receiver<bool>,
    /// To read a request may take a hundred times its bytes.
    readers: Semaphore,
    /// Random number from which ids of answers, and seeds of requests without one, are derived.
    secret: u64,
    /// The number of requests so far.
    count: AtomicU64,
}

/// The reason why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompletionApiError {
    #[error("the request has no valid key (K101)")]
    Key,
    #[error("POST to /v1/completions or /v1/chat/completions; GET /health (G108)")]
    Path,
    #[error("the body exceeds {BODY_BYTES_MAX} bytes, or broke off; send less (G101)")]
    Body,
    #[error("the body must be a JSON object: {0} (G101)")]
    Json(serde_json::Error),
    #[error(transparent)]
    Field(#[from] RequestFieldError),
    #[error("`messages`: {0}; `/v1/completions` takes texts (D106)")]
    Template(String),
    #[error("`messages`")]
    Conversation(#[from] ChatError),
    #[error("`lora`: choose an adapter; the base alone is not served here (G101)")]
    NoAdapter,
    #[error("`prompt` has no tokens; add some text (R112)")]
    EmptyPrompt,
    #[error("`prompt` has the token {token}; the model has {vocab_size} (R112)")]
    UnknownToken { token: u32, vocab_size: usize },
    #[error(
        "the prompt has {tokens} tokens, but prompt and answer have room for {context}; shorten it, \
         or start the agent with a larger --serve-context (R112)"
    )]
    TooLong { tokens: usize, context: usize },
    #[error(
        "the prompt has {bytes} bytes, but prompt and answer have room for {context} tokens; shorten \
         it, or start the agent with a larger --serve-context (R112)"
    )]
    TooManyBytes { bytes: usize, context: usize },
    #[error(
        "`logprobs`: the answer has more than {LOGPROBS_MAX} log-probabilities; send fewer prompts, or \
         ask for fewer tokens (G101)"
    )]
    TooManyLogprobs,
    #[error("the prompt cannot be read")]
    Tokenizer(#[from] TokenizerError),
    #[error("too many requests wait; try again later (G104)")]
    Busy,
    #[error("the engine failed: {0} (E104)")]
    Engine(String),
}

impl CompletionApiError {
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Key => StatusCode::UNAUTHORIZED,
            Self::Path => StatusCode::NOT_FOUND,
            Self::Body => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Self::Engine(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Json(_)
            | Self::Field(_)
            | Self::Template(_)
            | Self::Conversation(_)
            | Self::NoAdapter
            | Self::EmptyPrompt
            | Self::UnknownToken { .. }
            | Self::TooLong { .. }
            | Self::TooManyBytes { .. }
            | Self::TooManyLogprobs
            | Self::Tokenizer(_) => StatusCode::BAD_REQUEST,
        }
    }

    pub(crate) fn to_json(&self) -> Value {
        let is_server = self.status().is_server_error();
        let kind = if is_server { "server_error" } else { "invalid_request_error" };
        let field = match self {
            Self::Field(error) => Some(error.field.as_str()),
            Self::Template(_) | Self::Conversation(_) => Some("messages"),
            Self::EmptyPrompt | Self::UnknownToken { .. } => Some("prompt"),
            Self::TooManyLogprobs => Some("logprobs"),
            _ => None,
        };
        let is_long = matches!(self, Self::TooLong { .. } | Self::TooManyBytes { .. });
        let code = is_long.then_some("context_length_exceeded");
        let message = wire::format_error_chain(self);
        json!({ "error": { "message": message, "type": kind, "param": field, "code": code } })
    }
}

impl CompletionApi {
    /// Opens the API of the models of a batch, which receives `requests` and reports its steps.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub(crate) fn open(
        (alias, indices): (String, ModelIndices),
        tokenizer: ModelTokenizer,
        template: Result<ChatTemplate, TemplateError>,
        limits: ModelLimits,
        (requests, batch_idle): (Sender<BatchRequest>, watch::Receiver<bool>),
    ) -> io::Result<Self> {
        let mut secret = [0; 8];
        File::open("/dev/urandom")?.read_exact(&mut secret)?;
        Ok(Self {
            alias,
            indices,
            tokenizer: Arc::new(tokenizer),
            template: template.map_err(|error| wire::format_error_chain(&error)),
            limits,
            requests,
            batch_idle,
            readers: Semaphore::new(READERS_MAX),
            secret: u64::from_le_bytes(secret),
            count: AtomicU64::new(0),
        })
    }

    pub(crate) fn tokenizer(&self) -> Arc<ModelTokenizer> {
        self.tokenizer.clone()
    }

    /// Waits until the batch has no request, or has done a step. An engine that hangs does neither.
    pub(crate) async fn await_step(&self) {
        let mut batch_idle = self.batch_idle.clone();
        let is_idle = *batch_idle.borrow_and_update();
        if !is_idle {
            // Without a batch, the process ends.
            let _ = batch_idle.changed().await;
        }
    }

    /// Sends a request to the batch.
    ///
    /// # Errors
    /// The request is wrong, or too many wait.
    pub(crate) async fn start_answer(
        self: &Arc<Self>,
        kind: ApiKind,
        body: Bytes,
    ) -> Result<OpenAnswer, CompletionApiError> {
        let api = self.clone();
        // The semaphore is never closed.
        let _permit = self.readers.acquire().await;
        // Tokenizing a long prompt takes a while.
        let prepared = tokio::task::spawn_blocking(move || api.prepare_request(kind, &body)).await;
        let prepared = prepared.map_err(|panic| CompletionApiError::Engine(panic.to_string()))?;
        let (request, answer) = prepared?;
        self.requests.try_send(request).map_err(|_| CompletionApiError::Busy)?;
        Ok(answer)
    }

    fn prepare_request(
        &self,
        kind: ApiKind,
        body: &[u8],
    ) -> Result<(BatchRequest, OpenAnswer), CompletionApiError> {
        let fields: Map<String, Value> =
            serde_json::from_slice(body).map_err(CompletionApiError::Json)?;
        let asked = ApiRequest::read(kind, fields, self.indices.adapters.len())?;
        let model = match asked.adapter {
            Some(adapter) => self.indices.adapters.get(adapter).copied(),
            None => self.indices.base,
        };
        let model = model.ok_or(CompletionApiError::NoAdapter)?;
        let count = self.count.fetch_add(1, Ordering::Relaxed).to_string();
        let prompts = self.encode_prompts(&asked, &count)?;
        let scored = ScoreOptions {
            alternatives: asked.logprobs.unwrap_or(0),
            prompt: asked.echo && asked.logprobs.is_some(),
        };
        if scored.prompt {
            let tokens = prompts.iter().map(|prompt| prompt.tokens.len() * prompt.seeds.len());
            check_logprobs(tokens.sum(), scored.alternatives)?;
        }
        let (events, receiver) = open_event_channel(&prompts);
        let answer = self.open_answer(kind, &asked, &count, (prompts.as_slice(), receiver));
        let request = BatchRequest {
            model,
            prompts,
            sampling: SamplingParameters {
                temperature: asked.temperature,
                top_k: asked.top_k,
                top_p: asked.top_p,
                max_new_tokens: 1,
            },
            scored,
            stops: asked.stops,
            echo: asked.echo,
            draws: asked.max_tokens != Some(0),
            reports_tokens: asked.logprobs.is_some(),
            events,
        };
        Ok((request, answer))
    }

    fn open_answer(
        &self,
        kind: ApiKind,
        asked: &ApiRequest,
        count: &str,
        (prompts, events): (&[PromptTokens], Receiver<ChoiceEvent>),
    ) -> OpenAnswer {
        let prefix = match kind {
            ApiKind::Chat => "chatcmpl",
            ApiKind::Text => "cmpl",
        };
        let name = wire::derive_seed(self.secret, &["answer", count]);
        let writer = AnswerWriter {
            kind,
            id: format!("{prefix}-{name:016x}{count}"),
            created: wire::clock::unix_time().as_secs(),
            model: self.alias.clone(),
            tokenizer: self.tokenizer.clone(),
            logprobs: asked.logprobs.is_some(),
            echo: asked.echo,
            prompt_tokens: prompts.iter().map(|prompt| prompt.tokens.len()).sum(),
        };
        let choices = prompts.iter().map(|prompt| prompt.seeds.len()).sum();
        let (stream, usage) = (asked.stream, asked.stream_usage);
        OpenAnswer { writer, events, choices, stream, usage }
    }

    fn encode_prompts(
        &self,
        asked: &ApiRequest,
        count: &str,
    ) -> Result<Vec<PromptTokens>, CompletionApiError> {
        let seed = asked.seed.unwrap_or_else(|| wire::derive_seed(self.secret, &["seed", count]));
        let choice_seed = |choice: usize| match choice {
            0 => seed,
            choice => wire::derive_seed(seed, &["choice", &choice.to_string()]),
        };
        let seeds: Vec<u64> = (0..asked.choices).map(choice_seed).collect();
        let encode = |prompt: &PromptInput| {
            let tokens = match prompt {
                PromptInput::Text(text) => self.encode_text(text)?,
                PromptInput::Tokens(tokens) => tokens.clone(),
            };
            let max_new_tokens = self.limit_new_tokens(&tokens, asked.max_tokens)?;
            let text = match prompt {
                _ if !asked.echo => String::new(),
                PromptInput::Text(text) => text.clone(),
                PromptInput::Tokens(tokens) => self.tokenizer.decode_tokens(tokens)?,
            };
            Ok(PromptTokens { tokens, text, seeds: seeds.clone(), max_new_tokens })
        };
        match &asked.prompt {
            AskedPrompt::Prompts(prompts) => prompts.iter().map(encode).collect(),
            AskedPrompt::Conversation(messages) => {
                let template = self.template.as_ref();
                let template =
                    template.map_err(|error| CompletionApiError::Template(error.clone()))?;
                let text = template.render_prompt(messages)?;
                Ok(vec![encode(&PromptInput::Text(text))?])
            }
        }
    }

    fn encode_text(&self, text: &str) -> Result<Vec<u32>, CompletionApiError> {
        let (bytes, context) = (text.len(), self.limits.context);
        if bytes > context.saturating_mul(TOKEN_BYTES_MAX) {
            return Err(CompletionApiError::TooManyBytes { bytes, context });
        }
        Ok(self.tokenizer.encode_prompt(text)?)
    }

    /// Returns the maximum number of tokens to draw after a prompt. The last one takes no room in the
    /// context.
    fn limit_new_tokens(
        &self,
        tokens: &[u32],
        wanted: Option<usize>,
    ) -> Result<usize, CompletionApiError> {
        let ModelLimits { context, vocab_size } = self.limits;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab_size) {
            return Err(CompletionApiError::UnknownToken { token: *token, vocab_size });
        }
        match tokens.len() {
            0 => Err(CompletionApiError::EmptyPrompt),
            tokens if tokens > context => Err(CompletionApiError::TooLong { tokens, context }),
            // One token is drawn, and dropped, also if the answer is only the prompt.
            tokens => Ok(wanted.unwrap_or(usize::MAX).clamp(1, context + 1 - tokens)),
        }
    }
}

/// An answer that is being drawn. Dropping it drops the request.
pub(crate) struct OpenAnswer {
    writer: AnswerWriter,
    events: Receiver<ChoiceEvent>,
    choices: usize,
    /// True if the client wants the answer in pieces.
    pub stream: bool,
    usage: bool,
}

impl OpenAnswer {
    async fn next_piece(&mut self) -> Result<ChoicePiece, CompletionApiError> {
        match self.events.recv().await {
            Some(ChoiceEvent::Piece(piece)) => Ok(piece),
            Some(ChoiceEvent::Failed(message)) => Err(CompletionApiError::Engine(message)),
            None => Err(CompletionApiError::Engine("it ended".to_owned())),
        }
    }

    /// Waits for the whole answer.
    ///
    /// # Errors
    /// The engine fails.
    pub(crate) async fn collect_answer(mut self) -> Result<Value, CompletionApiError> {
        let new = |choice| ChoicePiece { choice, ..ChoicePiece::default() };
        let mut choices: Vec<ChoicePiece> = (0..self.choices).map(new).collect();
        let (mut open, mut logprobs) = (self.choices, 0);
        while open > 0 {
            let piece = self.next_piece().await?;
            open -= usize::from(piece.finish.is_some());
            let alternatives = piece.tokens.iter().map(|token| token.alternatives.len());
            logprobs += piece.tokens.len() + alternatives.sum::<usize>();
            check_logprobs(logprobs, 0)?;
            let Some(choice) = choices.get_mut(piece.choice) else { continue };
            choice.text.push_str(&piece.text);
            choice.tokens.extend(piece.tokens);
            choice.drawn += piece.drawn;
            choice.finish = piece.finish;
        }
        Ok(self.writer.write_answer(&choices)?)
    }

    /// Returns the answer as server-sent events.
    pub(crate) fn into_events(self) -> AnswerEvents {
        let (open, offsets) = (self.choices, vec![None; self.choices]);
        AnswerEvents { answer: self, open, offsets, drawn: 0, is_over: false }
    }
}

/// The events of an answer that is sent in pieces.
pub(crate) struct AnswerEvents {
    answer: OpenAnswer,
    /// The number of choices that have not ended.
    open: usize,
    /// The characters of each choice so far; `None` before its first piece.
    offsets: Vec<Option<usize>>,
    drawn: usize,
    is_over: bool,
}

impl AnswerEvents {
    /// Waits for the next events; `None` after the last one.
    pub(crate) async fn next_events(&mut self) -> Option<Bytes> {
        if self.is_over {
            return None;
        }
        let piece = self.answer.next_piece().await;
        let events = match piece.and_then(|piece| self.write_events(&piece)) {
            Ok(events) => events,
            Err(error) => {
                self.is_over = true;
                write_event(&error.to_json())
            }
        };
        Some(events.into())
    }

    fn write_events(&mut self, piece: &ChoicePiece) -> Result<String, CompletionApiError> {
        let (writer, mut events) = (&self.answer.writer, String::new());
        self.drawn += piece.drawn;
        if let Some(offset) = self.offsets.get_mut(piece.choice) {
            if offset.is_none() && writer.kind == ApiKind::Chat {
                events += &write_event(&writer.write_role(piece.choice));
            }
            events += &write_event(&writer.write_piece(piece, offset.get_or_insert(0))?);
        }
        self.open -= usize::from(piece.finish.is_some());
        if self.open == 0 {
            self.is_over = true;
            if self.answer.usage {
                events += &write_event(&writer.write_usage_event(self.drawn));
            }
            events += "data: [DONE]\n\n";
        }
        Ok(events)
    }
}

/// Fails if so many tokens, each with so many likely ones, are too much for an answer.
fn check_logprobs(tokens: usize, alternatives: usize) -> Result<(), CompletionApiError> {
    match tokens.saturating_mul(alternatives + 1) > LOGPROBS_MAX {
        true => Err(CompletionApiError::TooManyLogprobs),
        false => Ok(()),
    }
}

fn write_event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

#[cfg(test)]
mod tests {
    use engine::{MatrixDtype, load_model};
    use tokio::sync::mpsc;

    use super::*;
    use crate::batch::PieceToken;

    #[tokio::test]
    async fn an_answer_with_too_many_log_probabilities_is_not_collected() {
        let base = golden::small_set().model_path("qwen2-tiny");
        let (_, tokenizer) = load_model(&base, None, "cpu", MatrixDtype::F32).unwrap();
        let (sender, events) = mpsc::channel(1);
        let token = PieceToken { token: 1, logprob: Some(-1.0), alternatives: vec![(1, -1.0); 20] };
        let piece =
            ChoicePiece { tokens: vec![token; LOGPROBS_MAX / 20], ..ChoicePiece::default() };
        sender.send(ChoiceEvent::Piece(piece)).await.unwrap();
        let writer = AnswerWriter {
            kind: ApiKind::Text,
            id: String::new(),
            created: 0,
            model: String::new(),
            tokenizer: Arc::new(tokenizer),
            logprobs: true,
            echo: false,
            prompt_tokens: 0,
        };
        let answer = OpenAnswer { writer, events, choices: 1, stream: false, usage: false };
        let error = answer.collect_answer().await.unwrap_err();
        assert!(matches!(error, CompletionApiError::TooManyLogprobs), "{error}");
    }
}
