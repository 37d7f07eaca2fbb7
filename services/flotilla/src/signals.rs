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
            crate::notify::stopping();
            told.cancel();
        }
    });
    Ok(stop)
}

/// A token that SIGUSR1 cancels: a box's owner has an agent leave when it is done.
///
/// # Errors
/// When the process may not listen to signals.
pub(crate) fn leave_token() -> std::io::Result<CancellationToken> {
    let leave = CancellationToken::new();
    let mut told = signal(SignalKind::user_defined1())?;
    let token = leave.clone();
    tokio::spawn(async move {
        told.recv().await;
        token.cancel();
    });
    Ok(leave)
}
