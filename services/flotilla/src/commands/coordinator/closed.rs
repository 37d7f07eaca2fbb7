//! What a coordinator of a closed fleet shows, and what it gives to those it lets in.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use anyhow::Context;
use authority::Authority;
use control::Terms;

use crate::cli::CoordinatorArgs;

const HOUR_S: f64 = 3600.0;

/// What the gateway proves itself with.
pub(super) fn tls(keys: &Authority) -> anyhow::Result<gateway::Tls> {
    let read =
        |path: &Path| std::fs::read(path).with_context(|| format!("read {}", path.display()));
    let cert_pem = read(&keys.server_certificate())?;
    Ok(gateway::Tls { cert_pem, key_pem: read(&keys.server_key())? })
}

/// What members are given.
pub(super) fn terms(
    args: &CoordinatorArgs,
    keys: &Path,
    gateway: SocketAddr,
    nats: &[String],
    store: &str,
) -> Terms {
    let hosts = match &args.hosts[..] {
        [] if gateway.ip().is_unspecified() => {
            vec![rustix::system::uname().nodename().to_string_lossy().into_owned()]
        }
        [] => vec![gateway.ip().to_string()],
        hosts => hosts.to_vec(),
    };
    Terms {
        keys: keys.to_owned(),
        servers: nats.to_vec(),
        nats: nats_urls(&hosts, nats),
        gateways: hosts.iter().map(|host| at(host, gateway.port())).collect(),
        store: store.to_owned(),
        member_ttl: Duration::from_secs_f64(args.member_ttl * HOUR_S),
        lease: Duration::from_secs_f64(args.lease),
    }
}

/// The servers, as boxes elsewhere reach them: what is here by this machine's names, the others as
/// they are.
fn nats_urls(hosts: &[String], urls: &[String]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for url in urls {
        let (scheme, place) = url.split_once("://").unwrap_or(("tls", url));
        match place.trim_end_matches('/').rsplit_once(':') {
            Some((host, port)) if is_here(host) => {
                all.extend(hosts.iter().map(|host| format!("{scheme}://{}", at(host, port))));
            }
            _ => all.push(url.clone()),
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    all.retain(|url| seen.insert(url.clone()));
    all
}

fn is_here(host: &str) -> bool {
    let address: Result<IpAddr, _> = host.trim_matches(['[', ']']).parse();
    host == "localhost" || address.is_ok_and(|ip| ip.is_loopback() || ip.is_unspecified())
}

/// `host:port`, whatever kind of name the host has.
fn at(host: &str, port: impl std::fmt::Display) -> String {
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
            nats_urls(&hosts, &urls)
        };
        let here = ["tls://bus.lan:4222", "tls://[fd00::1]:4222"];
        assert_eq!(urls(&["tls://127.0.0.1:4222"]), here);
        assert_eq!(urls(&["tls://0.0.0.0:4222", "tls://localhost:4222"]), here);
        assert_eq!(urls(&["tls://[::1]:4222"]), here);
        let elsewhere = ["tls://a:4222", "tls://b:4222"];
        assert_eq!(urls(&elsewhere), elsewhere);
    }
}
