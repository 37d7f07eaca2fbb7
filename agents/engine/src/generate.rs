//! Batched generation with continuous batching: requests are admitted at any time, `step` moves
//! every running sample by one token. A sample depends on its prompt, sampling parameters, seed
//! and the weights only: never on what else is in the batch, on the order or on the threads.

mod cache;
mod request;
mod sampler;

use crate::canary::{Canary, CanaryError};
use crate::model::Model;
use crate::ops::{host, loss::row_nll, matmul::Phase, on_pool, wide};
use crate::random::Random;
use crate::sequence::check_vocabulary;
use crate::tokenizer::{Tokenizer, TokenizerError};
use cache::{Cache, Owner};
use candle_core::{Device, Tensor};
use rayon::prelude::*;
pub use request::{AdmitError, Completion, Finish, Prompt, Request, Sampling};
use std::collections::VecDeque;

#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    #[error("could not turn a completion into text")]
    Tokenizer(#[from] TokenizerError),
    #[error("tensor operation failed during generation (X101)")]
    Tensor(#[from] candle_core::Error),
}

/// Owns the model and everything that is running on it.
pub struct Generator<Tag> {
    model: Model,
    tokenizer: Tokenizer,
    slots: usize,
    waiting: VecDeque<Waiting<Tag>>,
    running: Vec<Running<Tag>>,
}

/// A request some of whose samples have not started.
struct Waiting<Tag> {
    request: Request<Tag>,
    prompt: Vec<u32>,
    started: usize,
    prefix: Option<Prefix>,
}

/// What the samples of a prompt share: its cache and the logits after its last token.
struct Prefix {
    cache: Cache,
    logits: Vec<f32>,
}

struct Running<Tag> {
    tag: Tag,
    index: usize,
    seed: u64,
    random: Random,
    sampling: Sampling,
    prompt_tokens: usize,
    tokens: Vec<u32>,
    cache: Cache,
    logprob: f64,
    finish: Option<Finish>,
}

/// Bounds the rows of one prefill pass (a longer prompt goes alone).
const PREFILL_TOKENS: usize = 2048;

impl<Tag: Clone + Send> Generator<Tag> {
    /// `slots` sequences run at once. Merge an adapter first: [`Model::with_adapter`].
    pub fn new(model: Model, tokenizer: Tokenizer, slots: usize) -> Self {
        let slots = slots.max(1);
        Self { model, tokenizer, slots, waiting: VecDeque::new(), running: Vec::new() }
    }

    /// Slots that neither a running nor a waiting sample will take.
    pub fn free_slots(&self) -> usize {
        let waiting = |one: &Waiting<Tag>| one.request.seeds.len() - one.started;
        let taken = self.running.len() + self.waiting.iter().map(waiting).sum::<usize>();
        self.slots.saturating_sub(taken)
    }

    /// What the model thinks of a text: see [`Canary`].
    ///
    /// # Errors
    /// When the text is not the model's, or the model cannot be computed.
    pub fn canary(&self, text: &str, most_scored: usize) -> Result<Vec<f32>, CanaryError> {
        Canary::read(&self.tokenizer, &self.model.config, text, most_scored)?.score(&self.model)
    }

    /// Nothing is running or waiting.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Queues the request's samples; they start, first come first served, as slots become free.
    pub fn admit(&mut self, request: Request<Tag>) -> Result<(), AdmitError> {
        request.sampling.check()?;
        let prompt = match &request.prompt {
            Prompt::Text(text) => self.tokenizer.encode(text)?,
            Prompt::Tokens(tokens) => tokens.clone(),
        };
        check_vocabulary(&prompt, &self.model.config)?;
        let (tokens, positions) = (prompt.len(), self.model.config.max_positions);
        match tokens {
            0 => Err(AdmitError::EmptyPrompt),
            _ if tokens > positions => Err(AdmitError::PromptTooLong { tokens, positions }),
            _ => {
                if !request.seeds.is_empty() {
                    let waiting = Waiting { request, prompt, started: 0, prefix: None };
                    self.waiting.push_back(waiting);
                }
                Ok(())
            }
        }
    }

    /// Moves every running sample by one token, starts what fits, returns what finished.
    pub fn step(&mut self) -> Result<Vec<Completion<Tag>>, GenerateError> {
        self.advance()?;
        self.start()?;
        let mut completions = Vec::new();
        for sample in self.running.extract_if(.., |sample| sample.finish.is_some()) {
            completions.extend(sample.completion(&self.tokenizer)?);
        }
        Ok(completions)
    }

    fn advance(&mut self) -> Result<(), candle_core::Error> {
        if self.running.is_empty() {
            return Ok(());
        }
        let (mut tokens, mut owners) = (Vec::new(), Vec::new());
        for (index, sample) in self.running.iter().enumerate() {
            tokens.extend(sample.tokens.last());
            let position = sample.prompt_tokens + sample.tokens.len() - 1;
            owners.push(Owner { cache: index, position });
        }
        let mut caches: Vec<&mut Cache> =
            self.running.iter_mut().map(|sample| &mut sample.cache).collect();
        let logits = on_pool(|| {
            let hidden = forward(&self.model, Phase::Decode, &tokens, &owners, &mut caches)?;
            logits(&self.model, &hidden)
        })?;
        let (vocabulary, positions) = (logits.dim(1)?, self.model.config.max_positions);
        let eos = &self.model.config.eos_tokens;
        let logits = host(&logits)?;
        let samples = self.running.par_iter_mut().zip(logits.par_chunks_exact(vocabulary));
        samples.for_each(|(sample, logits)| sample.draw(logits, eos, positions));
        Ok(())
    }

    fn start(&mut self) -> Result<(), candle_core::Error> {
        while self.running.len() < self.slots && !self.waiting.is_empty() {
            self.prefill()?;
            let positions = self.model.config.max_positions;
            while self.running.len() < self.slots {
                let Some(front) = self.waiting.front_mut() else { break };
                let Some(prefix) = &front.prefix else { break };
                let mut sample = front.sample(prefix);
                sample.draw(&prefix.logits, &self.model.config.eos_tokens, positions);
                self.running.push(sample);
                front.started += 1;
                if front.started == front.request.seeds.len() {
                    self.waiting.pop_front();
                }
            }
        }
        Ok(())
    }

    /// Runs the prompts at the front of the queue that the free slots will need, in one pass.
    fn prefill(&mut self) -> Result<(), candle_core::Error> {
        let mut free = self.slots - self.running.len();
        let (mut tokens, mut owners, mut lasts) = (Vec::new(), Vec::new(), Vec::new());
        let mut chosen = Vec::new();
        for waiting in &mut self.waiting {
            let full = !tokens.is_empty() && tokens.len() + waiting.prompt.len() > PREFILL_TOKENS;
            if free == 0 || full {
                break;
            }
            free = free.saturating_sub(waiting.request.seeds.len() - waiting.started);
            if waiting.prefix.is_some() {
                continue;
            }
            let cache = chosen.len();
            owners.extend((0..waiting.prompt.len()).map(|position| Owner { cache, position }));
            tokens.extend_from_slice(&waiting.prompt);
            lasts.push(tokens.len() as u32 - 1);
            chosen.push((waiting, Cache::new(self.model.config.layers)));
        }
        if chosen.is_empty() {
            return Ok(());
        }
        let mut caches: Vec<&mut Cache> = chosen.iter_mut().map(|(_, cache)| cache).collect();
        let logits = on_pool(|| {
            let hidden = forward(&self.model, Phase::Prefill, &tokens, &owners, &mut caches)?;
            let lasts = Tensor::new(lasts, &self.model.device)?;
            logits(&self.model, &hidden.index_select(&lasts, 0)?)
        })?;
        for ((waiting, cache), logits) in chosen.into_iter().zip(logits.to_vec2()?) {
            waiting.prefix = Some(Prefix { cache, logits });
        }
        Ok(())
    }
}

impl<Tag: Clone> Waiting<Tag> {
    fn sample(&self, prefix: &Prefix) -> Running<Tag> {
        let seed = self.request.seeds[self.started];
        Running {
            tag: self.request.tag.clone(),
            index: self.started,
            seed,
            random: Random::new(seed),
            sampling: self.request.sampling,
            prompt_tokens: self.prompt.len(),
            tokens: Vec::new(),
            cache: prefix.cache.clone(),
            logprob: 0.0,
            finish: None,
        }
    }
}

impl<Tag> Running<Tag> {
    /// `None` while it is running.
    fn completion(self, tokenizer: &Tokenizer) -> Result<Option<Completion<Tag>>, TokenizerError> {
        let Self { tag, index, seed, prompt_tokens, tokens, logprob, finish, .. } = self;
        let Some(finish) = finish else { return Ok(None) };
        let spoken = match finish {
            Finish::Stop => &tokens[..tokens.len() - 1],
            Finish::Length => &tokens[..],
        };
        let text = tokenizer.decode(spoken)?;
        Ok(Some(Completion { tag, index, seed, prompt_tokens, tokens, text, finish, logprob }))
    }

    fn draw(&mut self, logits: &[f32], eos: &[u32], positions: usize) {
        let token = sampler::draw(logits, &self.sampling, &mut self.random);
        self.logprob -= wide(
            #[inline(always)]
            || row_nll(logits, token as usize),
        );
        self.tokens.push(token);
        // The token just drawn would be fed at position prompt + tokens - 1.
        let full = self.prompt_tokens + self.tokens.len() > positions;
        if eos.contains(&token) {
            self.finish = Some(Finish::Stop);
        } else if full || self.tokens.len() >= self.sampling.max_new_tokens {
            self.finish = Some(Finish::Length);
        }
    }
}

/// Hidden states of the tokens, each the next of its owner's.
fn forward(
    model: &Model,
    phase: Phase,
    tokens: &[u32],
    owners: &[Owner],
    caches: &mut [&mut Cache],
) -> candle_core::Result<Tensor> {
    let positions: Vec<u32> = owners.iter().map(|owner| owner.position as u32).collect();
    let heads = model.heads();
    let mut attend = |layer, query: &Tensor, key: &Tensor, value: &Tensor| {
        cache::attend(&heads, layer, [query, key, value], owners, caches)
    };
    model.hidden(phase, tokens, &positions, &mut attend)
}

/// In main memory.
fn logits(model: &Model, hidden: &Tensor) -> candle_core::Result<Tensor> {
    model.logits(hidden)?.to_device(&Device::Cpu)?.contiguous()
}

/// What became of one request.
pub type Answer<Tag> = Result<Vec<Completion<Tag>>, AdmitError>;

/// Runs all requests. One result a request, in their order, completions by seed index; `progress`
/// hears (samples done, samples in all).
pub fn generate_all<Tag: Clone + Send>(
    model: &Model,
    tokenizer: &Tokenizer,
    slots: usize,
    requests: Vec<Request<Tag>>,
    mut progress: impl FnMut(usize, usize),
) -> Result<Vec<Answer<Tag>>, GenerateError> {
    let mut generator = Generator::new(model.clone(), tokenizer.clone(), slots);
    let (mut total, mut done) = (0, 0);
    let mut results = Vec::with_capacity(requests.len());
    for (index, request) in requests.into_iter().enumerate() {
        let Request { tag, prompt, seeds, sampling } = request;
        let samples = seeds.len();
        let request = Request { tag: (index, tag), prompt, seeds, sampling };
        results.push(generator.admit(request).map(|()| Vec::with_capacity(samples)));
        if results.last().is_some_and(Result::is_ok) {
            total += samples;
        }
    }
    while !generator.is_idle() {
        for completion in generator.step()? {
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
