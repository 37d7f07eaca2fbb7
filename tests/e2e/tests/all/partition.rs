//! Two hosts with a link that is cut and loses packets.

use std::time::{Duration, Instant};

use e2e::{Fleet, Member, OtherHost, ReferenceResults, Sampling, unix_time_s, wait_until};
use s3_server::S3Server;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(240);

/// Several leases of 3 s.
const OUTAGE: Duration = Duration::from_secs(10);

const SAMPLING: Sampling = Sampling { prompts: 384, per_prompt: 8, max_new_tokens: 480, cycles: 1 };

#[test]
fn a_host_that_is_cut_off_and_comes_back_changes_no_result() {
    let Some(host) = OtherHost::connect() else { return };
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let server = S3Server::start_on(host.local_address()).unwrap();
    let here = host.local_address().to_string();
    let arguments = ["--open", "--listen", &here, "--store", &server.url()];
    // Slow agents, so that work is left when the host is back.
    let slow = || server.env().into_iter().chain([("FLOTILLA_SLOTS".to_owned(), "1".to_owned())]);
    let fleet = Fleet::start_with("trainer,generator,verifier,evaluator", &arguments, slow());
    let far = |role: &str| {
        let (nats, name) = (fleet.nats_url(), format!("{role}-far"));
        let home = fleet.path().join("agents").join(&name).display().to_string();
        let arguments = ["agent", "--nats", &nats, "--roles", role, "--name", &name];
        let arguments = [&arguments[..], &["--agent-dir", &home]].concat();
        Member::start(&name, &host.command_prefix(), &arguments, slow(), &fleet.path().join("logs"))
    };
    let mut members = ["generator", "verifier", "evaluator"].map(far);
    wait_until("the far host has joined", LIMIT, || {
        members.iter_mut().for_each(Member::restart_exited);
        let listed = fleet.run_json(&["agents", "list"]).ok()?;
        let ready = |agent: &&Value| agent["state"] == "READY";
        (listed.as_array()?.iter().filter(ready).count() == 7).then_some(())
    });
    let run = fleet.submit(&reference.write_spec(&fleet, fleet.path()));
    fleet.await_samples(&run, 32, LIMIT);
    host.cut_link();
    let cut_at = Instant::now();
    fleet.await_samples(&run, 32, LIMIT);
    println!("cut off: more samples after {:.1} s", cut_at.elapsed().as_secs_f64());
    std::thread::sleep(OUTAGE.saturating_sub(cut_at.elapsed()));
    let restored_s = unix_time_s();
    host.restore_link();
    if host.set_packet_loss(20) {
        std::thread::sleep(Duration::from_secs(5));
        host.set_packet_loss(0);
    }
    wait_until("the run ends", LIMIT, || {
        members.iter_mut().for_each(Member::restart_exited);
        fleet.ended_run(&run)
    });
    reference.assert_same_results(&fleet, &run, LIMIT);
    let facts = fleet.read_facts(&run);
    for (kind, agent) in [("samples", "generator-far"), ("verdicts", "verifier-far")] {
        let is_later = |fact: &&Value| {
            let subject = fact["subject"].as_str().expect("a subject");
            subject.split('.').nth(2) == Some(kind)
                && fact["fact"]["agent"] == agent
                && fact["time_ms"].as_f64().expect("a time") / 1000.0 > restored_s
        };
        let count = facts.iter().filter(is_later).count();
        println!("{agent} wrote {count} results after the outage");
        assert!(count > 0, "{agent} did not come back");
    }
}
