//! The roles that a run needs and no agent offers.

use cycle::Run;
use wire::v1;

/// Returns the roles that the run needs and that no ready agent of its pool has. Verifiers and
/// evaluators serve all pools.
pub fn missing_roles(run: &Run, agents: &[v1::AgentStatus]) -> Vec<&'static str> {
    let spec = &run.spec;
    let mut needed = match spec.kind {
        Some(v1::spec::Kind::Raft(_)) => vec!["trainer", "generator", "verifier"],
        Some(v1::spec::Kind::Watched(_)) => Vec::new(),
        Some(v1::spec::Kind::Sft(_)) | None => vec!["trainer"],
    };
    if !spec.suites.is_empty() {
        needed.push("evaluator");
    }
    let serves = |agent: &v1::AgentStatus, role: &str| {
        let is_ready = agent.state() == v1::agent_status::State::Ready;
        let in_pool = agent.pool == spec.pool || matches!(role, "verifier" | "evaluator");
        is_ready && in_pool && agent.roles.iter().any(|name| name == role)
    };
    needed.retain(|role| !agents.iter().any(|agent| serves(agent, role)));
    needed
}
