//! Checks if a server is ready. Plain blocking HTTP: one request, one status line.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    time::Duration,
};

use super::ServerAddress;

const HEALTH_REQUEST: &[u8] =
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

/// The time limit of each step of a request: connect, write and read.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

const STATUS_BYTES: usize = 16;

/// A server that still loads its model replies with another status than 200.
pub(super) fn is_ready(address: &ServerAddress) -> bool {
    let status = match address {
        ServerAddress::Socket(path) => UnixStream::connect(path).and_then(|stream| {
            stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
            stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
            read_status(stream)
        }),
        ServerAddress::Port(port) => {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, *port));
            TcpStream::connect_timeout(&address, REQUEST_TIMEOUT).and_then(|stream| {
                stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
                stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
                read_status(stream)
            })
        }
    };
    status.is_ok_and(|line| line.starts_with(b"HTTP/1.") && line[8..].starts_with(b" 200"))
}

fn read_status(mut stream: impl Read + Write) -> io::Result<[u8; STATUS_BYTES]> {
    stream.write_all(HEALTH_REQUEST)?;
    let mut answer = [0; STATUS_BYTES];
    stream.read_exact(&mut answer)?;
    Ok(answer)
}
