//! A fleet on three nats-servers, without `flotilla up`: as people run it who trust no
//! single box.

use std::{
    fs::File,
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::{Client, Member, nats, until};

const NODES: usize = 3;

/// For a cluster to elect its leaders, on a busy machine.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// Servers, coordinators, agents; all end with the test.
pub struct Cluster {
    pub client: Client,
    members: Vec<Member>,
    nodes: Vec<Node>,
    directory: TempDir,
}

/// One of the servers.
struct Node {
    config: PathBuf,
    port: u16,
    child: Child,
}

impl Cluster {
    /// # Panics
    /// When it does not come up.
    pub fn up(agents: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let at = directory.path();
        let nodes = start_nodes(at);
        let urls: Vec<String> =
            nodes.iter().map(|node| format!("nats://127.0.0.1:{}", node.port)).collect();
        let urls = urls.join(",");
        let client = Client::new([("FLOTILLA_NATS".to_owned(), urls.clone())], at);
        let store = format!("file://{}", at.join("store").display());
        let logs = at.join("logs");
        let coordinator = |name: &str| {
            let arguments = ["coordinator", "--nats", &urls, "--replicas", "3", "--lease", "3"];
            let more = ["--store", &store, "--gateway", "127.0.0.1:0"];
            Member::start(name, &[], &[&arguments[..], &more].concat(), [], &logs)
        };
        let mut members = vec![coordinator("coordinator-1"), coordinator("coordinator-2")];
        until("the cluster has a coordinator", READY_LIMIT, || {
            members.iter_mut().for_each(Member::revive);
            client.json(&["run", "list"]).ok()
        });
        members.extend(agents.iter().map(|name| {
            let role = name.split('-').next().expect("an agent is named after its role");
            let home = at.join("agents").join(name).display().to_string();
            let arguments = ["agent", "--nats", &urls, "--roles", role, "--name", name];
            // Slow ones: a run is to be met at work, however fast the machine.
            let slow = ["--slots", "1", "--threads", "1"];
            let arguments = [&arguments[..], &["--agent-dir", &home], &slow].concat();
            Member::start(name, &[], &arguments, [], &logs)
        }));
        let mut cluster = Self { client, members, nodes, directory };
        until("the agents are ready", READY_LIMIT, || {
            cluster.revive();
            let listed = cluster.client.json(&["agents", "list"]).ok()?;
            let ready = |agent: &&serde_json::Value| agent["state"] == "READY";
            (listed.as_array()?.iter().filter(ready).count() >= agents.len()).then_some(())
        });
        cluster
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Brings back members that ended, as their box's init does.
    pub fn revive(&mut self) {
        self.members.iter_mut().for_each(Member::revive);
    }

    /// `kill -9` of a server.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(&mut self, node: usize) {
        let child = &mut self.nodes[node].child;
        child.kill().and_then(|()| child.wait()).expect("our own process can be killed");
    }

    /// Starts a killed server again, on the same port and files.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn restart(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        node.child = start_node(&node.config);
    }

    /// # Panics
    /// When it cannot be told.
    pub fn signal(&self, node: usize, signal: Signal) {
        let id = i32::try_from(self.nodes[node].child.id()).ok().and_then(Pid::from_raw);
        let told = kill_process(id.expect("a process has a number"), signal);
        told.expect("our own process can be told");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.members.clear();
        for node in &mut self.nodes {
            let _ = node.child.kill();
            let _ = node.child.wait();
        }
    }
}

fn start_nodes(directory: &Path) -> Vec<Node> {
    // All are held until all are known, so that they differ.
    let held: Vec<TcpListener> = (0..2 * NODES)
        .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port"))
        .collect();
    let ports: Vec<u16> =
        held.iter().map(|one| one.local_addr().expect("an address").port()).collect();
    drop(held);
    let (clients, routes) = ports.split_at(NODES);
    let all: Vec<String> =
        routes.iter().map(|port| format!("nats-route://127.0.0.1:{port}")).collect();
    let start = |number: usize| {
        let home = directory.join(format!("nats-{number}"));
        std::fs::create_dir_all(&home).expect("a directory");
        let text = format!(
            r#"server_name: n{number}
listen: "127.0.0.1:{client}"
max_payload: 8MB
log_file: "{home}/nats-server.log"
jetstream {{ store_dir: "{home}/store", sync_interval: always }}
cluster {{ name: flotilla, listen: "127.0.0.1:{route}", routes: [{all}] }}
"#,
            client = clients[number],
            route = routes[number],
            home = home.display(),
            all = all.join(", "),
        );
        let config = home.join("nats-server.conf");
        std::fs::write(&config, text).expect("a file");
        Node { child: start_node(&config), config, port: clients[number] }
    };
    let nodes: Vec<Node> = (0..NODES).map(start).collect();
    for node in &nodes {
        until("the servers listen", READY_LIMIT, || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, node.port)).ok()
        });
    }
    nodes
}

fn start_node(config: &Path) -> Child {
    let said = File::create(config.with_extension("stderr")).expect("a file");
    Command::new(nats::program())
        .arg("--config")
        .arg(config)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(said)
        .spawn()
        .expect("a nats-server starts")
}
