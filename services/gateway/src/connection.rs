//! Accepting connections: a limited number, in all and from each address, with TLS or without, each
//! closed for good when the gateway is over, even when its client holds a call open.

mod crowd;

use std::{
    io,
    pin::Pin,
    sync::Arc,
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
use tonic::transport::server::{Connected, TcpConnectInfo, TcpIncoming};

use self::crowd::{Crowd, Place};

/// Well below the usual 1024 open files; more wait until one closes.
const CONNECTIONS_MAX: usize = 512;
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);
/// Accepting fails when the machine is out of something; trying at once would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Whoever means to call says so at once; others only take up room.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// HTTP/2's preface and the head of the frame that follows it, without TLS around them.
const HELLO_BYTES: usize = 24 + 9;

/// One client's connection; reads as closed once `cut` is cancelled, or when no hello comes.
pub(crate) struct Connection {
    socket: Socket,
    peer: TcpConnectInfo,
    hello: Option<Hello>,
    cut: Cut,
    _one_of_the_most: OwnedSemaphorePermit,
    _one_of_its_address: Option<Place>,
}

type Cut = Pin<Box<WaitForCancellationFutureOwned>>;

/// What bytes go over. A handshake goes on as they are wanted, so that a slow one keeps nobody
/// else waiting; the hello's limit is its own.
enum Socket {
    Plain(TcpStream),
    Shaking(Box<Accept<TcpStream>>),
    Tls(Box<TlsStream<TcpStream>>),
}

/// A hello that has not come yet, and what is missing of it.
struct Hello {
    missing: usize,
    until: Pin<Box<Sleep>>,
}

pub(crate) fn incoming(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    cut: CancellationToken,
) -> impl Stream<Item = io::Result<Connection>> {
    let sockets =
        TcpIncoming::from(listener).with_nodelay(Some(true)).with_keepalive(Some(TCP_KEEPALIVE));
    let free = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let crowd = Crowd::default();
    let state = (sockets, free, crowd, tls, cut);
    stream::unfold(state, |(mut sockets, free, crowd, tls, cut)| async move {
        let permit = free.clone().acquire_owned().await.expect("nobody closes the semaphore");
        let connection = loop {
            match sockets.next().await? {
                Ok(socket) => {
                    let peer = socket.connect_info();
                    let Ok(place) = crowd.place(peer.remote_addr().map(|address| address.ip()))
                    else {
                        tracing::debug!(peer = ?peer.remote_addr(), "too many connections of one address");
                        continue;
                    };
                    break Ok(Connection {
                        peer,
                        socket: match &tls {
                            Some(tls) => Socket::Shaking(Box::new(tls.accept(socket))),
                            None => Socket::Plain(socket),
                        },
                        hello: Some(Hello {
                            missing: HELLO_BYTES,
                            until: Box::pin(sleep(HELLO_LIMIT)),
                        }),
                        cut: Box::pin(cut.clone().cancelled_owned()),
                        _one_of_the_most: permit,
                        _one_of_its_address: place,
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(ACCEPT_PAUSE).await;
                    break Err(error);
                }
            }
        };
        Some((connection, (sockets, free, crowd, tls, cut)))
    })
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.peer.clone()
    }
}

/// A socket that can be read and written, or what its handshake waits for or died of.
macro_rules! open {
    ($self:ident, $cx:ident, $socket:ident => $go_on:expr) => {
        loop {
            let this = &mut *$self;
            match &mut this.socket {
                Socket::Plain($socket) => break $go_on,
                Socket::Tls($socket) => break $go_on,
                Socket::Shaking(shaking) => {
                    // Whoever waits to write does not read, and would not come to its limit.
                    if is_over(&mut this.hello, &mut this.cut, $cx) {
                        break Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                    }
                    let shaken = ready!(Pin::new(shaking).poll($cx))?;
                    this.socket = Socket::Tls(Box::new(shaken));
                }
            }
        }
    };
}

/// Whether the gateway is, or the time for a hello.
fn is_over(hello: &mut Option<Hello>, cut: &mut Cut, cx: &mut Context<'_>) -> bool {
    let is_late = |hello: &mut Hello| hello.until.as_mut().poll(cx).is_ready();
    hello.as_mut().is_some_and(is_late) || cut.as_mut().poll(cx).is_ready()
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if is_over(&mut this.hello, &mut this.cut, cx) {
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let polled = open!(self, cx, socket => Pin::new(socket).poll_read(cx, buffer));
        let read = buffer.filled().len() - before;
        if let Some(hello) = &mut self.hello {
            hello.missing = hello.missing.saturating_sub(read);
        }
        self.hello.take_if(|hello| hello.missing == 0);
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
            Socket::Shaking(_) => false,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        open!(self, cx, socket => Pin::new(socket).poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.socket {
            Socket::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Socket::Tls(socket) => Pin::new(socket).poll_shutdown(cx),
            // Nothing was said yet that could be ended in order.
            Socket::Shaking(_) => Poll::Ready(Ok(())),
        }
    }
}
