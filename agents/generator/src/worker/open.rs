//! The calls being worked on, each put together sample by sample, whatever draws them.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use runtime::{Call, Responder};
use wire::v1;

use crate::calls::{Answer, Done, Generate, Generated, samples_of};

/// Between two progress messages of a call.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// Which call a sample belongs to, and which of its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Tag {
    pub call: u64,
    pub request: usize,
}

/// A sample as it was drawn.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Drawn {
    /// Which of its request's samples.
    pub nth: u32,
    pub text: String,
    pub tokens: u32,
    pub finish: v1::samples::Finish,
    /// As in a samples fact.
    pub logprob: Option<f64>,
}

pub(super) struct OpenCalls {
    open: BTreeMap<u64, Open>,
    next: u64,
    engine: String,
    caveat: String,
    tokenizer: String,
}

struct Open {
    respond: Responder,
    requests: Vec<v1::generate_order::Request>,
    samples: Vec<v1::samples::Sample>,
    total: usize,
    told: Instant,
    asked: String,
    canary: Option<Vec<f32>>,
}

impl OpenCalls {
    /// What draws the samples, why nobody can say that it is what was asked for, and the digest of
    /// its tokenizer.
    pub(super) fn new(engine: String, caveat: String, tokenizer: String) -> Self {
        Self { open: BTreeMap::new(), next: 0, engine, caveat, tokenizer }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(super) fn has(&self, call: u64) -> bool {
        self.open.contains_key(&call)
    }

    /// Opens a call, under this number. `None`: it asks for what no order may.
    pub(super) fn open(&mut self, call: Call<Generate>) -> Option<(u64, Generate)> {
        let Call { request, respond } = call;
        let total = match samples_of(&request.requests) {
            Ok(total) => total as usize,
            Err(why) => {
                respond.error(&why);
                return None;
            }
        };
        let number = self.next;
        self.next += 1;
        let requests = request.requests.clone();
        let samples = Vec::with_capacity(total);
        let asked = request.canary.clone();
        let (told, canary) = (Instant::now(), None);
        let open = Open { respond, requests, samples, total, told, asked, canary };
        self.open.insert(number, open);
        Some((number, request))
    }

    /// Answers the call if it asks for nothing more.
    pub(super) fn settle(&mut self, call: u64) {
        if self.open.get(&call).is_none_or(|open| open.samples.len() < open.total) {
            return;
        }
        if let Some(Open { respond, mut samples, requests, canary, .. }) = self.open.remove(&call) {
            let place = |id: &str| requests.iter().position(|request| request.prompt_id == id);
            samples.sort_by_cached_key(|sample| (place(&sample.prompt_id), sample.index));
            respond.reply(&Answer::Generated(Generated {
                samples,
                engine: self.engine.clone(),
                caveat: self.caveat.clone(),
                tokenizer: self.tokenizer.clone(),
                canary: canary.unwrap_or_default(),
            }));
        }
    }

    /// Takes a sample in. One of a call that was refused meanwhile is dropped.
    pub(super) fn take(&mut self, tag: Tag, drawn: Drawn) {
        let Some(open) = self.open.get_mut(&tag.call) else { return };
        let request = &open.requests[tag.request];
        open.samples.push(v1::samples::Sample {
            prompt_id: request.prompt_id.clone(),
            index: request.first.saturating_add(drawn.nth),
            text: drawn.text,
            tokens: drawn.tokens,
            finish: drawn.finish.into(),
            logprob: drawn.logprob,
        });
        self.settle(tag.call);
    }

    /// The text whose log-probabilities a call is to tell and are not known yet.
    pub(super) fn asks(&self, call: u64) -> Option<&str> {
        let open = self.open.get(&call)?;
        (open.canary.is_none() && !open.asked.is_empty()).then_some(&open.asked)
    }

    /// What a call's text was found to be worth.
    pub(super) fn show(&mut self, call: u64, canary: Vec<f32>) {
        if let Some(open) = self.open.get_mut(&call) {
            open.canary = Some(canary);
        }
    }

    /// Refuses a call; what is drawn for it later is dropped.
    pub(super) fn refuse(&mut self, call: u64, message: &str) {
        if let Some(open) = self.open.remove(&call) {
            open.respond.error(message);
        }
    }

    /// Says of a call that others may do it.
    pub(super) fn pass_on(&mut self, call: u64, message: &str) {
        if let Some(open) = self.open.remove(&call) {
            open.respond.reply(&Answer::NotHere(message.to_owned()));
        }
    }

    /// The call opened first.
    pub(super) fn first(&self) -> Option<u64> {
        self.open.keys().next().copied()
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn refuse_all(&mut self, message: &str) {
        while let Some(call) = self.first() {
            self.refuse(call, message);
        }
    }

    /// Tells every caller how far its call is, which is also that this process lives.
    pub(super) fn tell(&mut self) {
        for open in self.open.values_mut() {
            if open.told.elapsed() >= PROGRESS_EVERY {
                open.told = Instant::now();
                let samples = u32::try_from(open.samples.len()).unwrap_or(u32::MAX);
                open.respond.progress(&Done { samples });
            }
        }
    }
}
