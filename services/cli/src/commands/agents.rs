//! `flotilla agents`: list, drain and revoke agents.

use std::process::ExitCode;

use wire::{AgentId, v1};

use crate::{args::AgentsCommand, clock::unix_time_s, fleet::FleetArgs, output};

/// Seconds without a status after which an agent counts as silent. Agents publish one every 10 s.
const SILENT_AFTER_S: i64 = 30;

/// Runs a `flotilla agents` subcommand.
pub(crate) async fn run_agents_command(
    fleet: &FleetArgs,
    command: AgentsCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    match command {
        AgentsCommand::List => {
            let agents = fleet.connect_control().await?.list_agents().await?;
            output::print_json_or(json, &agents, || print_agents(&agents))?;
        }
        AgentsCommand::Drain { agent } => {
            fleet.connect_control().await?.drain_agent(&AgentId::new(agent)?).await?;
        }
        AgentsCommand::Revoke { agent } => super::members::revoke_member(fleet, &agent).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the agents as a table.
fn print_agents(agents: &[v1::AgentStatus]) {
    let rows = agents.iter().map(|agent| {
        let jobs: Vec<String> = agent
            .jobs
            .iter()
            .map(|job| format!("{} c{} {} {}/{}", job.run, job.cycle, job.job, job.done, job.total))
            .collect();
        let rate = Some(agent.tokens_per_s).filter(|rate| *rate > 0.0);
        [
            agent.agent.clone(),
            agent.host.clone(),
            agent.roles.join(", "),
            agent.pool.clone(),
            state_text(agent),
            rate.map_or("-".into(), |rate| format!("{rate:.0}")),
            output::format_bytes(agent.rss_bytes),
            agent.version.clone(),
            agent.profile.clone(),
            agent.engines.join("; "),
            agent.telemetry.as_ref().map_or("-".into(), telemetry_text),
            jobs.join("; "),
            trouble_text(agent),
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
    output::print_text(&output::format_table(headings, rows));
}

/// Returns the agent's trouble and its withheld roles with their remedies, on one line. Empty if it
/// has neither.
pub(crate) fn trouble_text(agent: &v1::AgentStatus) -> String {
    let withheld = agent.withheld.iter().map(|v1::Withheld { role, finding, seen, remedy }| {
        format!("{role} withheld, {finding}: {seen}; {remedy}")
    });
    let said = Some(agent.trouble.clone()).filter(|trouble| !trouble.is_empty());
    said.into_iter().chain(withheld).collect::<Vec<_>>().join("; ")
}

/// Returns the load, temperature and power of each GPU: `GPU 97 % 71 °C 212 W`. Without a GPU, the
/// load of the CPU.
pub(crate) fn telemetry_text(now: &v1::Telemetry) -> String {
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

/// Returns the agent's last state, or `silent for N s` if it stopped publishing without a final
/// status.
pub(crate) fn state_text(agent: &v1::AgentStatus) -> String {
    let now = i64::try_from(unix_time_s()).unwrap_or(i64::MAX);
    let silent_s = agent.seen_at.as_ref().map_or(i64::MAX, |at| now.saturating_sub(at.seconds));
    match agent.state() {
        v1::agent_status::State::Ready | v1::agent_status::State::Draining
            if silent_s > SILENT_AFTER_S =>
        {
            format!("last seen {silent_s} s ago")
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
        assert_eq!(telemetry_text(&now), "GPU 97 % 71 °C 212 W, GPU asleep");
        let now = v1::Telemetry { cpu_busy: Some(0.534), ..v1::Telemetry::default() };
        assert_eq!(telemetry_text(&now), "CPU 53 %");
        assert_eq!(telemetry_text(&v1::Telemetry::default()), "-");
    }
}
