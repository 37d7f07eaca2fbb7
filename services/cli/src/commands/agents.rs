//! `flotilla agents`: list, drain and revoke agents.

use run_view::{agent_state_text, job_text, load_text, sampling_rate_text, trouble_text};
use wire::{AgentId, clock::unix_seconds, v1};

use crate::{
    args::{AgentsCommand, GlobalArgs},
    output,
};

pub(crate) async fn handle_agents(
    flags: &GlobalArgs,
    command: AgentsCommand,
) -> anyhow::Result<()> {
    match command {
        AgentsCommand::List => {
            let agents = flags.fleet.connect_control().await?.list_agents().await?;
            output::print_json_or(flags.json, &agents, || print_agents(&agents))?;
        }
        AgentsCommand::Drain { agent } => {
            let agent = AgentId::new(agent)?;
            flags.fleet.connect_control().await?.drain_agent(&agent).await?;
            output::print_message(&format!(
                "{agent} takes no more jobs, finishes those it has and stops; to start it again, run \
                 `flotilla agent --name {agent} --roles ROLE` or its service on its box"
            ));
        }
        AgentsCommand::Revoke { agent } => {
            super::members::revoke_member(&flags.fleet, &agent).await?;
        }
    }
    Ok(())
}

fn print_agents(agents: &[v1::AgentStatus]) {
    let mut agents: Vec<&v1::AgentStatus> = agents.iter().collect();
    agents.sort_by_key(|agent| (&agent.host, &agent.agent));
    let rows = agents.into_iter().map(|agent| {
        let jobs: Vec<String> = agent.jobs.iter().map(job_text).collect();
        [
            agent.agent.clone(),
            agent.host.clone(),
            agent.roles.join(", "),
            agent.pool.clone(),
            agent_state_text(agent, unix_seconds()),
            sampling_rate_text(agent),
            output::format_bytes(agent.rss_bytes),
            agent.version.clone(),
            agent.profile.clone(),
            agent.engines.join("; "),
            stack_text(agent.stack.as_ref()),
            load_text(agent, unix_seconds()),
            output::text_or_dash(jobs.join("; ")),
            output::text_or_dash(trouble_text(agent)),
        ]
    });
    let headings = [
        "agent",
        "~host",
        "roles",
        "~pool",
        "state",
        ">?tokens/s",
        ">~memory",
        "~version",
        "~profile",
        "~engines",
        "?~stack",
        "~load of host",
        "?jobs",
        "?trouble",
    ];
    output::print_list(headings, rows, "no agents yet; `flotilla agent` starts one");
}

/// Returns the name of the installed stack, and how its versions differ from the known ones.
fn stack_text(stack: Option<&v1::Stack>) -> String {
    let parts = stack.into_iter().flat_map(|it| std::iter::once(&it.name).chain(&it.differences));
    let parts: Vec<&str> = parts.map(String::as_str).filter(|part| !part.is_empty()).collect();
    output::text_or_dash(parts.join("; "))
}
