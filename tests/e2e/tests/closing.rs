//! A fleet that was open and is closed, and one whose keys change.

use std::{collections::BTreeSet, time::Duration};

use e2e::{Files, Fleet, Sampling, flotilla};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);
const SAMPLING: Sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 48, cycles: 1 };
const AGENTS: &str = "trainer,generator,verifier,evaluator";

fn end(fleet: &mut Fleet) {
    fleet.terminate();
    e2e::until("the fleet is down", LIMIT, || fleet.ended());
}

/// Who wrote a run's facts.
fn authors(fleet: &Fleet, run: &str) -> BTreeSet<Option<String>> {
    let author = |fact: &Value| fact["author"].as_str().map(str::to_owned);
    fleet.facts(run).iter().map(author).collect()
}

#[test]
fn an_open_fleet_is_closed_and_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().display().to_string();
    let mut fleet = Fleet::up_in(directory, AGENTS, &["--open"], []);
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(5, 0));
    fleet.finish(&base, LIMIT);
    let before = fleet.audit_clean(&base);
    end(&mut fleet);
    flotilla(&["init", "--dir", &at], []).succeeds();
    let keys = std::fs::read(fleet.path().join("keys/signing.nk")).unwrap();
    flotilla(&["init", "--dir", &at], []).succeeds();
    let again = std::fs::read(fleet.path().join("keys/signing.nk")).unwrap();
    assert_eq!(keys, again, "a second init destroys nothing");
    let refused = flotilla(&["up", "--open", "--dir", &at], []);
    refused.refuses(&["this fleet has keys", "leave --open out"]);
    fleet.up_again_with(&[]);
    fleet.await_agents();
    assert_eq!(fleet.audit_clean(&base), before, "what was written open is read closed");
    let raft = fleet.submit(&files.raft(&base, SAMPLING));
    fleet.finish(&raft, LIMIT);
    fleet.audit_clean(&raft);
    assert_eq!(authors(&fleet, &base), [None].into());
    let names = ["admin", "coordinator", "generator-1", "verifier-1", "trainer-1", "evaluator-1"];
    let names = names.map(|name| Some(name.to_owned()));
    assert_eq!(authors(&fleet, &raft), names.into());
}

#[test]
fn an_agent_of_the_fleets_own_machine_is_cut_off_by_name() {
    let mut fleet = Fleet::up("verifier=2");
    let members = fleet.json(&["members", "list"]).unwrap();
    let name = |member: &Value| member["name"].as_str().unwrap().to_owned();
    let names: Vec<String> = members.as_array().unwrap().iter().map(name).collect();
    assert_eq!(names, ["verifier-1", "verifier-2"]);
    fleet.run(&["agents", "revoke", "verifier-1"]).succeeds();
    e2e::until("the other goes on alone", LIMIT, || {
        let agents = fleet.json(&["agents", "list"]).ok()?;
        let heard = |name: &str| {
            let of = |agent: &&Value| agent["agent"] == name;
            agents.as_array()?.iter().find(of)?["seenAt"].as_str().map(str::to_owned)
        };
        // Ten seconds lie between two records.
        (heard("verifier-2")? > heard("verifier-1")?).then_some(())
    });
    end(&mut fleet);
    fleet.up_again();
    e2e::until("the other is back", LIMIT, || {
        let said = std::fs::read_to_string(fleet.path().join("up.log")).ok()?;
        said.contains("verifier-1 was revoked").then_some(())
    });
}

#[test]
fn keys_are_changed_and_everybody_is_still_in() {
    let mut fleet = Fleet::up(AGENTS);
    let at = fleet.path().display().to_string();
    let read = |name: &str| std::fs::read(fleet.path().join("keys").join(name)).unwrap();
    let (signing, certificate) = (read("signing.nk"), read("server.pem"));
    for command in ["rotate-signing", "rotate-server"] {
        flotilla(&["keys", command, "--dir", &at], []).succeeds();
    }
    assert_ne!((signing, certificate), (read("signing.nk"), read("server.pem")));
    let kit = fleet.path().join("ann").display().to_string();
    let scope = ["--scope", "reader", "--expires", "1h", "--out", &kit];
    let create = [&["user", "create", "ann"][..], &scope].concat();
    e2e::until("the gateway knows the new key", LIMIT, || {
        (fleet.run(&create).code == 0).then_some(())
    });
    flotilla(&["agents", "list", "--dir", &kit], []).succeeds();
    end(&mut fleet);
    fleet.up_again();
    fleet.await_agents();
    flotilla(&["keys", "retire", "--dir", &at], []).succeeds();
    end(&mut fleet);
    fleet.up_again();
    fleet.await_agents();
    let files = Files::create(fleet.path());
    let base = fleet.submit(&files.sft(5, 0));
    fleet.finish(&base, LIMIT);
}
