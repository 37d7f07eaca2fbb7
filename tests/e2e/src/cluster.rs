//! A fleet on a cluster of three nats-servers, without `flotilla up`.

use std::{
    fs::File,
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::{Client, Member, nats, wait_until};

const NODES: usize = 3;

/// Leader elections take long on a busy machine.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// A cluster with its coordinators and agents. All processes end when it is dropped.
pub struct Cluster {
    pub client: Client,
    members: Vec<Member>,
    nodes: Vec<Node>,
    directory: TempDir,
}

struct Node {
    config: PathBuf,
    port: u16,
    child: Child,
}

impl Cluster {
    /// Starts the servers, two coordinators and these agents, and waits until all are ready.
    pub fn start(agents: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path();
        let nodes = start_nodes(path);
        let urls: Vec<String> =
            nodes.iter().map(|node| format!("nats://127.0.0.1:{}", node.port)).collect();
        let urls = urls.join(",");
        let client = Client::new([("FLOTILLA_NATS".to_owned(), urls.clone())], path);
        let store = format!("file://{}", path.join("store").display());
        let logs = path.join("logs");
        let coordinator = |name: &str| {
            let arguments = ["coordinator", "--nats", &urls, "--replicas", "3", "--lease", "3"];
            let more = ["--store", &store, "--gateway", "127.0.0.1:0"];
            Member::start(name, &[], &[&arguments[..], &more].concat(), [], &logs)
        };
        let mut members = vec![coordinator("coordinator-1"), coordinator("coordinator-2")];
        wait_until("the cluster has a coordinator", READY_LIMIT, || {
            members.iter_mut().for_each(Member::restart_exited);
            client.run_json(&["run", "list"]).ok()
        });
        members.extend(agents.iter().map(|name| {
            let role = name.split('-').next().expect("an agent is named after its role");
            let home = path.join("agents").join(name).display().to_string();
            let arguments = ["agent", "--nats", &urls, "--roles", role, "--name", name];
            // Slow agents, so that a run takes long enough on any machine.
            let slow = ["--slots", "1", "--threads", "1"];
            let arguments = [&arguments[..], &["--agent-dir", &home], &slow].concat();
            Member::start(name, &[], &arguments, [], &logs)
        }));
        let mut cluster = Self { client, members, nodes, directory };
        wait_until("the agents are ready", READY_LIMIT, || {
            cluster.restart_exited();
            let listed = cluster.client.run_json(&["agents", "list"]).ok()?;
            let ready = |agent: &&serde_json::Value| agent["state"] == "READY";
            (listed.as_array()?.iter().filter(ready).count() >= agents.len()).then_some(())
        });
        cluster
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Restarts exited members, as the init system of a host does.
    pub fn restart_exited(&mut self) {
        self.members.iter_mut().for_each(Member::restart_exited);
    }

    /// Kills a server with SIGKILL.
    pub fn kill_server(&mut self, node: usize) {
        let child = &mut self.nodes[node].child;
        child.kill().and_then(|()| child.wait()).expect("our own process can be killed");
    }

    /// Restarts a killed server on its port and its files.
    pub fn restart_server(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        node.child = start_node(&node.config);
    }

    pub fn signal_server(&self, node: usize, signal: Signal) {
        let id = i32::try_from(self.nodes[node].child.id()).ok().and_then(Pid::from_raw);
        let sent = kill_process(id.expect("a process has a number"), signal);
        sent.expect("our own process can be signalled");
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
    // All ports are bound at the same time, so that they differ.
    let listeners: Vec<TcpListener> = (0..2 * NODES)
        .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port"))
        .collect();
    let ports: Vec<u16> =
        listeners.iter().map(|one| one.local_addr().expect("an address").port()).collect();
    drop(listeners);
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
        wait_until("the servers listen", READY_LIMIT, || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, node.port)).ok()
        });
    }
    nodes
}

fn start_node(config: &Path) -> Child {
    let log = File::create(config.with_extension("stderr")).expect("a file");
    Command::new(nats::server_program())
        .arg("--config")
        .arg(config)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("a nats-server starts")
}
