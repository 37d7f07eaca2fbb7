//! A second site whose agents only know their own server, a leaf node of the hub.

use std::{path::Path, time::Duration};

use e2e::{Client, Member, NatsServer, ReferenceResults, Sampling, nats, wait_until};
use requirements::free_ports;

const LIMIT: Duration = Duration::from_secs(120);

const SAMPLING: Sampling = Sampling { prompts: 16, per_prompt: 4, max_new_tokens: 32, cycles: 1 };

/// Starts a server with a configuration of `deploy/nats`. Its keys give everybody access.
fn start_server(
    directory: &Path,
    config: &str,
    port: u16,
    replaced: &[(&str, String)],
) -> NatsServer {
    let home = directory.join(config);
    let listen = [("0.0.0.0:4222", format!("127.0.0.1:{port}"))];
    nats::copy_configs(
        &home,
        &nats::deploy_directory().join("keys"),
        &[&listen, replaced].concat(),
    );
    NatsServer::start_with_config(&home, config, port)
}

#[test]
fn agents_behind_a_leaf_node_do_a_run_of_the_hub() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let [here, there, line, monitor, far_monitor] = free_ports();
    let [line, monitor, far_monitor] =
        [line, monitor, far_monitor].map(|port| format!("127.0.0.1:{port}"));
    let replaced = [("0.0.0.0:7422", line.clone()), ("127.0.0.1:8222", monitor)];
    let hub = start_server(at, "hub.conf", here, &replaced);
    let leaf = start_server(
        at,
        "leaf.conf",
        there,
        &[("hub:7422", line), ("127.0.0.1:8222", far_monitor)],
    );

    let client = Client::new([("FLOTILLA_NATS".to_owned(), hub.url())], at);
    let store = format!("file://{}", at.join("store").display());
    let (logs, url) = (at.join("logs"), hub.url());
    let arguments = [
        "coordinator",
        "--nats",
        &url,
        "--store",
        &store,
        "--gateway",
        "127.0.0.1:0",
        "--lease",
        "3",
    ];
    let mut coordinator = Member::start("coordinator", &[], &arguments, [], &logs);
    wait_until("the fleet can be joined", LIMIT, || {
        coordinator.restart_exited();
        client.run_json(&["run", "list"]).ok()
    });
    let there = leaf.url();
    let mut agents: Vec<Member> = ["trainer", "generator", "verifier", "evaluator"]
        .iter()
        .map(|role| {
            let home = at.join(role).display().to_string();
            let arguments = ["agent", "--nats", &there, "--roles", role, "--name", role];
            Member::start(role, &[], &[&arguments[..], &["--agent-dir", &home]].concat(), [], &logs)
        })
        .collect();
    wait_until("its agents are ready", LIMIT, || {
        // The leaf node may not be connected yet.
        agents.iter_mut().for_each(Member::restart_exited);
        let listed = client.run_json(&["agents", "list"]).ok()?;
        let ready = |agent: &&serde_json::Value| agent["state"] == "READY";
        (listed.as_array()?.iter().filter(ready).count() == 4).then_some(())
    });
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let run = client.submit(&reference.write_spec(&client, at));
    reference.assert_same_results(&client, &run, LIMIT);
    assert_eq!(client.run(&["agents", "drain", "generator"]).code, 0);
}
