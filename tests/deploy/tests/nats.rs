//! The NATS configurations, loaded and run by a real nats-server.

use std::{
    fs::{self, File},
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use async_nats::jetstream::{self, stream};
use deploy::{files, name, program, read, root, run, said};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(30);

fn nats_server() -> Option<PathBuf> {
    program("FLOTILLA_NATS_SERVER", &["nats-server"])
}

/// As many free ports, all different.
fn ports<const N: usize>() -> [u16; N] {
    let held: Vec<TcpListener> =
        (0..N).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port")).collect();
    std::array::from_fn(|one| held[one].local_addr().expect("an address").port())
}

/// A server's directory, as on its box: all configurations, and keys, which ask nobody here.
struct Node {
    directory: TempDir,
    child: Option<Child>,
}

impl Node {
    /// With these in place of addresses; each must be in some file.
    fn new(replaced: &[(&str, String)]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let mut found = vec![false; replaced.len()];
        fs::create_dir(directory.path().join("keys")).expect("a directory");
        let deployed = [files("deploy/nats", ".conf"), files("deploy/nats/keys", ".conf")].concat();
        for path in deployed {
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
        let said = File::create(self.path().join("said")).expect("a log");
        let mut command = Command::new(server);
        // Paths in it count from here, as they do from the unit's directory.
        command.current_dir(self.path()).arg("--config").arg(config);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
        self.child = Some(command.spawn().expect("a nats-server starts"));
        let began = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            assert!(began.elapsed() < LIMIT, "{config}: {}", self.said());
            std::thread::sleep(Duration::from_millis(20));
        }
        self
    }

    fn said(&self) -> String {
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
fn the_server_takes_each_of_them_as_it_is() {
    let Some(server) = nats_server() else { return };
    let node = Node::new(&[]);
    for path in files("deploy/nats", ".conf") {
        let mut command = Command::new(&server);
        command.current_dir(node.path()).args(["-t", "--config"]).arg(name(&path));
        let output = run(&mut command);
        assert!(output.status.success(), "{}: {}", path.display(), said(&output));
    }
}

/// The managed server's limits are those of a server of one's own.
#[test]
fn limits_and_durability_are_those_of_the_managed_server() {
    let managed = read("services/bus/src/server/config.rs");
    let settings = |text: &str| -> Vec<String> {
        let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
        let keys = ["max_", "sync_interval"];
        lines
            .filter(|line| keys.iter().any(|key| line.starts_with(key)))
            .map(str::to_owned)
            .collect()
    };
    let ours = settings(&(read("deploy/nats/common.conf") + &read("deploy/nats/log.conf")));
    assert!(ours.contains(&"sync_interval: always".to_owned()), "{ours:?}");
    for setting in &ours {
        assert!(managed.contains(setting.as_str()), "the managed server has no {setting}");
    }
    assert!(ours.len() >= 5, "{ours:?}");
    for path in
        files("deploy/nats", ".conf").iter().filter(|path| !name(path).starts_with("common"))
    {
        let text = fs::read_to_string(path).expect("a configuration");
        let whole = ["log.conf", "hub.conf"].contains(&name(path).as_str());
        assert!(whole || text.contains("include common.conf"), "{}", path.display());
    }
}

#[tokio::test]
async fn a_single_server_writes_to_disk_before_it_acknowledges() {
    let Some(server) = nats_server() else { return };
    let [port, monitor] = ports();
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
async fn three_form_a_cluster_that_keeps_three_copies_and_loses_one_of_them() {
    let Some(server) = nats_server() else { return };
    let all: [u16; 9] = ports();
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
    // The cluster has a leader when it has one.
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
    // Killed, and what was acknowledged is there.
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
async fn a_second_site_reaches_the_log_through_its_leaf_and_again_after_the_line_was_down() {
    let Some(server) = nats_server() else { return };
    let [hub_port, leaf_port, site, monitor, far_monitor] = ports();
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
    let here = jetstream::new(async_nats::connect(local(hub_port)).await.expect("the hub"));
    let config =
        stream::Config { name: "LOG".into(), subjects: vec!["log".into()], ..Default::default() };
    here.create_stream(config).await.expect("a stream");

    let there = jetstream::new(async_nats::connect(local(site)).await.expect("the leaf"));
    publish(&there).await;
    assert_eq!(messages(&there).await, 1);
    assert!(!leaf.path().join("store").exists(), "a leaf keeps no log");

    // The hub goes and comes back, with its store.
    let child = hub.child.as_mut().expect("a server");
    child.kill().and_then(|()| child.wait()).expect("our own process");
    hub = start_hub(hub);
    publish(&there).await;
    assert_eq!(messages(&there).await, 2);
    drop(hub);
}

/// The hub says what it answers a moment after the line is there.
async fn messages(context: &jetstream::Context) -> u64 {
    let began = Instant::now();
    loop {
        match context.get_stream("LOG").await {
            Ok(log) => return log.cached_info().state.messages,
            Err(error) => assert!(began.elapsed() < LIMIT, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
