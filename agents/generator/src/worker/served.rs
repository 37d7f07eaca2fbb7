//! Drawing samples from a server over HTTP: as many requests at once as it has slots, one a
//! sample, from all calls at hand, first come first served.

use std::{
    collections::VecDeque,
    rc::Rc,
    time::{Duration, Instant},
};

use futures::{
    StreamExt,
    future::{FutureExt, LocalBoxFuture},
    stream::FuturesUnordered,
};
use llama::completion::Sampling;
use runtime::{Call, Inbox};
use tokio::sync::mpsc;
use wire::sample_seed;

use super::{
    WorkerConfig,
    canary::{self, Canaries},
    endpoint, llama_cpp,
    open::{Drawn, OpenCalls, Tag},
};
use crate::calls::{Done, Generate, Request, longest_first};

/// Calls read ahead; the agent sends only as many as it holds leases.
const CALLS_MAX: usize = 64;

/// Between two looks at the server.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Between two requests that only show that it lives.
const PING_EVERY: Duration = Duration::from_secs(1);

/// From a request that breaks off to the end of the process that served it.
const DEATH_LIMIT: Duration = Duration::from_secs(2);

/// However slow a box is, a token of one sequence takes no longer, nor does a prompt's.
const TOKEN_LIMIT: Duration = Duration::from_secs(2);
const SAMPLE_LIMIT_MIN: Duration = Duration::from_secs(120);

/// What a server may say for one sample: its text, its tokens, and what surrounds them.
const ANSWER_BYTES: usize = 256 * 1024;
const ANSWER_BYTES_A_TOKEN: usize = 256;

/// With its logprob and the likeliest token, each spelt out byte by byte.
const ANSWER_BYTES_A_LOGPROB: usize = 4096;

/// What draws.
pub(super) enum Source {
    LlamaCpp(Box<llama_cpp::Source>),
    Endpoint(endpoint::Source),
}

/// A prompt as it is sent.
#[derive(Debug, Clone)]
pub(super) enum Prompt {
    Tokens(Vec<u32>),
    Text(String),
}

/// What a request needs to be drawn.
pub(super) struct Prepared {
    pub prompt: Prompt,
    pub sampling: Sampling,
    /// Positions that its longest sample takes.
    pub positions: usize,
    /// Its samples are to tell their logprob, though it costs time.
    pub logprobs: bool,
}

/// One sample to be drawn.
#[derive(Clone)]
pub(super) struct Task {
    pub tag: Tag,
    pub nth: u32,
    pub seed: u64,
    pub of: Rc<Prepared>,
}

impl Task {
    /// What an answer may take, in time and bytes.
    pub(super) fn limits(&self) -> (Duration, usize) {
        let new = self.of.sampling.max_new_tokens;
        let tokens = u32::try_from(self.of.positions).unwrap_or(u32::MAX).max(new);
        let time = TOKEN_LIMIT.saturating_mul(tokens).max(SAMPLE_LIMIT_MIN);
        let each = if self.of.logprobs { ANSWER_BYTES_A_LOGPROB } else { ANSWER_BYTES_A_TOKEN };
        (time, ANSWER_BYTES + each * new as usize)
    }
}

/// Why a sample was not drawn.
#[derive(Debug)]
pub(super) struct NotDrawn {
    pub message: String,
    /// The server broke off: it may be gone.
    pub broke_off: bool,
}

type Drawing = LocalBoxFuture<'static, (Task, Result<Drawn, NotDrawn>)>;

/// Serves calls until the agent closes the pipe, or what draws is gone.
pub(super) fn serve(
    config: &WorkerConfig,
    inbox: Inbox<Request>,
    source: impl FnOnce(u32) -> anyhow::Result<Source>,
) -> anyhow::Result<()> {
    let slots = config.slots.max(1);
    let source = source(u32::try_from(slots).unwrap_or(u32::MAX));
    let source = source.and_then(|source| Ok((source, canary::tokenizer(&config.base)?)));
    let (source, tokenizer) = match source {
        Ok(loaded) => loaded,
        Err(error) => {
            // Told to the first caller, and the worker's end.
            if let Some(call) = inbox.next() {
                call.respond.error(&format!("{error:#}"));
            }
            return Ok(());
        }
    };
    let calls = OpenCalls::new(config.backend.describe(), source.caveat(), tokenizer);
    let (waiting, canaries) = (VecDeque::new(), Canaries::default());
    let table = Table { source, calls, canaries, slots, waiting };
    // The server's life hangs on this thread's: it must be the process's first.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(table.serve(forwarded(inbox)))
}

/// The inbox, for a runtime.
fn forwarded(inbox: Inbox<Request>) -> mpsc::Receiver<Call<Generate>> {
    let (send, calls) = mpsc::channel(CALLS_MAX);
    std::thread::spawn(move || {
        while let Some(Call { request, respond }) = inbox.next() {
            let Request::Generate(request) = request else {
                respond.error("what draws here keeps the adapter it was started with");
                continue;
            };
            if send.blocking_send(Call { request, respond }).is_err() {
                return;
            }
        }
    });
    calls
}

struct Table {
    source: Source,
    calls: OpenCalls,
    canaries: Canaries,
    slots: usize,
    waiting: VecDeque<Task>,
}

impl Table {
    async fn serve(mut self, mut inbox: mpsc::Receiver<Call<Generate>>) -> anyhow::Result<()> {
        let mut drawing: FuturesUnordered<Drawing> = FuturesUnordered::new();
        let mut pings: FuturesUnordered<LocalBoxFuture<'static, bool>> = FuturesUnordered::new();
        let mut pinged = Instant::now();
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            if let Err(why) = self.fill(&mut drawing, &mut inbox).await {
                return self.over(&why);
            }
            tokio::select! {
                biased;
                Some((task, outcome)) = drawing.next() => {
                    if let Err(why) = self.take(&task, outcome).await {
                        return self.over(&why);
                    }
                }
                Some(lives) = pings.next() => {
                    // Silence of a server is ours.
                    if lives {
                        self.calls.tell();
                    }
                }
                call = inbox.recv() => match call {
                    Some(call) => self.admit(call),
                    None => return Ok(()),
                },
                _ = look.tick() => {
                    if let Some(death) = self.source.death() {
                        return self.over(&death);
                    }
                    if !drawing.is_empty() && pings.is_empty() && pinged.elapsed() > PING_EVERY {
                        pinged = Instant::now();
                        pings.push(self.source.ping());
                    }
                }
            }
        }
    }

    fn admit(&mut self, call: Call<Generate>) {
        let Some((call, request)) = self.calls.open(call) else { return };
        let sampling = Sampling {
            temperature: request.sampling.temperature,
            top_k: request.sampling.top_k,
            top_p: request.sampling.top_p,
            max_new_tokens: request.sampling.max_new_tokens,
        };
        let mut tasks = Vec::new();
        for (index, wanted) in longest_first(request.requests) {
            let prepared = match check(&sampling)
                .and_then(|()| self.source.prepare(wanted.text, &sampling, request.logprobs))
            {
                Ok(prepared) => Rc::new(prepared),
                Err(why) => {
                    let message = format!("prompt {:?}: {why}", wanted.prompt_id);
                    return self.calls.refuse(call, &message);
                }
            };
            tasks.extend((0..wanted.count).map(|nth| Task {
                tag: Tag { call, request: index },
                nth,
                seed: sample_seed(request.seed, &wanted.prompt_id, wanted.first + nth),
                of: prepared.clone(),
            }));
        }
        self.waiting.extend(tasks);
        self.calls.settle(call);
    }

    /// Starts what fits. The error is the end of what draws.
    async fn fill(
        &mut self,
        drawing: &mut FuturesUnordered<Drawing>,
        inbox: &mut mpsc::Receiver<Call<Generate>>,
    ) -> Result<(), String> {
        while drawing.len() < self.slots {
            let Some(task) = self.waiting.front() else { return Ok(()) };
            if !self.calls.has(task.tag.call) {
                self.waiting.pop_front();
                continue;
            }
            if !self.source.fits(task.of.positions) {
                if !drawing.is_empty() {
                    // What runs now ends first.
                    return Ok(());
                }
                self.make_room(inbox)?;
                continue;
            }
            if let Some(why) = self.source.begin().await {
                self.pass_on(&why);
                continue;
            }
            let call = task.tag.call;
            if let Some(text) = self.calls.asks(call).map(str::to_owned) {
                self.score(call, &text).await?;
                continue;
            }
            if let Some(task) = self.waiting.pop_front() {
                drawing.push(self.source.draw(task));
            }
        }
        Ok(())
    }

    /// By what draws, so that it shows what that is.
    async fn score(&mut self, call: u64, text: &str) -> Result<(), String> {
        if let Some(known) = self.canaries.get(text) {
            self.calls.show(call, known);
            return Ok(());
        }
        let calls = &mut self.calls;
        match self.source.canary(text, &mut || calls.tell()).await {
            Ok(canary) => {
                self.canaries.learn(text, &canary);
                self.calls.show(call, canary);
                Ok(())
            }
            Err(failed) => self.fail(call, failed).await,
        }
    }

    /// Has a server started for all that waits, which may take minutes: callers are told that
    /// this process lives, those that come meanwhile as well.
    fn make_room(&mut self, inbox: &mut mpsc::Receiver<Call<Generate>>) -> Result<(), String> {
        let most = self.waiting.iter().map(|task| task.of.positions).max().unwrap_or(0);
        let (calls, mut late, mut told) = (&mut self.calls, Vec::new(), Instant::now());
        let made = self.source.make_room(most, &mut || {
            late.extend(std::iter::from_fn(|| inbox.try_recv().ok()));
            if told.elapsed() >= PING_EVERY {
                told = Instant::now();
                calls.tell();
                late.iter().for_each(|call| call.respond.progress(&Done { samples: 0 }));
            }
        });
        late.into_iter().for_each(|call| self.admit(call));
        made
    }

    /// What nobody can draw here just now.
    fn pass_on(&mut self, why: &str) {
        while let Some(call) = self.calls.first() {
            self.calls.pass_on(call, why);
        }
        self.waiting.clear();
    }

    async fn take(&mut self, task: &Task, outcome: Result<Drawn, NotDrawn>) -> Result<(), String> {
        match outcome {
            Ok(drawn) => {
                self.calls.take(task.tag, drawn);
                self.calls.tell();
            }
            Err(failed) => self.fail(task.tag.call, failed).await?,
        }
        Ok(())
    }

    /// The error is the end of what draws.
    async fn fail(&mut self, call: u64, failed: NotDrawn) -> Result<(), String> {
        let NotDrawn { message, broke_off } = failed;
        if broke_off && let Some(death) = self.source.death_within(DEATH_LIMIT).await {
            return Err(death);
        }
        if broke_off && self.source.is_elsewhere() {
            self.calls.pass_on(call, &message);
        } else {
            self.calls.refuse(call, &message);
        }
        Ok(())
    }

    /// What draws is gone. With one caller, that is told; with several, it is this process's end:
    /// whoever asked for what ended it must not be confused with the others.
    fn over(mut self, why: &str) -> anyhow::Result<()> {
        if let (1, Some(call)) = (self.calls.len(), self.calls.first()) {
            self.calls.refuse(call, why);
            return Ok(());
        }
        if self.calls.is_empty() {
            return Ok(());
        }
        Err(anyhow::anyhow!("{why}"))
    }
}

/// As the embedded engine checks them.
fn check(sampling: &Sampling) -> Result<(), String> {
    let Sampling { temperature, top_p, max_new_tokens, .. } = *sampling;
    if !temperature.is_finite() || temperature < 0.0 {
        return Err(format!("the sampling's temperature is {temperature}; it must be 0 or more"));
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(format!("the sampling's top_p is {top_p}; it must be above 0 and at most 1"));
    }
    if max_new_tokens == 0 {
        return Err("the sampling's max_new_tokens is 0; it must be 1 or more".to_owned());
    }
    Ok(())
}

impl Source {
    /// Why nobody can say that it is what was asked for; empty when somebody can.
    fn caveat(&self) -> String {
        match self {
            Self::LlamaCpp(_) => String::new(),
            Self::Endpoint(endpoint) => endpoint.caveat(),
        }
    }

    fn prepare(
        &self,
        text: String,
        sampling: &Sampling,
        logprobs: bool,
    ) -> Result<Prepared, String> {
        match self {
            Self::LlamaCpp(llama) => llama.prepare(&text, sampling, logprobs),
            Self::Endpoint(_) => {
                let prompt = Prompt::Text(text);
                Ok(Prepared { prompt, sampling: *sampling, positions: 0, logprobs: false })
            }
        }
    }

    fn fits(&self, positions: usize) -> bool {
        match self {
            Self::LlamaCpp(llama) => llama.fits(positions),
            Self::Endpoint(_) => true,
        }
    }

    fn make_room(&mut self, positions: usize, beat: &mut dyn FnMut()) -> Result<(), String> {
        match self {
            Self::LlamaCpp(llama) => {
                llama.start(positions, beat).map_err(|error| format!("{error:#}"))
            }
            Self::Endpoint(_) => Ok(()),
        }
    }

    /// Before the first sample. The answer is why it cannot be drawn here, though elsewhere.
    async fn begin(&mut self) -> Option<String> {
        match self {
            Self::LlamaCpp(_) => None,
            Self::Endpoint(endpoint) => endpoint.begin().await.err().map(|e| format!("{e:#}")),
        }
    }

    fn draw(&self, task: Task) -> Drawing {
        match self {
            Self::LlamaCpp(llama) => {
                let drawing = llama.draw(task.clone());
                async move { (task, drawing.await) }.boxed_local()
            }
            Self::Endpoint(endpoint) => {
                let drawing = endpoint.draw(task.clone());
                async move { (task, drawing.await) }.boxed_local()
            }
        }
    }

    /// Log-probabilities of a text's last tokens; none where it does not tell them.
    async fn canary(&self, text: &str, beat: &mut dyn FnMut()) -> Result<Vec<f32>, NotDrawn> {
        match self {
            Self::LlamaCpp(llama) => llama.canary(text, beat).await,
            Self::Endpoint(endpoint) => endpoint.canary(text).await,
        }
    }

    /// Whether it answers.
    fn ping(&self) -> LocalBoxFuture<'static, bool> {
        match self {
            Self::LlamaCpp(llama) => llama.ping(),
            Self::Endpoint(endpoint) => endpoint.ping(),
        }
    }

    /// How the process that serves ended, if it is ours and did.
    fn death(&mut self) -> Option<String> {
        match self {
            Self::LlamaCpp(llama) => llama.death(),
            Self::Endpoint(_) => None,
        }
    }

    async fn death_within(&mut self, limit: Duration) -> Option<String> {
        let began = Instant::now();
        while !self.is_elsewhere() && began.elapsed() < limit {
            if let Some(death) = self.death() {
                return Some(death);
            }
            tokio::time::sleep(LOOK_EVERY / 5).await;
        }
        None
    }

    /// Whether somebody else runs it.
    fn is_elsewhere(&self) -> bool {
        matches!(self, Self::Endpoint(_))
    }
}
