//! Sampling from a server over HTTP: one request for each sample, as many at once as the server has
//! slots, from all pending calls.

use std::{
    cell::Cell,
    collections::VecDeque,
    path::PathBuf,
    rc::Rc,
    time::{Duration, Instant},
};

use agent::{CallInbox, CallResponder, WorkerCall};
use futures::{
    StreamExt,
    future::{FutureExt, LocalBoxFuture},
    stream::FuturesUnordered,
};
use llama::completion::LlamaSampling;
use tokio::sync::mpsc;
use wire::derive_sample_seed;

use super::{
    WorkerConfig,
    canary_cache::{self, CanaryCache},
    endpoint, llama_server,
    pending_calls::{DrawnSample, PendingCalls, SampleTag},
    sample_task::{HttpPrompt, PreparedRequest, SampleError, SampleTask, WantedLogprobs},
    slot_planner::{SlotId, SlotPlanner, SlotStep, WaitingPrompt},
};
use crate::messages::{
    AdapterSwapRequest, GenerateProgress, GenerateRequest, GeneratorAnswer, GeneratorRequest,
    ScoreRequest, ScoredSamples, order_longest_first,
};

/// Calls read ahead; the agent sends only as many as it holds leases.
const UNREAD_CALLS_MAX: usize = 64;

/// Between two checks that the server's process runs.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Between two requests that only check that the server responds.
const PING_INTERVAL: Duration = Duration::from_secs(1);

/// The time in which the server's process may exit after a broken request, for the server to be at
/// fault.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// The server that draws the samples: a `llama-server` that this worker runs, or an external one.
pub(super) enum HttpBackend {
    LlamaCpp(Box<llama_server::LlamaServerBackend>),
    Endpoint(endpoint::EndpointBackend),
}

/// A request in progress for the samples of a prompt.
type StepFuture = LocalBoxFuture<'static, EndedStep>;

enum EndedStep {
    /// The outcome is the slots that hold the prompt.
    Prefill {
        tag: SampleTag,
        slots: Vec<SlotId>,
        outcome: Result<Vec<SlotId>, SampleError>,
    },
    Draw {
        tag: SampleTag,
        slot: SlotId,
        outcome: Result<DrawnSample, SampleError>,
    },
}

/// Serves calls until the agent closes the pipe or the server is gone.
pub(super) fn serve_calls(
    config: &WorkerConfig,
    inbox: CallInbox<GeneratorRequest>,
    source: impl FnOnce(u32) -> anyhow::Result<HttpBackend>,
) -> anyhow::Result<()> {
    let slots = u32::try_from(config.slots.max(1)).unwrap_or(u32::MAX);
    let source = source(slots);
    let source =
        source.and_then(|source| Ok((source, canary_cache::digest_tokenizer(&config.base)?)));
    let (source, tokenizer) = match source {
        Ok(loaded) => loaded,
        Err(error) => {
            // The first caller receives the error, and the worker ends.
            if let Some(call) = inbox.next() {
                call.responder.send_error(&format!("{error:#}"));
            }
            return Ok(());
        }
    };
    let calls =
        PendingCalls::new(config.backend.describe_engine(), source.unverified_reason(), tokenizer);
    let plan = SlotPlanner::new(slots, source.keeps_state());
    let table = SampleScheduler {
        backend: source,
        calls,
        canaries: CanaryCache::default(),
        plan,
        scoring: VecDeque::new(),
    };
    // The server dies with this thread, so it must be the first thread of the process.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(table.serve_until_closed(forward_calls(inbox)))
}

fn forward_calls(
    inbox: CallInbox<GeneratorRequest>,
) -> mpsc::Receiver<WorkerCall<GeneratorRequest>> {
    let (send, calls) = mpsc::channel(UNREAD_CALLS_MAX);
    std::thread::spawn(move || {
        while let Some(call) = inbox.next() {
            if send.blocking_send(call).is_err() {
                return;
            }
        }
    });
    calls
}

/// The scheduler of the samples of all pending calls.
///
/// The plan says which prompt or sample is next on which slots. Before such a step, the scheduler
///
/// 1. restarts a `llama-server` whose context is too small, once the running samples are done;
/// 2. makes sure that an external server has the model;
/// 3. scores the canary text of the step's call, if it has one.
///
/// Progress messages stop when the server does not respond, so that the agent recognises a hang. If
/// the server dies during several calls, the process ends with an error, because any of them may be
/// the cause.
struct SampleScheduler {
    backend: HttpBackend,
    calls: PendingCalls,
    canaries: CanaryCache,
    plan: SlotPlanner,
    /// Samples to score while none are drawn.
    scoring: VecDeque<WorkerCall<ScoreRequest>>,
}

impl SampleScheduler {
    /// Returns when the inbox closes or the server is gone.
    async fn serve_until_closed(
        mut self,
        mut inbox: mpsc::Receiver<WorkerCall<GeneratorRequest>>,
    ) -> anyhow::Result<()> {
        let mut steps: FuturesUnordered<StepFuture> = FuturesUnordered::new();
        let mut pings: FuturesUnordered<LocalBoxFuture<'static, bool>> = FuturesUnordered::new();
        let mut pinged = Instant::now();
        let mut exit_poll = tokio::time::interval(EXIT_POLL_INTERVAL);
        exit_poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            if let Err(why) = self.fill_slots(&mut steps, &mut inbox).await {
                return self.shut_down(&why);
            }
            if self.plan.is_idle()
                && let Some(call) = self.scoring.pop_front()
            {
                if let Err(why) = self.score_samples(call).await {
                    return self.shut_down(&why);
                }
                continue;
            }
            tokio::select! {
                biased;
                Some(ended) = steps.next() => {
                    if let Err(why) = self.handle_outcome(ended).await {
                        return self.shut_down(&why);
                    }
                }
                Some(lives) = pings.next() => {
                    // Without an answer no progress is sent, so a silent server makes this worker
                    // silent too.
                    if lives {
                        self.calls.report_progress();
                    }
                }
                call = inbox.recv() => match call {
                    Some(call) => {
                        if let Err(why) = self.serve_call(call) {
                            return self.shut_down(&why);
                        }
                    }
                    None => return Ok(()),
                },
                _ = exit_poll.tick() => {
                    if let Some(exit) = self.backend.describe_server_exit() {
                        return self.shut_down(&exit);
                    }
                    if !steps.is_empty() && pings.is_empty() && pinged.elapsed() > PING_INTERVAL {
                        pinged = Instant::now();
                        pings.push(self.backend.check_alive());
                    }
                }
            }
        }
    }

    /// An error means that the server is gone.
    fn serve_call(&mut self, call: WorkerCall<GeneratorRequest>) -> Result<(), String> {
        let WorkerCall { request, responder } = call;
        match request {
            GeneratorRequest::Generate(request) => {
                self.admit_call(WorkerCall { request, responder });
                Ok(())
            }
            GeneratorRequest::Adopt(AdapterSwapRequest { adapter }) => {
                self.swap_adapter(adapter, &responder)
            }
            GeneratorRequest::Score(request) => {
                self.scoring.push_back(WorkerCall { request, responder });
                Ok(())
            }
        }
    }

    /// Scores samples while none are drawn. An error means that the server is gone.
    async fn score_samples(&mut self, call: WorkerCall<ScoreRequest>) -> Result<(), String> {
        let WorkerCall { request, responder: caller } = call;
        let HttpBackend::LlamaCpp(llama) = &mut self.backend else {
            let why = "an external server reports no log-probabilities of given tokens";
            caller.send_reply(&GeneratorAnswer::NotHere(why.to_owned()));
            return Ok(());
        };
        self.plan.forget_state();
        let mut reported_at = Instant::now();
        let prepared = llama.prepare_scoring(&request, &mut || {
            if reported_at.elapsed() >= PING_INTERVAL {
                reported_at = Instant::now();
                caller.send_progress(&GenerateProgress { samples: 0 });
            }
        });
        let texts = match prepared {
            Ok(texts) => texts,
            Err(error) => {
                caller.send_error(&format!("{error:#}"));
                return Ok(());
            }
        };
        let scored = Rc::new(Cell::new(0));
        let counted = scored.clone();
        let mut scoring = llama.score_texts(texts, move |done| counted.set(done));
        let mut pause = tokio::time::interval(PING_INTERVAL);
        let outcome = loop {
            tokio::select! {
                outcome = &mut scoring => break outcome,
                _ = pause.tick() => {
                    // Without an answer no progress is sent, so a silent server makes this worker
                    // silent too.
                    let mut ping = llama.check_alive();
                    tokio::select! {
                        outcome = &mut scoring => break outcome,
                        lives = &mut ping => if lives {
                            caller.send_progress(&GenerateProgress { samples: scored.get() });
                        },
                    }
                }
            }
        };
        match outcome {
            Ok(logprobs) => {
                let engine = self.calls.engine().to_owned();
                caller.send_reply(&GeneratorAnswer::Scored(ScoredSamples { engine, logprobs }));
                Ok(())
            }
            Err(failed) => {
                let exit = match failed.connection_lost {
                    true => self.backend.wait_for_exit(EXIT_TIMEOUT).await,
                    false => None,
                };
                caller.send_error(exit.as_ref().unwrap_or(&failed.message));
                exit.map_or(Ok(()), Err)
            }
        }
    }

    /// Draws with another adapter from now on. An error means that the server is gone.
    fn swap_adapter(
        &mut self,
        adapter: Option<PathBuf>,
        caller: &CallResponder,
    ) -> Result<(), String> {
        if !self.calls.is_empty() || !self.plan.is_idle() {
            caller.send_error("another adapter is generating; retry when it is done");
            return Ok(());
        }
        self.plan.forget_state();
        self.canaries = CanaryCache::default();
        let mut reported_at = Instant::now();
        let swapped = self.backend.swap_adapter(adapter, &mut || {
            if reported_at.elapsed() >= PING_INTERVAL {
                reported_at = Instant::now();
                caller.send_progress(&GenerateProgress { samples: 0 });
            }
        });
        match swapped {
            Ok(()) => caller.send_reply(&GeneratorAnswer::Adopted),
            Err(why) => {
                caller.send_error(&why);
                return Err(why);
            }
        }
        Ok(())
    }

    /// Adds a call's samples to the plan, or refuses the call.
    fn admit_call(&mut self, call: WorkerCall<GenerateRequest>) {
        let Some((call, request)) = self.calls.open_call(call) else { return };
        let sampling = LlamaSampling {
            temperature: request.sampling.temperature,
            top_k: request.sampling.top_k,
            top_p: request.sampling.top_p,
            max_new_tokens: request.sampling.max_new_tokens,
        };
        let logprobs = match (request.token_logprobs, request.logprobs) {
            (true, _) => WantedLogprobs::OfTokens,
            (false, true) => WantedLogprobs::OfSamples,
            (false, false) => WantedLogprobs::None,
        };
        let mut prompts = Vec::new();
        for (index, wanted) in order_longest_first(request.requests) {
            let tag = SampleTag { call, request: index };
            let context = request.contexts.as_ref().map(|contexts| &*contexts[index]);
            let prepared = match validate_sampling(&sampling)
                .and_then(|()| self.backend.prepare_turn(context, wanted.text, &sampling, logprobs))
            {
                Ok(Some(prepared)) => Rc::new(prepared),
                Ok(None) => {
                    self.calls.skip_request(tag);
                    continue;
                }
                Err(why) => {
                    let message = format!("prompt {:?}: {why}", wanted.prompt_id);
                    return self.calls.refuse_call(call, &message);
                }
            };
            if let (Some(_), HttpPrompt::Tokens(tokens)) = (context, &prepared.prompt) {
                self.calls.set_prompt(tag, tokens.clone());
            }
            let seed =
                |nth| derive_sample_seed(request.seed, &wanted.prompt_id, wanted.first + nth);
            prompts.push(WaitingPrompt {
                tag,
                request: prepared,
                samples: (0..wanted.count).map(|nth| (nth, seed(nth))).collect(),
            });
        }
        prompts.into_iter().for_each(|prompt| self.plan.add_prompt(prompt));
        self.calls.reply_if_complete(call);
    }

    /// Starts steps while there are free slots. An error means that the server is gone.
    async fn fill_slots(
        &mut self,
        steps: &mut FuturesUnordered<StepFuture>,
        inbox: &mut mpsc::Receiver<WorkerCall<GeneratorRequest>>,
    ) -> Result<(), String> {
        while let Some(prompt) = self.plan.next_prompt() {
            let call = prompt.tag.call;
            if !self.calls.contains(call) {
                self.plan.remove_call(call);
                continue;
            }
            if !self.backend.fits_context(prompt.request.positions) {
                if !self.plan.is_idle() {
                    // The running samples end before a restart.
                    return Ok(());
                }
                self.enlarge_context(inbox)?;
                continue;
            }
            if let Some(why) = self.backend.unavailable_reason().await {
                self.decline_all(&why);
                continue;
            }
            if let Some(text) = self.calls.unscored_canary(call).map(str::to_owned) {
                self.score_canary(call, &text).await?;
                continue;
            }
            match self.plan.begin_step() {
                Some(SlotStep::Prefill { tag, request, slots }) => {
                    steps.push(self.backend.prefill_prompt(tag, request, slots));
                }
                Some(SlotStep::Draw(task)) => steps.push(self.backend.draw_sample(task)),
                None => return Ok(()),
            }
        }
        Ok(())
    }

    /// Scores a call's canary text with the server that draws its samples. An error means that the
    /// server is gone.
    async fn score_canary(&mut self, call: u64, text: &str) -> Result<(), String> {
        if let Some(known) = self.canaries.get(text) {
            self.calls.set_canary(call, known);
            return Ok(());
        }
        let calls = &mut self.calls;
        match self.backend.score_canary(text, &mut || calls.report_progress()).await {
            Ok(canary) => {
                self.canaries.remember_canary(text, &canary);
                self.calls.set_canary(call, canary);
                Ok(())
            }
            Err(failed) => self.handle_failure(call, failed).await,
        }
    }

    /// Restarts the server with a context for all waiting samples, which may take minutes.
    /// Meanwhile all callers, including new ones, receive progress messages that show that this
    /// process is alive.
    fn enlarge_context(
        &mut self,
        inbox: &mut mpsc::Receiver<WorkerCall<GeneratorRequest>>,
    ) -> Result<(), String> {
        let most = self.plan.largest_context();
        self.plan.forget_state();
        let (calls, mut late, mut reported_at) = (&mut self.calls, Vec::new(), Instant::now());
        let made = self.backend.enlarge_context(most, &mut || {
            late.extend(std::iter::from_fn(|| inbox.try_recv().ok()));
            if reported_at.elapsed() >= PING_INTERVAL {
                reported_at = Instant::now();
                calls.report_progress();
                late.iter().for_each(|call| {
                    call.responder.send_progress(&GenerateProgress { samples: 0 });
                });
            }
        });
        for call in late {
            self.serve_call(call)?;
        }
        made
    }

    /// Declines all calls, because this host cannot draw them now.
    fn decline_all(&mut self, why: &str) {
        while let Some(call) = self.calls.oldest_call() {
            self.calls.decline_call(call, why);
        }
        self.plan.remove_all();
    }

    /// An error means that the server is gone.
    async fn handle_outcome(&mut self, ended: EndedStep) -> Result<(), String> {
        let (call, failed) = match ended {
            EndedStep::Prefill { tag, slots, outcome } => {
                self.plan.end_prefill(tag, &slots, outcome.as_deref().unwrap_or_default());
                (tag.call, outcome.err())
            }
            EndedStep::Draw { tag, slot, outcome } => {
                self.plan.end_sample(tag, slot, outcome.is_ok());
                let drawn = outcome.map(|drawn| self.calls.add_sample(tag, drawn));
                (tag.call, drawn.err())
            }
        };
        match failed {
            None => self.calls.report_progress(),
            Some(failed) => self.handle_failure(call, failed).await?,
        }
        Ok(())
    }

    /// Refuses or declines the call of a failed sample. An error means that the server is gone.
    async fn handle_failure(&mut self, call: u64, failed: SampleError) -> Result<(), String> {
        let SampleError { message, connection_lost: broke_off } = failed;
        if broke_off && let Some(exit) = self.backend.wait_for_exit(EXIT_TIMEOUT).await {
            return Err(exit);
        }
        if broke_off && self.backend.is_external() {
            self.calls.decline_call(call, &message);
        } else {
            self.calls.refuse_call(call, &message);
        }
        Ok(())
    }

    /// Ends the worker after the server is gone. A single caller receives the error. With several,
    /// the process ends with an error, because the call that ended the server must not be confused
    /// with the others.
    fn shut_down(mut self, why: &str) -> anyhow::Result<()> {
        if let (1, Some(call)) = (self.calls.len(), self.calls.oldest_call()) {
            self.calls.refuse_call(call, why);
            return Ok(());
        }
        if self.calls.is_empty() {
            return Ok(());
        }
        Err(anyhow::anyhow!("{why}"))
    }
}

/// Checks the same bounds as the embedded engine.
fn validate_sampling(sampling: &LlamaSampling) -> Result<(), String> {
    let LlamaSampling { temperature, top_p, max_new_tokens, .. } = *sampling;
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

impl HttpBackend {
    /// Returns the reason why the policy cannot be verified; empty if it is.
    fn unverified_reason(&self) -> String {
        match self {
            Self::LlamaCpp(_) => String::new(),
            Self::Endpoint(endpoint) => endpoint.unverified_reason(),
        }
    }

    /// Prepares a request behind the tokens of an episode, if it is a turn of one. Returns `None`
    /// if the turn has no room for a token.
    fn prepare_turn(
        &self,
        context: Option<&[u32]>,
        text: String,
        sampling: &LlamaSampling,
        wanted: WantedLogprobs,
    ) -> Result<Option<PreparedRequest>, String> {
        match (self, context) {
            (Self::LlamaCpp(llama), None) => {
                llama.prepare_request(&text, sampling, wanted).map(Some)
            }
            (Self::LlamaCpp(llama), Some(context)) => {
                llama.prepare_turn(context, &text, sampling, wanted)
            }
            (Self::Endpoint(_), None) => {
                let (prompt, sampling) = (HttpPrompt::Text(text), *sampling);
                let wanted = WantedLogprobs::None;
                Ok(Some(PreparedRequest { prompt, sampling, positions: 0, wanted }))
            }
            (Self::Endpoint(_), Some(_)) => {
                Err("an external server does not continue the tokens of an episode (E102)".into())
            }
        }
    }

    /// Always true for an external server.
    fn fits_context(&self, positions: usize) -> bool {
        match self {
            Self::LlamaCpp(llama) => llama.fits_context(positions),
            Self::Endpoint(_) => true,
        }
    }

    /// Does nothing for an external server.
    fn enlarge_context(
        &mut self,
        positions: usize,
        on_heartbeat: &mut dyn FnMut(),
    ) -> Result<(), String> {
        match self {
            Self::LlamaCpp(llama) => {
                llama.enlarge_context(positions, on_heartbeat).map_err(|error| format!("{error:#}"))
            }
            Self::Endpoint(_) => Ok(()),
        }
    }

    /// Fails for an external server, whose adapter is loaded by name.
    fn swap_adapter(
        &mut self,
        adapter: Option<PathBuf>,
        on_heartbeat: &mut dyn FnMut(),
    ) -> Result<(), String> {
        match self {
            Self::LlamaCpp(llama) => {
                llama.swap_adapter(adapter, on_heartbeat).map_err(|error| format!("{error:#}"))
            }
            Self::Endpoint(_) => Err("an external server is asked for each adapter".to_owned()),
        }
    }

    /// Returns the reason if samples cannot be drawn here, though other hosts may.
    async fn unavailable_reason(&mut self) -> Option<String> {
        match self {
            Self::LlamaCpp(_) => None,
            Self::Endpoint(endpoint) => {
                endpoint.ensure_model().await.err().map(|e| format!("{e:#}"))
            }
        }
    }

    /// Returns true if a slot's state can be used again. An external server decides that by itself.
    fn keeps_state(&self) -> bool {
        matches!(self, Self::LlamaCpp(_))
    }

    fn draw_sample(&self, task: SampleTask) -> StepFuture {
        let SampleTask { tag, slot, .. } = task;
        match self {
            Self::LlamaCpp(llama) => {
                let drawing = llama.draw_sample(task);
                async move { EndedStep::Draw { tag, slot, outcome: drawing.await } }.boxed_local()
            }
            Self::Endpoint(endpoint) => {
                let drawing = endpoint.draw_sample(task);
                async move { EndedStep::Draw { tag, slot, outcome: drawing.await } }.boxed_local()
            }
        }
    }

    /// Computes a prompt on free slots; does nothing for an external server.
    fn prefill_prompt(
        &self,
        tag: SampleTag,
        request: Rc<PreparedRequest>,
        slots: Vec<SlotId>,
    ) -> StepFuture {
        let filling = match self {
            Self::LlamaCpp(llama) => Some(llama.prefill_prompt(request, slots.clone())),
            Self::Endpoint(_) => None,
        };
        async move {
            let outcome = match filling {
                Some(filling) => filling.await,
                None => Ok(Vec::new()),
            };
            EndedStep::Prefill { tag, slots, outcome }
        }
        .boxed_local()
    }

    /// Returns the log-probabilities of a text's last tokens; empty if the server does not report
    /// them.
    async fn score_canary(
        &self,
        text: &str,
        on_heartbeat: &mut dyn FnMut(),
    ) -> Result<Vec<f32>, SampleError> {
        match self {
            Self::LlamaCpp(llama) => llama.score_canary(text, on_heartbeat).await,
            Self::Endpoint(endpoint) => endpoint.score_canary(text).await,
        }
    }

    fn check_alive(&self) -> LocalBoxFuture<'static, bool> {
        match self {
            Self::LlamaCpp(llama) => llama.check_alive(),
            Self::Endpoint(endpoint) => endpoint.check_alive(),
        }
    }

    /// Describes how the server's process ended, if this worker runs it and it did.
    fn describe_server_exit(&mut self) -> Option<String> {
        match self {
            Self::LlamaCpp(llama) => llama.describe_server_exit(),
            Self::Endpoint(_) => None,
        }
    }

    /// Returns `None` at once for an external server.
    async fn wait_for_exit(&mut self, limit: Duration) -> Option<String> {
        let began = Instant::now();
        while !self.is_external() && began.elapsed() < limit {
            if let Some(exit) = self.describe_server_exit() {
                return Some(exit);
            }
            tokio::time::sleep(EXIT_POLL_INTERVAL / 5).await;
        }
        None
    }

    fn is_external(&self) -> bool {
        matches!(self, Self::Endpoint(_))
    }
}
