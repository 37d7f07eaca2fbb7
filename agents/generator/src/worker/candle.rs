//! Drawing samples with the embedded engine: continuous batching over all calls at hand.

use engine::{Completion, Finish, Generator, Prompt, Request, Sampling};
use runtime::{Call, Inbox};
use wire::{sample_seed, v1};

use super::{
    WorkerConfig,
    canary::{self, Canaries},
    open::{Drawn, OpenCalls, Tag},
};
use crate::calls::Generate;

/// Serves calls until the agent closes the pipe. A model that cannot be loaded is told to
/// the first caller, and is the worker's end.
pub(super) fn serve(config: &WorkerConfig, inbox: &Inbox<Generate>) {
    let WorkerConfig { base, adapter, device, dtype, .. } = config;
    let loaded = engine::load(base, adapter.as_deref(), device, *dtype);
    let loaded = loaded.map_err(anyhow::Error::from);
    match loaded.and_then(|loaded| Ok((loaded, canary::tokenizer(base)?))) {
        Ok(((model, tokenizer), digest)) => {
            let calls = OpenCalls::new(model.engine(), String::new(), digest);
            let generator = Generator::new(model, tokenizer, config.slots);
            Batch { generator, calls, canaries: Canaries::default() }.serve(inbox);
        }
        Err(error) => {
            if let Some(call) = inbox.next() {
                call.respond.error(&format!("{error:#}"));
            }
        }
    }
}

struct Batch {
    generator: Generator<Tag>,
    calls: OpenCalls,
    canaries: Canaries,
}

impl Batch {
    fn serve(mut self, inbox: &Inbox<Generate>) {
        loop {
            if self.calls.is_empty() {
                match inbox.next() {
                    Some(call) => self.admit(call),
                    None => return,
                }
            }
            while let Ok(call) = inbox.try_next() {
                self.admit(call);
            }
            match self.generator.step() {
                Ok(completions) => completions.into_iter().for_each(|done| self.take(done)),
                Err(error) => return self.calls.refuse_all(&format!("{error:#}")),
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
        for (index, wanted) in request.requests.into_iter().enumerate() {
            let indices = wanted.first..wanted.first + wanted.count;
            let seeds = indices.map(|n| sample_seed(request.seed, &wanted.prompt_id, n)).collect();
            let prompt = Prompt::Text(wanted.text);
            let tag = Tag { call, request: index };
            if let Err(error) = self.generator.admit(Request { tag, prompt, seeds, sampling }) {
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
