//! Which pages may call. A browser sends whatever page it shows to any address, also to those
//! that only this network has: without this, any page of the web could steer an open fleet.
//!
//! A page calls the gateway it came from. Its name must be one that no stranger can point at this
//! network (DNS rebinding): an address, or a name that public DNS does not have.

use std::net::IpAddr;

use tonic::{
    Status,
    codegen::http::{header, request::Parts, uri::Authority},
};

/// Names that are for private networks (RFC 6761, RFC 6762, RFC 8375, and ICANN's `.internal`).
const PRIVATE: [&str; 4] = [".localhost", ".local", ".home.arpa", ".internal"];

/// Requests of programs that are no browsers have no origin.
pub(super) fn check(head: &Parts) -> Result<(), Status> {
    let Some(origin) = head.headers.get(header::ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let host = head.uri.authority().map(Authority::as_str);
    let host = host.or_else(|| head.headers.get(header::HOST)?.to_str().ok()).unwrap_or_default();
    let from = origin.split_once("://").map(|(_, authority)| authority);
    if from != Some(host) {
        return Err(Status::permission_denied(format!(
            "a page of {origin:?} may not call {host:?}: only the gateway's own page may"
        )));
    }
    // A bearer is shown by those alone who have it.
    if head.headers.contains_key(header::AUTHORIZATION) || is_private(host) {
        return Ok(());
    }
    Err(Status::permission_denied(format!(
        "an open fleet's page is not served at {host:?}, which anybody could point here: use an \
         address or a name of this network, or make a closed fleet (flotilla init)"
    )))
}

fn is_private(authority: &str) -> bool {
    let Ok(authority) = authority.parse::<Authority>() else { return false };
    let name = authority.host().trim_start_matches('[').trim_end_matches(']');
    let is_address = name.parse::<IpAddr>().is_ok();
    is_address || !name.contains('.') || PRIVATE.iter().any(|suffix| name.ends_with(suffix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::codegen::http::Request;

    fn asked(host: &str, headers: &[(&str, &str)]) -> bool {
        let mut request = Request::post("/flotilla.v1.Runs/List").header("host", host);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        check(&request.body(()).unwrap().into_parts().0).is_ok()
    }

    #[test]
    fn a_page_calls_its_own_gateway_by_a_name_of_its_network() {
        for host in ["127.0.0.1:4", "[::1]:4", "localhost:4", "box", "box.local:4", "192.168.1.2:4"]
        {
            assert!(asked(host, &[("origin", &format!("http://{host}"))]), "{host}");
        }
        // Programs are no pages.
        assert!(asked("fleet.example.com", &[]));
        let bearer = ("authorization", "Bearer x");
        assert!(asked("fleet.example.com", &[("origin", "https://fleet.example.com"), bearer]));
    }

    #[test]
    fn no_other_page_calls_and_none_by_a_name_that_strangers_have() {
        for origin in ["http://evil.example", "null", "", "http://127.0.0.1:5", "127.0.0.1:4"] {
            assert!(!asked("127.0.0.1:4", &[("origin", origin)]), "{origin}");
        }
        for host in ["evil.example:4", "127.0.0.1.evil.example", "local.evil.example"] {
            assert!(!asked(host, &[("origin", &format!("http://{host}"))]), "{host}");
        }
    }
}
