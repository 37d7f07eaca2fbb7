//! Notifications to systemd (sd_notify): ready, status, stopping, and the watchdog signal, which
//! the task that does the work sends. Without systemd nothing is sent.

use std::{sync::OnceLock, time::Duration};

use sd_notify::NotifyState;
use tokio::process::Command;
use wire::v1;

/// Interval between status lines, unless the watchdog needs a shorter one.
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

/// Reports that the service is ready.
pub(crate) fn notify_ready() {
    send_state(&[NotifyState::Ready]);
}

/// Reports that the service is alive, with a status line.
pub(crate) fn notify_alive(status: &str) {
    send_state(&[NotifyState::Status(status), NotifyState::Watchdog]);
}

/// Reports that the service is stopping.
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

/// Returns an agent's status on one line: `3 jobs, 412 tokens/s`, its state if it is not ready, and
/// its trouble.
pub(crate) fn status_line(agent: &v1::AgentStatus) -> String {
    let jobs = match agent.jobs.len() {
        0 => "idle".to_owned(),
        1 => "1 job".to_owned(),
        more => format!("{more} jobs"),
    };
    let rate = (agent.tokens_per_s > 0.0).then(|| format!("{:.0} tokens/s", agent.tokens_per_s));
    let state = match agent.state() {
        v1::agent_status::State::Ready | v1::agent_status::State::Unspecified => None,
        other => Some(other.as_str_name().to_lowercase()),
    };
    // The trouble may have several lines.
    let trouble = (!agent.trouble.is_empty()).then(|| agent.trouble.replace('\n', " "));
    let parts = [Some(jobs), rate, state, trouble];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_an_agent_does_and_what_keeps_it() {
        let mut agent = v1::AgentStatus { tokens_per_s: 411.6, ..Default::default() };
        agent.set_state(v1::agent_status::State::Ready);
        agent.jobs = vec![v1::ActiveJob::default(); 3];
        assert_eq!(status_line(&agent), "3 jobs, 412 tokens/s");
        agent.jobs.truncate(1);
        agent.tokens_per_s = 0.0;
        agent.set_state(v1::agent_status::State::Draining);
        assert_eq!(status_line(&agent), "1 job, draining");
        agent.jobs.clear();
        agent.set_state(v1::agent_status::State::Quarantined);
        agent.trouble = "generator: the disk\nis full".into();
        assert_eq!(status_line(&agent), "idle, quarantined, generator: the disk is full");
    }
}
