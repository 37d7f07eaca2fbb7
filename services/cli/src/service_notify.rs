//! Notifications to systemd (sd_notify): ready, status, stopping, and the watchdog signal, which
//! the task that does the work sends. Without systemd nothing is sent.

use std::{sync::OnceLock, time::Duration};

use sd_notify::NotifyState;
use tokio::process::Command;

const STATUS_INTERVAL: Duration = Duration::from_secs(10);

/// Environment variables that systemd sets for this service. A child that used them would be taken
/// for the service.
const SYSTEMD_VARIABLES: [&str; 3] = ["NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"];

/// Returns the interval of watchdog signals, half of systemd's limit, so that one late signal does
/// not end the service. `None` without systemd.
pub(crate) fn status_interval() -> Option<Duration> {
    std::env::var_os("NOTIFY_SOCKET")?;
    Some(
        sd_notify::watchdog_enabled()
            .map_or(STATUS_INTERVAL, |limit| STATUS_INTERVAL.min(limit / 2)),
    )
}

pub(crate) fn notify_ready() {
    send_state(&[NotifyState::Ready]);
}

pub(crate) fn notify_alive(status: &str) {
    send_state(&[NotifyState::Status(status), NotifyState::Watchdog]);
}

pub(crate) fn notify_stopping() {
    send_state(&[NotifyState::Stopping]);
}

/// Removes systemd's variables from the environment of a child, which this process supervises
/// itself.
pub(crate) fn clear_environment(command: &mut Command) {
    for name in SYSTEMD_VARIABLES {
        command.env_remove(name);
    }
}

/// Sends a state to systemd. A lost message is replaced by the next one; the first failure is
/// logged.
fn send_state(state: &[NotifyState]) {
    static FAILED: OnceLock<()> = OnceLock::new();
    if let Err(error) = sd_notify::notify(state)
        && FAILED.set(()).is_ok()
    {
        tracing::warn!(%error, "cannot report status to the service manager");
    }
}
