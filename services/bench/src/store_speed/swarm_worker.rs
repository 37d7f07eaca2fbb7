//! Runs a node of the fan-out: a box or the store, as a worker process that the bench controls.

use std::{convert::Infallible, io::Write, net::SocketAddr, path::PathBuf, sync::Arc};

use anyhow::Context;
use axum::extract::Request;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use identity::{GatewayCaller, UserScope};
use serde::{Deserialize, Serialize};
use store::{ExternalSources, FileCache, GatewayStore, PeerAgent, PeerDirectory, PeerNode, Store};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use wire::{AgentId, v1};

/// Bytes of one read or write.
const BUFFER_BYTES: usize = 256 << 10;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum SwarmTask {
    Store {
        listen: SocketAddr,
        directory: PathBuf,
    },
    Box {
        name: String,
        listen: SocketAddr,
        gateway: SocketAddr,
        cache: PathBuf,
        peers: bool,
    },
    /// Sends bytes to one neighbour and receives as many from another one.
    Plain {
        listen: SocketAddr,
        neighbour: SocketAddr,
        bytes: usize,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct PeerContact {
    pub(super) name: String,
    pub(super) key: String,
    pub(super) address: SocketAddr,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct FetchInstruction {
    pub(super) cards: Vec<PeerContact>,
    pub(super) tree: (String, String),
}

struct FixedPeers(std::sync::Mutex<Vec<PeerAgent>>);

#[async_trait::async_trait]
impl PeerDirectory for FixedPeers {
    async fn sample_peers(&self) -> Vec<PeerAgent> {
        self.0.lock().map(|peers| peers.clone()).unwrap_or_default()
    }

    async fn find_key(&self, name: &AgentId) -> Option<store::Fingerprint> {
        self.sample_peers().await.into_iter().find(|peer| peer.name == *name).map(|peer| peer.key)
    }
}

pub(crate) fn run_swarm_node(part: &str) -> anyhow::Result<()> {
    let part: SwarmTask = serde_json::from_str(part).context("--part")?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build()?;
    match part {
        SwarmTask::Store { listen, directory } => {
            match runtime.block_on(serve_store(listen, directory))? {}
        }
        SwarmTask::Box { name, listen, gateway, cache, peers } => {
            let gateway = GatewayStore { gateway: gateway.to_string(), ca: None, bearer: None };
            runtime.block_on(fetch_tree(name.parse()?, listen, &gateway, (cache, peers)))
        }
        SwarmTask::Plain { listen, neighbour, bytes } => {
            runtime.block_on(pass_bytes(listen, neighbour, bytes))
        }
    }
}

/// Serves a directory to all callers as readers, until the process is killed.
async fn serve_store(listen: SocketAddr, directory: PathBuf) -> anyhow::Result<Infallible> {
    let store = Store::open(&format!("file://{}", directory.display())).await?;
    let routes = gateway::store_proxy::build_routes(&store);
    let listener = TcpListener::bind(listen).await.context("listen for the bench")?;
    print_message(&"ready")?;
    let mut connections = 0;
    loop {
        let (socket, _) = listener.accept().await?;
        let _ = socket.set_nodelay(true);
        connections += 1;
        // The proxy limits the transfers of each caller.
        let name: AgentId = format!("bench-{connections}").parse()?;
        let routes =
            routes.clone().layer(axum::middleware::map_request(move |mut request: Request| {
                let (scope, roles) = (Some(UserScope::Reader), [].into());
                let (name, public_key, expires_at) = (name.clone(), String::new(), None);
                let is_recorded = false;
                let caller =
                    GatewayCaller { name, scope, roles, public_key, expires_at, is_recorded };
                request.extensions_mut().insert(caller);
                async { request }
            }));
        let service = TowerToHyperService::new(routes);
        tokio::spawn(async move {
            // A broken connection is reported by its client.
            let _ = Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(socket), service)
                .await;
        });
    }
}

async fn fetch_tree(
    name: AgentId,
    listen: SocketAddr,
    gateway: &GatewayStore,
    (cache, with_peers): (PathBuf, bool),
) -> anyhow::Result<()> {
    let known_peers = Arc::new(FixedPeers(std::sync::Mutex::default()));
    let peers = PeerNode::new(name.clone(), known_peers.clone())?;
    let listener = TcpListener::bind(listen).await.context("listen for the bench")?;
    let (key, address) = (peers.own_key().to_string(), listener.local_addr()?);
    let elsewhere =
        ExternalSources { peers: with_peers.then(|| peers.clone()), ..ExternalSources::default() };
    let cache = FileCache::open_with_sources(&cache, 1 << 40, elsewhere)?;
    let store = Store::open_gateway(gateway)?;
    store.check_access().await?;
    let served = cache.clone();
    tokio::spawn(async move { match peers.serve_files(listener, &served).await {} });
    print_message(&PeerContact { name: name.to_string(), key, address })?;
    let go: FetchInstruction = serde_json::from_str(&read_line().await?)?;
    let mut known = Vec::new();
    for PeerContact { name, key, address } in go.cards {
        known.push(PeerAgent { name: name.parse()?, key: key.parse()?, addresses: vec![address] });
    }
    if let Ok(mut peers) = known_peers.0.lock() {
        *peers = known;
    }
    print_message(&"ready")?;
    read_line().await?;
    let (manifest, path) = go.tree;
    cache.fetch_tree(&store, &v1::Tree { manifest, path }).await?;
    print_message(&"done")?;
    // Serve other boxes until all are done.
    let _ = read_line().await;
    Ok(())
}

/// Sends bytes to the node that connects, and receives as many from `neighbour`.
async fn pass_bytes(listen: SocketAddr, neighbour: SocketAddr, bytes: usize) -> anyhow::Result<()> {
    let listener = TcpListener::bind(listen).await.context("listen for the bench")?;
    let sending = tokio::spawn(async move {
        let (mut to, _) = listener.accept().await?;
        let piece = vec![0; BUFFER_BYTES];
        for left in (0..bytes).step_by(BUFFER_BYTES) {
            to.write_all(&piece[..BUFFER_BYTES.min(bytes - left)]).await?;
        }
        to.shutdown().await
    });
    print_message(&"ready")?;
    read_line().await?;
    let mut from = TcpStream::connect(neighbour).await.context("connect to a neighbour")?;
    let (mut piece, mut count) = (vec![0; BUFFER_BYTES], 0);
    loop {
        match from.read(&mut piece).await? {
            0 => break,
            read => count += read,
        }
    }
    anyhow::ensure!(count == bytes, "{count} bytes came of {bytes}");
    print_message(&"done")?;
    // Wait until the neighbour has received all bytes.
    sending.await??;
    Ok(())
}

/// Reads the next line from standard input on a blocking thread, so that peers are served
/// meanwhile.
async fn read_line() -> anyhow::Result<String> {
    tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        let read = std::io::stdin().read_line(&mut line)?;
        anyhow::ensure!(read > 0, "the bench said nothing");
        Ok(line)
    })
    .await?
}

/// Prints a message as a line of JSON.
fn print_message(what: &impl Serialize) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, what)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}
