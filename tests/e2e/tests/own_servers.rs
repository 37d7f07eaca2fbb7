//! A closed fleet on NATS servers of its user's own: `deploy/nats` with the keys that `flotilla init`
//! wrote for them, a coordinator with the fleet's keys, boxes that joined.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use e2e::{Client, Files, Member, NatsServer, flotilla, nats, until};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(120);

/// Servers are started by the test; everything ends with it.
struct Own {
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

impl Own {
    /// `flotilla init` for servers on these ports.
    fn init(ports: &[u16]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let fleet = directory.path().join("fleet").display().to_string();
        let nats = ports.iter().map(|&port| url(port)).collect::<Vec<_>>().join(",");
        let gateway = local(nats::free_ports::<1>()[0]);
        let arguments = ["init", "--dir", &fleet, "--nats", &nats, "--gateway", &gateway];
        flotilla(&[&arguments[..], &["--host", "127.0.0.1"]].concat(), []).succeeds();
        let client = Client::new([("FLOTILLA_DIR".to_owned(), fleet)], directory.path());
        Self { client, gateway, members: Vec::new(), directory }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn keys(&self, which: &str) -> PathBuf {
        self.path().join("fleet/keys").join(which)
    }

    /// A server of a host that was given `keys`.
    fn serve(
        &self,
        host: &str,
        config: &str,
        port: u16,
        replaced: &[(&str, String)],
    ) -> NatsServer {
        let keys = self.keys(if config == "leaf.conf" { "leaf" } else { "nats" });
        let monitor = local(nats::free_ports::<1>()[0]);
        let listen = [("0.0.0.0:4222", local(port)), ("127.0.0.1:8222", monitor)];
        nats::lay_out(&self.path().join(host), &keys, &[&listen[..], replaced].concat());
        NatsServer::start_in(&self.path().join(host), config, port)
    }

    fn coordinate(&mut self, replicas: &str) {
        let keys = self.path().join("fleet/keys").display().to_string();
        let kit = format!("{keys}/coordinator");
        let store = format!("file://{}", self.path().join("store").display());
        let fixed = ["coordinator", "--keys", &keys, "--dir", &kit, "--replicas", replicas];
        let gateway = self.gateway.clone();
        let more = ["--store", &store, "--gateway", &gateway, "--lease", "3"];
        let arguments = [&fixed[..], &more].concat();
        self.start("coordinator", &arguments);
        until("the fleet can be joined", LIMIT, || {
            self.revive();
            self.client.json(&["members", "list"]).ok()
        });
    }

    fn start(&mut self, name: &str, arguments: &[&str]) {
        let logs = self.path().join("logs");
        self.members.push(Member::start(name, &[], arguments, [], &logs));
    }

    fn revive(&mut self) {
        self.members.iter_mut().for_each(Member::revive);
    }

    fn kit(&self, name: &str) -> String {
        self.path().join("kits").join(name).display().to_string()
    }

    /// A box gets a kit by a join token.
    fn join(&self, name: &str, roles: &str) {
        let made = self.client.run(&["token", "create", "--roles", roles]);
        made.succeeds();
        let token = [("FLOTILLA_TOKEN".to_owned(), made.stdout.trim().to_owned())];
        let kit = self.kit(name);
        flotilla(&["join", "--name", name, "--dir", &kit, "--no-agent"], token).succeeds();
    }

    /// Its agent, on the servers that its kit or the test names.
    fn work(&mut self, name: &str, nats: &[&str]) {
        let (kit, home) = (self.kit(name), self.path().join("agents").join(name));
        let home = home.display().to_string();
        let arguments = ["agent", "--dir", &kit, "--name", name, "--agent-dir", &home];
        self.start(name, &[&arguments[..], nats].concat());
        until("it is ready", LIMIT, || {
            self.revive();
            let listed = self.client.json(&["agents", "list"]).ok()?;
            let ready =
                |agent: &&serde_json::Value| agent["agent"] == name && agent["state"] == "READY";
            listed.as_array()?.iter().find(ready).map(|_| ())
        });
    }

    /// What a server says to a box that asks it with its kit.
    fn asks(&self, name: &str, port: u16) -> Result<(), String> {
        let (kit, url) = (self.kit(name), url(port));
        let asked = flotilla(&["run", "list", "--dir", &kit, "--nats", &url], []);
        if asked.code == 0 { Ok(()) } else { Err(asked.stderr) }
    }

    fn revoke(&self, name: &str) {
        self.client.run(&["agents", "revoke", name]).succeeds();
    }

    fn refuses(&self, name: &str, port: u16) {
        let said = self.asks(name, port).expect_err("it was revoked");
        assert!(said.contains("refuse") || said.contains("revoked"), "{said}");
    }

    fn submit(&self) -> String {
        let files = Files::create(self.path());
        self.client.submit(&files.sft(60, 20))
    }

    fn finish(&mut self, run: &str) {
        until(&format!("{run} ends: {}", self.client.logs()), LIMIT, || {
            self.revive();
            self.client.outcome(run)
        });
        self.client.finish(run, LIMIT);
        self.client.audit_clean(run);
    }
}

#[test]
fn one_server_lets_in_the_fleet_s_members_and_nobody_else() {
    let [port] = nats::free_ports();
    let mut own = Own::init(&[port]);
    let _server = own.serve("nats", "single.conf", port, &[]);
    own.coordinate("1");
    own.join("box-1", "trainer,evaluator");
    own.work("box-1", &[]);
    let run = own.submit();
    own.finish(&run);
    let stranger = flotilla(&["run", "list", "--nats", &url(port)], []);
    assert_ne!(stranger.code, 0, "{stranger:?}");
}

#[test]
fn a_cluster_of_three_goes_on_without_one_and_each_refuses_who_was_revoked() {
    let [clients @ .., a, b, c] = nats::free_ports::<6>();
    let routes = [a, b, c];
    let mut own = Own::init(&clients);
    let serve = |own: &Own, one: usize| {
        let replaced = [
            ("0.0.0.0:6222", local(routes[one])),
            ("nats-1:6222", local(routes[0])),
            ("nats-2:6222", local(routes[1])),
            ("nats-3:6222", local(routes[2])),
        ];
        let config = format!("cluster-{}.conf", one + 1);
        own.serve(&format!("nats-{}", one + 1), &config, clients[one], &replaced)
    };
    let mut servers: Vec<NatsServer> = (0..3).map(|one| serve(&own, one)).collect();
    own.coordinate("3");
    for name in ["box-1", "box-2", "box-3"] {
        own.join(name, "trainer,evaluator");
    }
    for port in clients {
        own.asks("box-2", port).expect("it joined");
    }
    own.revoke("box-2");
    for port in clients {
        own.refuses("box-2", port);
        own.asks("box-1", port).expect("it joined");
    }

    own.work("box-1", &[]);
    let run = own.submit();
    until("there is a checkpoint", LIMIT, || {
        let shown = own.client.json(&["run", "show", &run]).ok()?;
        shown["checkpoints"].as_array()?.first().cloned()
    });
    // Killed.
    drop(servers.remove(0));
    own.revoke("box-3");
    own.finish(&run);
    servers.insert(0, serve(&own, 0));
    until("the node is back", LIMIT, || own.asks("box-1", clients[0]).ok());
    own.refuses("box-2", clients[0]);
    // It asks for what it missed.
    until("it has heard of box-3", LIMIT / 4, || own.asks("box-3", clients[0]).err());
    own.refuses("box-3", clients[0]);
}

#[test]
fn a_box_behind_a_leaf_node_works_and_is_cut_off_there() {
    let [hub, leaf, line] = nats::free_ports();
    let mut own = Own::init(&[hub]);
    let _hub = own.serve("hub", "hub.conf", hub, &[("0.0.0.0:7422", local(line))]);
    let _leaf = own.serve("leaf", "leaf.conf", leaf, &[("127.0.0.1:7422", local(line))]);
    own.coordinate("1");
    own.join("far-1", "trainer,evaluator");
    until("the line is there", LIMIT, || own.asks("far-1", leaf).ok());
    own.work("far-1", &["--nats", &url(leaf)]);
    let run = own.submit();
    own.finish(&run);
    own.revoke("far-1");
    until("the leaf node has heard of it", LIMIT, || own.asks("far-1", leaf).err());
    own.refuses("far-1", leaf);
    own.refuses("far-1", hub);
    let agent = own.members.last_mut().unwrap();
    until("the agent that was at work has ended", LIMIT, || (!agent.is_alive()).then_some(()));
}
