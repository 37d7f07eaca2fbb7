//! `flotilla agents …`.

use std::{
    process::ExitCode,
    time::{SystemTime, UNIX_EPOCH},
};

use wire::{AgentId, v1};

use crate::{cli::AgentsCommand, fleet::FleetArgs, output};

/// Agents record their status every ten seconds.
const GONE_AFTER_S: i64 = 30;

pub(crate) async fn agents(
    fleet: &FleetArgs,
    command: AgentsCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    if let AgentsCommand::Revoke { agent } = &command {
        super::members::revoke(fleet, agent).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let control = fleet.control().await?;
    match command {
        AgentsCommand::List => {
            let agents = control.agents().await?;
            if json {
                output::print_json(&agents)?;
            } else {
                list(&agents);
            }
        }
        AgentsCommand::Drain { agent } => control.drain(&AgentId::new(agent)?).await?,
        AgentsCommand::Revoke { .. } => {}
    }
    Ok(ExitCode::SUCCESS)
}

fn list(agents: &[v1::AgentStatus]) {
    let rows = agents.iter().map(|agent| {
        let jobs: Vec<String> = agent
            .jobs
            .iter()
            .map(|job| format!("{} c{} {} {}/{}", job.run, job.cycle, job.job, job.done, job.total))
            .collect();
        let rate = if agent.tokens_per_s > 0.0 {
            format!("{:.0}", agent.tokens_per_s)
        } else {
            "-".into()
        };
        [
            agent.agent.clone(),
            agent.host.clone(),
            agent.roles.join(", "),
            agent.pool.clone(),
            state(agent),
            rate,
            output::bytes(agent.rss_bytes),
            agent.version.clone(),
            agent.profile.clone(),
            agent.engines.join("; "),
            agent.telemetry.as_ref().map_or("-".into(), doing),
            jobs.join("; "),
            trouble(agent),
        ]
    });
    let headings = [
        "agent",
        "host",
        "roles",
        "pool",
        "state",
        ">tokens/s",
        ">memory",
        "version",
        "profile",
        "engines",
        "box",
        "jobs",
        "trouble",
    ];
    output::print(&output::table(headings, rows));
}

/// What keeps it from working, and what would keep it from roles it was asked to do.
pub(crate) fn trouble(agent: &v1::AgentStatus) -> String {
    let withheld = agent.withheld.iter().map(|v1::Withheld { role, finding, seen, remedy }| {
        format!("{role} withheld, {finding}: {seen}; {remedy}")
    });
    let said = Some(agent.trouble.clone()).filter(|trouble| !trouble.is_empty());
    said.into_iter().chain(withheld).collect::<Vec<_>>().join("; ")
}

/// `GPU 97 % 71 °C 212 W`, one after the other; the processor where there is none.
pub(crate) fn doing(now: &v1::Telemetry) -> String {
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

/// What it said last, unless it fell silent without saying goodbye.
pub(crate) fn state(agent: &v1::AgentStatus) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    let silent_s = agent.seen_at.as_ref().map_or(i64::MAX, |at| now.saturating_sub(at.seconds));
    match agent.state() {
        v1::agent_status::State::Ready | v1::agent_status::State::Draining
            if silent_s > GONE_AFTER_S =>
        {
            format!("silent for {silent_s} s")
        }
        state => state.as_str_name().to_lowercase(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use v1::telemetry::{Gpu, Temperature};

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
        assert_eq!(doing(&now), "GPU 97 % 71 °C 212 W, GPU asleep");
        let now = v1::Telemetry { cpu_busy: Some(0.534), ..v1::Telemetry::default() };
        assert_eq!(doing(&now), "CPU 53 %");
        assert_eq!(doing(&v1::Telemetry::default()), "-");
    }
}
