//! The worker's side: judges all items of a call, and asks environments while samples are drawn.

use std::{
    sync::Mutex,
    thread::{self, Scope},
    time::{Duration, Instant},
};

use agent::{CallInbox, CallResponder};
use wire::v1;

use crate::{
    Toolchain,
    calls::{ActRequest, VerifierCall, VerifyItem, VerifyProgress, VerifyReply},
    environment::EnvironmentVerifier,
    pipeline::{ConfiguredVerifier, JudgePipeline, TimedResult},
};

const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Verifiers that are kept between calls.
const VERIFIERS_MAX: usize = 16;

/// The verifiers of the newest calls. They keep their connections, and know whether their server was
/// there. The newest is the last.
#[derive(Default)]
struct RecentVerifiers(Vec<(v1::Verifier, ConfiguredVerifier)>);

impl RecentVerifiers {
    /// Returns a verifier with these settings. Fails with what is wrong with them.
    fn configure(&mut self, settings: &v1::Verifier) -> Result<&ConfiguredVerifier, String> {
        let known = self.0.iter().position(|(known, _)| known == settings);
        let entry = match known {
            Some(place) => self.0.remove(place),
            None => (settings.clone(), ConfiguredVerifier::new(settings)?),
        };
        if self.0.len() >= VERIFIERS_MAX {
            self.0.remove(0);
        }
        self.0.push(entry);
        Ok(&self.0[self.0.len() - 1].1)
    }
}

/// Serves calls until the agent closes the pipe.
pub fn serve_verify_calls(toolchain: Toolchain, threads: usize) {
    let inbox: CallInbox<VerifierCall> = CallInbox::read_stdin();
    let pipeline = JudgePipeline::new(toolchain);
    let mut verifiers = RecentVerifiers::default();
    thread::scope(|scope| {
        while let Some(call) = inbox.next() {
            match call.request {
                VerifierCall::Verify(request) => match verifiers.configure(&request.verifier) {
                    Ok(verifier) => {
                        let items = &request.items;
                        judge_call(&pipeline, verifier, items, threads, &call.responder);
                    }
                    Err(problem) => {
                        let problem = format!("the verifier's settings: {problem}");
                        call.responder.send_error(&problem);
                    }
                },
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
    verifier: &ConfiguredVerifier,
    items: &[VerifyItem],
    threads: usize,
    respond: &CallResponder,
) {
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
    let found = pipeline.judge_items(verifier, items, threads, &tell);
    let unreachable = found.iter().find(|found| found.result.is_unreachable);
    let trouble = unreachable.or_else(|| found.iter().find(|found| found.result.retry_elsewhere));
    let trouble = trouble.map(|TimedResult { result, .. }| result.detail.clone());
    let is_unreachable = unreachable.is_some();
    let verdicts =
        found.into_iter().zip(items).map(|(found, item)| found.result.into_verdict(item));
    respond.send_reply(&VerifyReply { verdicts: verdicts.collect(), trouble, is_unreachable });
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

#[cfg(test)]
mod tests {
    use wire::v1::verifier::{How, Regex};

    use super::*;

    #[test]
    fn the_verifiers_of_the_newest_calls_are_kept() {
        let settings = |n: usize| {
            let pattern = n.to_string();
            v1::Verifier { how: Some(How::Regex(Regex { pattern })) }
        };
        let mut recent = RecentVerifiers::default();
        for n in (0..VERIFIERS_MAX).chain([0, VERIFIERS_MAX]) {
            assert!(recent.configure(&settings(n)).is_ok());
        }
        let kept = |n| recent.0.iter().any(|(known, _)| *known == settings(n));
        assert_eq!((recent.0.len(), kept(0), kept(1)), (VERIFIERS_MAX, true, false));
        assert!(recent.configure(&v1::Verifier { how: None }).is_err());
    }
}
