//! The worker's side: judges all items of a call, commands several at a time.

use std::sync::atomic::{AtomicUsize, Ordering};

use runtime::Inbox;
use wire::v1;

use crate::{
    calls::{Item, Verified, Verify},
    judge::{Judge, Opinion},
};

/// Serves calls until the agent closes the pipe.
pub fn work(threads: usize) {
    let inbox: Inbox<Verify> = Inbox::open();
    while let Some(call) = inbox.next() {
        match judge(&call.request) {
            Ok(judge) => {
                let verdicts = judge_all(&judge, &call.request.items, threads.max(1));
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
fn judge_all(judge: &Judge, items: &[Item], threads: usize) -> Vec<v1::verdicts::Verdict> {
    let next = AtomicUsize::new(0);
    let take = || {
        let mut opinions = Vec::new();
        while let Some((place, item)) = {
            let place = next.fetch_add(1, Ordering::Relaxed);
            items.get(place).map(|item| (place, item))
        } {
            opinions.push((place, judge.judge(item)));
        }
        opinions
    };
    let mut opinions: Vec<(usize, Opinion)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(take)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
    });
    opinions.sort_by_key(|(place, _)| *place);
    opinions.into_iter().map(|(place, opinion)| opinion.on(&items[place])).collect()
}
