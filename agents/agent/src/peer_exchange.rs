//! File exchange with other agents: this agent's addresses, their announcement in its status, and
//! the other agents' addresses from theirs. The transfer itself is in the crate `store`.

use std::{
    convert::Infallible,
    net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket},
    sync::Arc,
};

use anyhow::Context;
use async_trait::async_trait;
use bus::Bus;
use store::{FileCache, Fingerprint, PeerAgent, PeerDirectory, PeerNode};
use tokio::net::TcpListener;
use wire::{AgentId, v1};

/// Peers requested from the bus for one file; the store contacts fewer.
const PEERS_MAX: usize = 32;
const ADDRESSES_MAX: usize = 4;
/// An address that is never assigned (RFC 5737). The route to it is the route to the rest of the
/// network.
const UNUSED_ADDRESS: &str = "192.0.2.1:9";

/// An agent's part in the file exchange: a listener, its addresses and the peers.
pub struct PeerExchange {
    peers: PeerNode,
    listener: TcpListener,
    addresses: Vec<SocketAddr>,
}

impl PeerExchange {
    /// Starts to listen at an address; files are served once the agent runs. `bus_hosts` are the
    /// `HOST:PORT`s of the fleet's bus: if `listen` is unspecified (`0.0.0.0`, `::`), the local
    /// addresses that reach them and the rest of the network are announced to other agents.
    ///
    /// # Errors
    /// When the address does not belong to this host, or is taken.
    pub async fn listen_at(
        listen: SocketAddr,
        name: &AgentId,
        bus: &Bus,
        bus_hosts: Vec<String>,
    ) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(listen).await;
        let listener = listener.with_context(|| format!("exchange files at {listen}"))?;
        let bound = listener.local_addr()?;
        let own =
            tokio::task::spawn_blocking(move || list_own_addresses(bound, &bus_hosts)).await?;
        let peers = PeerNode::new(name.clone(), Arc::new(BusPeerDirectory(bus.clone())))?;
        tracing::info!(address = %bound, known_as = ?own, "files are exchanged with other agents");
        Ok(Self { peers, listener, addresses: own })
    }

    /// Returns a handle to the other agents, for the cache that fetches files from them.
    pub fn peer_handle(&self) -> PeerNode {
        self.peers.clone()
    }

    pub(crate) fn build_announcement(&self) -> v1::Exchange {
        let addresses = self.addresses.iter().map(ToString::to_string).collect();
        v1::Exchange { key: self.peers.own_key().to_string(), addresses, ..Default::default() }
    }

    pub(crate) async fn serve_files(self, cache: FileCache) -> Infallible {
        self.peers.serve_files(self.listener, &cache).await
    }
}

/// Does nothing if no files are exchanged.
pub(crate) fn update_byte_counts(peers: Option<&PeerNode>, status: &mut v1::AgentStatus) {
    let (Some(peers), Some(exchange)) = (peers, &mut status.exchange) else { return };
    let now = peers.transfer_totals();
    exchange.bytes_from_store = now.from_store;
    exchange.bytes_from_peers = now.from_peers;
    exchange.bytes_to_peers = now.to_peers;
}

/// Lists the addresses at which other hosts reach this one, the loopback last.
fn list_own_addresses(bound: SocketAddr, bus_hosts: &[String]) -> Vec<SocketAddr> {
    let port = bound.port();
    if !bound.ip().is_unspecified() {
        return vec![bound];
    }
    let towards = bus_hosts.iter().map(String::as_str).chain([UNUSED_ADDRESS]);
    let mut own: Vec<IpAddr> = Vec::new();
    for ip in towards.filter_map(source_address) {
        if !own.contains(&ip) && (bound.is_ipv6() || ip.is_ipv4()) {
            own.push(ip);
        }
    }
    own.sort_by_key(IpAddr::is_loopback);
    own.into_iter().take(ADDRESSES_MAX).map(|ip| SocketAddr::new(ip, port)).collect()
}

/// Returns the local address that this host would use to reach `host`. Sends no packet.
fn source_address(host: &str) -> Option<IpAddr> {
    let to = host.to_socket_addrs().ok()?.next()?;
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(to).ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_unspecified()).then_some(ip)
}

/// In a closed fleet no agent can write another's status.
struct BusPeerDirectory(Bus);

#[async_trait]
impl PeerDirectory for BusPeerDirectory {
    async fn sample_peers(&self) -> Vec<PeerAgent> {
        let seed = u64::from(wire::clock::unix_time().subsec_nanos());
        let statuses = self.0.sample_recent_statuses(PEERS_MAX, seed).await;
        match statuses {
            Ok(statuses) => statuses.iter().filter_map(parse_peer).collect(),
            Err(error) => {
                tracing::debug!(%error, "peer discovery failed");
                Vec::new()
            }
        }
    }

    async fn find_key(&self, name: &AgentId) -> Option<Fingerprint> {
        Some(parse_peer(&self.0.read_recent_status(name).await.ok()??)?.key)
    }
}

/// Returns `None` if the agent exchanges no files or its entry is invalid.
fn parse_peer(status: &v1::AgentStatus) -> Option<PeerAgent> {
    let exchange = status.exchange.as_ref()?;
    let addresses = exchange.addresses.iter().take(ADDRESSES_MAX);
    Some(PeerAgent {
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
        let given = list_own_addresses(bound("127.0.0.2:7"), &["127.0.0.1:1".into()]);
        assert_eq!(given, [bound("127.0.0.2:7")]);
        let found =
            list_own_addresses(bound("0.0.0.0:7"), &["127.0.0.1:1".into(), "nowhere".into()]);
        assert_eq!(found.last(), Some(&bound("127.0.0.1:7")));
    }
}
