//! The worker's side: judges all items of a call.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use agent::CallInbox;

use crate::{
    Toolchain,
    calls::{VerifyProgress, VerifyReply, VerifyRequest},
    pipeline::{ConfiguredVerifier, JudgePipeline, TimedResult},
};

const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Serves calls until the agent closes the pipe.
pub fn serve_verify_calls(toolchain: Toolchain, threads: usize) {
    let inbox: CallInbox<VerifyRequest> = CallInbox::read_stdin();
    let pipeline = JudgePipeline::new(toolchain);
    while let Some(call) = inbox.next() {
        let VerifyRequest { verifier, items } = &call.request;
        let verifier = match ConfiguredVerifier::new(verifier) {
            Ok(verifier) => verifier,
            Err(problem) => {
                call.responder.send_error(&format!("the verifier's settings: {problem}"));
                continue;
            }
        };
        let last_progress = Mutex::new(Instant::now());
        let tell = |items: usize| {
            if let Ok(mut last_progress) = last_progress.try_lock()
                && last_progress.elapsed() >= PROGRESS_INTERVAL
            {
                *last_progress = Instant::now();
                let items = u32::try_from(items).unwrap_or(u32::MAX);
                call.responder.send_progress(&VerifyProgress { items });
            }
        };
        let found = pipeline.judge_items(&verifier, items, threads, &tell);
        let trouble = found.iter().find(|found| found.result.retry_elsewhere);
        let trouble = trouble.map(|TimedResult { result, .. }| result.detail.clone());
        let verdicts =
            found.into_iter().zip(items).map(|(found, item)| found.result.into_verdict(item));
        call.responder.send_reply(&VerifyReply { verdicts: verdicts.collect(), trouble });
    }
}
