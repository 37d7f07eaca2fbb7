//! A closed fleet on NATS servers of the user: `deploy/nats` with the keys that `flotilla init`
//! wrote, a coordinator with the fleet's keys, and joined agents.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use e2e::{Client, Member, NatsServer, SpecFiles, nats, run_flotilla, wait_until};
use requirements::free_ports;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(120);

/// A fleet without `flotilla up`. The test starts the servers.
struct OwnServersFleet {
    client: Client,
    gateway: String,
    members: Vec<Member>,
    directory: TempDir,
}

fn local(port: u16) -> String {
    format!("127.0.0.1:{port}")
}

fn url(port: u16) -> String {
    format!("tls://127.0.0.1:{port}")
}

impl OwnServersFleet {
    /// Runs `flotilla init` for servers on these ports.
    fn init(ports: &[u16]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let fleet = directory.path().join("fleet").display().to_string();
        let nats = ports.iter().map(|&port| url(port)).collect::<Vec<_>>().join(",");
        let gateway = local(free_ports::<1>()[0]);
        let arguments = ["init", "--dir", &fleet, "--nats", &nats, "--gateway", &gateway];
        run_flotilla(&[&arguments[..], &["--host", "127.0.0.1"]].concat(), []).assert_success();
        let client = Client::new([("FLOTILLA_DIR".to_owned(), fleet)], directory.path());
        Self { client, gateway, members: Vec::new(), directory }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn keys(&self, which: &str) -> PathBuf {
        self.path().join("fleet/keys").join(which)
    }

    /// Starts a server on a host that has these keys.
    fn start_server(
        &self,
        host: &str,
        config: &str,
        port: u16,
        replaced: &[(&str, String)],
    ) -> NatsServer {
        let keys = self.keys(if config == "leaf.conf" { "leaf" } else { "nats" });
        let monitor = local(free_ports::<1>()[0]);
        let listen = [("0.0.0.0:4222", local(port)), ("127.0.0.1:8222", monitor)];
        nats::copy_configs(&self.path().join(host), &keys, &[&listen[..], replaced].concat());
        NatsServer::start_with_config(&self.path().join(host), config, port)
    }

    fn start_coordinator(&mut self, replicas: &str) {
        let keys = self.path().join("fleet/keys").display().to_string();
        let credentials = format!("{keys}/coordinator");
        let store = format!("file://{}", self.path().join("store").display());
        let fixed = ["coordinator", "--keys", &keys, "--dir", &credentials, "--replicas", replicas];
        let gateway = self.gateway.clone();
        let more = ["--store", &store, "--gateway", &gateway, "--lease", "3"];
        let arguments = [&fixed[..], &more].concat();
        self.start_member("coordinator", &arguments);
        wait_until("the fleet can be joined", LIMIT, || {
            self.restart_exited();
            self.client.run_json(&["members", "list"]).ok()
        });
    }

    fn start_member(&mut self, name: &str, arguments: &[&str]) {
        let logs = self.path().join("logs");
        self.members.push(Member::start(name, &[], arguments, [], &logs));
    }

    fn restart_exited(&mut self) {
        self.members.iter_mut().for_each(Member::restart_exited);
    }

    fn credentials_directory(&self, name: &str) -> String {
        self.path().join("credentials").join(name).display().to_string()
    }

    /// Creates credentials with a join token.
    fn join_member(&self, name: &str, roles: &str) {
        let created = self.client.run(&["token", "create", "--roles", roles]);
        created.assert_success();
        let token = [("FLOTILLA_TOKEN".to_owned(), created.stdout.trim().to_owned())];
        let credentials = self.credentials_directory(name);
        run_flotilla(&["join", "--name", name, "--dir", &credentials, "--no-agent"], token)
            .assert_success();
    }

    /// Starts an agent with its credentials, on the servers of the credentials or these.
    fn start_agent(&mut self, name: &str, nats: &[&str]) {
        let (credentials, home) =
            (self.credentials_directory(name), self.path().join("agents").join(name));
        let home = home.display().to_string();
        let arguments = ["agent", "--dir", &credentials, "--name", name, "--agent-dir", &home];
        self.start_member(name, &[&arguments[..], nats].concat());
        wait_until("it is ready", LIMIT, || {
            self.restart_exited();
            let listed = self.client.run_json(&["agents", "list"]).ok()?;
            let ready =
                |agent: &&serde_json::Value| agent["agent"] == name && agent["state"] == "READY";
            listed.as_array()?.iter().find(ready).map(|_| ())
        });
    }

    /// Sends a request to a server with a member's credentials.
    fn try_request(&self, name: &str, port: u16) -> Result<(), String> {
        let (credentials, url) = (self.credentials_directory(name), url(port));
        let output = run_flotilla(&["run", "list", "--dir", &credentials, "--nats", &url], []);
        if output.code == 0 { Ok(()) } else { Err(output.stderr) }
    }

    fn revoke(&self, name: &str) {
        self.client.run(&["agents", "revoke", name]).assert_success();
    }

    fn assert_refused(&self, name: &str, port: u16) {
        let error = self.try_request(name, port).expect_err("it was revoked");
        assert!(error.contains("refuse") || error.contains("revoked"), "{error}");
    }

    fn submit(&self) -> String {
        let files = SpecFiles::create(self.path());
        self.client.submit(&files.write_sft_spec(60, 20))
    }

    fn await_success(&mut self, run: &str) {
        wait_until(&format!("{run} ends: {}", self.client.log_tails()), LIMIT, || {
            self.restart_exited();
            self.client.ended_run(run)
        });
        self.client.await_success(run, LIMIT);
        self.client.assert_clean_audit(run);
    }
}

#[test]
fn one_server_only_accepts_members_of_the_fleet() {
    let [port] = free_ports();
    let mut fleet = OwnServersFleet::init(&[port]);
    let _server = fleet.start_server("nats", "single.conf", port, &[]);
    fleet.start_coordinator("1");
    fleet.join_member("box-1", "trainer,evaluator");
    fleet.start_agent("box-1", &[]);
    let run = fleet.submit();
    fleet.await_success(&run);
    let stranger = run_flotilla(&["run", "list", "--nats", &url(port)], []);
    assert_ne!(stranger.code, 0, "{stranger:?}");
}

#[test]
fn a_cluster_of_three_works_without_one_and_each_refuses_revoked_members() {
    let [clients @ .., a, b, c] = free_ports::<6>();
    let routes = [a, b, c];
    let mut fleet = OwnServersFleet::init(&clients);
    let start_server = |fleet: &OwnServersFleet, one: usize| {
        let replaced = [
            ("0.0.0.0:6222", local(routes[one])),
            ("nats-1:6222", local(routes[0])),
            ("nats-2:6222", local(routes[1])),
            ("nats-3:6222", local(routes[2])),
        ];
        let config = format!("cluster-{}.conf", one + 1);
        fleet.start_server(&format!("nats-{}", one + 1), &config, clients[one], &replaced)
    };
    let mut servers: Vec<NatsServer> = (0..3).map(|one| start_server(&fleet, one)).collect();
    fleet.start_coordinator("3");
    for name in ["box-1", "box-2", "box-3"] {
        fleet.join_member(name, "trainer,evaluator");
    }
    for port in clients {
        fleet.try_request("box-2", port).expect("it joined");
    }
    fleet.revoke("box-2");
    for port in clients {
        fleet.assert_refused("box-2", port);
        fleet.try_request("box-1", port).expect("it joined");
    }

    fleet.start_agent("box-1", &[]);
    let run = fleet.submit();
    wait_until("there is a checkpoint", LIMIT, || {
        let shown = fleet.client.run_json(&["run", "show", &run]).ok()?;
        shown["checkpoints"].as_array()?.first().cloned()
    });
    // Kills the server.
    drop(servers.remove(0));
    fleet.revoke("box-3");
    fleet.await_success(&run);
    servers.insert(0, start_server(&fleet, 0));
    wait_until("the node is back", LIMIT, || fleet.try_request("box-1", clients[0]).ok());
    fleet.assert_refused("box-2", clients[0]);
    // The node requests the revocations that it missed.
    wait_until("it knows the revocation of box-3", LIMIT / 4, || {
        fleet.try_request("box-3", clients[0]).err()
    });
    fleet.assert_refused("box-3", clients[0]);
}

#[test]
fn an_agent_behind_a_leaf_node_works_and_loses_access_there_when_revoked() {
    let [hub, leaf, line] = free_ports();
    let mut fleet = OwnServersFleet::init(&[hub]);
    let _hub = fleet.start_server("hub", "hub.conf", hub, &[("0.0.0.0:7422", local(line))]);
    let _leaf = fleet.start_server("leaf", "leaf.conf", leaf, &[("127.0.0.1:7422", local(line))]);
    fleet.start_coordinator("1");
    fleet.join_member("far-1", "trainer,evaluator");
    wait_until("the line is there", LIMIT, || fleet.try_request("far-1", leaf).ok());
    fleet.start_agent("far-1", &["--nats", &url(leaf)]);
    let run = fleet.submit();
    fleet.await_success(&run);
    fleet.revoke("far-1");
    wait_until("the leaf node knows the revocation", LIMIT, || {
        fleet.try_request("far-1", leaf).err()
    });
    fleet.assert_refused("far-1", leaf);
    fleet.assert_refused("far-1", hub);
    let agent = fleet.members.last_mut().unwrap();
    wait_until("the agent that was at work has ended", LIMIT, || (!agent.is_alive()).then_some(()));
}
