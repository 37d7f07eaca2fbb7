//! The roles that a run needs and no agent offers, and the jobs that no agent can do now.

use wire::{FactKey, PromptSet, WorkKind, v1};

use crate::{fold::parse_job_id, state::Run};

/// Seconds without a status after which an agent counts as gone. Agents publish one every 10 s;
/// the rest is for clocks that differ.
const GONE_AFTER_S: u64 = 120;

/// The roles that load a run's base, with the engine of an agent that loads any.
const BASE_ROLES: [(&str, &str); 3] = [
    ("trainer", "--trainer-engine pytorch"),
    ("generator", "--generator-engine llama.cpp"),
    ("evaluator", "--evaluator-engine llama.cpp"),
];

/// Returns the roles that a run of this spec needs and that no ready agent of its pool has, or none
/// that works with its base. Verifiers, scorers and evaluators serve all pools. `now_s` is in seconds
/// since 1970.
pub fn missing_roles<'a>(
    spec: &v1::Spec,
    agents: impl IntoIterator<Item = &'a v1::AgentStatus>,
    now_s: u64,
) -> Vec<&'static str> {
    let mut missing = match &spec.kind {
        Some(v1::spec::Kind::Raft(raft)) => {
            let only_measures = spec.only_measures();
            let sampled = raft.prompt_sets().filter(|set| {
                !only_measures || (set.purpose == v1::Purpose::Heldout && set.file.is_some())
            });
            let sampled: Vec<PromptSet<'_>> = sampled.collect();
            let mut needed = if only_measures { Vec::new() } else { vec!["trainer"] };
            needed.extend((!sampled.is_empty()).then_some("generator"));
            needed.extend(sampled.iter().any(|set| set.verifier.is_some()).then_some("verifier"));
            needed.extend(raft.teacher.is_some().then_some("scorer"));
            needed
        }
        Some(v1::spec::Kind::Watched(_)) => Vec::new(),
        Some(v1::spec::Kind::Sft(_)) | None => vec!["trainer"],
    };
    if !spec.suites.is_empty() {
        missing.push("evaluator");
    }
    for agent in agents {
        if agent.state() == v1::agent_status::State::Ready && !is_agent_gone(agent, now_s) {
            let serves_all = |role: &str| matches!(role, "verifier" | "scorer" | "evaluator");
            let in_pool = |role: &str| agent.pool == spec.pool || serves_all(role);
            let takes_base = |role: &str| {
                let loads_base = BASE_ROLES.iter().any(|(name, _)| *name == role);
                spec.other_model_type.is_empty() || !loads_base || agent.takes_any_model(role)
            };
            let has_role = |role: &str| agent.roles.iter().any(|has| has == role);
            missing.retain(|role| !(in_pool(role) && has_role(role) && takes_base(role)));
        }
    }
    missing
}

/// Returns true if an agent has been silent for so long that it counts as gone. `now_s` is in seconds
/// since 1970.
pub fn is_agent_gone(agent: &v1::AgentStatus, now_s: u64) -> bool {
    let seen = agent.seen_at.as_ref().and_then(|at| u64::try_from(at.seconds).ok());
    seen.is_some_and(|seen| now_s.saturating_sub(seen) > GONE_AFTER_S)
}

/// Returns true unless an agent has stopped, by its last status.
pub fn is_agent_running(agent: &v1::AgentStatus) -> bool {
    use v1::agent_status::State;
    matches!(agent.state(), State::Ready | State::Draining | State::Quarantined)
}

/// Returns true if an agent answers requests to models, or could. `now_s` is in seconds since 1970.
pub fn can_serve(agent: &v1::AgentStatus, now_s: u64) -> bool {
    let has_role = agent.roles.iter().any(|role| role == "server");
    has_role && is_agent_running(agent) && !is_agent_gone(agent, now_s)
}

/// Returns a message for users about the missing roles; empty if there are none.
pub fn describe_missing_roles<'a>(
    spec: &v1::Spec,
    agents: impl IntoIterator<Item = &'a v1::AgentStatus>,
    now_s: u64,
) -> String {
    let missing = missing_roles(spec, agents, now_s);
    if missing.is_empty() {
        return String::new();
    }
    let (pool, other) = (&spec.pool, &spec.other_model_type);
    let without = missing.iter().map(|role| format!("no {role}")).collect::<Vec<_>>().join(" and ");
    let (base, options) = match other.is_empty() {
        true => (String::new(), String::new()),
        false => (format!(" for {other} models"), any_model_options(&missing)),
    };
    let roles = missing.join(",");
    format!(
        "waits: pool {pool} has {without}{base}; start one with `flotilla agent --pool {pool} \
         --roles {roles}{options}`"
    )
}

/// Returns the verdicts that a failed verification still owes, because no agent can do it now: its
/// server is down, or agents lack what it needs. `None` if it is given up or left to other agents,
/// or its cycle is done.
pub fn awaited_verdicts(run: &Run, failure: &v1::Failure) -> Option<FactKey> {
    let (cycle, job) = parse_job_id(&failure.id)?;
    let is_done = run.cycles.get(&cycle).is_some_and(|cycle| cycle.done.is_some());
    let waits = failure.kind == WorkKind::Verify.as_str()
        && failure.cause() == v1::failure::Cause::Surroundings
        && !failure.r#final
        && !failure.is_left_to_others()
        && !is_done;
    waits.then_some(FactKey::Verdicts { cycle, job })
}

/// Returns a message for users about a job that waits because of its failure.
pub fn describe_unmet_needs(failure: &v1::Failure) -> String {
    let v1::Failure { agent, kind, message, .. } = failure;
    format!("waits: {agent} cannot {kind}: {}", message.replace('\n', " "))
}

/// Returns the options with which agents of these roles work with models outside of the table.
fn any_model_options(roles: &[&str]) -> String {
    let own = BASE_ROLES.iter().filter(|(role, _)| roles.contains(role));
    let own: Vec<&str> = own.map(|(_, option)| *option).collect();
    if own.is_empty() {
        return String::new();
    }
    let converts = own != ["--trainer-engine pytorch"];
    let sources = if converts { " --llama-cpp-sources DIR" } else { "" };
    format!(" {}{sources} --python PYTHON", own.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(pool: &str, roles: &[&str]) -> v1::AgentStatus {
        v1::AgentStatus {
            pool: pool.into(),
            roles: roles.iter().map(|role| (*role).to_owned()).collect(),
            state: v1::agent_status::State::Ready.into(),
            ..v1::AgentStatus::default()
        }
    }

    #[test]
    fn a_run_waits_for_the_roles_that_its_pool_lacks() {
        let spec = v1::Spec {
            pool: "gpu".into(),
            suites: vec![v1::Suite::default()],
            kind: Some(v1::spec::Kind::Raft(v1::spec::Raft {
                cycles: 1,
                verifier: Some(v1::Verifier::default()),
                ..v1::spec::Raft::default()
            })),
            ..v1::Spec::default()
        };
        let all = ["trainer", "generator", "verifier", "evaluator"];
        assert_eq!(missing_roles(&spec, [], 0), all);
        let measuring = |heldout| {
            let verifier = Some(v1::Verifier::default());
            let raft = v1::spec::Raft { heldout, verifier, ..v1::spec::Raft::default() };
            v1::Spec { kind: Some(v1::spec::Kind::Raft(raft)), ..v1::Spec::default() }
        };
        let sampled = measuring(Some(v1::Blob::default()));
        assert_eq!(missing_roles(&sampled, [], 0), ["generator", "verifier"], "it trains nothing");
        assert!(missing_roles(&measuring(None), [], 0).is_empty(), "nor does it sample");
        let taught = v1::Spec {
            kind: Some(v1::spec::Kind::Raft(v1::spec::Raft {
                cycles: 1,
                teacher: Some(v1::Tree::default()),
                ..v1::spec::Raft::default()
            })),
            ..v1::Spec::default()
        };
        assert_eq!(missing_roles(&taught, [], 0), ["trainer", "generator", "scorer"]);
        let elsewhere = agent("default", &all);
        assert_eq!(missing_roles(&spec, [&elsewhere], 0), ["trainer", "generator"]);
        let here = agent("gpu", &["generator"]);
        let said = describe_missing_roles(&spec, [&elsewhere, &here], 0);
        assert!(said.contains("pool gpu has no trainer;"), "{said}");
        let mut trainer = agent("gpu", &["trainer"]);
        assert_eq!(describe_missing_roles(&spec, [&elsewhere, &here, &trainer], 0), "");
        trainer.set_state(v1::agent_status::State::Draining);
        assert_eq!(missing_roles(&spec, [&elsewhere, &here, &trainer], 0), ["trainer"]);
        trainer.set_state(v1::agent_status::State::Ready);
        trainer.seen_at = Some(wire::Timestamp { seconds: 1000, nanos: 0 });
        let missing_at = |now_s| missing_roles(&spec, [&elsewhere, &here, &trainer], now_s);
        assert!(missing_at(1000 + GONE_AFTER_S).is_empty());
        assert_eq!(missing_at(1001 + GONE_AFTER_S), ["trainer"]);
    }

    #[test]
    fn a_base_outside_of_the_table_waits_for_agents_that_take_it() {
        let spec = v1::Spec {
            pool: "gpu".into(),
            other_model_type: "arcee".into(),
            suites: vec![v1::Suite::default()],
            kind: Some(v1::spec::Kind::Sft(v1::spec::Sft::default())),
            ..v1::Spec::default()
        };
        let mut both = agent("gpu", &["trainer", "evaluator"]);
        let said = describe_missing_roles(&spec, [&both], 0);
        let expected = "no trainer and no evaluator for arcee models; start one with `flotilla agent \
                        --pool gpu --roles trainer,evaluator --trainer-engine pytorch \
                        --evaluator-engine llama.cpp --llama-cpp-sources DIR --python PYTHON`";
        assert!(said.ends_with(expected), "{said}");
        both.abilities = vec!["evaluator:any-model".into()];
        let said = describe_missing_roles(&spec, [&both], 0);
        assert!(said.ends_with("--trainer-engine pytorch --python PYTHON`"), "{said}");
        both.abilities.push("trainer:any-model".into());
        assert_eq!(describe_missing_roles(&spec, [&both], 0), "");
    }
}
