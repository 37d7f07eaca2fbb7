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
}

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

    /// Refuses a call for more samples than an order may request, and returns `None`.
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
        };
        self.calls.insert(number, open);
        Some((number, request))
    }

    /// Replies with the samples in the order of the requests.
    pub(super) fn reply_if_complete(&mut self, call: u64) {
        if self.calls.get(&call).is_none_or(|open| open.samples.len() < open.total) {
            return;
        }
        if let Some(PendingCall { responder: respond, mut samples, requests, canary, .. }) =
            self.calls.remove(&call)
        {
            let place = |id: &str| requests.iter().position(|request| request.prompt_id == id);
            samples.sort_by_cached_key(|sample| (place(&sample.prompt_id), sample.index));
            respond.send_reply(&GeneratorAnswer::Generated(GeneratedSamples {
                samples,
                engine: self.engine.clone(),
                caveat: self.caveat.clone(),
                tokenizer: self.tokenizer.clone(),
                canary: canary.unwrap_or_default(),
            }));
        }
    }

    /// A sample of a call that was refused meanwhile is dropped.
    pub(super) fn add_sample(&mut self, tag: SampleTag, drawn: DrawnSample) {
        let Some(open) = self.calls.get_mut(&tag.call) else { return };
        let request = &open.requests[tag.request];
        let record = drawn.record.unwrap_or_default();
        open.samples.push(v1::samples::Sample {
            prompt_id: request.prompt_id.clone(),
            index: request.first.saturating_add(drawn.nth),
            text: drawn.text,
            tokens: drawn.tokens,
            finish: drawn.finish.into(),
            logprob: drawn.logprob,
            token_logprobs: encode_logprobs(&record.logprobs),
            token_ids: record.ids,
        });
        self.reply_if_complete(tag.call);
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
