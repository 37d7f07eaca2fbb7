//! A connection to one peer.

use std::{ops::Range, sync::Arc, time::Duration};

use authority::{PeerIdentity, SERVER_NAME};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Empty};
use hyper::{
    Request, Response, StatusCode,
    body::Incoming,
    client::conn::http2::{self, SendRequest},
    header::RANGE,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tokio::{io::BufReader, net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;
use wire::{AgentId, Digest};

use super::{Peer, plan::Marks, shelf::Said};

/// Who asks.
pub(super) const AGENT: &str = "flotilla-agent";
/// A peer of the same network answers at once; others are not worth waiting for.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// Between two pieces of what was asked for.
const SILENCE: Duration = Duration::from_secs(3);
const PING_EVERY: Duration = Duration::from_secs(5);
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
const FRAME_BYTES: u32 = 256 << 10;
const READ_BYTES: usize = 128 << 10;
/// Addresses of one peer that are tried.
const ADDRESSES_MAX: usize = 4;

/// Why a peer is no use (any more).
#[derive(Debug, thiserror::Error)]
pub(super) enum Useless {
    #[error("it cannot be reached (S112)")]
    Away,
    #[error("it fell silent (S112)")]
    Silent,
    #[error("it answered {0} (S112)")]
    Refuses(StatusCode),
    #[error("the connection broke (S112)")]
    Broken(#[from] hyper::Error),
    #[error("it sent what was not asked for (S112)")]
    Odd,
}

#[derive(Clone)]
pub(super) struct Link {
    to: SendRequest<Empty<Bytes>>,
    name: AgentId,
    _connection: Arc<AbortOnDropHandle<()>>,
}

impl Link {
    pub(super) async fn open(
        name: &AgentId,
        identity: &PeerIdentity,
        peer: &Peer,
    ) -> Result<Self, Useless> {
        let config = identity.client(peer.key).map_err(|_| Useless::Away)?;
        let connector = TlsConnector::from(Arc::new(config));
        for address in peer.addresses.iter().take(ADDRESSES_MAX) {
            let shaken = async {
                let socket = TcpStream::connect(address).await.ok()?;
                // What cannot be set costs speed alone.
                let _ = socket.set_nodelay(true);
                // TLS would read a quarter of a record at a time.
                let socket = BufReader::with_capacity(READ_BYTES, socket);
                let server = ServerName::try_from(SERVER_NAME).expect("it is a host name");
                connector.connect(server, socket).await.ok()
            };
            let Ok(Some(socket)) = timeout(CONNECT_LIMIT, shaken).await else { continue };
            let (to, connection) = http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .max_frame_size(FRAME_BYTES)
                .keep_alive_interval(PING_EVERY)
                .keep_alive_timeout(SILENCE)
                .handshake(TokioIo::new(socket))
                .await?;
            let connection = tokio::spawn(async move {
                // Whoever uses it hears of it.
                let _ = connection.await;
            });
            let _connection = Arc::new(AbortOnDropHandle::new(connection));
            return Ok(Self { to, name: name.clone(), _connection });
        }
        Err(Useless::Away)
    }

    async fn get(
        &self,
        path: String,
        range: Option<Range<u64>>,
    ) -> Result<Response<Incoming>, Useless> {
        let request = Request::get(format!("https://{SERVER_NAME}{path}"));
        let request = request.header(AGENT, self.name.as_str());
        let request = match range {
            Some(range) => {
                request.header(RANGE, format!("bytes={}-{}", range.start, range.end - 1))
            }
            None => request,
        };
        let request = request.body(Empty::new()).map_err(|_| Useless::Odd)?;
        let answer = timeout(SILENCE, self.to.clone().send_request(request)).await;
        let answer = answer.map_err(|_| Useless::Silent)??;
        match answer.status() {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT => Ok(answer),
            status => Err(Useless::Refuses(status)),
        }
    }

    /// Bytes of a file, as many as were asked for.
    pub(super) async fn bytes(&self, digest: Digest, range: Range<u64>) -> Result<Bytes, Useless> {
        let bytes = usize::try_from(range.end - range.start).map_err(|_| Useless::Odd)?;
        let mut body = self.get(format!("/b3/{}", digest.to_hex()), Some(range)).await?.into_body();
        let (mut pieces, mut count) = (Vec::new(), 0);
        while let Some(frame) = timeout(SILENCE, body.frame()).await.map_err(|_| Useless::Silent)? {
            let Ok(data) = frame?.into_data() else { continue };
            count += data.len();
            if count > bytes {
                return Err(Useless::Odd);
            }
            if !data.is_empty() {
                pieces.push(data);
            }
        }
        if count < bytes {
            return Err(Useless::Odd);
        }
        // A part fits into a frame, and need not be copied then.
        Ok(<[Bytes; 1]>::try_from(pieces).map_or_else(|many| many.concat().into(), |[one]| one))
    }

    /// What it has of a file of so many parts.
    pub(super) async fn parts(&self, digest: Digest, count: usize) -> Result<Words, Useless> {
        let body = self.get(format!("/parts/{}", digest.to_hex()), None).await?.into_body();
        Ok(Words { body, count, held: BytesMut::new() })
    }
}

/// What a peer says of its parts, word by word.
pub(super) struct Words {
    body: Incoming,
    count: usize,
    held: BytesMut,
}

impl Words {
    /// `None` when it says nothing more. It may be silent for as long as nothing changes; pings
    /// tell whether it is there.
    pub(super) async fn next(&mut self) -> Result<Option<Said>, Useless> {
        let half = self.count.div_ceil(8);
        while self.held.len() < 2 * half {
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            if let Ok(data) = frame?.into_data() {
                self.held.extend_from_slice(&data);
            }
        }
        // Only the last word counts, when several came.
        let words = self.held.len() / (2 * half);
        let heard = self.held.split_to(words * 2 * half);
        Ok(Some(said(&heard[heard.len() - 2 * half..], self.count)))
    }
}

fn said(frame: &[u8], count: usize) -> Said {
    let marks = |bits: &[u8]| -> Marks {
        (0..count).map(|index| bits[index / 8] >> (index % 8) & 1 == 1).collect()
    };
    let (here, claimed) = frame.split_at(frame.len() / 2);
    (marks(here), marks(claimed))
}
