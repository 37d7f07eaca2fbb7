//! Signals: the first SIGINT or SIGTERM requests a drain, the second ends the process at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Exit code after a second signal: 128 + SIGTERM.
const FORCED_EXIT_CODE: i32 = 143;

/// Returns a token that SIGINT or SIGTERM cancels. A second signal exits the process.
///
/// # Errors
/// If signal handlers cannot be installed.
pub fn stop_token() -> std::io::Result<CancellationToken> {
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
                std::process::exit(FORCED_EXIT_CODE);
            }
            crate::service_notify::notify_stopping();
            told.cancel();
        }
    });
    Ok(stop)
}

/// Returns a token that SIGUSR1 cancels, with which an upgrade or the box's owner drains an agent.
///
/// # Errors
/// If the signal handler cannot be installed.
pub(crate) fn drain_token() -> std::io::Result<CancellationToken> {
    let leave = CancellationToken::new();
    let mut told = signal(SignalKind::user_defined1())?;
    let token = leave.clone();
    tokio::spawn(async move {
        told.recv().await;
        token.cancel();
    });
    Ok(leave)
}
