//! Accepts connections: a limited number in total and per address, with or without TLS. All are
//! closed when the gateway stops, even if a client keeps a call open.
//!
//! A port with TLS also serves plain HTTP from its own machine to a loopback address, so that a
//! browser there needs no certificate. [`refuse_foreign_host`] then limits the hosts.

mod connection_limit;
mod plain_http;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Sleep, sleep},
};
use tokio_rustls::{Accept, TlsAcceptor, server::TlsStream};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::{
    body::Body,
    codegen::http::{Request, Response},
    transport::server::{Connected, TcpConnectInfo, TcpIncoming},
};

use self::{
    connection_limit::{ConnectionLimiter, ConnectionPermit},
    plain_http::TLS_HANDSHAKE,
};

/// Well below the usual limit of 1024 open files. Further clients wait until one closes.
const CONNECTIONS_MAX: usize = 512;
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);
/// An accept fails if the machine lacks a resource, so that an immediate retry would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A client must send its first bytes within this time; idle connections would occupy permits.
const FIRST_BYTES_LIMIT: Duration = Duration::from_secs(10);
/// The first bytes of HTTP/2.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The preface of HTTP/2 and the next frame's header.
const FIRST_BYTES_MIN: usize = PREFACE.len() + 9;

/// One client's connection. Reads return end-of-file once the gateway stops, or if the first bytes
/// do not arrive in time.
pub(crate) struct Connection {
    socket: Socket,
    info: ConnectionInfo,
    first_bytes: Option<FirstBytes>,
    shutdown: ShutdownSignal,
    _connection_slot: OwnedSemaphorePermit,
    _address_permit: Option<ConnectionPermit>,
}

/// The addresses of a connection, and whether it is plain HTTP on a port with TLS. Each request has
/// it as an extension.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionInfo {
    tcp: TcpConnectInfo,
    /// Set before the first request, when the client's first byte has arrived.
    is_plain: Arc<AtomicBool>,
}

impl ConnectionInfo {
    fn new(tcp: TcpConnectInfo) -> Self {
        Self { tcp, is_plain: Arc::default() }
    }

    pub(crate) fn remote_ip(&self) -> Option<IpAddr> {
        self.tcp.remote_addr().map(|address| address.ip())
    }

    /// Returns true if both ends are loopback addresses, so that no other machine takes part.
    fn is_loopback(&self) -> bool {
        let is_loopback = |end: Option<SocketAddr>| {
            end.is_some_and(|address| address.ip().to_canonical().is_loopback())
        };
        is_loopback(self.tcp.local_addr()) && is_loopback(self.tcp.remote_addr())
    }
}

/// Returns the refusal of a request that arrived without TLS on a port with TLS and does not name
/// this machine by a loopback address. `None` for all other requests.
///
/// A page of a public name that its owner points to 127.0.0.1 (DNS rebinding) names that host.
pub(crate) fn refuse_foreign_host(request: &Request<Body>) -> Option<Response<Body>> {
    let info = request.extensions().get::<ConnectionInfo>()?;
    if !info.is_plain.load(Ordering::Relaxed) {
        return None;
    }
    let port = info.tcp.local_addr().map_or(0, |address| address.port());
    plain_http::refuse_foreign_host(request, port)
}

/// Resolves when all connections must close.
type ShutdownSignal = Pin<Box<WaitForCancellationFutureOwned>>;

/// The transport of a connection. A TLS handshake advances only while the connection is polled, so
/// that a slow one delays no other; it must end within [`FIRST_BYTES_LIMIT`].
enum Socket {
    Plain(TcpStream),
    /// The first byte, which has not arrived, distinguishes TLS from plain HTTP. `None` only during
    /// the transition.
    AwaitingFirstByte(Option<(TcpStream, TlsAcceptor)>),
    Handshaking(Box<Accept<TcpStream>>),
    Tls(Box<TlsStream<TcpStream>>),
}

/// The first bytes of a client that have not all arrived.
struct FirstBytes {
    read: usize,
    is_preface: bool,
    /// The last bytes read.
    last: [u8; 3],
    deadline: Pin<Box<Sleep>>,
}

impl FirstBytes {
    fn within(limit: Duration) -> Self {
        Self { read: 0, is_preface: true, last: [0; 3], deadline: Box::pin(sleep(limit)) }
    }

    /// Adds received bytes; returns true when the preface is complete.
    fn is_complete_with(&mut self, bytes: &[u8]) -> bool {
        for byte in bytes {
            self.is_preface &= PREFACE.get(self.read).is_none_or(|expected| expected == byte);
            self.read += 1;
            self.last = [self.last[1], self.last[2], *byte];
            let is_head = self.last == *b"\n\r\n" || self.last[1..] == *b"\n\n";
            if if self.is_preface { self.read >= FIRST_BYTES_MIN } else { is_head } {
                return true;
            }
        }
        false
    }
}

/// Accepts connections as a stream, with at most 512 open at a time.
pub(crate) fn accept_connections(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    shutdown: CancellationToken,
) -> impl Stream<Item = io::Result<Connection>> {
    let sockets =
        TcpIncoming::from(listener).with_nodelay(Some(true)).with_keepalive(Some(TCP_KEEPALIVE));
    let free = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let limiter = ConnectionLimiter::default();
    let state = (sockets, free, limiter, tls, shutdown);
    stream::unfold(state, |(mut sockets, free, limiter, tls, shutdown)| async move {
        let permit = free.clone().acquire_owned().await.expect("nobody closes the semaphore");
        let connection = loop {
            match sockets.next().await? {
                Ok(socket) => {
                    let info = ConnectionInfo::new(socket.connect_info());
                    let Ok(place) = limiter.acquire_permit(info.remote_ip()) else {
                        tracing::debug!(peer = ?info.remote_ip(), "too many connections from one address");
                        continue;
                    };
                    break Ok(Connection {
                        info,
                        socket: match &tls {
                            Some(tls) => Socket::AwaitingFirstByte(Some((socket, tls.clone()))),
                            None => Socket::Plain(socket),
                        },
                        first_bytes: Some(FirstBytes::within(FIRST_BYTES_LIMIT)),
                        shutdown: Box::pin(shutdown.clone().cancelled_owned()),
                        _connection_slot: permit,
                        _address_permit: place,
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(ACCEPT_PAUSE).await;
                    break Err(error);
                }
            }
        };
        Some((connection, (sockets, free, limiter, tls, shutdown)))
    })
}

impl Connected for Connection {
    type ConnectInfo = ConnectionInfo;

    fn connect_info(&self) -> ConnectionInfo {
        self.info.clone()
    }
}

/// Returns a socket that can be read and written, or the pending or failed state of its handshake.
macro_rules! open {
    ($self:ident, $cx:ident, $socket:ident => $action:expr) => {
        loop {
            let this = &mut *$self;
            match &mut this.socket {
                Socket::Plain($socket) => break $action,
                Socket::Tls($socket) => break $action,
                Socket::AwaitingFirstByte(fresh) => {
                    if is_over(&mut this.first_bytes, &mut this.shutdown, $cx) {
                        break Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                    }
                    this.socket = ready!(begin_tls(fresh, &this.info, $cx))?;
                }
                Socket::Handshaking(handshake) => {
                    // A client that only waits to write does not read, and would not reach its
                    // limit there.
                    if is_over(&mut this.first_bytes, &mut this.shutdown, $cx) {
                        break Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                    }
                    let stream = ready!(Pin::new(handshake).poll($cx))?;
                    this.socket = Socket::Tls(Box::new(stream));
                }
            }
        }
    };
}

/// Begins the handshake once the client has sent a byte. A client without TLS is served on this
/// machine's loopback addresses, and told to use TLS elsewhere.
fn begin_tls(
    fresh: &mut Option<(TcpStream, TlsAcceptor)>,
    info: &ConnectionInfo,
    cx: &mut Context<'_>,
) -> Poll<io::Result<Socket>> {
    let Some((socket, _)) = fresh.as_ref() else {
        return Poll::Ready(Err(io::ErrorKind::NotConnected.into()));
    };
    let mut first = [0];
    let peeked = ready!(socket.poll_peek(cx, &mut ReadBuf::new(&mut first)))?;
    Poll::Ready(match fresh.take() {
        Some((socket, tls)) if peeked == 0 || first[0] == TLS_HANDSHAKE => {
            Ok(Socket::Handshaking(Box::new(tls.accept(socket))))
        }
        Some((socket, _)) if info.is_loopback() => {
            info.is_plain.store(true, Ordering::Relaxed);
            Ok(Socket::Plain(socket))
        }
        Some((socket, _)) => Err(plain_http::refuse_plain_http(&socket)),
        None => Err(io::ErrorKind::NotConnected.into()),
    })
}

/// Returns true if the gateway stops or the time for the first bytes is over. Registers the waker
/// for both.
fn is_over(
    first_bytes: &mut Option<FirstBytes>,
    shutdown: &mut ShutdownSignal,
    cx: &mut Context<'_>,
) -> bool {
    let is_late = |first_bytes: &mut FirstBytes| first_bytes.deadline.as_mut().poll(cx).is_ready();
    first_bytes.as_mut().is_some_and(is_late) || shutdown.as_mut().poll(cx).is_ready()
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if is_over(&mut this.first_bytes, &mut this.shutdown, cx) {
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let polled = open!(self, cx, socket => Pin::new(socket).poll_read(cx, buffer));
        self.first_bytes
            .take_if(|first_bytes| first_bytes.is_complete_with(&buffer.filled()[before..]));
        polled
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        open!(self, cx, socket => Pin::new(socket).poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        open!(self, cx, socket => Pin::new(socket).poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match &self.socket {
            Socket::Plain(socket) => socket.is_write_vectored(),
            Socket::Tls(socket) => socket.is_write_vectored(),
            Socket::AwaitingFirstByte(_) | Socket::Handshaking(_) => false,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        open!(self, cx, socket => Pin::new(socket).poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.socket {
            Socket::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Socket::Tls(socket) => Pin::new(socket).poll_shutdown(cx),
            // There is no TLS session yet that could be closed.
            Socket::AwaitingFirstByte(_) | Socket::Handshaking(_) => Poll::Ready(Ok(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needed(bytes: &[u8]) -> Option<usize> {
        let mut first_bytes = FirstBytes::within(FIRST_BYTES_LIMIT);
        bytes.iter().position(|byte| first_bytes.is_complete_with(&[*byte])).map(|last| last + 1)
    }

    #[test]
    fn a_connection_is_local_only_between_loopback_addresses() {
        let is_loopback = |local: &str, remote: &str| {
            let [local_addr, remote_addr] = [local, remote].map(|address| address.parse().ok());
            ConnectionInfo::new(TcpConnectInfo { local_addr, remote_addr }).is_loopback()
        };
        for address in ["127.0.0.1:1", "[::1]:1", "127.0.1.1:1", "[::ffff:127.0.0.1]:1"] {
            assert!(is_loopback("127.0.0.1:7070", address), "{address}");
        }
        for address in ["192.168.1.2:1", "[fe80::1]:1", "[::ffff:192.168.1.2]:1", "0.0.0.0:1", ""] {
            assert!(!is_loopback("127.0.0.1:7070", address), "{address}");
            assert!(!is_loopback(address, "127.0.0.1:1"), "{address}");
        }
    }

    #[tokio::test]
    async fn the_first_bytes_are_a_preface_with_a_frame_or_the_head_of_a_request() {
        let frame = [PREFACE, &[0; 20]].concat();
        assert_eq!(needed(&frame), Some(33));
        assert_eq!(needed(PREFACE), None);
        let get = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
        assert_eq!(needed(get), Some(get.len()));
        assert_eq!(needed(b"POST / HTTP/1.1\nhost: a\n\nbody"), Some(25));
        assert_eq!(needed(b"PRI * HTTP/1.1\r\nhost: a very long name indeed"), None);
        assert_eq!(needed(&[b'x'; 10_000]), None);
    }
}
