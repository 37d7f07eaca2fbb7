//! TLS and membership configuration of a closed fleet's coordinator.

use std::{net::SocketAddr, path::Path, time::Duration};

use anyhow::Context;
use control::MembershipConfig;
use identity::FleetAuthority;

use crate::{
    args::CoordinatorArgs,
    this_machine::{self, SECONDS_PER_HOUR, is_local_host},
};

pub(super) fn read_server_tls(keys: &FleetAuthority) -> anyhow::Result<gateway::GatewayTls> {
    let read =
        |path: &Path| std::fs::read(path).with_context(|| format!("read {}", path.display()));
    let cert_pem = read(&keys.server_certificate_path())?;
    Ok(gateway::GatewayTls { cert_pem, key_pem: read(&keys.server_key_path())? })
}

pub(super) fn membership_config(
    args: &CoordinatorArgs,
    keys: &Path,
    gateway: SocketAddr,
    nats: &[String],
    store: &str,
) -> MembershipConfig {
    let hosts = match &args.hosts[..] {
        [] if gateway.ip().is_unspecified() => {
            vec![this_machine::host_name()]
        }
        [] => vec![gateway.ip().to_string()],
        hosts => hosts.to_vec(),
    };
    MembershipConfig {
        keys_dir: keys.to_owned(),
        nats_servers: nats.to_vec(),
        advertised_nats: external_nats_urls(&hosts, nats),
        advertised_gateways: hosts
            .iter()
            .map(|host| format_host_port(host, gateway.port()))
            .collect(),
        store: store.to_owned(),
        member_ttl: Duration::from_secs_f64(args.member_ttl * SECONDS_PER_HOUR),
        lease: Duration::from_secs_f64(args.lease),
    }
}

/// Local addresses are replaced by this machine's names.
fn external_nats_urls(hosts: &[String], urls: &[String]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for url in urls {
        let (scheme, place) = url.split_once("://").unwrap_or(("tls", url));
        match place.trim_end_matches('/').rsplit_once(':') {
            Some((host, port)) if is_local_host(host) => {
                all.extend(
                    hosts.iter().map(|host| format!("{scheme}://{}", format_host_port(host, port))),
                );
            }
            _ => all.push(url.clone()),
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    all.retain(|url| seen.insert(url.clone()));
    all
}

fn format_host_port(host: &str, port: impl std::fmt::Display) -> String {
    if host.parse::<std::net::Ipv6Addr>().is_ok() {
        return format!("[{host}]:{port}");
    }
    format!("{host}:{port}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_listens_here_is_named_as_others_name_this_machine() {
        let hosts = ["bus.lan".to_owned(), "fd00::1".to_owned()];
        let urls = |urls: &[&str]| {
            let urls: Vec<String> = urls.iter().map(|&url| url.to_owned()).collect();
            external_nats_urls(&hosts, &urls)
        };
        let here = ["tls://bus.lan:4222", "tls://[fd00::1]:4222"];
        assert_eq!(urls(&["tls://127.0.0.1:4222"]), here);
        assert_eq!(urls(&["tls://0.0.0.0:4222", "tls://localhost:4222"]), here);
        assert_eq!(urls(&["tls://[::1]:4222"]), here);
        let elsewhere = ["tls://a:4222", "tls://b:4222"];
        assert_eq!(urls(&elsewhere), elsewhere);
    }
}
