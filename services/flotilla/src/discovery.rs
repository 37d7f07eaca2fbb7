//! Fleets on this network, by multicast DNS: who says that one is here, and who looks for it. What
//! is said is no secret and proves nothing: whoever joins compares the authority with its token's.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::Context;
use authority::Fingerprint;
use mdns_sd::{ResolvedService, ServiceDaemon, ServiceEvent, ServiceInfo};
use serde::Serialize;
use tokio::time::{Instant, timeout_at};

const SERVICE: &str = "_flotilla._tcp.local.";
/// Of the authority's fingerprint: enough to tell fleets apart, and no more than that is for.
const PREFIX_HEX: usize = 16;
/// A network with more of them than this is somebody's prank.
const FOUND_MAX: usize = 256;
/// Answers come within a second on a quiet network; the question is asked again meanwhile.
pub(crate) const WAIT: Duration = Duration::from_secs(4);
/// For tests, which must not speak to everybody.
const PORT: &str = "FLOTILLA_MDNS_PORT";

/// A fleet that says where it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Found {
    pub name: String,
    /// `host:port`, of each address it has.
    pub gateways: Vec<String>,
    /// How its authority's fingerprint begins; empty for an open fleet.
    pub authority: String,
}

/// Says that a fleet is here for as long as it is held.
pub(crate) struct Announcement {
    daemon: ServiceDaemon,
}

impl Announcement {
    /// # Errors
    /// When multicast is not to be had here.
    pub(crate) fn begin(
        name: &str,
        gateway: SocketAddr,
        authority: Option<&Fingerprint>,
    ) -> anyhow::Result<Self> {
        let daemon = daemon()?;
        let host = format!("{}.local.", rustix::system::uname().nodename().to_string_lossy());
        let authority = authority.map_or(String::new(), prefix);
        let told = [("authority", authority.as_str()), ("name", name)];
        let port = gateway.port();
        // A label of DNS has 63 bytes at most.
        let instance: String = format!("{port}-{name}").chars().take(60).collect();
        let info = if gateway.ip().is_unspecified() {
            ServiceInfo::new(SERVICE, &instance, &host, "", port, &told[..])
                .map(ServiceInfo::enable_addr_auto)
        } else {
            ServiceInfo::new(SERVICE, &instance, &host, gateway.ip(), port, &told[..])
        };
        let info = info.context("announce the fleet on this network")?;
        daemon.register(info).context("announce the fleet on this network")?;
        tracing::info!(name, port, "the fleet is announced on this network");
        Ok(Self { daemon })
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        // It takes its leave by itself, or is forgotten within two minutes.
        let _ = self.daemon.shutdown();
    }
}

/// What is announced on this network within some time; `enough` may end that sooner.
///
/// # Errors
/// When multicast is not to be had here.
pub(crate) async fn look(
    wait: Duration,
    enough: impl Fn(&Found) -> bool,
) -> anyhow::Result<Vec<Found>> {
    let deadline = Instant::now() + wait;
    let daemon = daemon()?;
    let events = daemon.browse(SERVICE).context("look for fleets on this network")?;
    let mut all = BTreeMap::new();
    while let Ok(Ok(event)) = timeout_at(deadline, events.recv_async()).await {
        let ServiceEvent::ServiceResolved(service) = event else { continue };
        let found = found(&service);
        let is_enough = enough(&found);
        all.insert(service.fullname.clone(), found);
        if is_enough || all.len() >= FOUND_MAX {
            break;
        }
    }
    let _ = daemon.shutdown();
    Ok(all.into_values().collect())
}

/// Where the fleet of that authority has its gateway, as far as anybody on this network says.
/// Others may say so too: who joins looks at the whole fingerprint.
///
/// # Errors
/// When nobody says so, or multicast is not to be had here.
pub(crate) async fn gateways(authority: &Fingerprint) -> anyhow::Result<Vec<String>> {
    let wanted = prefix(authority);
    let all = look(WAIT, |found| found.authority == wanted).await?;
    let gateways = of_authority(&all, &wanted);
    if gateways.is_empty() {
        anyhow::bail!(
            "nobody on this network announces the token's fleet ({} others were found); start it \
             with `flotilla up --announce`, or make a token with `flotilla token create --gateway \
             HOST:PORT` (A117)",
            all.len()
        );
    }
    Ok(gateways)
}

fn of_authority(all: &[Found], wanted: &str) -> Vec<String> {
    let ours = all.iter().filter(|found| found.authority == wanted);
    ours.flat_map(|found| found.gateways.iter().cloned()).collect()
}

fn prefix(authority: &Fingerprint) -> String {
    authority.to_string().chars().take(PREFIX_HEX).collect()
}

fn daemon() -> anyhow::Result<ServiceDaemon> {
    let port = std::env::var(PORT).ok().map(|text| text.parse::<u16>());
    let daemon = match port.transpose().with_context(|| format!("{PORT} must be a port"))? {
        Some(port) => ServiceDaemon::new_with_port(port),
        None => ServiceDaemon::new(),
    };
    daemon.context("use multicast DNS")
}

fn found(service: &ResolvedService) -> Found {
    let told = |key: &str| {
        let text = service.get_property_val_str(key).unwrap_or_default();
        // It is printed, and anybody may have written it.
        text.chars().filter(|c| !c.is_control()).take(64).collect::<String>()
    };
    let mut addresses: Vec<IpAddr> =
        service.addresses.iter().map(mdns_sd::ScopedIp::to_ip_addr).collect();
    // Link-local addresses need a scope that an address of ours has no place for.
    addresses.retain(|address| !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()));
    addresses.sort_by_key(|address| (address.is_loopback(), *address));
    let gateway = |address| SocketAddr::new(address, service.port).to_string();
    Found {
        name: told("name"),
        gateways: addresses.into_iter().map(gateway).collect(),
        authority: told("authority"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_fleets_the_authority_decides() {
        let fleet = |name: &str, gateway: &str, authority: &str| Found {
            name: name.into(),
            gateways: vec![gateway.into()],
            authority: authority.into(),
        };
        let ours = Fingerprint::of(b"ours");
        let (wanted, other) = (prefix(&ours), prefix(&Fingerprint::of(b"theirs")));
        let all = [
            fleet("rack", "10.0.0.1:7070", &other),
            fleet("rack", "10.0.0.2:7070", &wanted),
            fleet("open", "10.0.0.3:7070", ""),
        ];
        assert_eq!(of_authority(&all, &wanted), ["10.0.0.2:7070"]);
        assert_eq!(wanted.len(), PREFIX_HEX);
    }
}
