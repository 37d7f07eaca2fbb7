//! The worker's side: judges all items of a call, commands several at a time.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use runtime::Inbox;
use wire::v1;

use crate::{
    calls::{Item, Judged, Verified, Verify},
    judge::{Judge, Opinion},
};

/// Between two progress messages of a call.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// Serves calls until the agent closes the pipe.
pub fn work(threads: usize) {
    let inbox: Inbox<Verify> = Inbox::open();
    while let Some(call) = inbox.next() {
        match judge(&call.request) {
            Ok(judge) => {
                let tell = |items| call.respond.progress(&Judged { items });
                let verdicts = judge_all(&judge, &call.request.items, threads.max(1), &tell);
                call.respond.reply(&Verified { verdicts });
            }
            Err(problem) => call.respond.error(&problem),
        }
    }
}

fn judge(call: &Verify) -> Result<Judge, String> {
    let how = call.verifier.how.as_ref().ok_or("the spec names no verifier")?;
    Judge::new(how).map_err(|error| format!("the verifier's pattern: {error}"))
}

/// Verdicts in the order of the items.
fn judge_all(
    judge: &Judge,
    items: &[Item],
    threads: usize,
    tell: &(impl Fn(u32) + Sync),
) -> Vec<v1::verdicts::Verdict> {
    let next = AtomicUsize::new(0);
    let told = Mutex::new(Instant::now());
    let take = || {
        let mut opinions = Vec::new();
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(place) else { return opinions };
            opinions.push((place, judge.judge(item)));
            if let Ok(mut told) = told.try_lock()
                && told.elapsed() >= PROGRESS_EVERY
            {
                *told = Instant::now();
                tell(u32::try_from(place).unwrap_or(u32::MAX));
            }
        }
    };
    let mut opinions: Vec<(usize, Opinion)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(take)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
    });
    opinions.sort_by_key(|(place, _)| *place);
    opinions.into_iter().map(|(place, opinion)| opinion.on(&items[place])).collect()
}
