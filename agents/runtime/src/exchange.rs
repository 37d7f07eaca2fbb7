//! Exchanging files with other agents: where this one listens, what its status says of that, and
//! who the others are, by theirs. The exchange itself is the store's.

use std::{
    convert::Infallible,
    net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use async_trait::async_trait;
use bus::Bus;
use store::{Cache, Fingerprint, Peer, Peers, Roll};
use tokio::net::TcpListener;
use wire::{AgentId, v1};

/// Asked of the bus for one file; the store asks fewer.
const SOME: usize = 32;
/// Of those an agent says it has.
const ADDRESSES_MAX: usize = 4;
/// Where nobody is (RFC 5737): the way there is the way to the rest of the network.
const ANYWHERE: &str = "192.0.2.1:9";

/// An agent's part in it.
pub struct Exchange {
    peers: Peers,
    listener: TcpListener,
    addresses: Vec<SocketAddr>,
}

impl Exchange {
    /// Listens there. `bus_hosts` are `HOST:PORT`s of the fleet's bus: where they are reached from
    /// is where others reach this box.
    ///
    /// # Errors
    /// When the address is not this box's, or taken.
    pub async fn open(
        listen: SocketAddr,
        name: &AgentId,
        bus: &Bus,
        bus_hosts: Vec<String>,
    ) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(listen).await;
        let listener = listener.with_context(|| format!("exchange files at {listen}"))?;
        let bound = listener.local_addr()?;
        let own = tokio::task::spawn_blocking(move || own_addresses(bound, &bus_hosts)).await?;
        let peers = Peers::new(name.clone(), Arc::new(BusRoll(bus.clone())))?;
        tracing::info!(address = %bound, known_as = ?own, "files are exchanged with other agents");
        Ok(Self { peers, listener, addresses: own })
    }

    pub fn peers(&self) -> Peers {
        self.peers.clone()
    }

    /// What others must know to take part.
    pub(crate) fn said(&self) -> v1::Exchange {
        let addresses = self.addresses.iter().map(ToString::to_string).collect();
        v1::Exchange { key: self.peers.key().to_string(), addresses, ..Default::default() }
    }

    /// Gives others what they ask for, for as long as it is polled.
    pub(crate) async fn serve(self, cache: Cache) -> Infallible {
        self.peers.serve(self.listener, &cache).await
    }
}

/// What came and went so far, where files are exchanged.
pub(crate) fn count(peers: Option<&Peers>, status: &mut v1::AgentStatus) {
    let (Some(peers), Some(said)) = (peers, &mut status.exchange) else { return };
    let now = peers.exchanged();
    said.bytes_from_store = now.from_store;
    said.bytes_from_peers = now.from_peers;
    said.bytes_to_peers = now.to_peers;
}

/// What this box is called from elsewhere, the loopback last.
fn own_addresses(bound: SocketAddr, bus_hosts: &[String]) -> Vec<SocketAddr> {
    let port = bound.port();
    if !bound.ip().is_unspecified() {
        return vec![bound];
    }
    let towards = bus_hosts.iter().map(String::as_str).chain([ANYWHERE]);
    let mut own: Vec<IpAddr> = Vec::new();
    for ip in towards.filter_map(source_towards) {
        if !own.contains(&ip) && (bound.is_ipv6() || ip.is_ipv4()) {
            own.push(ip);
        }
    }
    own.sort_by_key(IpAddr::is_loopback);
    own.into_iter().take(ADDRESSES_MAX).map(|ip| SocketAddr::new(ip, port)).collect()
}

/// From which address this box would speak to that one. Nothing is sent.
fn source_towards(host: &str) -> Option<IpAddr> {
    let to = host.to_socket_addrs().ok()?.next()?;
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(to).ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_unspecified()).then_some(ip)
}

/// Agents by their statuses: in a closed fleet, nobody can write another's.
struct BusRoll(Bus);

#[async_trait]
impl Roll for BusRoll {
    async fn some(&self) -> Vec<Peer> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let statuses = self.0.recent_statuses(SOME, u64::from(now.subsec_nanos())).await;
        match statuses {
            Ok(statuses) => statuses.iter().filter_map(peer).collect(),
            Err(error) => {
                tracing::debug!(%error, "looking for peers");
                Vec::new()
            }
        }
    }

    async fn key_of(&self, name: &AgentId) -> Option<Fingerprint> {
        Some(peer(&self.0.recent_status(name).await.ok()??)?.key)
    }
}

fn peer(status: &v1::AgentStatus) -> Option<Peer> {
    let exchange = status.exchange.as_ref()?;
    let addresses = exchange.addresses.iter().take(ADDRESSES_MAX);
    Some(Peer {
        name: status.agent.parse().ok()?,
        key: exchange.key.parse().ok()?,
        addresses: addresses.filter_map(|address| address.parse().ok()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_known_by_where_it_is_reached() {
        let bound = |text: &str| text.parse::<SocketAddr>().unwrap();
        let given = own_addresses(bound("127.0.0.2:7"), &["127.0.0.1:1".into()]);
        assert_eq!(given, [bound("127.0.0.2:7")]);
        let found = own_addresses(bound("0.0.0.0:7"), &["127.0.0.1:1".into(), "nowhere".into()]);
        assert_eq!(found.last(), Some(&bound("127.0.0.1:7")));
    }
}
