//! Agents that fetch the same files get them from each other and from no other host.

use std::{
    fs,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use store::{
    ExternalSources, FileCache, Fingerprint, GetError, PeerAgent, PeerDirectory, PeerNode,
    StorageError, Store,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use wire::{AgentId, v1};

use crate::support::{MIB, Place, about, adapter, noise, place};

const WEIGHTS: &str = "adapter_model.safetensors";

/// The peer directory of the test's agents.
#[derive(Clone, Default)]
struct KnownPeers(Arc<Mutex<Vec<PeerAgent>>>);

#[async_trait]
impl PeerDirectory for KnownPeers {
    async fn sample_peers(&self) -> Vec<PeerAgent> {
        self.0.lock().unwrap().clone()
    }

    async fn find_key(&self, name: &AgentId) -> Option<Fingerprint> {
        let peers = self.0.lock().unwrap();
        peers.iter().find(|peer| peer.name == *name).map(|peer| peer.key)
    }
}

/// An agent's cache, served to others while this value exists.
struct Box_ {
    cache: FileCache,
    dir: TempDir,
    peer: PeerAgent,
    peers: PeerNode,
    _serving: JoinSet<()>,
}

impl Box_ {
    /// The directory need not list the new agent.
    async fn new(name: &str, roll: &KnownPeers) -> Self {
        let name: AgentId = name.parse().unwrap();
        let peers = PeerNode::new(name.clone(), Arc::new(roll.clone())).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addresses = vec![listener.local_addr().unwrap()];
        let peer = PeerAgent { name, key: peers.own_key(), addresses };
        let dir = tempfile::tempdir().unwrap();
        let elsewhere =
            ExternalSources { peers: Some(peers.clone()), ..ExternalSources::default() };
        let cache = FileCache::open_with_sources(dir.path(), 1 << 30, elsewhere).unwrap();
        let mut serving = JoinSet::new();
        let served = cache.clone();
        let serves = peers.clone();
        serving.spawn(async move { match serves.serve_files(listener, &served).await {} });
        Self { cache, dir, peer, peers, _serving: serving }
    }

    /// Creates an agent that the directory lists.
    async fn member(name: &str, roll: &KnownPeers) -> Self {
        let member = Self::new(name, roll).await;
        roll.0.lock().unwrap().push(member.peer.clone());
        member
    }

    async fn fetch(&self, store: &Store, tree: &v1::Tree) -> Result<Vec<u8>, GetError> {
        let tree = self.cache.fetch_tree(store, tree).await?;
        Ok(fs::read(tree.path().join(WEIGHTS)).unwrap())
    }

    /// Returns the path of its copy of the weights.
    fn weights(&self, bytes: &[u8]) -> PathBuf {
        let hex = blake3::hash(bytes).to_hex();
        self.dir.path().join("b3").join(&hex[..2]).join(hex.as_str())
    }
}

async fn published(len: usize) -> (Place, v1::Tree, Vec<u8>) {
    let at = Place::s3().await;
    let tree = at.store.publish_tree(adapter(1, len).path(), &place(1), about()).await.unwrap();
    (at, tree, noise(1, len))
}

/// Removes the store's copy of the weights.
fn lose_weights(at: &Place, tree: &v1::Tree) {
    fs::remove_file(at.dir.join(&tree.path).join(WEIGHTS)).unwrap();
}

fn is_missing(fetched: &Result<Vec<u8>, GetError>) -> bool {
    matches!(fetched, Err(GetError::Storage(StorageError::Missing { .. })))
}

/// Forwards to an address, until `bytes` bytes have passed.
async fn cut_after(bytes: u64, to: SocketAddr, passing: &mut JoinSet<()>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let left = Arc::new(AtomicU64::new(bytes));
    passing.spawn(async move {
        let mut pipes = JoinSet::new();
        while let Ok((client, _)) = listener.accept().await {
            let Ok(server) = TcpStream::connect(to).await else { return };
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            pipes.spawn(pipe(from_client, to_server, left.clone()));
            pipes.spawn(pipe(from_server, to_client, left.clone()));
        }
    });
    address
}

async fn pipe(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    left: Arc<AtomicU64>,
) {
    let mut buffer = vec![0; 16 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let counted = |left: u64| left.checked_sub(read as u64);
        if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, counted).is_err() {
            return;
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

#[tokio::test]
async fn what_a_peer_has_need_not_come_from_the_store() {
    let (at, tree, bytes) = published(5 * MIB + 7).await;
    let directory = KnownPeers::default();
    let (first, second) =
        (Box_::member("a", &directory).await, Box_::member("b", &directory).await);
    assert_eq!(first.fetch(&at.store, &tree).await.unwrap(), bytes);
    lose_weights(&at, &tree);
    assert_eq!(second.fetch(&at.store, &tree).await.unwrap(), bytes);
    // The same when a third agent has it from the second.
    drop(first);
    let third = Box_::member("c", &directory).await;
    assert_eq!(third.fetch(&at.store, &tree).await.unwrap(), bytes);
}

#[tokio::test]
async fn who_publishes_has_it_for_peers_and_all_tell_what_came_from_where() {
    let at = Place::s3().await;
    let directory = KnownPeers::default();
    let (trainer, other) =
        (Box_::member("a", &directory).await, Box_::member("b", &directory).await);
    let (files, place) = (adapter(1, 3 * MIB), place(1));
    let published = trainer.cache.publish_tree(&at.store, files.path(), &place, about());
    let tree = published.await.unwrap();
    lose_weights(&at, &tree);
    assert_eq!(other.fetch(&at.store, &tree).await.unwrap(), noise(1, 3 * MIB));
    let bytes = 3 * MIB as u64;
    let (sent, came) = (trainer.peers.transfer_totals(), other.peers.transfer_totals());
    assert_eq!((sent.from_store, sent.to_peers), (0, bytes));
    assert_eq!((came.from_peers, came.to_peers), (bytes, 0));
    // Small files, for which no peer is asked.
    assert_eq!(came.from_store, 8);
    // Its publisher needs no store for it either.
    assert_eq!(trainer.fetch(&at.store, &tree).await.unwrap(), noise(1, 3 * MIB));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_at_once_get_most_of_it_from_each_other() {
    let (at, tree, bytes) = published(24 * MIB).await;
    let directory = KnownPeers::default();
    let mut boxes = Vec::new();
    for index in 0..6 {
        boxes.push(Box_::member(&format!("box-{index}"), &directory).await);
    }
    let fetching = boxes.iter().map(|one| one.fetch(&at.store, &tree));
    for fetched in futures::future::join_all(fetching).await {
        assert!(fetched.unwrap() == bytes);
    }
    // A busy machine sends some parts late, and then the store sends them once more.
    let sent: u64 = boxes.iter().map(|one| one.peers.transfer_totals().from_store).sum();
    assert!(sent < 3 * bytes.len() as u64, "the store sent {sent} bytes");
    eprintln!("copies {}", sent as f64 / bytes.len() as f64);
}

#[tokio::test]
async fn a_peer_that_lies_is_found_out_and_the_store_has_it() {
    let (at, tree, bytes) = published(3 * MIB).await;
    let directory = KnownPeers::default();
    let (liar, honest) = (Box_::member("a", &directory).await, Box_::member("b", &directory).await);
    liar.fetch(&at.store, &tree).await.unwrap();
    let path = liar.weights(&bytes);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fs::set_permissions(&path, mode).unwrap();
    fs::write(&path, noise(9, bytes.len())).unwrap();
    assert_eq!(honest.fetch(&at.store, &tree).await.unwrap(), bytes);
    // With the lying peer alone the fetch fails.
    lose_weights(&at, &tree);
    directory.0.lock().unwrap().retain(|peer| peer.name != honest.peer.name);
    let third = Box_::member("c", &directory).await;
    assert!(is_missing(&third.fetch(&at.store, &tree).await));
}

#[tokio::test]
async fn a_peer_that_dies_midway_or_never_answers_costs_no_file() {
    let (at, tree, bytes) = published(8 * MIB).await;
    let directory = KnownPeers::default();
    let first = Box_::member("a", &directory).await;
    first.fetch(&at.store, &tree).await.unwrap();
    let mut passing = JoinSet::new();
    let dies = cut_after(2 * MIB as u64, first.peer.addresses[0], &mut passing).await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    {
        let mut peers = directory.0.lock().unwrap();
        peers[0].addresses = vec![dies];
        let address = silent.local_addr().unwrap();
        let name = "silent".parse().unwrap();
        let silent = PeerAgent { name, addresses: vec![address], ..peers[0].clone() };
        peers.push(silent);
    }
    let second = Box_::member("b", &directory).await;
    assert_eq!(second.fetch(&at.store, &tree).await.unwrap(), bytes);
}

#[tokio::test]
async fn who_is_no_member_gets_nothing_and_is_not_listened_to() {
    let (at, tree, _) = published(2 * MIB).await;
    let directory = KnownPeers::default();
    let member = Box_::member("a", &directory).await;
    member.fetch(&at.store, &tree).await.unwrap();
    lose_weights(&at, &tree);
    // The directory lists neither the agent nor its key, also under a listed name.
    for name in ["stranger", "a-2"] {
        let known = KnownPeers(Arc::new(Mutex::new(directory.0.lock().unwrap().clone())));
        let stranger = Box_::new(name, &known).await;
        assert!(is_missing(&stranger.fetch(&at.store, &tree).await), "{name}");
    }
    let other = Box_::member("a-2", &KnownPeers::default()).await;
    directory.0.lock().unwrap().push(other.peer.clone());
    let posing = Box_::new("a-2", &directory).await;
    assert!(is_missing(&posing.fetch(&at.store, &tree).await));
    // A peer with another key than listed is not asked, although it would answer.
    let second = Box_::member("b", &directory).await;
    directory.0.lock().unwrap()[0].key = Fingerprint::from_der(b"another's");
    assert!(is_missing(&second.fetch(&at.store, &tree).await));
}

#[tokio::test]
async fn without_a_list_of_parts_files_come_from_the_store_as_ever() {
    let (at, tree, bytes) = published(3 * MIB).await;
    let directory = KnownPeers::default();
    let (first, second) =
        (Box_::member("a", &directory).await, Box_::member("b", &directory).await);
    first.fetch(&at.store, &tree).await.unwrap();
    let list = at.dir.join(&tree.path).join("B3PARTS");
    // A list of another file is ignored.
    let text = fs::read_to_string(&list).unwrap();
    fs::write(&list, text.replace(['0', '1', '2'], "7")).unwrap();
    assert_eq!(second.fetch(&at.store, &tree).await.unwrap(), bytes);
    fs::remove_file(&list).unwrap();
    let third = Box_::member("c", &directory).await;
    assert_eq!(third.fetch(&at.store, &tree).await.unwrap(), bytes);
}
