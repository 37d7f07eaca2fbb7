//! A connection to one peer.

use std::{ops::Range, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Empty};
use hyper::{
    Request, Response, StatusCode,
    body::Incoming,
    client::conn::http2::{self, SendRequest},
    header::RANGE,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use identity::{PeerIdentity, SERVER_NAME};
use rustls::pki_types::ServerName;
use tokio::{io::BufReader, net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;
use wire::{AgentId, Digest};

use super::{PeerAgent, active_downloads::Availability, plan::PartBitmap};

pub(super) const AGENT_HEADER: &str = "flotilla-agent";
/// A peer on the same network answers at once; others are not worth waiting for.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const SILENCE_TIMEOUT: Duration = Duration::from_secs(3);
const PING_INTERVAL: Duration = Duration::from_secs(5);
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
const FRAME_BYTES: u32 = 256 << 10;
const READ_BYTES: usize = 128 << 10;
const ADDRESSES_MAX: usize = 4;

#[derive(Debug, thiserror::Error)]
pub(super) enum PeerFailure {
    #[error("it cannot be reached (S112)")]
    Unreachable,
    #[error("it stopped answering (S112)")]
    Silent,
    #[error("it answered {0} (S112)")]
    Refuses(StatusCode),
    #[error("the connection broke (S112)")]
    Broken(#[from] hyper::Error),
    #[error("it sent bytes that were not requested (S112)")]
    Unexpected,
}

/// An HTTP/2 connection to a peer. Clones share it; it closes when the last one is dropped.
#[derive(Clone)]
pub(super) struct PeerConnection {
    sender: SendRequest<Empty<Bytes>>,
    name: AgentId,
    _connection: Arc<AbortOnDropHandle<()>>,
}

impl PeerConnection {
    /// Connects to the first address that accepts, with the key that the directory lists.
    pub(super) async fn open(
        name: &AgentId,
        identity: &PeerIdentity,
        peer: &PeerAgent,
    ) -> Result<Self, PeerFailure> {
        let config = identity.client_config(peer.key).map_err(|_| PeerFailure::Unreachable)?;
        let connector = TlsConnector::from(Arc::new(config));
        for address in peer.addresses.iter().take(ADDRESSES_MAX) {
            let shaken = async {
                let socket = TcpStream::connect(address).await.ok()?;
                // A failure costs only speed.
                let _ = socket.set_nodelay(true);
                // Without the buffer, TLS would read a quarter of a record at a time.
                let socket = BufReader::with_capacity(READ_BYTES, socket);
                let server = ServerName::try_from(SERVER_NAME).expect("it is a host name");
                connector.connect(server, socket).await.ok()
            };
            let Ok(Some(socket)) = timeout(CONNECT_TIMEOUT, shaken).await else { continue };
            let (to, connection) = http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .max_frame_size(FRAME_BYTES)
                .keep_alive_interval(PING_INTERVAL)
                .keep_alive_timeout(SILENCE_TIMEOUT)
                .handshake(TokioIo::new(socket))
                .await?;
            let connection = tokio::spawn(async move {
                // Errors also reach the requests on this connection.
                let _ = connection.await;
            });
            let _connection = Arc::new(AbortOnDropHandle::new(connection));
            return Ok(Self { sender: to, name: name.clone(), _connection });
        }
        Err(PeerFailure::Unreachable)
    }

    async fn get_path(
        &self,
        path: String,
        range: Option<Range<u64>>,
    ) -> Result<Response<Incoming>, PeerFailure> {
        let request = Request::get(format!("https://{SERVER_NAME}{path}"));
        let request = request.header(AGENT_HEADER, self.name.as_str());
        let request = match range {
            Some(range) => {
                request.header(RANGE, format!("bytes={}-{}", range.start, range.end - 1))
            }
            None => request,
        };
        let request = request.body(Empty::new()).map_err(|_| PeerFailure::Unexpected)?;
        let answer = timeout(SILENCE_TIMEOUT, self.sender.clone().send_request(request)).await;
        let answer = answer.map_err(|_| PeerFailure::Silent)??;
        match answer.status() {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT => Ok(answer),
            status => Err(PeerFailure::Refuses(status)),
        }
    }

    /// Fetches a byte range of a file. The result has exactly the requested length.
    pub(super) async fn fetch_range(
        &self,
        digest: Digest,
        range: Range<u64>,
    ) -> Result<Bytes, PeerFailure> {
        let bytes =
            usize::try_from(range.end - range.start).map_err(|_| PeerFailure::Unexpected)?;
        let mut body =
            self.get_path(format!("/b3/{}", digest.to_hex()), Some(range)).await?.into_body();
        let (mut pieces, mut count) = (Vec::new(), 0);
        while let Some(frame) =
            timeout(SILENCE_TIMEOUT, body.frame()).await.map_err(|_| PeerFailure::Silent)?
        {
            let Ok(data) = frame?.into_data() else { continue };
            count += data.len();
            if count > bytes {
                return Err(PeerFailure::Unexpected);
            }
            if !data.is_empty() {
                pieces.push(data);
            }
        }
        if count < bytes {
            return Err(PeerFailure::Unexpected);
        }
        // A part that fits into one frame is not copied.
        Ok(<[Bytes; 1]>::try_from(pieces).map_or_else(|many| many.concat().into(), |[one]| one))
    }

    pub(super) async fn follow_availability(
        &self,
        digest: Digest,
        count: usize,
    ) -> Result<AvailabilityStream, PeerFailure> {
        let body = self.get_path(format!("/parts/{}", digest.to_hex()), None).await?.into_body();
        Ok(AvailabilityStream { body, count, buffered: BytesMut::new() })
    }
}

pub(super) struct AvailabilityStream {
    body: Incoming,
    count: usize,
    /// Bytes of an unfinished announcement.
    buffered: BytesMut,
}

impl AvailabilityStream {
    /// Returns the newest announcement, or `None` at the end. A peer may be silent while nothing
    /// changes; keep-alive pings detect a dead one.
    pub(super) async fn next(&mut self) -> Result<Option<Availability>, PeerFailure> {
        let half = self.count.div_ceil(8);
        while self.buffered.len() < 2 * half {
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            if let Ok(data) = frame?.into_data() {
                self.buffered.extend_from_slice(&data);
            }
        }
        // Of several announcements only the last counts.
        let words = self.buffered.len() / (2 * half);
        let frames = self.buffered.split_to(words * 2 * half);
        Ok(Some(decode_availability(&frames[frames.len() - 2 * half..], self.count)))
    }
}

fn decode_availability(frame: &[u8], count: usize) -> Availability {
    let marks = |bits: &[u8]| -> PartBitmap {
        (0..count).map(|index| bits[index / 8] >> (index % 8) & 1 == 1).collect()
    };
    let (here, claimed) = frame.split_at(frame.len() / 2);
    (marks(here), marks(claimed))
}
