//! Sampling with the embedded engine: continuous batching over all pending calls. Each adapter
//! begins a new batch on the loaded base. Cached state is never shared between policies.

use std::path::Path;

use agent::{CallInbox, CallResponder, WorkerCall};
use anyhow::Context;
use engine::{
    BatchGenerator, CompletionExample, FinishReason, LanguageModel, LoraAdapter, ModelTokenizer,
    PromptInput, SampleCompletion, SamplingParameters, TokenizerError,
};
use wire::{derive_sample_seed, v1};

use super::{
    WorkerConfig,
    canary_cache::{self, CanaryCache},
    pending_calls::{DrawnSample, PendingCalls, SampleTag},
    token_record::TokenRecord,
    turn_prompt::{TurnLimits, TurnPrompt},
};
use crate::messages::{
    AdapterSwapRequest, GenerateProgress, GenerateRequest, GeneratorAnswer, GeneratorRequest,
    SampleToScore, ScoreRequest, ScoredSamples, order_longest_first,
};

/// If a model or adapter cannot be loaded, the first caller, or the one that requested the adapter,
/// receives the error, and the worker ends.
pub(super) fn serve_calls(config: &WorkerConfig, inbox: &CallInbox<GeneratorRequest>) {
    let failed = |error: &anyhow::Error, caller: Option<CallResponder>| {
        caller.iter().for_each(|caller| caller.send_error(&format!("{error:#}")));
    };
    let loaded = LoadedBase::load_base(config).and_then(|mut base| {
        let batch = base.new_batch(config.adapter.as_deref())?;
        Ok((base, batch))
    });
    let (mut base, mut batch) = match loaded {
        Ok(loaded) => loaded,
        Err(error) => return failed(&error, inbox.next().map(|call| call.responder)),
    };
    while let Some(WorkerCall { request: AdapterSwapRequest { adapter }, responder: respond }) =
        batch.serve_until_swap(inbox)
    {
        batch = match base.new_batch(adapter.as_deref()) {
            Ok(batch) => batch,
            Err(error) => return failed(&error, Some(respond)),
        };
        respond.send_reply(&GeneratorAnswer::Adopted);
    }
}

/// The parts of the model that stay loaded when the adapter changes.
struct LoadedBase<'a> {
    config: &'a WorkerConfig,
    tokenizer: ModelTokenizer,
    tokenizer_digest: String,
    /// `None` after an adapter was merged into the weights.
    model: Option<LanguageModel>,
}

impl<'a> LoadedBase<'a> {
    fn load_base(config: &'a WorkerConfig) -> anyhow::Result<Self> {
        let WorkerConfig { base, device, dtype, .. } = config;
        let (model, tokenizer) = engine::load_model(base, None, device, *dtype)?;
        let model = model.into_packed()?;
        Ok(Self {
            config,
            tokenizer,
            tokenizer_digest: canary_cache::digest_tokenizer(base)?,
            model: Some(model),
        })
    }

    /// Returns an empty batch that draws with an adapter. The caller must have dropped the previous
    /// batch. In f32 there is memory for one model, with the adapter merged into its weights, so
    /// the next adapter needs the weights read again. In other types it stays beside the weights.
    fn new_batch(&mut self, adapter: Option<&Path>) -> anyhow::Result<CandleBatch> {
        let WorkerConfig { base, device, dtype, slots, .. } = self.config;
        let mut model = match self.model.take() {
            Some(model) => model,
            None => engine::load_model(base, None, device, *dtype)?.0,
        };
        if adapter.is_none() || !dtype.merges_adapters() {
            self.model = Some(model.clone());
        }
        if let Some(path) = adapter {
            let adapter =
                LoraAdapter::load_peft(path, model.model_config()).context("load the adapter")?;
            model = model.into_adapted(&adapter).context("merge the adapter")?;
        }
        let calls =
            PendingCalls::new(model.engine_name(), String::new(), self.tokenizer_digest.clone());
        let generator = BatchGenerator::new(model, self.tokenizer.clone(), *slots);
        Ok(CandleBatch { generator, calls, canaries: CanaryCache::default() })
    }
}

/// The pending calls of one adapter, and the generator that draws their samples.
struct CandleBatch {
    generator: BatchGenerator<SampleTag>,
    calls: PendingCalls,
    canaries: CanaryCache,
}

impl CandleBatch {
    /// Serves calls until another adapter is requested, and returns that call. Returns `None` if no
    /// more calls will come or the engine failed.
    fn serve_until_swap(
        mut self,
        inbox: &CallInbox<GeneratorRequest>,
    ) -> Option<WorkerCall<AdapterSwapRequest>> {
        loop {
            let first = if self.calls.is_empty() { Some(inbox.next()?) } else { None };
            let waiting = std::iter::from_fn(|| inbox.try_next().ok());
            for WorkerCall { request, responder: respond } in first.into_iter().chain(waiting) {
                match request {
                    GeneratorRequest::Generate(request) => {
                        self.admit_call(WorkerCall { request, responder: respond });
                    }
                    GeneratorRequest::Score(request) => self.score_samples(&request, &respond),
                    GeneratorRequest::Adopt(request) if self.calls.is_empty() => {
                        return Some(WorkerCall { request, responder: respond });
                    }
                    GeneratorRequest::Adopt(_) => {
                        respond.send_error("another adapter is generating; retry when it is done");
                    }
                }
            }
            match self.generator.generate_step() {
                Ok(completions) => {
                    completions.into_iter().for_each(|done| self.take_completion(done));
                }
                Err(error) => {
                    self.calls.refuse_all(&format!("{error:#}"));
                    return None;
                }
            }
            self.calls.report_progress();
        }
    }

    fn admit_call(&mut self, call: WorkerCall<GenerateRequest>) {
        let Some((call, request)) = self.calls.open_call(call) else { return };
        if let Err(error) = self.score_canary(call) {
            return self.calls.refuse_call(call, &format!("{error:#}"));
        }
        let sampling = SamplingParameters {
            temperature: request.sampling.temperature,
            top_k: request.sampling.top_k as usize,
            top_p: request.sampling.top_p,
            max_new_tokens: request.sampling.max_new_tokens as usize,
        };
        for (index, wanted) in order_longest_first(request.requests) {
            let indices = wanted.first..wanted.first + wanted.count;
            let seeds =
                indices.map(|n| derive_sample_seed(request.seed, &wanted.prompt_id, n)).collect();
            let tag = SampleTag { call, request: index };
            let (mut sampling, mut prompt) = (sampling, PromptInput::Text(wanted.text));
            if let (Some(contexts), PromptInput::Text(text)) = (&request.contexts, &prompt) {
                let max_new_tokens = request.sampling.max_new_tokens;
                match self.encode_turn(tag, &contexts[index], text, max_new_tokens) {
                    Ok(Some(turn)) => {
                        sampling.max_new_tokens = turn.max_new_tokens as usize;
                        prompt = PromptInput::Tokens(turn.tokens);
                    }
                    Ok(None) => continue,
                    Err(error) => {
                        let message = format!("prompt {:?}: {error}", wanted.prompt_id);
                        return self.calls.refuse_call(call, &message);
                    }
                }
            }
            if let Err(error) =
                self.generator.admit_request(engine::PromptRequest { tag, prompt, seeds, sampling })
            {
                // Samples of this call that were admitted before are drawn and then dropped.
                let error = anyhow::Error::from(error);
                let message = format!("prompt {:?}: {error:#}", wanted.prompt_id);
                return self.calls.refuse_call(call, &message);
            }
        }
        self.calls.reply_if_complete(call);
    }

    /// Encodes the prompt of a turn and keeps its tokens for the reply. Returns `None` if there is
    /// no room for a token, so that the turn has no sample.
    fn encode_turn(
        &mut self,
        tag: SampleTag,
        context: &[u32],
        text: &str,
        max_new_tokens: u32,
    ) -> Result<Option<TurnPrompt>, TokenizerError> {
        let limits = TurnLimits { max_new_tokens, positions: self.generator.max_positions() };
        let turn = TurnPrompt::encode_turn(self.generator.tokenizer(), context, text, limits)?;
        match &turn {
            Some(turn) => self.calls.set_prompt(tag, turn.tokens.clone()),
            None => self.calls.skip_request(tag),
        }
        Ok(turn)
    }

    /// Scores with the weights that draw samples, while none are drawn.
    fn score_samples(&mut self, request: &ScoreRequest, caller: &CallResponder) {
        let (tokenizer, vocab_size) = (self.generator.tokenizer(), self.generator.vocab_size());
        let encode =
            |sample: &SampleToScore| sample.to_example(tokenizer, vocab_size, request.end_token);
        let examples: Vec<Option<CompletionExample>> = request.samples.iter().map(encode).collect();
        let known: Vec<CompletionExample> = examples.iter().flatten().cloned().collect();
        let calls = &mut self.calls;
        let scored = self.generator.score_completions(&known, |done, _| {
            let samples = u32::try_from(done).unwrap_or(u32::MAX);
            caller.send_progress(&GenerateProgress { samples });
            calls.report_progress();
        });
        match scored {
            Ok(scored) => {
                let is_finite = |list: &Vec<f64>| list.iter().all(|value| value.is_finite());
                let mut scored = scored.into_iter().map(|it| it.filter(is_finite));
                let mut next = || scored.next().flatten().unwrap_or_default();
                let of = |it: Option<CompletionExample>| it.map_or_else(Vec::new, |_| next());
                let logprobs = examples.into_iter().map(of).collect();
                let engine = self.calls.engine().to_owned();
                caller.send_reply(&GeneratorAnswer::Scored(ScoredSamples { engine, logprobs }));
            }
            Err(error) => caller.send_error(&format!("{:#}", anyhow::Error::from(error))),
        }
    }

    /// Uses the same weights that draw the call's samples.
    fn score_canary(&mut self, call: u64) -> anyhow::Result<()> {
        let Some(text) = self.calls.unscored_canary(call).map(str::to_owned) else { return Ok(()) };
        let canary = match self.canaries.get(&text) {
            Some(canary) => canary,
            None => {
                let canary = self.generator.score_canary(&text, wire::CANARY_TOKENS_MAX)?;
                self.canaries.remember_canary(&text, &canary);
                canary
            }
        };
        self.calls.set_canary(call, canary);
        Ok(())
    }

    fn take_completion(&mut self, done: SampleCompletion<SampleTag>) {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let finish = match done.finish {
            FinishReason::Stop => v1::samples::Finish::Stop,
            FinishReason::Length => v1::samples::Finish::Length,
        };
        let (nth, tokens) = (count(done.index), count(done.tokens.len()));
        let record = self.calls.records_tokens(done.tag.call).then(|| {
            let (tokenizer, end) = (self.generator.tokenizer(), self.generator.end_token());
            let spoken = (done.text.as_str(), finish);
            TokenRecord::new(tokenizer, end, spoken, &done.tokens, done.logprobs.clone())
        });
        let logprob = Some(done.logprob());
        let (text, ids) = (done.text, done.tokens);
        let drawn = DrawnSample { nth, text, tokens, finish, logprob, record, ids };
        self.calls.add_sample(done.tag, drawn);
    }
}

#[cfg(test)]
mod tests {
    use engine::MatrixDtype;

    use super::*;
    use crate::GeneratorBackend;

    #[test]
    fn an_adapter_leaves_nothing_behind_for_the_next() {
        let set = golden::small_set();
        let adapter = set.adapter_path("qwen2-r8-qv");
        for dtype in [MatrixDtype::F32, MatrixDtype::Bf16, MatrixDtype::Q8_0] {
            let config = WorkerConfig {
                backend: GeneratorBackend::Candle,
                base: set.model_path("qwen2-tiny"),
                base_key: String::new(),
                adapter: None,
                adapter_key: String::new(),
                slots: 1,
                device: "cpu".into(),
                dtype,
            };
            let mut base = LoadedBase::load_base(&config).unwrap();
            let mut thinks = |adapter: Option<&Path>| {
                let batch = base.new_batch(adapter).unwrap();
                batch.generator.score_canary("def main(files, limit):", 4).unwrap()
            };
            let (alone, adapted) = (thinks(None), thinks(Some(&adapter)));
            assert_ne!(alone, adapted);
            assert_eq!(thinks(None), alone);
            assert_eq!(thinks(Some(&adapter)), adapted);
            assert_eq!(thinks(Some(&adapter)), adapted);
        }
    }
}
