//! Sends GET requests to the monitoring port of a nats-server: plain HTTP, bounded in time and
//! size.

use std::{io, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// The server answers monitoring requests from memory.
const LIMIT: Duration = Duration::from_secs(2);
/// `/varz` is about 10 KB.
const RESPONSE_BYTES_MAX: u64 = 1 << 20;

/// Returns the body of a 200 response; any other status is an error. `base` is `http://host:port`.
pub(crate) async fn get(base: &str, path: &str) -> io::Result<Vec<u8>> {
    match get_response(base, path).await? {
        (200, body) => Ok(body),
        (status, _) => Err(io::Error::other(format!("answered with status {status}"))),
    }
}

pub(crate) async fn get_response(base: &str, path: &str) -> io::Result<(u16, Vec<u8>)> {
    timeout(LIMIT, get_without_timeout(base, path))
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, format!("no answer in {LIMIT:?}")))?
}

async fn get_without_timeout(base: &str, path: &str) -> io::Result<(u16, Vec<u8>)> {
    let host = base
        .strip_prefix("http://")
        .ok_or_else(|| io::Error::other("only http:// monitoring URLs are supported"))?
        .trim_end_matches('/');
    let mut stream = TcpStream::connect(host).await?;
    // HTTP 1.0: the response is not chunked and ends with the connection.
    let request = format!("GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(RESPONSE_BYTES_MAX).read_to_end(&mut answer).await?;
    let end = answer
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .ok_or_else(|| io::Error::other("not an HTTP answer"))?;
    let head = String::from_utf8_lossy(&answer[..end]);
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| io::Error::other("not an HTTP answer"))?;
    Ok((status, answer.split_off(end + 4)))
}
