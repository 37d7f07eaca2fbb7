//! An open fleet that is closed later, and a fleet whose keys change.

use std::{collections::BTreeSet, time::Duration};

use e2e::{Fleet, Sampling, SpecFiles, run_flotilla};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);
const SAMPLING: Sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 48, cycles: 1 };
const AGENTS: &str = "trainer,generator,verifier,evaluator";

fn stop_fleet(fleet: &mut Fleet) {
    fleet.terminate();
    e2e::wait_until("the fleet is down", LIMIT, || fleet.exit_status());
}

/// Returns the authors of a run's facts.
fn authors(fleet: &Fleet, run: &str) -> BTreeSet<Option<String>> {
    let author = |fact: &Value| fact["author"].as_str().map(str::to_owned);
    fleet.read_facts(run).iter().map(author).collect()
}

#[test]
fn an_open_fleet_is_closed_and_continues() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().display().to_string();
    let mut fleet = Fleet::start_in(directory, AGENTS, &["--open"], []);
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(5, 0));
    fleet.await_success(&base, LIMIT);
    let before = fleet.assert_clean_audit(&base);
    stop_fleet(&mut fleet);
    run_flotilla(&["init", "--dir", &at], []).assert_success();
    let keys = std::fs::read(fleet.path().join("keys/signing.nk")).unwrap();
    run_flotilla(&["init", "--dir", &at], []).assert_success();
    let second = std::fs::read(fleet.path().join("keys/signing.nk")).unwrap();
    assert_eq!(keys, second, "a second init destroys nothing");
    let refused = run_flotilla(&["up", "--open", "--dir", &at], []);
    refused.assert_refused(&["this fleet has keys", "leave --open out"]);
    fleet.restart_with(&[]);
    fleet.await_agents();
    assert_eq!(fleet.assert_clean_audit(&base), before, "what was written open is read closed");
    let raft = fleet.submit(&files.write_raft_spec(&base, SAMPLING));
    fleet.await_success(&raft, LIMIT);
    fleet.assert_clean_audit(&raft);
    assert_eq!(authors(&fleet, &base), [None].into());
    let names = ["admin", "coordinator", "generator-1", "verifier-1", "trainer-1", "evaluator-1"];
    let names = names.map(|name| Some(name.to_owned()));
    assert_eq!(authors(&fleet, &raft), names.into());
}

#[test]
fn an_agent_of_the_fleets_own_machine_is_cut_off_by_name() {
    let mut fleet = Fleet::start("verifier=2");
    let members = fleet.run_json(&["members", "list"]).unwrap();
    let name = |member: &Value| member["name"].as_str().unwrap().to_owned();
    let names: Vec<String> = members.as_array().unwrap().iter().map(name).collect();
    assert_eq!(names, ["verifier-1", "verifier-2"]);
    fleet.run(&["agents", "revoke", "verifier-1"]).assert_success();
    e2e::wait_until("the other continues alone", LIMIT, || {
        let agents = fleet.run_json(&["agents", "list"]).ok()?;
        let seen_at = |name: &str| {
            let of = |agent: &&Value| agent["agent"] == name;
            agents.as_array()?.iter().find(of)?["seenAt"].as_str().map(str::to_owned)
        };
        // Agents publish a record every ten seconds.
        (seen_at("verifier-2")? > seen_at("verifier-1")?).then_some(())
    });
    stop_fleet(&mut fleet);
    fleet.restart();
    e2e::wait_until("the other is back", LIMIT, || {
        let log = std::fs::read_to_string(fleet.path().join("up.log")).ok()?;
        log.contains("verifier-1 was revoked").then_some(())
    });
}

#[test]
fn keys_are_rotated_and_all_members_keep_access() {
    let mut fleet = Fleet::start(AGENTS);
    let at = fleet.path().display().to_string();
    let read = |name: &str| std::fs::read(fleet.path().join("keys").join(name)).unwrap();
    let (signing, certificate) = (read("signing.nk"), read("server.pem"));
    for command in ["rotate-signing", "rotate-server"] {
        run_flotilla(&["keys", command, "--dir", &at], []).assert_success();
    }
    assert_ne!((signing, certificate), (read("signing.nk"), read("server.pem")));
    let credentials = fleet.path().join("ann").display().to_string();
    let scope = ["--scope", "reader", "--expires", "1h", "--out", &credentials];
    let create = [&["user", "create", "ann"][..], &scope].concat();
    e2e::wait_until("the gateway knows the new key", LIMIT, || {
        (fleet.run(&create).code == 0).then_some(())
    });
    run_flotilla(&["agents", "list", "--dir", &credentials], []).assert_success();
    stop_fleet(&mut fleet);
    fleet.restart();
    fleet.await_agents();
    run_flotilla(&["keys", "retire", "--dir", &at], []).assert_success();
    stop_fleet(&mut fleet);
    fleet.restart();
    fleet.await_agents();
    let files = SpecFiles::create(fleet.path());
    let base = fleet.submit(&files.write_sft_spec(5, 0));
    fleet.await_success(&base, LIMIT);
}
