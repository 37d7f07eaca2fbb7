//! The worker's side: judges all items of a call.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use runtime::Inbox;

use crate::{
    Kit,
    bench::{Bench, Found, Verifier},
    calls::{Judged, Verified, Verify},
};

/// Between two progress messages of a call.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// Serves calls until the agent closes the pipe.
pub fn work(kit: Kit, threads: usize) {
    let inbox: Inbox<Verify> = Inbox::open();
    let bench = Bench::new(kit);
    while let Some(call) = inbox.next() {
        let Verify { verifier, items } = &call.request;
        let verifier = match Verifier::new(verifier) {
            Ok(verifier) => verifier,
            Err(problem) => {
                call.respond.error(&format!("the verifier's settings: {problem}"));
                continue;
            }
        };
        let told = Mutex::new(Instant::now());
        let tell = |items: usize| {
            if let Ok(mut told) = told.try_lock()
                && told.elapsed() >= PROGRESS_EVERY
            {
                *told = Instant::now();
                let items = u32::try_from(items).unwrap_or(u32::MAX);
                call.respond.progress(&Judged { items });
            }
        };
        let found = bench.judge_all(&verifier, items, threads, &tell);
        let trouble = found.iter().find(|found| found.opinion.elsewhere);
        let trouble = trouble.map(|Found { opinion, .. }| opinion.detail.clone());
        let verdicts = found.into_iter().zip(items).map(|(found, item)| found.opinion.on(item));
        call.respond.reply(&Verified { verdicts: verdicts.collect(), trouble });
    }
}
