//! Statuses of agents as single lines of text.

use cycle::{can_serve, is_agent_running};
use wire::v1;

/// Seconds without a status after which an agent counts as silent. Agents publish one every 10 s.
const SILENT_AFTER_S: i64 = 30;

/// Returns the job and its progress: `r-1 c2 generate-3 5/16`.
pub fn job_text(job: &v1::ActiveJob) -> String {
    format!("{} c{} {} {}/{}", job.run, job.cycle, job.job, job.done, job.total)
}

/// Returns the trouble of an agent and its withheld roles with their remedies; empty without any.
pub fn trouble_text(agent: &v1::AgentStatus) -> String {
    let withheld = agent.withheld.iter().map(|v1::Withheld { role, finding, seen, remedy }| {
        format!("{role} withheld, {finding}: {seen}; {remedy}")
    });
    let said = Some(agent.trouble.clone()).filter(|trouble| !trouble.is_empty());
    said.into_iter().chain(withheld).collect::<Vec<_>>().join("; ")
}

/// Returns `GPU 97 % 71 °C 212 W` for each GPU, or `CPU 53 %`.
fn telemetry_text(now: &v1::Telemetry) -> String {
    let one = |value: Option<f64>, unit: &str| value.map(|value| format!(" {value:.0} {unit}"));
    let gpu = |gpu: &v1::telemetry::Gpu| {
        if gpu.asleep {
            return "GPU asleep".to_owned();
        }
        let hottest = gpu.temperatures.iter().map(|one| one.celsius).reduce(f64::max);
        let parts =
            [one(gpu.busy_percent, "%"), one(hottest, "°C"), one(gpu.watts, "W")].into_iter();
        format!("GPU{}", parts.flatten().collect::<String>())
    };
    if now.gpus.is_empty() {
        return one(now.cpu_busy.map(|share| share * 100.0), "%")
            .map_or("-".into(), |busy| format!("CPU{busy}"));
    }
    now.gpus.iter().map(gpu).collect::<Vec<_>>().join(", ")
}

/// Returns the load of an agent's host, or `-` if the agent stopped or is silent: its last status
/// has the load of that time. `now` is in seconds since 1970.
pub fn load_text(agent: &v1::AgentStatus, now: u64) -> String {
    let is_current = is_agent_running(agent) && !is_silent(agent, now);
    let telemetry = agent.telemetry.as_ref().filter(|_| is_current);
    telemetry.map_or_else(|| "-".into(), telemetry_text)
}

/// Returns the tokens per second of an agent that draws samples, otherwise `-`: the status of one
/// that draws nothing has the rate of its last jobs.
pub fn sampling_rate_text(agent: &v1::AgentStatus) -> String {
    let rate = Some(agent.tokens_per_s).filter(|rate| *rate > 0.0 && !agent.jobs.is_empty());
    rate.map_or("-".into(), |rate| format!("{rate:.0}"))
}

/// Returns the state of an agent, or when it was last seen if it stopped publishing without a final
/// status. `now` is in seconds since 1970.
pub fn agent_state_text(agent: &v1::AgentStatus, now: u64) -> String {
    match agent.state() {
        v1::agent_status::State::Ready | v1::agent_status::State::Draining
            if is_silent(agent, now) =>
        {
            format!("seen {} s ago", silent_seconds(agent, now))
        }
        state => state.as_str_name().to_lowercase(),
    }
}

pub(crate) fn is_silent(agent: &v1::AgentStatus, now: u64) -> bool {
    silent_seconds(agent, now) > SILENT_AFTER_S
}

/// Returns the seconds since the agent's last status.
pub(crate) fn silent_seconds(agent: &v1::AgentStatus, now: u64) -> i64 {
    let now = i64::try_from(now).unwrap_or(i64::MAX);
    agent.seen_at.as_ref().map_or(i64::MAX, |at| now.saturating_sub(at.seconds))
}

/// Returns the jobs, state and trouble of an agent, and its speed while it has jobs:
/// `3 jobs, 412 tokens/s`.
pub fn status_line(agent: &v1::AgentStatus) -> String {
    let jobs = match agent.jobs.len() {
        0 => "idle".to_owned(),
        1 => "1 job".to_owned(),
        more => format!("{more} jobs"),
    };
    let is_working = !agent.jobs.is_empty() && agent.tokens_per_s > 0.0;
    let rate = is_working.then(|| format!("{:.0} tokens/s", agent.tokens_per_s));
    let state = match agent.state() {
        v1::agent_status::State::Ready | v1::agent_status::State::Unspecified => None,
        other => Some(other.as_str_name().to_lowercase()),
    };
    // The trouble may have several lines.
    let trouble = (!agent.trouble.is_empty()).then(|| agent.trouble.replace('\n', " "));
    let parts = [Some(jobs), rate, state, trouble];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Returns which agents serve a channel, and where; `None` if it is not served. `page` is the URL of
/// the fleet's page, `now` is in seconds since 1970.
pub fn describe_serving(
    channel: &v1::Channel,
    agents: &[v1::AgentStatus],
    page: &str,
    now: u64,
) -> Option<String> {
    let serving = channel.r#move.as_ref()?.serving.as_ref()?;
    let pool = &serving.pool;
    let serves = |agent: &v1::AgentStatus| agent.pool == *pool && can_serve(agent, now);
    if !agents.iter().any(serves) {
        return Some(format!(
            "no agent of pool {pool} has the role server; start one with `flotilla agent --pool \
             {pool} --roles server`"
        ));
    }
    let who = match serving.replicas {
        0 => "all agents".to_owned(),
        1 => "1 agent".to_owned(),
        many => format!("{many} agents"),
    };
    let name = &channel.channel;
    Some(format!(
        "{who} with the role server in pool {pool} serve it; clients name the model {name} at \
         {page}v1"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use v1::telemetry::{Gpu, Temperature};

    #[test]
    fn a_channel_that_no_agent_serves_names_the_command_that_starts_one() {
        let serving = v1::channel_move::Serving { pool: "gpu".into(), replicas: 1 };
        let r#move = v1::ChannelMove { serving: Some(serving), ..Default::default() };
        let channel =
            v1::Channel { channel: "best".into(), r#move: Some(r#move), ..Default::default() };
        let agent = |pool: &str, role: &str| v1::AgentStatus {
            pool: pool.into(),
            roles: vec![role.into()],
            state: v1::agent_status::State::Ready.into(),
            seen_at: Some(wire::Timestamp { seconds: 1, nanos: 0 }),
            ..Default::default()
        };
        let describe = |agents: &[_]| describe_serving(&channel, agents, "https://box:7/", 1);
        let other = [agent("default", "server"), agent("gpu", "trainer")];
        let none = describe(&other).expect("it is to be served");
        assert!(
            none.ends_with("start one with `flotilla agent --pool gpu --roles server`"),
            "{none}"
        );
        let one = describe(&[agent("gpu", "server")]).expect("it is served");
        assert!(one.starts_with("1 agent") && one.ends_with("at https://box:7/v1"), "{one}");
        assert_eq!(describe_serving(&v1::Channel::default(), &[], "", 1), None);
    }

    #[test]
    fn what_a_box_does_fits_a_column() {
        let temperature = |celsius| Temperature { sensor: "edge".into(), celsius, critical: None };
        let gpu = Gpu {
            busy_percent: Some(97.0),
            temperatures: vec![temperature(62.0), temperature(71.4)],
            watts: Some(212.2),
            ..Gpu::default()
        };
        let asleep = Gpu { asleep: true, ..Gpu::default() };
        let now = v1::Telemetry { gpus: vec![gpu, asleep], ..v1::Telemetry::default() };
        assert_eq!(telemetry_text(&now), "GPU 97 % 71 °C 212 W, GPU asleep");
        let now = v1::Telemetry { cpu_busy: Some(0.534), ..v1::Telemetry::default() };
        assert_eq!(telemetry_text(&now), "CPU 53 %");
        assert_eq!(telemetry_text(&v1::Telemetry::default()), "-");
    }

    #[test]
    fn only_an_agent_with_jobs_has_a_speed() {
        let mut agent = v1::AgentStatus { tokens_per_s: 412.3, ..Default::default() };
        assert_eq!(status_line(&agent), "idle");
        agent.jobs.push(v1::ActiveJob::default());
        assert_eq!(status_line(&agent), "1 job, 412 tokens/s");
    }

    #[test]
    fn an_agent_that_stopped_or_is_silent_has_no_load() {
        let telemetry = Some(v1::Telemetry { cpu_busy: Some(0.99), ..v1::Telemetry::default() });
        let seen_at = Some(wire::Timestamp { seconds: 1000, nanos: 0 });
        let mut agent = v1::AgentStatus { telemetry, seen_at, ..Default::default() };
        agent.set_state(v1::agent_status::State::Ready);
        assert_eq!(load_text(&agent, 1010), "CPU 99 %");
        assert_eq!(load_text(&agent, 1031), "-");
        assert_eq!(agent_state_text(&agent, 1068), "seen 68 s ago");
        agent.set_state(v1::agent_status::State::Stopped);
        assert_eq!(load_text(&agent, 1010), "-");
    }

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
