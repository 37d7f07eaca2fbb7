//! Whether a server answers that it is ready. Plain blocking HTTP: one request, one line.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    time::Duration,
};

use super::Address;

const REQUEST: &[u8] = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

/// Of one request.
const LIMIT: Duration = Duration::from_secs(2);

/// All that is read of an answer.
const ANSWER_BYTES: usize = 16;

/// Whether it says so. One that is still loading says that it is not.
pub(super) fn is_ready(address: &Address) -> bool {
    let status = match address {
        Address::Socket(path) => UnixStream::connect(path).and_then(|stream| {
            stream.set_read_timeout(Some(LIMIT))?;
            stream.set_write_timeout(Some(LIMIT))?;
            ask(stream)
        }),
        Address::Port(port) => {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, *port));
            TcpStream::connect_timeout(&address, LIMIT).and_then(|stream| {
                stream.set_read_timeout(Some(LIMIT))?;
                stream.set_write_timeout(Some(LIMIT))?;
                ask(stream)
            })
        }
    };
    status.is_ok_and(|line| line.starts_with(b"HTTP/1.") && line[8..].starts_with(b" 200"))
}

/// The start of the answer.
fn ask(mut stream: impl Read + Write) -> io::Result<[u8; ANSWER_BYTES]> {
    stream.write_all(REQUEST)?;
    let mut answer = [0; ANSWER_BYTES];
    stream.read_exact(&mut answer)?;
    Ok(answer)
}
