//! The answer to a browser that may not speak plain HTTP to a port with TLS: the same address with
//! `https`.

use std::io;

use tokio::net::TcpStream;
use tonic::{
    body::Body,
    codegen::http::{
        HeaderValue, Request, Response, StatusCode, header,
        uri::{Authority, PathAndQuery},
    },
};

/// The first byte of a TLS handshake.
pub(super) const TLS_HANDSHAKE: u8 = 22;

/// Enough for the request line and the host of a browser's request.
const HEAD_BYTES_MAX: usize = 4096;
/// Maximum further reads of a longer request, whose bytes are discarded.
const EXTRA_READS_MAX: usize = 16;
const USE_TLS: &str = "This port uses TLS: write https:// in place of http://.\n";
/// Names of this machine that a page from another host cannot have.
const LOOPBACK_HOSTS: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// Answers a request that arrived without TLS, as far as this is possible at once, and returns the
/// error of the connection.
pub(super) fn refuse_plain_http(socket: &TcpStream) -> io::Error {
    let mut head = [0; HEAD_BYTES_MAX];
    let read = socket.try_read(&mut head).unwrap_or(0);
    // Bytes that nobody read would make the system discard the answer.
    let mut rest = [0; HEAD_BYTES_MAX];
    for _ in 0..EXTRA_READS_MAX {
        if !matches!(socket.try_read(&mut rest), Ok(1..)) {
            break;
        }
    }
    // A client that does not read its answer has none.
    let _ = socket.try_write(answer_plain_http(&head[..read]).as_bytes());
    io::Error::new(io::ErrorKind::InvalidData, "plain HTTP on a port with TLS")
}

fn answer_plain_http(head: &[u8]) -> String {
    let (status, location) = match https_address(head) {
        // Not a permanent one: the port may serve an open fleet one day.
        Some(address) => {
            let headers = format!("location: {address}\r\ncache-control: no-store\r\n");
            ("307 Temporary Redirect", headers)
        }
        None => ("400 Bad Request", String::new()),
    };
    format!(
        "HTTP/1.1 {status}\r\n{location}content-type: text/plain\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n{USE_TLS}",
        USE_TLS.len()
    )
}

/// Returns the refusal of a request that names another host than a loopback address with `port`.
pub(super) fn refuse_foreign_host(request: &Request<Body>, port: u16) -> Option<Response<Body>> {
    let authority = request.uri().authority().map(Authority::as_str);
    let named = request.headers().get_all(header::HOST).iter();
    let named = named.map(|host| host.to_str().unwrap_or_default());
    let hosts: Vec<&str> = authority.into_iter().chain(named).collect();
    if !hosts.is_empty() && hosts.iter().all(|host| is_loopback_host(host, port)) {
        return None;
    }
    let path = request.uri().path_and_query().map_or("/", PathAndQuery::as_str);
    let address = match (authority, &hosts[..]) {
        (None, [host]) => redirect_address(request.method().as_str(), host, path),
        _ => None,
    };
    let location = address.and_then(|address| HeaderValue::from_str(&address).ok());
    let mut response = Response::new(Body::new(USE_TLS.to_owned()));
    *response.status_mut() = match &location {
        Some(_) => StatusCode::TEMPORARY_REDIRECT,
        None => StatusCode::BAD_REQUEST,
    };
    let headers = response.headers_mut();
    headers.extend(location.map(|location| (header::LOCATION, location)));
    let fixed = [
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_TYPE, "text/plain"),
        (header::CONNECTION, "close"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    Some(response)
}

fn is_loopback_host(host: &str, port: u16) -> bool {
    // Browsers leave out the port of HTTP.
    let name = host.strip_suffix(&format!(":{port}")).or((port == 80).then_some(host));
    name.is_some_and(|name| LOOPBACK_HOSTS.contains(&name))
}

/// Returns the requested address with `https`; `None` if the bytes are no request for a page.
fn https_address(head: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(head).ok()?;
    let mut lines = text.lines();
    let mut request = lines.next()?.split(' ');
    let (method, path) = (request.next()?, request.next()?);
    request.next()?.strip_prefix("HTTP/1.")?;
    let header = |line: &'_ str| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("host").then(|| value.trim().to_owned())
    };
    redirect_address(method, &lines.find_map(header)?, path)
}

/// Returns the address of a page with `https`; `None` if the request is for no page. A script that
/// posts its bearer in clear text must fail.
fn redirect_address(method: &str, host: &str, path: &str) -> Option<String> {
    if !matches!(method, "GET" | "HEAD") {
        return None;
    }
    // Nothing else may end up in a header of the answer.
    let is_plain = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
    let is_legal = is_plain(host) && !host.contains('/') && is_plain(path) && path.starts_with('/');
    is_legal.then(|| format!("https://{host}{path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_sent_to_the_same_address_with_https() {
        let head = b"GET /page?a=1 HTTP/1.1\r\naccept: */*\r\nHost: bus.lan:7070\r\n\r\n";
        assert_eq!(https_address(head).as_deref(), Some("https://bus.lan:7070/page?a=1"));
        assert!(
            answer_plain_http(head).contains("\r\nlocation: https://bus.lan:7070/page?a=1\r\n")
        );
    }

    #[test]
    fn without_tls_a_request_must_name_a_loopback_address() {
        let refused = |uri: &str, hosts: &[&str]| {
            let mut request = Request::get(uri);
            for host in hosts {
                request = request.header(header::HOST, *host);
            }
            let refusal = refuse_foreign_host(&request.body(Body::empty()).unwrap(), 7070);
            refusal.map(|answer| answer.status().as_u16())
        };
        for host in ["localhost:7070", "127.0.0.1:7070", "[::1]:7070"] {
            assert_eq!(refused("/page?a=1", &[host]), None, "{host}");
            // The form of HTTP/2.
            assert_eq!(refused(&format!("http://{host}/"), &[]), None, "{host}");
        }
        for host in
            ["evil.example:7070", "localhost", "127.0.0.1:80", "localhost.evil.example:7070"]
        {
            assert_eq!(refused("/", &[host]), Some(307), "{host}");
            assert_eq!(
                refused(&format!("http://{host}/"), &["localhost:7070"]),
                Some(400),
                "{host}"
            );
            assert_eq!(refused("/", &["localhost:7070", host]), Some(400), "{host}");
        }
        assert_eq!(refused("/", &[]), Some(400));
        assert!(is_loopback_host("localhost", 80) && !is_loopback_host("evil.example", 80));
    }

    #[test]
    fn what_is_no_request_gets_no_address() {
        for head in [
            &b""[..],
            b"\x80\x2e\x01",
            b"GET / HTTP/1.1\r\n\r\n",
            b"POST / HTTP/1.1\r\nhost: a\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: evil.example/x\r\n\r\n",
            b"GET //x\x01 HTTP/1.1\r\nhost: a\r\n\r\n",
            b"GET http://a/ HTTP/1.1\r\nhost: a\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ] {
            assert_eq!(https_address(head), None, "{head:?}");
            assert!(answer_plain_http(head).starts_with("HTTP/1.1 400 "));
        }
    }
}
