//! What systemd is told of a service (sd_notify): that it is ready, how it fares, that it stops,
//! and, from the task that does its work, that it is alive. Elsewhere nobody listens, and nothing
//! is said.

use std::{sync::OnceLock, time::Duration};

use sd_notify::NotifyState;
use tokio::process::Command;
use wire::v1;

/// Between two lines of status, where the watchdog does not ask more often.
const STATUS_EVERY: Duration = Duration::from_secs(10);

/// What systemd gives a service for itself; a child that spoke would be taken for it.
const OURS: [&str; 3] = ["NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"];

/// How often it wants to hear that the service is alive: twice as often as it says, lest one late
/// word end the service. `None` when nobody listens.
pub(crate) fn every() -> Option<Duration> {
    std::env::var_os("NOTIFY_SOCKET")?;
    Some(sd_notify::watchdog_enabled().map_or(STATUS_EVERY, |limit| STATUS_EVERY.min(limit / 2)))
}

pub(crate) fn ready() {
    say(&[NotifyState::Ready]);
}

/// The service goes on, and what it does, in a line.
pub(crate) fn alive(status: &str) {
    say(&[NotifyState::Status(status), NotifyState::Watchdog]);
}

pub(crate) fn stopping() {
    say(&[NotifyState::Stopping]);
}

/// A child that is a service of its own, ours to watch.
pub(crate) fn keep_from(command: &mut Command) {
    for name in OURS {
        command.env_remove(name);
    }
}

/// A word that is lost is followed by the next; that none arrives is said once.
fn say(state: &[NotifyState]) {
    static FAILED: OnceLock<()> = OnceLock::new();
    if let Err(error) = sd_notify::notify(state)
        && FAILED.set(()).is_ok()
    {
        tracing::warn!(%error, "telling the service manager how the service fares");
    }
}

/// `3 jobs, 412 tokens/s`, and what is not as it should be.
pub(crate) fn line(agent: &v1::AgentStatus) -> String {
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
    // A line is a line, whatever a trouble holds.
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
        assert_eq!(line(&agent), "3 jobs, 412 tokens/s");
        agent.jobs.truncate(1);
        agent.tokens_per_s = 0.0;
        agent.set_state(v1::agent_status::State::Draining);
        assert_eq!(line(&agent), "1 job, draining");
        agent.jobs.clear();
        agent.set_state(v1::agent_status::State::Quarantined);
        agent.trouble = "generator: the disk\nis full".into();
        assert_eq!(line(&agent), "idle, quarantined, generator: the disk is full");
    }
}
