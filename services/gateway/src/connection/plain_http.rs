//! The answer to a browser that speaks plain HTTP to a port with TLS: the same address with
//! `https`.

use std::io;

use tokio::net::TcpStream;

/// The first byte of a TLS handshake.
pub(super) const TLS_HANDSHAKE: u8 = 22;

/// Enough for the request line and the host of a browser's request.
const HEAD_BYTES_MAX: usize = 4096;
/// Reads of a longer request.
const RESTS_MAX: usize = 16;

/// Answers a request that arrived without TLS, as far as this is possible at once, and returns the
/// error of the connection.
pub(super) fn refuse_plain_http(socket: &TcpStream) -> io::Error {
    let mut head = [0; HEAD_BYTES_MAX];
    let read = socket.try_read(&mut head).unwrap_or(0);
    // Bytes that nobody read would make the system discard the answer.
    let mut rest = [0; HEAD_BYTES_MAX];
    for _ in 0..RESTS_MAX {
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
    let body = "This port uses TLS: write https:// in place of http://.\n";
    format!(
        "HTTP/1.1 {status}\r\n{location}content-type: text/plain\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n{body}",
        body.len()
    )
}

/// Returns the requested address with `https`; `None` if the bytes are no request for a page. A
/// script that posts its bearer in clear text must fail.
fn https_address(head: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(head).ok()?;
    let mut lines = text.lines();
    let mut request = lines.next()?.split(' ');
    let (method, path) = (request.next()?, request.next()?);
    if !matches!(method, "GET" | "HEAD") {
        return None;
    }
    request.next()?.strip_prefix("HTTP/1.")?;
    let header = |line: &'_ str| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("host").then(|| value.trim().to_owned())
    };
    let host = lines.find_map(header)?;
    // Nothing else may end up in a header of the answer.
    let is_plain = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
    let is_legal =
        is_plain(&host) && !host.contains('/') && is_plain(path) && path.starts_with('/');
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
