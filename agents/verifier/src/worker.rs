//! The worker's side: judges all items of a call, and asks environments while samples are drawn.

use std::{
    sync::Mutex,
    thread::{self, Scope},
    time::{Duration, Instant},
};

use agent::{CallInbox, CallResponder};

use crate::{
    Toolchain,
    calls::{ActRequest, VerifierCall, VerifyProgress, VerifyReply, VerifyRequest},
    environment::EnvironmentVerifier,
    pipeline::{ConfiguredVerifier, JudgePipeline, TimedResult},
};

const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Serves calls until the agent closes the pipe.
pub fn serve_verify_calls(toolchain: Toolchain, threads: usize) {
    let inbox: CallInbox<VerifierCall> = CallInbox::read_stdin();
    let pipeline = JudgePipeline::new(toolchain);
    thread::scope(|scope| {
        while let Some(call) = inbox.next() {
            match call.request {
                VerifierCall::Verify(request) => {
                    judge_call(&pipeline, &request, threads, &call.responder);
                }
                VerifierCall::Act(request) => {
                    spawn_action(scope, &pipeline, request, threads, call.responder);
                }
            }
        }
    });
}

/// Judges all items of a call with all threads.
fn judge_call(
    pipeline: &JudgePipeline,
    VerifyRequest { verifier, items }: &VerifyRequest,
    threads: usize,
    respond: &CallResponder,
) {
    let verifier = match ConfiguredVerifier::new(verifier) {
        Ok(verifier) => verifier,
        Err(problem) => return respond.send_error(&format!("the verifier's settings: {problem}")),
    };
    let last_progress = Mutex::new(Instant::now());
    let tell = |items: usize| {
        if let Ok(mut last_progress) = last_progress.try_lock()
            && last_progress.elapsed() >= PROGRESS_INTERVAL
        {
            *last_progress = Instant::now();
            let items = u32::try_from(items).unwrap_or(u32::MAX);
            respond.send_progress(&VerifyProgress { items });
        }
    };
    let found = pipeline.judge_items(&verifier, items, threads, &tell);
    let trouble = found.iter().find(|found| found.result.retry_elsewhere);
    let trouble = trouble.map(|TimedResult { result, .. }| result.detail.clone());
    let verdicts =
        found.into_iter().zip(items).map(|(found, item)| found.result.into_verdict(item));
    respond.send_reply(&VerifyReply { verdicts: verdicts.collect(), trouble });
}

/// Asks an environment in a thread of its own, because episodes are played at the same time. The
/// agent has no more actions open than samples that it draws at once.
fn spawn_action<'scope, 'a: 'scope>(
    scope: &'scope Scope<'scope, 'a>,
    pipeline: &'a JudgePipeline,
    ActRequest { environment, request }: ActRequest,
    threads: usize,
    respond: CallResponder,
) {
    let failed = respond.clone();
    let spawned = thread::Builder::new().spawn_scoped(scope, move || {
        let environment = EnvironmentVerifier::from(&environment);
        match environment.answer_action(&request, &mut pipeline.open_slot(threads)) {
            Ok(answer) => respond.send_reply(&answer),
            Err(problem) => respond.send_error(&problem),
        }
    });
    if let Err(error) = spawned {
        failed.send_error(&format!("start a thread: {error}"));
    }
}
