//! Agents that fetch the same file get it from each other: each part comes from the store once or
//! so, and the last of many boxes is hardly later than the first.
//!
//! Peers are found by what agents say on the bus, which this crate is told as a [`Roll`]. Both ends
//! of a connection show a key that stands there. What a peer sends is compared part by part
//! ([`parts`](crate::parts)), so that nobody needs to be trusted for more than patience; and the
//! store has whatever no peer has.

mod counts;
mod fetch;
mod link;
mod plan;
mod serve;
mod shelf;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use authority::{Fingerprint, PeerError, PeerIdentity};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use wire::AgentId;

use self::{counts::Counts, shelf::Shelf};

pub use self::counts::Exchanged;
pub(crate) use self::{fetch::fetch, shelf::Entry};

/// Asked for one file.
const PEERS_MAX: usize = 16;
/// The bus may take so long to say who is there.
const ROLL_LIMIT: Duration = Duration::from_millis(500);
/// Who was there is there still.
const ROLL_FRESH: Duration = Duration::from_secs(5);
/// Who sent what was wrong is not asked again so soon.
const SHUNNED: Duration = Duration::from_secs(300);
/// Whether somebody is a member is asked again after this.
const MEMBER_FRESH: Duration = Duration::from_secs(10);
/// Of who was looked up, and of who is shunned.
const REMEMBERED_MAX: usize = 256;

/// An agent that exchanges files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub name: AgentId,
    /// Of the certificate that it shows.
    pub key: Fingerprint,
    /// Where it listens, the likeliest first.
    pub addresses: Vec<SocketAddr>,
}

/// Who is in the fleet, as its members can see and others cannot forge.
#[async_trait]
pub trait Roll: Send + Sync {
    /// Some agents that are there now; not all of a large fleet, nor the same ones each time.
    async fn some(&self) -> Vec<Peer>;
    /// What an agent goes by, if it is there now.
    async fn key_of(&self, name: &AgentId) -> Option<Fingerprint>;
}

/// This agent among its peers. Clones are the same.
#[derive(Clone)]
pub struct Peers {
    inner: Arc<Inner>,
}

struct Inner {
    name: AgentId,
    identity: PeerIdentity,
    acceptor: TlsAcceptor,
    roll: Arc<dyn Roll>,
    shelf: Shelf,
    counts: Counts,
    some: tokio::sync::Mutex<Option<(Instant, Vec<Peer>)>>,
    shunned: Mutex<BTreeMap<String, Instant>>,
    members: Mutex<BTreeMap<(AgentId, String), (Instant, bool)>>,
}

impl Peers {
    /// # Errors
    /// When no key can be made.
    pub fn new(name: AgentId, roll: Arc<dyn Roll>) -> Result<Self, PeerError> {
        let identity = PeerIdentity::new()?;
        let acceptor = TlsAcceptor::from(Arc::new(identity.server()?));
        let inner = Inner {
            name,
            identity,
            acceptor,
            roll,
            shelf: Shelf::default(),
            counts: Counts::default(),
            some: Default::default(),
            shunned: Mutex::default(),
            members: Mutex::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What the roll must say of this agent.
    pub fn key(&self) -> Fingerprint {
        self.inner.identity.fingerprint()
    }

    /// What came and went so far.
    pub fn exchanged(&self) -> Exchanged {
        self.inner.counts.now()
    }

    /// A file came from the store as a whole.
    pub(crate) fn count_whole(&self, bytes: u64) {
        self.inner.counts.came_from_store(bytes);
    }

    /// Whom to ask, and which place in their row is one's own.
    async fn around(&self) -> (Vec<Peer>, (usize, usize)) {
        let mut known = self.inner.some.lock().await;
        if known.as_ref().is_none_or(|(at, _)| at.elapsed() > ROLL_FRESH) {
            // Without an answer it is tried without peers, and not asked again at once.
            let some = timeout(ROLL_LIMIT, self.inner.roll.some()).await.unwrap_or_default();
            *known = Some((Instant::now(), some));
        }
        let mut peers = known.as_ref().map(|(_, peers)| peers.clone()).unwrap_or_default();
        drop(known);
        peers.retain(|peer| peer.name != self.inner.name && !self.is_shunned(peer.key));
        peers.truncate(PEERS_MAX);
        let place = peers.iter().filter(|peer| peer.name < self.inner.name).count();
        let count = peers.len() + 1;
        (peers, (place, count))
    }

    /// It sent what it should not have.
    fn shun(&self, key: Fingerprint) {
        let mut shunned = lock(&self.inner.shunned);
        shunned.retain(|_, at| at.elapsed() < SHUNNED);
        if shunned.len() < REMEMBERED_MAX {
            shunned.insert(key.to_string(), Instant::now());
        }
    }

    fn is_shunned(&self, key: Fingerprint) -> bool {
        lock(&self.inner.shunned).get(&key.to_string()).is_some_and(|at| at.elapsed() < SHUNNED)
    }

    /// Whether that agent goes by that key now.
    async fn is_member(&self, name: &AgentId, key: Fingerprint) -> bool {
        let who = (name.clone(), key.to_string());
        let known = lock(&self.inner.members).get(&who).copied();
        if let Some((at, is)) = known.filter(|(at, _)| at.elapsed() < MEMBER_FRESH) {
            // Who just came may not have been seen yet.
            if is || at.elapsed() < ROLL_LIMIT {
                return is;
            }
        }
        let is = self.inner.roll.key_of(name).await == Some(key);
        let mut members = lock(&self.inner.members);
        members.retain(|_, (at, _)| at.elapsed() < MEMBER_FRESH);
        if members.len() < REMEMBERED_MAX {
            members.insert(who, (Instant::now(), is));
        }
        is
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
