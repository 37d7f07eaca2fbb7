//! Streams that end when their reader takes nothing. HTTP/2 does not poll a body while the client
//! has no window, so neither a deadline nor a revocation in the body can end it.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll},
    time::Duration,
};

use futures::{Stream, stream::BoxStream};
use tokio::time::{Instant, sleep};

/// A reader that takes nothing for this long is gone.
pub(crate) const STALL_LIMIT: Duration = Duration::from_secs(60);
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Returns the same stream. A task drops it, with all that it holds, when its reader has not asked
/// for the next item for [`STALL_LIMIT`]; a reader that comes back gets `stalled` as the last item.
pub(crate) fn end_when_stalled<I: Send + 'static>(
    items: BoxStream<'static, I>,
    stalled: impl FnOnce() -> I + Send + 'static,
) -> BoxStream<'static, I> {
    let state = StreamState { items: Some(items), last: None, idle_since: Some(Instant::now()) };
    let shared = Arc::new(Mutex::new(state));
    tokio::spawn(watch_reader(Arc::downgrade(&shared), stalled));
    Box::pin(WatchedStream(shared))
}

struct WatchedStream<I>(Arc<Mutex<StreamState<I>>>);

struct StreamState<I> {
    /// `None` once the stream is over.
    items: Option<BoxStream<'static, I>>,
    /// Follows the items of a stream that was dropped.
    last: Option<I>,
    /// When the reader took an item; `None` while it waits for the next one.
    idle_since: Option<Instant>,
}

impl<I> Stream for WatchedStream<I> {
    type Item = I;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<I>> {
        let mut state = lock_state(&self.0);
        let state = &mut *state;
        let Some(items) = &mut state.items else { return Poll::Ready(state.last.take()) };
        let polled = items.as_mut().poll_next(cx);
        match &polled {
            Poll::Pending => state.idle_since = None,
            Poll::Ready(Some(_)) => state.idle_since = Some(Instant::now()),
            Poll::Ready(None) => state.items = None,
        }
        polled
    }
}

/// Ends when the stream is over or dropped.
async fn watch_reader<I>(shared: Weak<Mutex<StreamState<I>>>, stalled: impl FnOnce() -> I) {
    loop {
        sleep(CHECK_INTERVAL).await;
        let Some(shared) = shared.upgrade() else { return };
        let mut state = lock_state(&shared);
        if state.items.is_none() {
            return;
        }
        if state.idle_since.is_none_or(|since| since.elapsed() < STALL_LIMIT) {
            continue;
        }
        tracing::info!("the client stopped reading; its stream ended");
        state.last = Some(stalled());
        let items = state.items.take();
        drop(state);
        drop(items);
        return;
    }
}

fn lock_state<I>(shared: &Mutex<StreamState<I>>) -> MutexGuard<'_, StreamState<I>> {
    // The stream is not polled again after a panic.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt, stream};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_nobody_reads_frees_what_it_holds() {
        let held = Arc::new(());
        let kept = held.clone();
        let items = stream::repeat_with(move || Arc::strong_count(&kept)).boxed();
        let mut read = end_when_stalled(items, || 0);
        for _ in 0..10 {
            sleep(STALL_LIMIT / 2).await;
            assert_eq!(read.next().await, Some(2), "a slow reader goes on");
        }
        sleep(STALL_LIMIT + CHECK_INTERVAL).await;
        assert_eq!(Arc::strong_count(&held), 1);
        assert_eq!((read.next().await, read.next().await), (Some(0), None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_waits_for_an_item_is_not_gone() {
        let items = stream::once(async {
            sleep(STALL_LIMIT * 10).await;
            1
        });
        let read = end_when_stalled(items.boxed(), || 0);
        assert_eq!(read.collect::<Vec<_>>().await, [1]);
    }
}
