//! File exchange between agents that fetch the same file: each part leaves the store about once,
//! and the last of many hosts finishes hardly later than the first.
//!
//! Agents announce themselves on the bus; this crate sees them as a [`PeerDirectory`]. Both ends of
//! a connection present a key that the directory lists. Bytes from a peer are verified part by part
//! ([`parts`](crate::parts)), so a bad peer can only waste time, and the store remains the source
//! for parts that no peer has.

mod active_downloads;
mod peer_connection;
mod peer_download;
mod peer_server;
mod plan;
mod transfer_counts;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use identity::{Fingerprint, PeerIdentity, PeerTlsError};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use wire::AgentId;

use self::{active_downloads::ActiveDownloads, transfer_counts::TransferCounters};

pub use self::transfer_counts::TransferTotals;
pub(crate) use self::{active_downloads::ActiveDownloadGuard, peer_download::fetch_with_peers};

const PEERS_MAX: usize = 16;
const DIRECTORY_TIMEOUT: Duration = Duration::from_millis(500);
const DIRECTORY_TTL: Duration = Duration::from_secs(5);
const BAN_DURATION: Duration = Duration::from_secs(300);
const MEMBER_TTL: Duration = Duration::from_secs(10);
const REMEMBERED_MAX: usize = 256;

/// An agent that exchanges files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAgent {
    pub name: AgentId,
    /// The fingerprint of its certificate.
    pub key: Fingerprint,
    /// Addresses on which it listens, the likeliest first.
    pub addresses: Vec<SocketAddr>,
}

/// The agents of the fleet that are online, from a source that non-members cannot forge.
#[async_trait]
pub trait PeerDirectory: Send + Sync {
    /// Returns a sample of the agents that are online, which differs between calls.
    async fn sample_peers(&self) -> Vec<PeerAgent>;
    async fn find_key(&self, name: &AgentId) -> Option<Fingerprint>;
}

/// This agent as a node of the file exchange. Clones share one state.
///
/// A fetch asks the directory for up to 16 peers and follows which parts each has; a `DownloadPlan`
/// decides which part to request from whom. [`serve_files`](Self::serve_files) offers the cache and
/// unfinished files to others. A peer that sends wrong bytes is banned for 5 minutes.
#[derive(Clone)]
pub struct PeerNode {
    inner: Arc<PeerNodeInner>,
}

struct PeerNodeInner {
    name: AgentId,
    identity: PeerIdentity,
    acceptor: TlsAcceptor,
    directory: Arc<dyn PeerDirectory>,
    active: ActiveDownloads,
    counts: TransferCounters,
    sampled: tokio::sync::Mutex<Option<(Instant, Vec<PeerAgent>)>>,
    banned: Mutex<BTreeMap<String, Instant>>,
    members: Mutex<BTreeMap<(AgentId, String), (Instant, bool)>>,
}

impl PeerNode {
    /// Creates the exchange of an agent, with a fresh key.
    pub fn new(name: AgentId, roll: Arc<dyn PeerDirectory>) -> Result<Self, PeerTlsError> {
        let identity = PeerIdentity::new()?;
        let acceptor = TlsAcceptor::from(Arc::new(identity.server_config()?));
        let inner = PeerNodeInner {
            name,
            identity,
            acceptor,
            directory: roll,
            active: ActiveDownloads::default(),
            counts: TransferCounters::default(),
            sampled: Default::default(),
            banned: Mutex::default(),
            members: Mutex::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns the fingerprint that the directory must list for this agent.
    pub fn own_key(&self) -> Fingerprint {
        self.inner.identity.own_fingerprint()
    }

    pub fn transfer_totals(&self) -> TransferTotals {
        self.inner.counts.current_totals()
    }

    pub(crate) fn count_from_store(&self, bytes: u64) {
        self.inner.counts.add_from_store(bytes);
    }

    /// Returns the peers to ask, and this agent's rank among them with their number. The rank
    /// decides which share of a file this agent takes from the store first.
    async fn select_peers(&self) -> (Vec<PeerAgent>, (usize, usize)) {
        let mut known = self.inner.sampled.lock().await;
        if known.as_ref().is_none_or(|(at, _)| at.elapsed() > DIRECTORY_TTL) {
            // If the directory does not answer, the fetch starts without peers, and the empty list
            // is reused for a while.
            let some = timeout(DIRECTORY_TIMEOUT, self.inner.directory.sample_peers())
                .await
                .unwrap_or_default();
            *known = Some((Instant::now(), some));
        }
        let mut peers = known.as_ref().map(|(_, peers)| peers.clone()).unwrap_or_default();
        drop(known);
        peers.retain(|peer| peer.name != self.inner.name && !self.is_banned(peer.key));
        peers.truncate(PEERS_MAX);
        let place = peers.iter().filter(|peer| peer.name < self.inner.name).count();
        let count = peers.len() + 1;
        (peers, (place, count))
    }

    fn ban_peer(&self, key: Fingerprint) {
        let mut shunned = lock_mutex(&self.inner.banned);
        shunned.retain(|_, at| at.elapsed() < BAN_DURATION);
        if shunned.len() < REMEMBERED_MAX {
            shunned.insert(key.to_string(), Instant::now());
        }
    }

    fn is_banned(&self, key: Fingerprint) -> bool {
        lock_mutex(&self.inner.banned)
            .get(&key.to_string())
            .is_some_and(|at| at.elapsed() < BAN_DURATION)
    }

    async fn is_member(&self, name: &AgentId, key: Fingerprint) -> bool {
        let who = (name.clone(), key.to_string());
        let known = lock_mutex(&self.inner.members).get(&who).copied();
        if let Some((at, is)) = known.filter(|(at, _)| at.elapsed() < MEMBER_TTL) {
            // A negative result is reused only briefly, because a new agent may not have been
            // listed yet.
            if is || at.elapsed() < DIRECTORY_TIMEOUT {
                return is;
            }
        }
        let is = self.inner.directory.find_key(name).await == Some(key);
        let mut members = lock_mutex(&self.inner.members);
        members.retain(|_, (at, _)| at.elapsed() < MEMBER_TTL);
        if members.len() < REMEMBERED_MAX {
            members.insert(who, (Instant::now(), is));
        }
        is
    }
}

fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
