//! Signals: the first SIGINT or SIGTERM requests a drain, the second ends the process at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

const FORCED_EXIT_CODE: i32 = 143;

/// Returns a token that SIGINT or SIGTERM cancels. A second signal exits the process.
pub fn stop_token() -> std::io::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let token = stop.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            if token.is_cancelled() {
                std::process::exit(FORCED_EXIT_CODE);
            }
            crate::service_notify::notify_stopping();
            token.cancel();
        }
    });
    Ok(stop)
}

pub(crate) fn drain_token() -> std::io::Result<CancellationToken> {
    let leave = CancellationToken::new();
    let mut drain = signal(SignalKind::user_defined1())?;
    let token = leave.clone();
    tokio::spawn(async move {
        drain.recv().await;
        token.cancel();
    });
    Ok(leave)
}
