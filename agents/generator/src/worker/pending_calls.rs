//! The pending calls, each assembled sample by sample, independent of the engine.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use agent::{CallResponder, WorkerCall};
use wire::{encode_logprobs, v1};

use super::token_record::TokenRecord;
use crate::messages::{
    GenerateProgress, GenerateRequest, GeneratedSamples, GeneratorAnswer, count_samples,
};

const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// The call and the request that a sample belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SampleTag {
    pub call: u64,
    pub request: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct DrawnSample {
    pub nth: u32,
    pub text: String,
    pub tokens: u32,
    pub finish: v1::samples::Finish,
    /// The value of a samples fact; `None` if the engine does not report it.
    pub logprob: Option<f64>,
    /// `None` if it was not requested, or the engine does not report log-probabilities.
    pub record: Option<TokenRecord>,
    /// All drawn tokens; empty if the engine does not report them.
    pub ids: Vec<u32>,
}

/// The pending calls by number, and the description of what draws their samples.
pub(super) struct PendingCalls {
    calls: BTreeMap<u64, PendingCall>,
    next_number: u64,
    engine: String,
    caveat: String,
    tokenizer: String,
}

struct PendingCall {
    responder: CallResponder,
    requests: Vec<v1::generate_order::Request>,
    samples: Vec<v1::samples::Sample>,
    total: usize,
    reported_at: Instant,
    canary_text: String,
    canary: Option<Vec<f32>>,
    token_logprobs: bool,
    /// The tokens of the prompt of each request, if they are turns of episodes.
    prompts: Option<Vec<Vec<u32>>>,
}

/// The reason why a call for turns of episodes is refused.
const TOKENS_MISSING: &str = "the server reports no tokens, which episodes need; use a newer \
                              llama.cpp, or the embedded engine (E102)";

impl PendingCalls {
    /// The arguments describe what draws the samples: the engine, the reason why its policy cannot
    /// be verified, and the digest of its tokenizer.
    pub(super) fn new(engine: String, caveat: String, tokenizer: String) -> Self {
        Self { calls: BTreeMap::new(), next_number: 0, engine, caveat, tokenizer }
    }

    /// Describes what draws the samples.
    pub(super) fn engine(&self) -> &str {
        &self.engine
    }

    pub(super) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    pub(super) fn contains(&self, call: u64) -> bool {
        self.calls.contains_key(&call)
    }

    /// Refuses a call for more samples than an order may request, or for turns that do not fit
    /// their contexts, and returns `None`.
    pub(super) fn open_call(
        &mut self,
        call: WorkerCall<GenerateRequest>,
    ) -> Option<(u64, GenerateRequest)> {
        let WorkerCall { request, responder: respond } = call;
        let total = match count_samples(&request.requests) {
            Ok(total) => total as usize,
            Err(why) => {
                respond.send_error(&why);
                return None;
            }
        };
        let turns = request.contexts.as_ref().map(Vec::len);
        if turns.is_some_and(|turns| turns != request.requests.len()) {
            respond.send_error("not each request of an episode has its context (E111)");
            return None;
        }
        let prompts = turns.map(|turns| vec![Vec::new(); turns]);
        let number = self.next_number;
        self.next_number += 1;
        let requests = request.requests.clone();
        let samples = Vec::with_capacity(total);
        let asked = request.canary.clone();
        let token_logprobs = request.token_logprobs;
        let (reported_at, canary) = (Instant::now(), None);
        let open = PendingCall {
            responder: respond,
            requests,
            samples,
            total,
            reported_at,
            canary_text: asked,
            canary,
            token_logprobs,
            prompts,
        };
        self.calls.insert(number, open);
        Some((number, request))
    }

    /// Replies with the samples in the order of the requests.
    pub(super) fn reply_if_complete(&mut self, call: u64) {
        if self.calls.get(&call).is_none_or(|open| open.samples.len() < open.total) {
            return;
        }
        if let Some(PendingCall {
            responder: respond,
            mut samples,
            requests,
            canary,
            prompts,
            ..
        }) = self.calls.remove(&call)
        {
            let place = |id: &str| requests.iter().position(|request| request.prompt_id == id);
            samples.sort_by_cached_key(|sample| (place(&sample.prompt_id), sample.index));
            respond.send_reply(&GeneratorAnswer::Generated(GeneratedSamples {
                samples,
                engine: self.engine.clone(),
                caveat: self.caveat.clone(),
                tokenizer: self.tokenizer.clone(),
                canary: canary.unwrap_or_default(),
                prompts: prompts.unwrap_or_default(),
            }));
        }
    }

    /// A sample of a call that was refused meanwhile is dropped.
    pub(super) fn add_sample(&mut self, tag: SampleTag, drawn: DrawnSample) {
        let Some(open) = self.calls.get_mut(&tag.call) else { return };
        let request = &open.requests[tag.request];
        let record = drawn.record.unwrap_or_default();
        let is_turn = open.prompts.is_some();
        if is_turn && drawn.ids.is_empty() {
            return self.refuse_call(tag.call, TOKENS_MISSING);
        }
        open.samples.push(v1::samples::Sample {
            prompt_id: request.prompt_id.clone(),
            index: request.first.saturating_add(drawn.nth),
            text: drawn.text,
            tokens: drawn.tokens,
            finish: drawn.finish.into(),
            logprob: drawn.logprob,
            token_logprobs: encode_logprobs(&record.logprobs),
            token_ids: if is_turn { drawn.ids } else { record.ids },
            turns: Vec::new(),
        });
        self.reply_if_complete(tag.call);
    }

    /// Keeps the tokens of a turn's prompt for the reply.
    pub(super) fn set_prompt(&mut self, tag: SampleTag, tokens: Vec<u32>) {
        let prompts = self.calls.get_mut(&tag.call).and_then(|open| open.prompts.as_mut());
        if let Some(prompt) = prompts.and_then(|prompts| prompts.get_mut(tag.request)) {
            *prompt = tokens;
        }
    }

    /// Expects no samples of a request, which has no room for a token.
    pub(super) fn skip_request(&mut self, tag: SampleTag) {
        if let Some(open) = self.calls.get_mut(&tag.call) {
            let count = open.requests.get(tag.request).map_or(0, |request| request.count as usize);
            open.total = open.total.saturating_sub(count);
        }
    }

    /// Returns true if the samples of a call must have the log-probability of each token.
    pub(super) fn records_tokens(&self, call: u64) -> bool {
        self.calls.get(&call).is_some_and(|open| open.token_logprobs)
    }

    /// Returns the canary text of a call, if it has one that is not scored yet.
    pub(super) fn unscored_canary(&self, call: u64) -> Option<&str> {
        let open = self.calls.get(&call)?;
        (open.canary.is_none() && !open.canary_text.is_empty()).then_some(&open.canary_text)
    }

    pub(super) fn set_canary(&mut self, call: u64, canary: Vec<f32>) {
        if let Some(open) = self.calls.get_mut(&call) {
            open.canary = Some(canary);
        }
    }

    /// Samples that are drawn for the call later are dropped.
    pub(super) fn refuse_call(&mut self, call: u64, message: &str) {
        if let Some(open) = self.calls.remove(&call) {
            open.responder.send_error(message);
        }
    }

    /// Replies that this host cannot do a call, and that others may.
    pub(super) fn decline_call(&mut self, call: u64, message: &str) {
        if let Some(open) = self.calls.remove(&call) {
            open.responder.send_reply(&GeneratorAnswer::NotHere(message.to_owned()));
        }
    }

    pub(super) fn oldest_call(&self) -> Option<u64> {
        self.calls.keys().next().copied()
    }

    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    pub(super) fn refuse_all(&mut self, message: &str) {
        while let Some(call) = self.oldest_call() {
            self.refuse_call(call, message);
        }
    }

    /// Sends each caller its progress, at most once per interval. The message also shows that this
    /// process is alive.
    pub(super) fn report_progress(&mut self) {
        for open in self.calls.values_mut() {
            if open.reported_at.elapsed() >= PROGRESS_INTERVAL {
                open.reported_at = Instant::now();
                let samples = u32::try_from(open.samples.len()).unwrap_or(u32::MAX);
                open.responder.send_progress(&GenerateProgress { samples });
            }
        }
    }
}
