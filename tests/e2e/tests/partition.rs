//! Two hosts, and a cable between them that is pulled or bad.

use std::time::{Duration, Instant};

use e2e::{Fleet, Member, OtherHost, Sampling, Undisturbed, until};
use s3_server::S3Server;

const LIMIT: Duration = Duration::from_secs(240);

/// Several leases of 3 s.
const PULLED: Duration = Duration::from_secs(10);

const SAMPLING: Sampling = Sampling { prompts: 384, per_prompt: 8, max_new_tokens: 480, cycles: 1 };

#[test]
fn a_host_that_is_cut_off_and_comes_back_changes_no_result() {
    let Some(host) = OtherHost::connect() else { return };
    let undisturbed = Undisturbed::of(SAMPLING);
    let server = S3Server::start_on(host.here()).unwrap();
    let here = host.here().to_string();
    let arguments = ["--open", "--listen", &here, "--store", &server.url()];
    // Slow ones: there is to be work left when the host is back, however fast the machine.
    let slow = || server.env().into_iter().chain([("FLOTILLA_SLOTS".to_owned(), "1".to_owned())]);
    let fleet = Fleet::up_with("trainer,generator,verifier,evaluator", &arguments, slow());
    let far = |role: &str| {
        let (nats, name) = (fleet.nats(), format!("{role}-far"));
        let home = fleet.path().join("agents").join(&name).display().to_string();
        let arguments = ["agent", "--nats", &nats, "--roles", role, "--name", &name];
        let arguments = [&arguments[..], &["--agent-dir", &home]].concat();
        Member::start(&name, &host.on(), &arguments, slow(), &fleet.path().join("logs"))
    };
    let mut members = ["generator", "verifier", "evaluator"].map(far);
    until("the far host has joined", LIMIT, || {
        members.iter_mut().for_each(Member::revive);
        let listed = fleet.json(&["agents", "list"]).ok()?;
        let ready = |agent: &&serde_json::Value| agent["state"] == "READY";
        (listed.as_array()?.iter().filter(ready).count() == 7).then_some(())
    });
    let run = fleet.submit(&undisturbed.spec(&fleet, fleet.path()));
    fleet.await_samples(&run, 32, LIMIT);
    host.pull();
    let pulled = Instant::now();
    fleet.await_samples(&run, 32, LIMIT);
    println!("cut off: more samples after {:.1} s", pulled.elapsed().as_secs_f64());
    std::thread::sleep(PULLED.saturating_sub(pulled.elapsed()));
    host.plug();
    if host.lose(20) {
        std::thread::sleep(Duration::from_secs(5));
        host.lose(0);
    }
    until("the run ends", LIMIT, || {
        members.iter_mut().for_each(Member::revive);
        fleet.outcome(&run)
    });
    undisturbed.assert_same(&fleet, &run, LIMIT);
    let made = &fleet.json(&["run", "show", &run]).unwrap()["cyclesDone"][1]["samplesByAgent"];
    println!("{made}");
    assert!(made["generator-far"].as_u64() > Some(0), "{made}");
}
