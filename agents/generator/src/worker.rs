//! The worker's side: one model, continuous batching over all calls at hand.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use engine::{Completion, Finish, Generator, Prompt, Request, Sampling};
use runtime::{Call, Inbox, Responder};
use wire::{sample_seed, v1};

use crate::calls::{Done, Generate, Generated, samples_of};

/// Between two progress messages of a call.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// What the agent starts the worker with.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    pub base: PathBuf,
    pub adapter: Option<PathBuf>,
    pub slots: usize,
    pub device: String,
}

/// Serves calls until the agent closes the pipe. A model that cannot be loaded is told to
/// the first caller, and is the worker's end.
pub fn work(config: &WorkerConfig) {
    let inbox: Inbox<Generate> = Inbox::open();
    match engine::load(&config.base, config.adapter.as_deref(), &config.device) {
        Ok((model, tokenizer)) => {
            let generator = Generator::new(model, tokenizer, config.slots);
            Batch { generator, calls: BTreeMap::new(), next: 0 }.serve(&inbox);
        }
        Err(error) => {
            if let Some(call) = inbox.next() {
                call.respond.error(&format!("{:#}", anyhow::Error::from(error)));
            }
        }
    }
}

/// Which call a sequence belongs to, and which of its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Tag {
    call: u64,
    request: usize,
}

struct Batch {
    generator: Generator<Tag>,
    calls: BTreeMap<u64, Open>,
    next: u64,
}

/// A call being worked on.
struct Open {
    respond: Responder,
    requests: Vec<v1::generate_order::Request>,
    samples: Vec<v1::samples::Sample>,
    total: usize,
    told: Instant,
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
                Err(error) => return self.give_up(&format!("{error:#}")),
            }
            self.tell();
        }
    }

    fn admit(&mut self, Call { request, respond }: Call<Generate>) {
        let total = match samples_of(&request.requests) {
            Ok(total) => total as usize,
            Err(why) => return respond.error(&why),
        };
        let call = self.next;
        self.next += 1;
        let sampling = Sampling {
            temperature: request.sampling.temperature,
            top_k: request.sampling.top_k as usize,
            top_p: request.sampling.top_p,
            max_new_tokens: request.sampling.max_new_tokens as usize,
        };
        for (index, wanted) in request.requests.iter().enumerate() {
            let indices = wanted.first..wanted.first + wanted.count;
            let seeds = indices.map(|n| sample_seed(request.seed, &wanted.prompt_id, n)).collect();
            let prompt = Prompt::Text(wanted.text.clone());
            let tag = Tag { call, request: index };
            if let Err(error) = self.generator.admit(Request { tag, prompt, seeds, sampling }) {
                // What of this call was admitted before runs on and is dropped when done.
                return respond.error(&format!("prompt {:?}: {error}", wanted.prompt_id));
            }
        }
        let open = Open {
            respond,
            requests: request.requests,
            samples: Vec::with_capacity(total),
            total,
            told: Instant::now(),
        };
        self.calls.insert(call, open);
        self.answer_if_whole(call);
    }

    fn take(&mut self, done: Completion<Tag>) {
        let Some(open) = self.calls.get_mut(&done.tag.call) else { return };
        let request = &open.requests[done.tag.request];
        let finish = match done.finish {
            Finish::Stop => v1::samples::Finish::Stop,
            Finish::Length => v1::samples::Finish::Length,
        };
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        open.samples.push(v1::samples::Sample {
            prompt_id: request.prompt_id.clone(),
            index: request.first + count(done.index),
            text: done.text,
            tokens: count(done.tokens.len()),
            finish: finish.into(),
        });
        self.answer_if_whole(done.tag.call);
    }

    fn answer_if_whole(&mut self, call: u64) {
        if self.calls.get(&call).is_none_or(|open| open.samples.len() < open.total) {
            return;
        }
        if let Some(Open { respond, mut samples, requests, .. }) = self.calls.remove(&call) {
            let place = |id: &str| requests.iter().position(|request| request.prompt_id == id);
            samples.sort_by_cached_key(|sample| (place(&sample.prompt_id), sample.index));
            respond.reply(&Generated { samples });
        }
    }

    fn tell(&mut self) {
        for open in self.calls.values_mut() {
            if open.told.elapsed() >= PROGRESS_EVERY {
                open.told = Instant::now();
                let samples = u32::try_from(open.samples.len()).unwrap_or(u32::MAX);
                open.respond.progress(&Done { samples });
            }
        }
    }

    fn give_up(&self, message: &str) {
        self.calls.values().for_each(|open| open.respond.error(message));
    }
}
