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
            jobs.join("; "),
            agent.trouble.clone(),
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
        "jobs",
        "trouble",
    ];
    output::print(&output::table(headings, rows));
}

/// What it said last, unless it fell silent without saying goodbye.
fn state(agent: &v1::AgentStatus) -> String {
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
