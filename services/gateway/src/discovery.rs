//! Fleet discovery on the local network by multicast DNS. Announcements are public and not trusted:
//! a joining box compares the authority with the one in its token.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::Context;
use identity::Fingerprint;
use mdns_sd::{ResolvedService, ServiceDaemon, ServiceEvent, ServiceInfo};
use serde::Serialize;
use tokio::time::{Instant, timeout_at};

const SERVICE_TYPE: &str = "_flotilla._tcp.local.";
/// Hexadecimal digits of the authority's fingerprint that are announced: enough to distinguish
/// fleets, not enough to authenticate one.
const FINGERPRINT_PREFIX_CHARS: usize = 16;
/// Against a flood.
const FLEETS_MAX: usize = 256;
/// Time to wait for announcements. Answers arrive within a second on a quiet network, and the query
/// is repeated meanwhile.
const SEARCH_TIME: Duration = Duration::from_secs(4);
/// Environment variable with another port than that of multicast DNS, for tests.
const PORT_VARIABLE: &str = "FLOTILLA_MDNS_PORT";

/// A fleet that is announced on this network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AnnouncedFleet {
    pub name: String,
    /// `host:port` of the gateway, for each of its addresses.
    pub gateways: Vec<String>,
    /// First digits of the authority's fingerprint; empty for an open fleet.
    pub authority: String,
}

/// An announcement of a fleet, which lasts until it is dropped.
pub struct FleetAnnouncement {
    daemon: ServiceDaemon,
}

impl FleetAnnouncement {
    /// Announces a fleet and its gateway on this network, until the result is dropped. `host` is the
    /// name of this machine.
    pub fn announce_fleet(
        name: &str,
        host: &str,
        gateway: SocketAddr,
        authority: Option<&Fingerprint>,
    ) -> anyhow::Result<Self> {
        let daemon = start_mdns()?;
        let host = format!("{host}.local.");
        let authority = authority.map_or(String::new(), fingerprint_prefix);
        let properties = [("authority", authority.as_str()), ("name", name)];
        let port = gateway.port();
        // A DNS label has at most 63 bytes.
        let instance: String = format!("{port}-{name}").chars().take(60).collect();
        let info = if gateway.ip().is_unspecified() {
            ServiceInfo::new(SERVICE_TYPE, &instance, &host, "", port, &properties[..])
                .map(ServiceInfo::enable_addr_auto)
        } else {
            ServiceInfo::new(SERVICE_TYPE, &instance, &host, gateway.ip(), port, &properties[..])
        };
        let info = info.context("announce the fleet on this network")?;
        daemon.register(info).context("announce the fleet on this network")?;
        tracing::info!(name, port, "the fleet is announced on this network");
        Ok(Self { daemon })
    }
}

impl Drop for FleetAnnouncement {
    fn drop(&mut self) {
        // The daemon withdraws the announcement; without that it expires within two minutes.
        let _ = self.daemon.shutdown();
    }
}

/// Returns the fleets that are announced within `wait`. Stops early when `enough` returns true for
/// one of them.
pub async fn find_fleets(
    wait: Duration,
    enough: impl Fn(&AnnouncedFleet) -> bool,
) -> anyhow::Result<Vec<AnnouncedFleet>> {
    let deadline = Instant::now() + wait;
    let daemon = start_mdns()?;
    let events = daemon.browse(SERVICE_TYPE).context("look for fleets on this network")?;
    let mut all = BTreeMap::new();
    while let Ok(Ok(event)) = timeout_at(deadline, events.recv_async()).await {
        let ServiceEvent::ServiceResolved(service) = event else { continue };
        let found = parse_announcement(&service);
        let is_enough = enough(&found);
        all.insert(service.fullname.clone(), found);
        if is_enough || all.len() >= FLEETS_MAX {
            break;
        }
    }
    let _ = daemon.shutdown();
    Ok(all.into_values().collect())
}

/// Returns the gateways announced for the fleet of an authority. The announcements may be forged:
/// the caller must check the full fingerprint.
pub async fn find_gateways(authority: &Fingerprint) -> anyhow::Result<Vec<String>> {
    let wanted = fingerprint_prefix(authority);
    let all = find_fleets(SEARCH_TIME, |found| found.authority == wanted).await?;
    let gateways = gateways_of_authority(&all, &wanted);
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

fn gateways_of_authority(all: &[AnnouncedFleet], wanted: &str) -> Vec<String> {
    let ours = all.iter().filter(|found| found.authority == wanted);
    ours.flat_map(|found| found.gateways.iter().cloned()).collect()
}

fn fingerprint_prefix(authority: &Fingerprint) -> String {
    authority.to_string().chars().take(FINGERPRINT_PREFIX_CHARS).collect()
}

fn start_mdns() -> anyhow::Result<ServiceDaemon> {
    let port = std::env::var(PORT_VARIABLE).ok().map(|text| text.parse::<u16>());
    let daemon =
        match port.transpose().with_context(|| format!("{PORT_VARIABLE} must be a port"))? {
            Some(port) => ServiceDaemon::new_with_port(port),
            None => ServiceDaemon::new(),
        };
    daemon.context("use multicast DNS")
}

fn parse_announcement(service: &ResolvedService) -> AnnouncedFleet {
    let property = |key: &str| {
        let text = service.get_property_val_str(key).unwrap_or_default();
        // The text is untrusted and will be printed.
        text.chars().filter(|c| !c.is_control()).take(64).collect::<String>()
    };
    let mut addresses: Vec<IpAddr> =
        service.addresses.iter().map(mdns_sd::ScopedIp::to_ip_addr).collect();
    // Link-local addresses need a scope id, which `SocketAddr` text from here does not carry.
    addresses.retain(|address| !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local()));
    addresses.sort_by_key(|address| (address.is_loopback(), *address));
    let gateway = |address| SocketAddr::new(address, service.port).to_string();
    AnnouncedFleet {
        name: property("name"),
        gateways: addresses.into_iter().map(gateway).collect(),
        authority: property("authority"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_fleets_the_authority_decides() {
        let fleet = |name: &str, gateway: &str, authority: &str| AnnouncedFleet {
            name: name.into(),
            gateways: vec![gateway.into()],
            authority: authority.into(),
        };
        let ours = Fingerprint::from_der(b"ours");
        let (wanted, other) =
            (fingerprint_prefix(&ours), fingerprint_prefix(&Fingerprint::from_der(b"theirs")));
        let all = [
            fleet("rack", "10.0.0.1:7070", &other),
            fleet("rack", "10.0.0.2:7070", &wanted),
            fleet("open", "10.0.0.3:7070", ""),
        ];
        assert_eq!(gateways_of_authority(&all, &wanted), ["10.0.0.2:7070"]);
        assert_eq!(wanted.len(), FINGERPRINT_PREFIX_CHARS);
    }
}
