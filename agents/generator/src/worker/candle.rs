//! Drawing samples with the embedded engine: continuous batching over all calls at hand.
//!
//! Another adapter begins a batch of its own, on the base that is loaded: nothing that was computed
//! with the one before is kept.

use std::path::Path;

use anyhow::Context;
use engine::{Adapter, Completion, Dtype, Finish, Generator, Model, Prompt, Sampling, Tokenizer};
use runtime::{Call, Inbox, Responder};
use wire::{sample_seed, v1};

use super::{
    WorkerConfig,
    canary::{self, Canaries},
    open::{Drawn, OpenCalls, Tag},
};
use crate::calls::{Adopt, Answer, Generate, Request, longest_first};

/// Serves calls until the agent closes the pipe. A model that cannot be loaded is told to
/// the first caller, or to whoever asked for its adapter, and is the worker's end.
pub(super) fn serve(config: &WorkerConfig, inbox: &Inbox<Request>) {
    let failed = |error: &anyhow::Error, caller: Option<Responder>| {
        caller.iter().for_each(|caller| caller.error(&format!("{error:#}")));
    };
    let loaded = Base::load(config).and_then(|mut base| {
        let batch = base.batch(config.adapter.as_deref())?;
        Ok((base, batch))
    });
    let (mut base, mut batch) = match loaded {
        Ok(loaded) => loaded,
        Err(error) => return failed(&error, inbox.next().map(|call| call.respond)),
    };
    while let Some(Call { request: Adopt { adapter }, respond }) = batch.serve(inbox) {
        batch = match base.batch(adapter.as_deref()) {
            Ok(batch) => batch,
            Err(error) => return failed(&error, Some(respond)),
        };
        respond.reply(&Answer::Adopted);
    }
}

/// What stays loaded, whichever adapter draws.
struct Base<'a> {
    config: &'a WorkerConfig,
    tokenizer: Tokenizer,
    /// Of its tokenizer.
    digest: String,
    /// None: an adapter was merged into it.
    model: Option<Model>,
}

impl<'a> Base<'a> {
    fn load(config: &'a WorkerConfig) -> anyhow::Result<Self> {
        let WorkerConfig { base, device, dtype, .. } = config;
        let (model, tokenizer) = engine::load(base, None, device, *dtype)?;
        Ok(Self { config, tokenizer, digest: canary::tokenizer(base)?, model: Some(model) })
    }

    /// An empty batch that draws with an adapter. Whoever had one dropped it before: in f32 there
    /// is memory for one model, with the adapter in its weights, so that the next adapter needs
    /// them read again; in bf16 an adapter stays beside the weights.
    fn batch(&mut self, adapter: Option<&Path>) -> anyhow::Result<Batch> {
        let WorkerConfig { base, device, dtype, slots, .. } = self.config;
        let mut model = match self.model.take() {
            Some(model) => model,
            None => engine::load(base, None, device, *dtype)?.0,
        };
        if adapter.is_none() || *dtype == Dtype::Bf16 {
            self.model = Some(model.clone());
        }
        if let Some(path) = adapter {
            let adapter = Adapter::load(path, model.config()).context("load the adapter")?;
            model = model.adapted(&adapter).context("merge the adapter")?;
        }
        let calls = OpenCalls::new(model.engine(), String::new(), self.digest.clone());
        let generator = Generator::new(model, self.tokenizer.clone(), *slots);
        Ok(Batch { generator, calls, canaries: Canaries::default() })
    }
}

struct Batch {
    generator: Generator<Tag>,
    calls: OpenCalls,
    canaries: Canaries,
}

impl Batch {
    /// Until another adapter is to draw; `None` when there will be no more calls.
    fn serve(mut self, inbox: &Inbox<Request>) -> Option<Call<Adopt>> {
        loop {
            let first = if self.calls.is_empty() { Some(inbox.next()?) } else { None };
            let waiting = std::iter::from_fn(|| inbox.try_next().ok());
            for Call { request, respond } in first.into_iter().chain(waiting) {
                match request {
                    Request::Generate(request) => self.admit(Call { request, respond }),
                    Request::Adopt(request) if self.calls.is_empty() => {
                        return Some(Call { request, respond });
                    }
                    Request::Adopt(_) => respond.error("another adapter is drawing just now"),
                }
            }
            match self.generator.step() {
                Ok(completions) => completions.into_iter().for_each(|done| self.take(done)),
                Err(error) => {
                    self.calls.refuse_all(&format!("{error:#}"));
                    return None;
                }
            }
            self.calls.tell();
        }
    }

    fn admit(&mut self, call: Call<Generate>) {
        let Some((call, request)) = self.calls.open(call) else { return };
        if let Err(error) = self.score(call) {
            return self.calls.refuse(call, &format!("{error:#}"));
        }
        let sampling = Sampling {
            temperature: request.sampling.temperature,
            top_k: request.sampling.top_k as usize,
            top_p: request.sampling.top_p,
            max_new_tokens: request.sampling.max_new_tokens as usize,
        };
        for (index, wanted) in longest_first(request.requests) {
            let indices = wanted.first..wanted.first + wanted.count;
            let seeds = indices.map(|n| sample_seed(request.seed, &wanted.prompt_id, n)).collect();
            let prompt = Prompt::Text(wanted.text);
            let tag = Tag { call, request: index };
            if let Err(error) =
                self.generator.admit(engine::Request { tag, prompt, seeds, sampling })
            {
                // What of this call was admitted before runs on and is dropped when done.
                let error = anyhow::Error::from(error);
                let message = format!("prompt {:?}: {error:#}", wanted.prompt_id);
                return self.calls.refuse(call, &message);
            }
        }
        self.calls.settle(call);
    }

    /// With the very weights that draw.
    fn score(&mut self, call: u64) -> anyhow::Result<()> {
        let Some(text) = self.calls.asks(call).map(str::to_owned) else { return Ok(()) };
        let canary = match self.canaries.get(&text) {
            Some(canary) => canary,
            None => {
                let canary = self.generator.canary(&text, wire::CANARY_TOKENS)?;
                self.canaries.learn(&text, &canary);
                canary
            }
        };
        self.calls.show(call, canary);
        Ok(())
    }

    fn take(&mut self, done: Completion<Tag>) {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let finish = match done.finish {
            Finish::Stop => v1::samples::Finish::Stop,
            Finish::Length => v1::samples::Finish::Length,
        };
        let (nth, tokens) = (count(done.index), count(done.tokens.len()));
        let logprob = Some(done.logprob);
        self.calls.take(done.tag, Drawn { nth, text: done.text, tokens, finish, logprob });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backend;

    #[test]
    fn an_adapter_leaves_nothing_behind_for_the_next() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/golden");
        if !root.exists() {
            println!("skipped: {} is absent", root.display());
            return;
        }
        let adapter = root.join("peft/qwen2-r8-qv");
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let config = WorkerConfig {
                backend: Backend::Candle,
                base: root.join("hf/qwen2-tiny"),
                base_key: String::new(),
                adapter: None,
                adapter_key: String::new(),
                slots: 1,
                device: "cpu".into(),
                dtype,
            };
            let mut base = Base::load(&config).unwrap();
            let mut thinks = |adapter: Option<&Path>| {
                let batch = base.batch(adapter).unwrap();
                batch.generator.canary("def main(files, limit):", 4).unwrap()
            };
            let (alone, adapted) = (thinks(None), thinks(Some(&adapter)));
            assert_ne!(alone, adapted);
            assert_eq!(thinks(None), alone);
            assert_eq!(thinks(Some(&adapter)), adapted);
            assert_eq!(thinks(Some(&adapter)), adapted);
        }
    }
}
