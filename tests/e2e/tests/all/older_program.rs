//! A fleet whose coordinator was upgraded and whose agents were not, or only some.
//!
//! The older program is the one that made the recording of the previous version:
//! `deploy/build-previous.sh` builds it.

use std::time::Duration;

use e2e::{Fleet, Member, ReferenceResults, Sampling, wait_until, write_script};

const LIMIT: Duration = Duration::from_secs(240);

const SAMPLING: Sampling = Sampling { prompts: 96, per_prompt: 8, max_new_tokens: 320, cycles: 2 };

const ROLES: [&str; 4] = ["trainer", "generator", "verifier", "evaluator"];

fn start_older_agent(fleet: &Fleet, wrapper: &str, role: &str) -> Member {
    let (nats, name) = (fleet.nats_url(), format!("{role}-older"));
    let home = fleet.path().join(&name).display().to_string();
    let arguments = ["agent", "--nats", &nats, "--roles", role, "--name", &name];
    let arguments = [&arguments[..], &["--agent-dir", &home]].concat();
    Member::start(&name, &[wrapper.to_owned()], &arguments, [], fleet.path())
}

#[test]
fn agents_of_the_previous_version_and_of_this_one_have_the_same_results() {
    let Some(older) = requirements::find_program("flotilla-previous") else {
        requirements::skip_test("flotilla-previous", "run deploy/build-previous.sh");
        return;
    };
    let reference = ReferenceResults::for_sampling(SAMPLING);
    // All trainings are done by the older program.
    let fleet = Fleet::start_open("generator,verifier,evaluator");
    // It receives a command line of this program.
    let script = format!("shift\nexec {} \"$@\"", older.display());
    let wrapper = write_script(&fleet.path().join("older"), &script);
    let _agents = ROLES.map(|role| start_older_agent(&fleet, &wrapper, role));
    wait_until("the older agents have joined", LIMIT, || {
        let listed = fleet.run_json(&["agents", "list"]).ok()?;
        let ready = |agent: &&serde_json::Value| agent["state"] == "READY";
        (listed.as_array()?.iter().filter(ready).count() == 7).then_some(())
    });
    let run = fleet.submit(&reference.write_spec(&fleet, fleet.path()));
    reference.assert_same_results(&fleet, &run, LIMIT);
    let shown = fleet.run_json(&["run", "show", &run]).expect("a run");
    let samples = &shown["cyclesDone"][1]["samplesByAgent"];
    for agent in ["generator-older", "generator-1"] {
        assert!(samples[agent].as_u64() > Some(0), "{agent}: {samples}");
    }
    // Commands of the older program read the fleet of this one.
    let nats = fleet.nats_url();
    for command in [&["run", "show", &run][..], &["agents", "list"], &["audit", &run]] {
        let output = std::process::Command::new(&older)
            .args(command)
            .args(["--json", "--nats", &nats])
            .output()
            .expect("the older program starts");
        assert!(output.status.success(), "{command:?}: {output:?}");
    }
}
