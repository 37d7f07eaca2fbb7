//! Accepting connections: a limited number, each closed for good when the gateway is over,
//! even when its client holds a call open.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Sleep, sleep},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::{Connected, TcpConnectInfo, TcpIncoming};

/// Well below the usual 1024 open files; more wait until one closes.
const CONNECTIONS_MAX: usize = 512;
const TCP_KEEPALIVE: Duration = Duration::from_secs(60);
/// Accepting fails when the machine is out of something; trying at once would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Whoever means to call says so at once; others only take up room.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
/// HTTP/2's preface and the head of the frame that follows it.
const HELLO_BYTES: usize = 24 + 9;

/// One client's connection; reads as closed once `cut` is cancelled, or when no hello comes.
pub(crate) struct Connection {
    socket: TcpStream,
    hello: Option<Hello>,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    _one_of_the_most: OwnedSemaphorePermit,
}

/// A hello that has not come yet, and what is missing of it.
struct Hello {
    missing: usize,
    until: Pin<Box<Sleep>>,
}

pub(crate) fn incoming(
    listener: TcpListener,
    cut: CancellationToken,
) -> impl Stream<Item = io::Result<Connection>> {
    let sockets =
        TcpIncoming::from(listener).with_nodelay(Some(true)).with_keepalive(Some(TCP_KEEPALIVE));
    let free = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    stream::unfold((sockets, free, cut), |(mut sockets, free, cut)| async move {
        let permit = free.clone().acquire_owned().await.expect("nobody closes the semaphore");
        let connection = match sockets.next().await? {
            Ok(socket) => Ok(Connection {
                socket,
                hello: Some(Hello { missing: HELLO_BYTES, until: Box::pin(sleep(HELLO_LIMIT)) }),
                cut: Box::pin(cut.clone().cancelled_owned()),
                _one_of_the_most: permit,
            }),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
                Err(error)
            }
        };
        Some((connection, (sockets, free, cut)))
    })
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.socket.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.cut.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        if let Some(hello) = &mut self.hello
            && hello.until.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.socket).poll_read(cx, buffer);
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
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
