//! Checks which web pages may call. A browser sends requests of any page to any address, including
//! those of a private network: without this check, any web page could control an open fleet.
//!
//! Only the gateway's own page may call. Its host must be one that no outsider can point at this
//! network (DNS rebinding): an address, or a name that public DNS does not have.

use std::net::IpAddr;

use tonic::{
    Code, Status,
    codegen::http::{HeaderMap, Uri, header, uri::Authority},
};

use crate::status::build_status;

/// RFC 6761, RFC 6762, RFC 8375, and ICANN's `.internal`.
const PRIVATE_SUFFIXES: [&str; 4] = [".localhost", ".local", ".home.arpa", ".internal"];

/// Checks the `Origin` header against the host. `is_known` is true if the request has a valid
/// bearer or a secret, which no foreign page has. Programs that are not browsers have no origin and pass. Fails
/// if the page comes from another host, or an open fleet's page is served at a public name.
pub(super) fn check_origin(uri: &Uri, headers: &HeaderMap, is_known: bool) -> Result<(), Status> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let host = uri.authority().map(Authority::as_str);
    let host = host.or_else(|| headers.get(header::HOST)?.to_str().ok()).unwrap_or_default();
    let from = origin.split_once("://").map(|(_, authority)| authority);
    if from != Some(host) {
        return Err(deny_origin(format!(
            "a page of {origin:?} may not call {host:?}: only the gateway's own page may (G111)"
        )));
    }
    if is_known || is_private(host) {
        return Ok(());
    }
    Err(deny_origin(format!(
        "an open fleet's page is not served at {host:?}, which anybody could point here: use an \
         address or a name of this network, or make a closed fleet (flotilla init) (G111)"
    )))
}

fn deny_origin(words: String) -> Status {
    build_status(Code::PermissionDenied, words)
}

/// Returns true if the host is an address, a name without a dot, or a name for private networks.
fn is_private(authority: &str) -> bool {
    let Ok(authority) = authority.parse::<Authority>() else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    let is_address = name.parse::<IpAddr>().is_ok();
    is_address
        || !name.contains('.')
        || PRIVATE_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::codegen::http::Request;

    fn asked(host: &str, origin: Option<&str>, is_known: bool) -> bool {
        let mut request = Request::post("/flotilla.v1.Runs/List").header("host", host);
        if let Some(origin) = origin {
            request = request.header("origin", origin);
        }
        let request = request.body(()).unwrap();
        check_origin(request.uri(), request.headers(), is_known).is_ok()
    }

    #[test]
    fn a_page_calls_its_own_gateway_by_a_name_of_its_network() {
        let hosts =
            ["127.0.0.1:4", "[::1]:4", "localhost:4", "box", "box.local:4", "192.168.1.2:4"];
        for host in hosts {
            assert!(asked(host, Some(&format!("http://{host}")), false), "{host}");
        }
        // Programs send no origin.
        assert!(asked("fleet.example.com", None, false));
        assert!(asked("fleet.example.com", Some("https://fleet.example.com"), true));
    }

    #[test]
    fn no_other_page_calls_and_none_by_a_name_that_strangers_have() {
        for origin in ["http://evil.example", "null", "", "http://127.0.0.1:5", "127.0.0.1:4"] {
            for is_known in [false, true] {
                assert!(!asked("127.0.0.1:4", Some(origin), is_known), "{origin}");
            }
        }
        for host in ["evil.example:4", "127.0.0.1.evil.example", "local.evil.example"] {
            assert!(!asked(host, Some(&format!("http://{host}")), false), "{host}");
        }
    }
}
