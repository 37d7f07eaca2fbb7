//! The NATS configurations, loaded and run by a real nats-server.

use std::{
    fs::{self, File},
    net::{Ipv4Addr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use async_nats::jetstream::{self, stream};
use deploy::{file_name, list_files, output_text, read_file, root, run_command};
use requirements::{free_ports, require_program};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(30);

fn nats_server() -> Option<PathBuf> {
    let named = std::env::var_os("FLOTILLA_NATS_SERVER").map(PathBuf::from);
    named.or_else(|| require_program("nats-server"))
}

/// The directory of a server: all configurations, and keys that give everybody access.
struct Node {
    directory: TempDir,
    child: Option<Child>,
}

impl Node {
    /// Copies the configurations with these replacements. Each text must be in some file.
    fn new(replaced: &[(&str, String)]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let mut found = vec![false; replaced.len()];
        fs::create_dir(directory.path().join("keys")).expect("a directory");
        let sources =
            [list_files("deploy/nats", ".conf"), list_files("deploy/nats/keys", ".conf")].concat();
        for path in sources {
            let mut text = fs::read_to_string(&path).expect("a configuration");
            for (number, (old, new)) in replaced.iter().enumerate() {
                found[number] |= text.contains(old);
                text = text.replace(old, new);
            }
            let below = path.strip_prefix(root().join("deploy/nats")).expect("one of these");
            fs::write(directory.path().join(below), text).expect("a file");
        }
        assert!(found.iter().all(|found| *found), "no longer there: {replaced:?}");
        Self { directory, child: None }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn start(mut self, server: &Path, config: &str, port: u16) -> Self {
        let log = File::create(self.path().join("said")).expect("a log");
        let mut command = Command::new(server);
        // Relative paths in the configuration start here, as in the systemd unit.
        command.current_dir(self.path()).arg("--config").arg(config);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().expect("a nats-server starts"));
        let began = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            assert!(began.elapsed() < LIMIT, "{config}: {}", self.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
        self
    }

    fn log_text(&self) -> String {
        fs::read_to_string(self.path().join("said")).unwrap_or_default()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn local(port: u16) -> String {
    format!("127.0.0.1:{port}")
}

#[test]
fn each_configuration_is_valid() {
    let Some(server) = nats_server() else { return };
    let node = Node::new(&[]);
    for path in list_files("deploy/nats", ".conf") {
        let mut command = Command::new(&server);
        command.current_dir(node.path()).args(["-t", "--config"]).arg(file_name(&path));
        let output = run_command(&mut command);
        assert!(output.status.success(), "{}: {}", path.display(), output_text(&output));
    }
}

/// The configurations in `deploy/nats` have the limits of the server that `flotilla up` starts.
#[test]
fn limits_and_durability_are_those_of_the_managed_server() {
    let managed = read_file("services/bus/src/server/config.rs");
    let settings = |text: &str| -> Vec<String> {
        let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
        let keys = ["max_", "sync_interval"];
        lines
            .filter(|line| keys.iter().any(|key| line.starts_with(key)))
            .map(str::to_owned)
            .collect()
    };
    let limits =
        settings(&(read_file("deploy/nats/common.conf") + &read_file("deploy/nats/log.conf")));
    assert!(limits.contains(&"sync_interval: always".to_owned()), "{limits:?}");
    for setting in &limits {
        assert!(managed.contains(setting.as_str()), "the managed server has no {setting}");
    }
    assert!(limits.len() >= 5, "{limits:?}");
    for path in list_files("deploy/nats", ".conf")
        .iter()
        .filter(|path| !file_name(path).starts_with("common"))
    {
        let text = fs::read_to_string(path).expect("a configuration");
        let whole = ["log.conf", "hub.conf"].contains(&file_name(path).as_str());
        assert!(whole || text.contains("include common.conf"), "{}", path.display());
    }
}

#[tokio::test]
async fn a_single_server_writes_to_disk_before_it_acknowledges() {
    let Some(server) = nats_server() else { return };
    let [port, monitor] = free_ports();
    let node = Node::new(&[("0.0.0.0:4222", local(port)), ("127.0.0.1:8222", local(monitor))]);
    let node = node.start(&server, "single.conf", port);
    let client = async_nats::connect(local(port)).await.expect("a connection");
    assert_eq!(client.server_info().max_payload, 8 << 20);
    let context = jetstream::new(client);
    let config =
        stream::Config { name: "LOG".into(), subjects: vec!["log".into()], ..Default::default() };
    context.create_stream(config).await.expect("a stream");
    context.publish("log", "a fact".into()).await.expect("sent").await.expect("acknowledged");
    assert!(node.path().join("store/jetstream").is_dir(), "the store is not where the unit has it");
    let varz = http_get(monitor, "/varz").await;
    let varz: serde_json::Value = serde_json::from_str(&varz).expect("JSON");
    assert_eq!(varz["jetstream"]["config"]["sync_always"], true, "{varz}");
}

async fn http_get(port: u16, path: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(local(port)).await.expect("a monitor");
    let request = format!("GET {path} HTTP/1.0\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("asked");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("answered");
    answer.split_once("\r\n\r\n").expect("a body").1.to_owned()
}

#[tokio::test]
async fn three_servers_form_a_cluster_that_survives_the_loss_of_one() {
    let Some(server) = nats_server() else { return };
    let all: [u16; 9] = free_ports();
    let (clients, routes, monitors) = (&all[..3], &all[3..6], &all[6..]);
    let mut nodes: Vec<Node> = (0..3)
        .map(|one| {
            let replaced = [
                ("0.0.0.0:4222", local(clients[one])),
                ("0.0.0.0:6222", local(routes[one])),
                ("127.0.0.1:8222", local(monitors[one])),
                ("nats-1:6222", local(routes[0])),
                ("nats-2:6222", local(routes[1])),
                ("nats-3:6222", local(routes[2])),
            ];
            let config = format!("cluster-{}.conf", one + 1);
            Node::new(&replaced).start(&server, &config, clients[one])
        })
        .collect();
    let urls: Vec<async_nats::ServerAddr> =
        clients.iter().map(|&port| local(port).parse().expect("an address")).collect();
    let client = async_nats::connect(urls).await.expect("a connection");
    let context = jetstream::new(client);
    let config = stream::Config {
        name: "LOG".into(),
        subjects: vec!["log".into()],
        num_replicas: 3,
        ..Default::default()
    };
    let began = Instant::now();
    // Fails until the cluster has a leader.
    let mut log = loop {
        match context.create_stream(config.clone()).await {
            Ok(log) => break log,
            Err(error) => assert!(began.elapsed() < LIMIT, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let copies = log.info().await.expect("a stream").cluster.clone().expect("of a cluster");
    assert_eq!(copies.replicas.len(), 2, "{copies:?}");
    publish(&context).await;
    // Kills a server. Acknowledged messages are not lost.
    drop(nodes.pop());
    publish(&context).await;
    assert!(log.info().await.expect("a stream").state.messages >= 2);
}

async fn publish(context: &jetstream::Context) {
    let began = Instant::now();
    loop {
        let sent = context.publish("log", "a fact".into()).await.expect("sent");
        match sent.await {
            Ok(_) => return,
            Err(error) => assert!(began.elapsed() < LIMIT, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn a_second_site_reaches_the_log_through_its_leaf_and_reconnects() {
    let Some(server) = nats_server() else { return };
    let [hub_port, leaf_port, site, monitor, far_monitor] = free_ports();
    let start_hub = |hub: Node| hub.start(&server, "hub.conf", hub_port);
    let mut hub = start_hub(Node::new(&[
        ("0.0.0.0:4222", local(hub_port)),
        ("0.0.0.0:7422", local(leaf_port)),
        ("127.0.0.1:8222", local(monitor)),
    ]));
    let leaf = Node::new(&[
        ("0.0.0.0:4222", local(site)),
        ("hub:7422", local(leaf_port)),
        ("127.0.0.1:8222", local(far_monitor)),
    ]);
    let leaf = leaf.start(&server, "leaf.conf", site);
    let hub_context = jetstream::new(async_nats::connect(local(hub_port)).await.expect("the hub"));
    let config =
        stream::Config { name: "LOG".into(), subjects: vec!["log".into()], ..Default::default() };
    hub_context.create_stream(config).await.expect("a stream");

    let leaf_context = jetstream::new(async_nats::connect(local(site)).await.expect("the leaf"));
    publish(&leaf_context).await;
    assert_eq!(count_messages(&leaf_context).await, 1);
    assert!(!leaf.path().join("store").exists(), "a leaf keeps no log");

    // Restarts the hub with its store.
    let child = hub.child.as_mut().expect("a server");
    child.kill().and_then(|()| child.wait()).expect("our own process");
    hub = start_hub(hub);
    publish(&leaf_context).await;
    assert_eq!(count_messages(&leaf_context).await, 2);
    drop(hub);
}

/// Returns the number of messages. Retries, because the hub only responds some time after the leaf
/// node has connected.
async fn count_messages(context: &jetstream::Context) -> u64 {
    let began = Instant::now();
    loop {
        match context.get_stream("LOG").await {
            Ok(log) => return log.cached_info().state.messages,
            Err(error) => assert!(began.elapsed() < LIMIT, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
