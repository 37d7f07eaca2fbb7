//! Two hosts with a link that is cut and loses packets.

use std::time::{Duration, Instant};

use e2e::{Fleet, Member, OtherHost, ReferenceResults, Sampling, wait_until};
use rustix::process::Signal;
use s3_server::S3Server;
use serde_json::Value;

use crate::raw_log::RawLog;

const LIMIT: Duration = Duration::from_secs(240);

/// Several leases of 3 s.
const OUTAGE: Duration = Duration::from_secs(10);

const SAMPLING: Sampling = Sampling { prompts: 96, per_prompt: 8, max_new_tokens: 320, cycles: 2 };

/// Returns how many results of a kind an agent has written.
fn count_results(log: &RawLog, run: &str, kind: &str, agent: &str) -> usize {
    let subjects = log.subjects(&format!("flotilla.{run}.{kind}.>"));
    let is_own = |subject: &&String| log.read(subject).is_some_and(|fact| fact["agent"] == agent);
    subjects.iter().filter(is_own).count()
}

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
    // Leaves work to the far host.
    let near = ["generator-1", "verifier-1"];
    near.iter().for_each(|agent| fleet.signal(agent, Signal::STOP));
    std::thread::sleep(OUTAGE.saturating_sub(cut_at.elapsed()));
    let log = RawLog::open(&fleet);
    let far = [("samples", "generator-far"), ("verdicts", "verifier-far")];
    let count = |(kind, agent): (&str, &str)| count_results(&log, &run, kind, agent);
    let before = far.map(count);
    host.restore_link();
    let restored = Instant::now();
    if host.set_packet_loss(20) {
        std::thread::sleep(Duration::from_secs(5));
        host.set_packet_loss(0);
    }
    wait_until("the far host works again", LIMIT, || {
        let now = far.map(count);
        now.iter().zip(before).all(|(now, before)| *now > before).then_some(())
    });
    println!("restored: results of the far host after {:.1} s", restored.elapsed().as_secs_f64());
    assert!(members.iter_mut().all(Member::is_alive), "they reconnect without a restart");
    near.iter().for_each(|agent| fleet.signal(agent, Signal::CONT));
    reference.assert_same_results(&fleet, &run, LIMIT);
}
