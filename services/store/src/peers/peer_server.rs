//! The server for peers: files of the cache and parts of unfinished downloads, over HTTP/2 with
//! TLS, to members of the fleet, by digest.
//!
//! | request | answer |
//! |---|---|
//! | `GET /b3/HEX` with `Range` | those bytes, if they are here |
//! | `GET /parts/HEX` | the parts that are here or claimed, and each change |
//!
//! The answer to `/parts` is a sequence of frames of two bitmaps, one bit per part, the first part
//! in the lowest bit: the parts that are here, and the parts being fetched from the store. It ends
//! when the file is complete, or when the file is neither here nor being fetched and no download
//! begins for 20 s.

use std::{
    convert::Infallible,
    fs::File,
    io::{self, IoSliceMut},
    ops::Range,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::{StreamExt, stream};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Frame, Incoming},
    header::{CONTENT_RANGE, RANGE},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use identity::Fingerprint;
use rustix::io::ReadWriteFlags;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::{Instant, sleep, timeout},
};
use wire::{AgentId, Digest};

use super::{PeerNode, peer_connection::AGENT_HEADER, plan::PartBitmap};
use crate::{
    blocking::run_blocking,
    cache::FileCache,
    limits::OBJECT_BYTES_MAX,
    parts::{PARTS_MAX, PartHashes},
};

/// The largest number of connections; more wait until one closes.
const CONNECTIONS_MAX: usize = 64;
const REQUESTS_MAX: u32 = 32;
/// The largest number of parallel answers with bytes on all connections together.
const SENDING_MAX: usize = 64;
const TURN_TIMEOUT: Duration = Duration::from_secs(2);
/// The longest range of an answer: the largest part.
const RANGE_BYTES_MAX: u64 = OBJECT_BYTES_MAX / PARTS_MAX;
/// The limit of an answer with bytes, without the time that depends on their number.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// The least mean rate at which a peer takes an answer, in bytes per second.
const ANSWER_RATE_MIN: u64 = 32 << 10;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection without a request of a known member is closed after this time, to make room.
const MEMBERSHIP_TIMEOUT: Duration = Duration::from_secs(10);
const PING_INTERVAL: Duration = Duration::from_secs(20);
const CONNECTION_LIFETIME: Duration = Duration::from_secs(3600);
const BEGIN_TIMEOUT: Duration = Duration::from_secs(20);
/// Each announcement goes to every peer, so more frequent ones cost more than they help.
const ANNOUNCE_INTERVAL: Duration = Duration::from_millis(12);
const READ_BYTES: u64 = 256 << 10;
/// A failed accept means that the machine lacks a resource, and an immediate retry would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

type PeerReplyBody = UnsyncBoxBody<Bytes, io::Error>;

struct PeerServer {
    peers: PeerNode,
    cache: FileCache,
    sending: Arc<Semaphore>,
}

impl PeerNode {
    /// Serves peers while it is polled. Dropping the future ends all connections.
    pub async fn serve_files(&self, listener: TcpListener, cache: &FileCache) -> Infallible {
        let sending = Arc::new(Semaphore::new(SENDING_MAX));
        let server = Arc::new(PeerServer { peers: self.clone(), cache: cache.clone(), sending });
        let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let permit = room.clone().acquire_owned().await.expect("nobody closes it");
            let Ok((socket, _)) = listener.accept().await else {
                sleep(ACCEPT_PAUSE).await;
                continue;
            };
            while connections.try_join_next().is_some() {}
            let connected = server.clone().handle_connection(socket, permit);
            connections.spawn(timeout(CONNECTION_LIFETIME, connected));
        }
    }
}

impl PeerServer {
    /// Closes the connection if no member shows in time.
    async fn handle_connection(self: Arc<Self>, socket: TcpStream, _permit: OwnedSemaphorePermit) {
        // A failure costs only speed.
        let _ = socket.set_nodelay(true);
        let shaken = timeout(HANDSHAKE_TIMEOUT, self.peers.inner.acceptor.accept(socket)).await;
        let Ok(Ok(socket)) = shaken else { return };
        let shown = socket.get_ref().1.peer_certificates();
        let Some(key) = shown.and_then(|shown| shown.first()).map(|one| Fingerprint::from_der(one))
        else {
            return;
        };
        let is_known = Arc::new(AtomicBool::new(false));
        let known = is_known.clone();
        let answer = service_fn(move |request| {
            let (server, known) = (self.clone(), known.clone());
            async move { Ok::<_, Infallible>(server.answer_request(key, request, &known).await) }
        });
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(REQUESTS_MAX)
            .keep_alive_interval(PING_INTERVAL)
            .max_send_buf_size(1 << 20)
            .serve_connection(TokioIo::new(socket), answer);
        let mut connection = std::pin::pin!(connection);
        let ended = timeout(MEMBERSHIP_TIMEOUT, &mut connection).await.is_ok();
        if !ended && is_known.load(Ordering::Relaxed) {
            // The peer may have disconnected.
            let _ = connection.await;
        }
    }

    async fn answer_request(
        &self,
        key: Fingerprint,
        request: Request<Incoming>,
        known: &AtomicBool,
    ) -> Response<PeerReplyBody> {
        let named = request.headers().get(AGENT_HEADER).and_then(|name| name.to_str().ok());
        let Some(name) = named.and_then(|name| name.parse::<AgentId>().ok()) else {
            return refuse_request(StatusCode::UNAUTHORIZED, "the request does not name its agent");
        };
        if !self.peers.is_member(&name, key).await {
            tracing::debug!(%name, "refused a file to a caller that is not a member");
            return refuse_request(StatusCode::FORBIDDEN, "no member with that name and key");
        }
        known.store(true, Ordering::Relaxed);
        if request.method() != Method::GET {
            return refuse_request(StatusCode::METHOD_NOT_ALLOWED, "only GET");
        }
        let path = request.uri().path().trim_start_matches('/');
        let (what, hex) = path.split_once('/').unwrap_or_default();
        let Ok(digest) = format!("b3:{hex}").parse::<Digest>() else {
            return refuse_request(
                StatusCode::NOT_FOUND,
                "unknown path; use /b3/HEX or /parts/HEX",
            );
        };
        match what {
            "b3" => {
                let asked = request.headers().get(RANGE).and_then(|range| range.to_str().ok());
                let Some(range) = asked.and_then(parse_range) else {
                    return refuse_request(
                        StatusCode::BAD_REQUEST,
                        "ask for a Range of at most 512 MiB: bytes=FIRST-LAST",
                    );
                };
                self.send_bytes(digest, range).await
            }
            "parts" => self.send_availability(digest),
            _ => refuse_request(StatusCode::NOT_FOUND, "unknown path; use /b3/HEX or /parts/HEX"),
        }
    }

    async fn send_bytes(&self, digest: Digest, range: Range<u64>) -> Response<PeerReplyBody> {
        let turn = timeout(TURN_TIMEOUT, self.sending.clone().acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            return refuse_request(StatusCode::SERVICE_UNAVAILABLE, "too many requests; try again");
        };
        let file = match self.peers.inner.active.get(digest) {
            Some(here) if !here.covers_range(&range) => None,
            Some(here) => here.file.try_clone().ok(),
            None => self
                .open_whole_file(digest)
                .await
                .filter(|(_, bytes)| range.end <= *bytes)
                .map(|f| f.0),
        };
        let Some(file) = file else {
            return refuse_request(StatusCode::NOT_FOUND, "those bytes are not here");
        };
        let content_range = format!("bytes {}-{}/*", range.start, range.end - 1);
        // The permit is held until the last byte is read.
        let turn = LimitedTurn::start(turn, range.end - range.start);
        let state = (self.peers.clone(), Arc::new(file), range, turn);
        let pieces = stream::try_unfold(state, |(peers, file, range, turn)| async move {
            if range.is_empty() {
                return Ok(None);
            }
            turn.check_time()?;
            let (from, next) = (file.clone(), range.end.min(range.start + READ_BYTES));
            let now = range.start..next;
            let piece = match read_from_memory(&file, &now) {
                Some(piece) => piece,
                None => run_blocking(move || read_range(&from, now)).await?,
            };
            peers.inner.counts.add_to_peers(next - range.start);
            Ok(Some((Frame::data(piece), (peers, file, next..range.end, turn))))
        });
        let mut response = Response::new(StreamBody::new(pieces.boxed()).boxed_unsync());
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        if let Ok(value) = content_range.parse() {
            response.headers_mut().insert(CONTENT_RANGE, value);
        }
        response
    }

    fn send_availability(&self, digest: Digest) -> Response<PeerReplyBody> {
        let state = Some((self.peers.clone(), self.cache.clone(), None));
        let frames = stream::unfold(state, move |state| async move {
            let (peers, cache, mut changes) = state?;
            loop {
                // Subscribes before the check, so that no begin is missed.
                let mut begun = peers.inner.active.subscribe_begun();
                begun.borrow_and_update();
                if changes.is_none() {
                    changes = peers.inner.active.get(digest).map(|here| {
                        let mut receiver = here.availability.subscribe();
                        receiver.mark_changed();
                        receiver
                    });
                }
                if let Some(mut receiver) = changes.take() {
                    if receiver.changed().await.is_ok() {
                        let frame = encode_availability(&receiver.borrow_and_update());
                        // Announces several parts together.
                        sleep(ANNOUNCE_INTERVAL).await;
                        return Some((
                            Ok(Frame::data(frame)),
                            Some((peers, cache, Some(receiver))),
                        ));
                    }
                    continue;
                }
                if let Some((_, bytes)) = open_cached_file(&cache, digest).await {
                    let count = PartHashes::part_size(bytes).map_or(0, |part| bytes.div_ceil(part));
                    let all = vec![true; usize::try_from(count).unwrap_or(0)];
                    let none = vec![false; all.len()];
                    return Some((Ok(Frame::data(encode_availability(&(all, none)))), None));
                }
                timeout(BEGIN_TIMEOUT, begun.changed()).await.ok()?.ok()?;
            }
        });
        Response::new(StreamBody::new(frames.boxed()).boxed_unsync())
    }

    async fn open_whole_file(&self, digest: Digest) -> Option<(File, u64)> {
        open_cached_file(&self.cache, digest).await
    }
}

/// The permit of an answer with bytes. It is given back when this is dropped, or when the peer takes
/// the bytes too slowly: an answer that is not read is never polled.
struct LimitedTurn {
    until: Instant,
    /// Closed when this is dropped.
    _answered: oneshot::Sender<()>,
}

impl LimitedTurn {
    fn start(permit: OwnedSemaphorePermit, bytes: u64) -> Self {
        let limit = ANSWER_TIMEOUT + Duration::from_secs(bytes / ANSWER_RATE_MIN);
        let (_answered, answered) = oneshot::channel();
        tokio::spawn(async move {
            let _permit = permit;
            // An error means that the answer has ended.
            let _ = timeout(limit, answered).await;
        });
        Self { until: Instant::now() + limit, _answered }
    }

    fn check_time(&self) -> io::Result<()> {
        match Instant::now() < self.until {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::TimedOut, "the peer is too slow")),
        }
    }
}

async fn open_cached_file(cache: &FileCache, digest: Digest) -> Option<(File, u64)> {
    let cache = cache.clone();
    run_blocking(move || {
        let file = cache.open_unverified(digest)?;
        let bytes = file.metadata().ok()?.len();
        Some((file, bytes))
    })
    .await
}

/// Reads a range if the kernel has it in memory, which is common for parts that just arrived; a
/// switch to another thread would take more time.
fn read_from_memory(file: &File, range: &Range<u64>) -> Option<Bytes> {
    let mut piece = vec![0; usize::try_from(range.end - range.start).ok()?];
    let into = &mut [IoSliceMut::new(&mut piece)];
    let read = rustix::io::preadv2(file, into, range.start, ReadWriteFlags::NOWAIT);
    (read == Ok(piece.len())).then(|| piece.into())
}

fn read_range(file: &File, range: Range<u64>) -> io::Result<Bytes> {
    let mut piece = vec![0; usize::try_from(range.end - range.start).unwrap_or(0)];
    file.read_exact_at(&mut piece, range.start)?;
    Ok(piece.into())
}

fn encode_availability((here, claimed): &(PartBitmap, PartBitmap)) -> Bytes {
    let bits = |marks: &PartBitmap| -> Vec<u8> {
        let byte =
            |eight: &[bool]| eight.iter().rev().fold(0, |byte, mark| byte << 1 | u8::from(*mark));
        marks.chunks(8).map(byte).collect()
    };
    [bits(here), bits(claimed)].concat().into()
}

/// Parses a `Range` such as `bytes=0-9`. Returns `None` if it is too long.
fn parse_range(text: &str) -> Option<Range<u64>> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last && last - first < RANGE_BYTES_MAX).then_some(())?;
    Some(first..last.checked_add(1)?)
}

fn refuse_request(status: StatusCode, sentence: &'static str) -> Response<PeerReplyBody> {
    let never = |never: Infallible| match never {};
    let body = Full::new(Bytes::from_static(sentence.as_bytes())).map_err(never);
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = status;
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_at_most_one_part() {
        assert_eq!(parse_range("bytes=0-9"), Some(0..10));
        assert_eq!(parse_range("bytes=1-536870912"), Some(1..(512 << 20) + 1));
        let too_long = ["bytes=0-536870912", "bytes=0-18446744073709551615"];
        for wrong in [&too_long[..], &["bytes=9-8", "bytes=0-", "0-9"]].concat() {
            assert_eq!(parse_range(wrong), None, "{wrong}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_takes_its_answer_too_slowly_loses_its_turn() {
        let sending = Arc::new(Semaphore::new(2));
        let acquire = async || sending.clone().acquire_owned().await.unwrap();
        let slow = LimitedTurn::start(acquire().await, 1 << 20);
        let quick = LimitedTurn::start(acquire().await, 1 << 20);
        drop(quick);
        sleep(Duration::from_secs(60 + 31)).await;
        assert_eq!(sending.available_permits(), 1, "only the slow one is sent");
        slow.check_time().unwrap();
        sleep(Duration::from_secs(2)).await;
        assert_eq!(sending.available_permits(), 2);
        slow.check_time().unwrap_err();
    }
}
