//! A box of the fan-out, and the store's: `flotilla worker`, told what to do by the bench.

use std::{convert::Infallible, io::Write, net::SocketAddr, path::PathBuf, sync::Arc};

use anyhow::Context;
use authority::{Caller, Scope};
use axum::extract::Request;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use serde::{Deserialize, Serialize};
use store::{Cache, Door, Elsewhere, Peer, Peers, Roll, Store};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use wire::{AgentId, v1};

/// Of a read or a write.
const PIECE: usize = 256 << 10;

/// What a box is to be.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Part {
    /// The gateway's door to a directory.
    Store { listen: SocketAddr, directory: PathBuf },
    /// An agent's cache; with peers or without.
    Box { name: String, listen: SocketAddr, door: SocketAddr, cache: PathBuf, peers: bool },
    /// Bytes to one neighbour and from another, and nothing but that.
    Plain { listen: SocketAddr, neighbour: SocketAddr, bytes: usize },
}

/// Of a box to the others.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Card {
    pub(super) name: String,
    pub(super) key: String,
    pub(super) address: SocketAddr,
}

/// What the bench says next.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Go {
    pub(super) cards: Vec<Card>,
    /// Manifest and path.
    pub(super) tree: (String, String),
}

struct Cards(std::sync::Mutex<Vec<Peer>>);

#[async_trait::async_trait]
impl Roll for Cards {
    async fn some(&self) -> Vec<Peer> {
        self.0.lock().map(|peers| peers.clone()).unwrap_or_default()
    }

    async fn key_of(&self, name: &AgentId) -> Option<store::Fingerprint> {
        self.some().await.into_iter().find(|peer| peer.name == *name).map(|peer| peer.key)
    }
}

pub(crate) fn work(part: &str) -> anyhow::Result<()> {
    let part: Part = serde_json::from_str(part).context("--part")?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build()?;
    match part {
        Part::Store { listen, directory } => match runtime.block_on(serve(listen, directory))? {},
        Part::Box { name, listen, door, cache, peers } => {
            let door = Door { gateway: door.to_string(), ca: None, bearer: None };
            runtime.block_on(fetch(name.parse()?, listen, &door, (cache, peers)))
        }
        Part::Plain { listen, neighbour, bytes } => {
            runtime.block_on(pass(listen, neighbour, bytes))
        }
    }
}

async fn serve(listen: SocketAddr, directory: PathBuf) -> anyhow::Result<Infallible> {
    let store = Store::open(&format!("file://{}", directory.display())).await?;
    let name: AgentId = "bench".parse()?;
    let routes = gateway::door::routes(&store).layer(axum::middleware::map_request(
        move |mut request: Request| {
            let (scope, roles) = (Some(Scope::Reader), [].into());
            let (key, expires_at) = (String::new(), None);
            let caller = Caller { name: name.clone(), scope, roles, key, expires_at };
            request.extensions_mut().insert(caller);
            async { request }
        },
    ));
    let listener = TcpListener::bind(listen).await.context("listen for the bench")?;
    say(&"ready")?;
    loop {
        let (socket, _) = listener.accept().await?;
        let _ = socket.set_nodelay(true);
        let service = TowerToHyperService::new(routes.clone());
        tokio::spawn(async move {
            // A connection that breaks is the client's to report.
            let _ = Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(socket), service)
                .await;
        });
    }
}

async fn fetch(
    name: AgentId,
    listen: SocketAddr,
    door: &Door,
    (cache, with_peers): (PathBuf, bool),
) -> anyhow::Result<()> {
    let roll = Arc::new(Cards(std::sync::Mutex::default()));
    let peers = Peers::new(name.clone(), roll.clone())?;
    let listener = TcpListener::bind(listen).await.context("listen for the bench")?;
    let (key, address) = (peers.key().to_string(), listener.local_addr()?);
    let elsewhere = Elsewhere { peers: with_peers.then(|| peers.clone()), ..Elsewhere::default() };
    let cache = Cache::with(&cache, 1 << 40, elsewhere)?;
    let store = Store::through(door)?;
    store.check().await?;
    let served = cache.clone();
    tokio::spawn(async move { match peers.serve(listener, &served).await {} });
    say(&Card { name: name.to_string(), key, address })?;
    let go: Go = serde_json::from_str(&hear().await?)?;
    let mut known = Vec::new();
    for Card { name, key, address } in go.cards {
        known.push(Peer { name: name.parse()?, key: key.parse()?, addresses: vec![address] });
    }
    if let Ok(mut peers) = roll.0.lock() {
        *peers = known;
    }
    say(&"ready")?;
    hear().await?;
    let (manifest, path) = go.tree;
    cache.tree(&store, &v1::Tree { manifest, path }).await?;
    say(&"done")?;
    // Others may have it from here until all are done.
    let _ = hear().await;
    Ok(())
}

async fn pass(listen: SocketAddr, neighbour: SocketAddr, bytes: usize) -> anyhow::Result<()> {
    let listener = TcpListener::bind(listen).await.context("listen for the bench")?;
    let sending = tokio::spawn(async move {
        let (mut to, _) = listener.accept().await?;
        let piece = vec![0; PIECE];
        for left in (0..bytes).step_by(PIECE) {
            to.write_all(&piece[..PIECE.min(bytes - left)]).await?;
        }
        to.shutdown().await
    });
    say(&"ready")?;
    hear().await?;
    let mut from = TcpStream::connect(neighbour).await.context("connect to a neighbour")?;
    let (mut piece, mut count) = (vec![0; PIECE], 0);
    loop {
        match from.read(&mut piece).await? {
            0 => break,
            read => count += read,
        }
    }
    anyhow::ensure!(count == bytes, "{count} bytes came of {bytes}");
    say(&"done")?;
    // Its neighbour may not have all yet.
    sending.await??;
    Ok(())
}

/// The next line, while peers are served.
async fn hear() -> anyhow::Result<String> {
    tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        let read = std::io::stdin().read_line(&mut line)?;
        anyhow::ensure!(read > 0, "the bench said nothing");
        Ok(line)
    })
    .await?
}

fn say(what: &impl Serialize) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, what)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}
