//! Batched generation with continuous batching: requests are admitted at any time, and each step
//! moves every running sample by one token.
//!
//! A sample depends only on its prompt, sampling parameters, seed and the weights, never on the
//! rest of the batch, the order or the threads.

mod kv_cache;
mod request;
mod sampler;
mod token_scores;

use crate::canary::{CanaryError, CanaryText};
use crate::completion_scores::score_completions;
use crate::model::LanguageModel;
use crate::ops::{host_f32, loss::row_nll, matmul::MatmulPhase, run_on_pool, run_vectorised};
use crate::perplexity::PerplexityError;
use crate::random::RandomStream;
use crate::sequence::{CompletionExample, check_vocabulary};
use crate::tokenizer::{ModelTokenizer, TokenizerError};
use candle_core::Tensor;
use kv_cache::{KvCache, RowOwner};
use rayon::prelude::*;
pub use request::{
    AdmitError, FinishReason, PromptInput, PromptRequest, RunningTokens, SampleCompletion,
    SamplingParameters,
};
use std::collections::VecDeque;
use std::sync::Arc;
pub use token_scores::{ScoreOptions, TokenScore};
use token_scores::{logits_on_cpu, score_prompt, score_token};

/// An error that ends a generation.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    #[error("could not turn a completion into text")]
    Tokenizer(#[from] TokenizerError),
    #[error("tensor operation failed during generation (X101)")]
    Tensor(#[from] candle_core::Error),
}

/// A model and the samples that run on it, in a fixed number of slots.
///
/// A request waits until slots are free. Its prompt is computed once (prefill); each sample starts
/// with a copy of the prompt's cache, takes a slot, and draws one token a step until it is
/// finished:
///
/// ```text
/// admit_request -> waiting -> prefill -> running (one token a step) -> finished
/// ```
///
/// The caller alternates `admit_request` and `generate_step` until `is_idle`. Between two steps,
/// `running_samples` shows the tokens so far, and `cancel_samples` ends samples early.
pub struct BatchGenerator<Tag> {
    model: LanguageModel,
    tokenizer: ModelTokenizer,
    /// At least 1.
    slots: usize,
    /// The requests with samples that have not started, in order of admission.
    waiting: VecDeque<WaitingRequest<Tag>>,
    running: Vec<RunningSample<Tag>>,
}

struct WaitingRequest<Tag> {
    request: PromptRequest<Tag>,
    scored: ScoreOptions,
    prompt: Vec<u32>,
    /// The number of samples that have started.
    started: usize,
    prefix: Option<PromptPrefix>,
}

/// The state that all samples of a prompt start from: its cache, and the logits after its last
/// token.
struct PromptPrefix {
    cache: KvCache,
    logits: Vec<f32>,
    scores: Arc<[TokenScore]>,
}

struct RunningSample<Tag> {
    tag: Tag,
    index: usize,
    seed: u64,
    random: RandomStream,
    sampling: SamplingParameters,
    prompt_tokens: usize,
    tokens: Vec<u32>,
    cache: KvCache,
    /// The log-probability of each token, in nats.
    logprobs: Vec<f64>,
    scored: ScoreOptions,
    /// Empty if none are wanted.
    alternatives: Vec<Vec<(u32, f64)>>,
    prompt_scores: Arc<[TokenScore]>,
    finish: Option<FinishReason>,
}

/// The largest number of rows of one prefill pass; a longer prompt has a pass of its own.
const PREFILL_TOKENS_MAX: usize = 2048;

impl<Tag: Clone + Send> BatchGenerator<Tag> {
    /// Creates a generator of `slots` sequences at once, at least 1. Apply an adapter to the model
    /// before, with `LanguageModel::with_adapter`.
    pub fn new(model: LanguageModel, tokenizer: ModelTokenizer, slots: usize) -> Self {
        let slots = slots.max(1);
        Self { model, tokenizer, slots, waiting: VecDeque::new(), running: Vec::new() }
    }

    /// Returns the tokenizer of the prompts and completions.
    pub fn tokenizer(&self) -> &ModelTokenizer {
        &self.tokenizer
    }

    /// Returns the token that a training adds to a finished text; `None` if the model has none.
    pub fn end_token(&self) -> Option<u32> {
        self.model.config.eos_tokens.first().copied()
    }

    /// Returns the number of samples that run or wait.
    pub fn open_samples(&self) -> usize {
        let waiting = |one: &WaitingRequest<Tag>| one.request.seeds.len() - one.started;
        self.running.len() + self.waiting.iter().map(waiting).sum::<usize>()
    }

    /// Yields the samples that are still drawn, with their tokens so far.
    pub fn running_samples(&self) -> impl Iterator<Item = RunningTokens<'_, Tag>> {
        self.running.iter().map(|sample| RunningTokens {
            tag: &sample.tag,
            index: sample.index,
            tokens: &sample.tokens,
            logprobs: &sample.logprobs,
            alternatives: &sample.alternatives,
            prompt_scores: &sample.prompt_scores,
        })
    }

    /// Drops the samples that `is_cancelled` names by the tag and index of each. A request that waits
    /// is dropped with all its samples if its next one is named.
    pub fn cancel_samples(&mut self, is_cancelled: impl Fn(&Tag, usize) -> bool) {
        self.running.retain(|sample| !is_cancelled(&sample.tag, sample.index));
        self.waiting.retain(|waiting| !is_cancelled(&waiting.request.tag, waiting.started));
    }

    /// Returns the log-probabilities of a canary text; see `CanaryText`.
    pub fn score_canary(&self, text: &str, most_scored: usize) -> Result<Vec<f32>, CanaryError> {
        CanaryText::from_text(&self.tokenizer, &self.model.config, text, most_scored)?
            .score_tokens(&self.model)
    }

    /// Returns the largest number of tokens of a prompt and its sample together, but for the sample's
    /// last one.
    pub fn max_positions(&self) -> usize {
        self.model.config.max_positions
    }

    /// Returns the number of tokens that the model knows.
    pub fn vocab_size(&self) -> usize {
        self.model.config.vocab_size
    }

    /// Returns the log-probabilities of given completions; see `score_completions`. `None` for an
    /// example of more tokens than the model's context.
    ///
    /// # Errors
    /// When an example cannot be tokenized, or a tensor operation fails.
    pub fn score_completions(
        &self,
        examples: &[CompletionExample],
        progress: impl FnMut(usize, usize),
    ) -> Result<Vec<Option<Vec<f64>>>, PerplexityError> {
        score_completions(&self.model, &self.tokenizer, examples, usize::MAX, progress)
    }

    /// Returns true if no sample is running or waiting.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Queues the samples of a request. They start in order of admission, as slots become free.
    pub fn admit_request(&mut self, request: PromptRequest<Tag>) -> Result<(), AdmitError> {
        self.admit_scored_request(request, ScoreOptions::default())
    }

    /// Like [`Self::admit_request`], with more log-probabilities.
    pub fn admit_scored_request(
        &mut self,
        request: PromptRequest<Tag>,
        scored: ScoreOptions,
    ) -> Result<(), AdmitError> {
        request.sampling.check_ranges()?;
        let prompt = match &request.prompt {
            PromptInput::Text(text) => self.tokenizer.encode_prompt(text)?,
            PromptInput::Tokens(tokens) => tokens.clone(),
        };
        check_vocabulary(&prompt, (&self.model.config).into())?;
        let (tokens, positions) = (prompt.len(), self.model.config.max_positions);
        match tokens {
            0 => Err(AdmitError::EmptyPrompt),
            _ if tokens > positions => Err(AdmitError::PromptTooLong { tokens, positions }),
            _ => {
                if !request.seeds.is_empty() {
                    let (started, prefix) = (0, None);
                    let waiting = WaitingRequest { request, scored, prompt, started, prefix };
                    self.waiting.push_back(waiting);
                }
                Ok(())
            }
        }
    }

    /// Moves every running sample by one token, starts the samples that fit, and returns the
    /// finished ones.
    pub fn generate_step(&mut self) -> Result<Vec<SampleCompletion<Tag>>, GenerateError> {
        self.advance_running()?;
        self.start_waiting()?;
        let mut completions = Vec::new();
        for sample in self.running.extract_if(.., |sample| sample.finish.is_some()) {
            completions.extend(sample.into_completion(&self.tokenizer)?);
        }
        Ok(completions)
    }

    fn advance_running(&mut self) -> Result<(), candle_core::Error> {
        if self.running.is_empty() {
            return Ok(());
        }
        let (mut tokens, mut owners) = (Vec::new(), Vec::new());
        for (index, sample) in self.running.iter().enumerate() {
            tokens.extend(sample.tokens.last());
            let position = sample.prompt_tokens + sample.tokens.len() - 1;
            owners.push(RowOwner { cache: index, position });
        }
        let mut caches: Vec<&mut KvCache> =
            self.running.iter_mut().map(|sample| &mut sample.cache).collect();
        let logits = run_on_pool(|| {
            let hidden =
                forward_rows(&self.model, MatmulPhase::Decode, &tokens, &owners, &mut caches)?;
            logits_on_cpu(&self.model, &hidden)
        })?;
        let (vocabulary, positions) = (logits.dim(1)?, self.model.config.max_positions);
        let eos = &self.model.config.eos_tokens;
        let logits = host_f32(&logits)?;
        let samples = self.running.par_iter_mut().zip(logits.par_chunks_exact(vocabulary));
        samples.for_each(|(sample, logits)| sample.draw_token(logits, eos, positions));
        Ok(())
    }

    /// Starts samples while slots are free; each draws a token from the logits of its prompt.
    fn start_waiting(&mut self) -> Result<(), candle_core::Error> {
        while self.running.len() < self.slots && !self.waiting.is_empty() {
            self.prefill_prompts()?;
            let positions = self.model.config.max_positions;
            while self.running.len() < self.slots {
                let Some(front) = self.waiting.front_mut() else { break };
                let Some(prefix) = &front.prefix else { break };
                let mut sample = front.start_sample(prefix);
                sample.draw_token(&prefix.logits, &self.model.config.eos_tokens, positions);
                self.running.push(sample);
                front.started += 1;
                if front.started == front.request.seeds.len() {
                    self.waiting.pop_front();
                }
            }
        }
        Ok(())
    }

    /// Computes in one pass the prompts that the free slots need, up to `PREFILL_TOKENS_MAX`
    /// tokens.
    fn prefill_prompts(&mut self) -> Result<(), candle_core::Error> {
        let mut free = self.slots - self.running.len();
        let (mut tokens, mut owners, mut lasts) = (Vec::new(), Vec::new(), Vec::new());
        let (mut chosen, mut scored) = (Vec::new(), Vec::new());
        for waiting in &mut self.waiting {
            let full =
                !tokens.is_empty() && tokens.len() + waiting.prompt.len() > PREFILL_TOKENS_MAX;
            if free == 0 || full {
                break;
            }
            free = free.saturating_sub(waiting.request.seeds.len() - waiting.started);
            if waiting.prefix.is_some() {
                continue;
            }
            let cache = chosen.len();
            owners.extend((0..waiting.prompt.len()).map(|position| RowOwner { cache, position }));
            tokens.extend_from_slice(&waiting.prompt);
            lasts.push(tokens.len() as u32 - 1);
            scored.push((tokens.len() - waiting.prompt.len()..tokens.len(), waiting.scored));
            chosen.push((waiting, KvCache::new(self.model.config.layers)));
        }
        if chosen.is_empty() {
            return Ok(());
        }
        let mut caches: Vec<&mut KvCache> = chosen.iter_mut().map(|(_, cache)| cache).collect();
        let (logits, scores) = run_on_pool(|| {
            let hidden =
                forward_rows(&self.model, MatmulPhase::Prefill, &tokens, &owners, &mut caches)?;
            let scores = scored.into_iter().map(|(rows, wanted)| match wanted.prompt {
                true => {
                    let prompt = &tokens[rows.clone()];
                    score_prompt(&self.model, &hidden, rows, prompt, wanted.alternatives)
                }
                false => Ok(Vec::new()),
            });
            let scores = scores.collect::<candle_core::Result<Vec<_>>>()?;
            let lasts = Tensor::new(lasts, &self.model.device)?;
            let logits = logits_on_cpu(&self.model, &hidden.index_select(&lasts, 0)?)?;
            candle_core::Result::Ok((logits, scores))
        })?;
        let computed = logits.to_vec2()?.into_iter().zip(scores);
        for ((waiting, cache), (logits, scores)) in chosen.into_iter().zip(computed) {
            waiting.prefix = Some(PromptPrefix { cache, logits, scores: scores.into() });
        }
        Ok(())
    }
}

impl<Tag: Clone> WaitingRequest<Tag> {
    fn start_sample(&self, prefix: &PromptPrefix) -> RunningSample<Tag> {
        let seed = self.request.seeds[self.started];
        RunningSample {
            tag: self.request.tag.clone(),
            index: self.started,
            seed,
            random: RandomStream::new(seed),
            sampling: self.request.sampling,
            prompt_tokens: self.prompt.len(),
            tokens: Vec::new(),
            cache: prefix.cache.clone(),
            logprobs: Vec::new(),
            scored: self.scored,
            alternatives: Vec::new(),
            prompt_scores: prefix.scores.clone(),
            finish: None,
        }
    }
}

impl<Tag> RunningSample<Tag> {
    /// Returns `None` while the sample runs.
    fn into_completion(
        self,
        tokenizer: &ModelTokenizer,
    ) -> Result<Option<SampleCompletion<Tag>>, TokenizerError> {
        let Self { tag, index, seed, prompt_tokens, tokens, logprobs, finish, .. } = self;
        let Self { alternatives, prompt_scores, .. } = self;
        let Some(finish) = finish else { return Ok(None) };
        let spoken = match finish {
            FinishReason::Stop => &tokens[..tokens.len() - 1],
            FinishReason::Length => &tokens[..],
        };
        let text = tokenizer.decode_tokens(spoken)?;
        Ok(Some(SampleCompletion {
            tag,
            index,
            seed,
            prompt_tokens,
            tokens,
            text,
            finish,
            logprobs,
            alternatives,
            prompt_scores,
        }))
    }

    /// Ends the sample at an end token (`eos`), at its largest length or at the model's last
    /// position.
    fn draw_token(&mut self, logits: &[f32], eos: &[u32], positions: usize) {
        let token = sampler::draw_token(logits, &self.sampling, &mut self.random);
        if self.scored.alternatives == 0 {
            let loss = run_vectorised(
                #[inline(always)]
                || row_nll(logits, token as usize),
            );
            self.logprobs.push(-loss);
        } else {
            let scored = score_token(logits, token, self.scored.alternatives);
            self.logprobs.push(scored.logprob);
            self.alternatives.push(scored.alternatives);
        }
        self.tokens.push(token);
        // The token just drawn would be fed at position prompt + tokens - 1.
        let full = self.prompt_tokens + self.tokens.len() > positions;
        if eos.contains(&token) {
            self.finish = Some(FinishReason::Stop);
        } else if full || self.tokens.len() >= self.sampling.max_new_tokens {
            self.finish = Some(FinishReason::Length);
        }
    }
}

/// Computes the hidden states of tokens, each the next one of its owner's sequence.
fn forward_rows(
    model: &LanguageModel,
    phase: MatmulPhase,
    tokens: &[u32],
    owners: &[RowOwner],
    caches: &mut [&mut KvCache],
) -> candle_core::Result<Tensor> {
    let positions: Vec<u32> = owners.iter().map(|owner| owner.position as u32).collect();
    let heads = model.head_shape();
    let mut attend = |layer, query: &Tensor, key: &Tensor, value: &Tensor| {
        kv_cache::attend_cached(&heads, layer, [query, key, value], owners, caches)
    };
    model.hidden_states(phase, tokens, &positions, &mut attend)
}

/// The completions of a request, or the reason why it was rejected.
pub type RequestResult<Tag> = Result<Vec<SampleCompletion<Tag>>, AdmitError>;

/// Runs all requests. Returns one result a request, in their order, with completions by the index
/// of their seed. `progress` is called with (finished samples, all samples).
pub fn generate_all<Tag: Clone + Send>(
    model: &LanguageModel,
    tokenizer: &ModelTokenizer,
    slots: usize,
    requests: Vec<PromptRequest<Tag>>,
    mut progress: impl FnMut(usize, usize),
) -> Result<Vec<RequestResult<Tag>>, GenerateError> {
    let mut generator = BatchGenerator::new(model.clone(), tokenizer.clone(), slots);
    let (mut total, mut done) = (0, 0);
    let mut results = Vec::with_capacity(requests.len());
    for (index, request) in requests.into_iter().enumerate() {
        let PromptRequest { tag, prompt, seeds, sampling } = request;
        let samples = seeds.len();
        let request = PromptRequest { tag: (index, tag), prompt, seeds, sampling };
        results.push(generator.admit_request(request).map(|()| Vec::with_capacity(samples)));
        if results.last().is_some_and(Result::is_ok) {
            total += samples;
        }
    }
    while !generator.is_idle() {
        for completion in generator.generate_step()? {
            done += 1;
            let (request, tag) = completion.tag.clone();
            if let Ok(completions) = &mut results[request] {
                completions.push(completion.with_tag(tag));
            }
        }
        progress(done, total);
    }
    for completions in results.iter_mut().flatten() {
        completions.sort_by_key(|completion| completion.index);
    }
    Ok(results)
}
