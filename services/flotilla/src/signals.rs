//! Asking to stop: the first signal drains, the second one ends the process at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Exit code of a process that was told twice: 128 + SIGTERM.
const TOLD_TWICE: i32 = 143;

/// A token that SIGINT or SIGTERM cancels.
///
/// # Errors
/// When the process may not listen to signals.
pub(crate) fn stop_token() -> std::io::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let told = stop.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if told.is_cancelled() {
                std::process::exit(TOLD_TWICE);
            }
            told.cancel();
        }
    });
    Ok(stop)
}
