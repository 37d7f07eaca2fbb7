//! Giving peers what is in the cache, and what is on its way into it: over HTTP/2 with TLS, to
//! members of the fleet, by digest.
//!
//! | | |
//! |---|---|
//! | `GET /b3/HEX` with `Range` | those bytes, if they are here |
//! | `GET /parts/HEX` | which parts are here or claimed, and again when that changes |
//!
//! `/parts` answers with frames of two bitmaps, a bit for each part, the first in the lowest: what
//! is here, and what is on its way from the store. It ends when all is here, or nothing came to be
//! here for a while.

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

use authority::Fingerprint;
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
use rustix::io::ReadWriteFlags;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout},
};
use wire::{AgentId, Digest};

use super::{Peers, link::AGENT, plan::Marks};
use crate::{cache::Cache, parts::Parts, store::blocking};

/// More wait until one closes.
const CONNECTIONS_MAX: usize = 64;
/// Over one connection.
const REQUESTS_MAX: u32 = 32;
/// Requests for bytes that are being answered, in all.
const SENDING_MAX: usize = 64;
/// A request waits so long for its turn.
const TURN_LIMIT: Duration = Duration::from_secs(2);
const SHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Whoever shows in this time no record of a member's makes room for others.
const STRANGER_LIMIT: Duration = Duration::from_secs(10);
/// A connection over which nothing is asked.
const PING_EVERY: Duration = Duration::from_secs(20);
/// One that is used still.
const CONNECTION_LIMIT: Duration = Duration::from_secs(3600);
/// Who asks for what is not here may wait so long for it to be begun.
const BEGIN_LIMIT: Duration = Duration::from_secs(20);
/// Between two words on what is here. Each is told to every peer, which costs more than it helps when
/// it is told at once.
const SAY_EVERY: Duration = Duration::from_millis(12);
const READ_BYTES: u64 = 256 << 10;
/// Accepting fails when the machine is out of something; trying at once would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

type Body = UnsyncBoxBody<Bytes, io::Error>;

struct Server {
    peers: Peers,
    cache: Cache,
    sending: Arc<Semaphore>,
}

impl Peers {
    /// Serves for as long as it is polled. Connections end with it.
    pub async fn serve(&self, listener: TcpListener, cache: &Cache) -> Infallible {
        let sending = Arc::new(Semaphore::new(SENDING_MAX));
        let server = Arc::new(Server { peers: self.clone(), cache: cache.clone(), sending });
        let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let permit = room.clone().acquire_owned().await.expect("nobody closes it");
            let Ok((socket, _)) = listener.accept().await else {
                sleep(ACCEPT_PAUSE).await;
                continue;
            };
            while connections.try_join_next().is_some() {}
            let connected = server.clone().connected(socket, permit);
            connections.spawn(timeout(CONNECTION_LIMIT, connected));
        }
    }
}

impl Server {
    async fn connected(self: Arc<Self>, socket: TcpStream, _permit: OwnedSemaphorePermit) {
        // What cannot be set costs speed alone.
        let _ = socket.set_nodelay(true);
        let shaken = timeout(SHAKE_LIMIT, self.peers.inner.acceptor.accept(socket)).await;
        let Ok(Ok(socket)) = shaken else { return };
        let shown = socket.get_ref().1.peer_certificates();
        let Some(key) = shown.and_then(|shown| shown.first()).map(|one| Fingerprint::of(one))
        else {
            return;
        };
        let is_known = Arc::new(AtomicBool::new(false));
        let known = is_known.clone();
        let answer = service_fn(move |request| {
            let (server, known) = (self.clone(), known.clone());
            async move { Ok::<_, Infallible>(server.answer(key, request, &known).await) }
        });
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(REQUESTS_MAX)
            .keep_alive_interval(PING_EVERY)
            .max_send_buf_size(1 << 20)
            .serve_connection(TokioIo::new(socket), answer);
        let mut connection = std::pin::pin!(connection);
        let ended = timeout(STRANGER_LIMIT, &mut connection).await.is_ok();
        if !ended && is_known.load(Ordering::Relaxed) {
            // Whoever asked may have gone.
            let _ = connection.await;
        }
    }

    async fn answer(
        &self,
        key: Fingerprint,
        request: Request<Incoming>,
        known: &AtomicBool,
    ) -> Response<Body> {
        let named = request.headers().get(AGENT).and_then(|name| name.to_str().ok());
        let Some(name) = named.and_then(|name| name.parse::<AgentId>().ok()) else {
            return refusal(StatusCode::UNAUTHORIZED, "say who you are");
        };
        if !self.peers.is_member(&name, key).await {
            tracing::debug!(%name, "somebody who is no member asked for a file");
            return refusal(StatusCode::FORBIDDEN, "that agent is not known by that key");
        }
        known.store(true, Ordering::Relaxed);
        if request.method() != Method::GET {
            return refusal(StatusCode::METHOD_NOT_ALLOWED, "only GET");
        }
        let path = request.uri().path().trim_start_matches('/');
        let (what, hex) = path.split_once('/').unwrap_or_default();
        let Ok(digest) = format!("b3:{hex}").parse::<Digest>() else {
            return refusal(StatusCode::NOT_FOUND, "there is only /b3/HEX and /parts/HEX");
        };
        match what {
            "b3" => {
                let asked = request.headers().get(RANGE).and_then(|range| range.to_str().ok());
                let Some(range) = asked.and_then(parse_range) else {
                    return refusal(StatusCode::BAD_REQUEST, "ask for a Range: bytes=FIRST-LAST");
                };
                self.bytes(digest, range).await
            }
            "parts" => self.parts(digest),
            _ => refusal(StatusCode::NOT_FOUND, "there is only /b3/HEX and /parts/HEX"),
        }
    }

    async fn bytes(&self, digest: Digest, range: Range<u64>) -> Response<Body> {
        let turn = timeout(TURN_LIMIT, self.sending.clone().acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            return refusal(StatusCode::SERVICE_UNAVAILABLE, "too many ask; try again");
        };
        let file = match self.peers.inner.shelf.get(digest) {
            Some(here) if !here.covers(&range) => None,
            Some(here) => here.file.try_clone().ok(),
            None => self.whole(digest).await.filter(|(_, bytes)| range.end <= *bytes).map(|f| f.0),
        };
        let Some(file) = file else {
            return refusal(StatusCode::NOT_FOUND, "those bytes are not here");
        };
        let told = format!("bytes {}-{}/*", range.start, range.end - 1);
        // The turn is over when the last byte is read.
        let state = (self.peers.clone(), Arc::new(file), range, turn);
        let pieces = stream::try_unfold(state, |(peers, file, range, turn)| async move {
            if range.is_empty() {
                return Ok(None);
            }
            let (from, next) = (file.clone(), range.end.min(range.start + READ_BYTES));
            let now = range.start..next;
            let piece = match read_at_once(&file, &now) {
                Some(piece) => piece,
                None => blocking(move || read(&from, now)).await?,
            };
            peers.inner.counts.went_to_peers(next - range.start);
            Ok(Some((Frame::data(piece), (peers, file, next..range.end, turn))))
        });
        let mut response = Response::new(StreamBody::new(pieces.boxed()).boxed_unsync());
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        if let Ok(value) = told.parse() {
            response.headers_mut().insert(CONTENT_RANGE, value);
        }
        response
    }

    fn parts(&self, digest: Digest) -> Response<Body> {
        let state = Some((self.peers.clone(), self.cache.clone(), None));
        let said = stream::unfold(state, move |state| async move {
            let (peers, cache, mut heard) = state?;
            loop {
                // Taken before looking, so that nothing is begun unseen.
                let mut begun = peers.inner.shelf.begun();
                begun.borrow_and_update();
                if heard.is_none() {
                    heard = peers.inner.shelf.get(digest).map(|here| {
                        let mut heard = here.said.subscribe();
                        heard.mark_changed();
                        heard
                    });
                }
                if let Some(mut changes) = heard.take() {
                    if changes.changed().await.is_ok() {
                        let frame = frame(&changes.borrow_and_update());
                        // Many parts are told of at once.
                        sleep(SAY_EVERY).await;
                        return Some((Ok(Frame::data(frame)), Some((peers, cache, Some(changes)))));
                    }
                    continue;
                }
                if let Some((_, bytes)) = whole(&cache, digest).await {
                    let count = Parts::part_bytes(bytes).map_or(0, |part| bytes.div_ceil(part));
                    let all = vec![true; usize::try_from(count).unwrap_or(0)];
                    let none = vec![false; all.len()];
                    return Some((Ok(Frame::data(frame(&(all, none)))), None));
                }
                timeout(BEGIN_LIMIT, begun.changed()).await.ok()?.ok()?;
            }
        });
        Response::new(StreamBody::new(said.boxed()).boxed_unsync())
    }

    async fn whole(&self, digest: Digest) -> Option<(File, u64)> {
        whole(&self.cache, digest).await
    }
}

async fn whole(cache: &Cache, digest: Digest) -> Option<(File, u64)> {
    let cache = cache.clone();
    blocking(move || {
        let file = cache.lend(digest)?;
        let bytes = file.metadata().ok()?.len();
        Some((file, bytes))
    })
    .await
}

/// What came just now is in memory still, and a trip to another thread would take longer.
fn read_at_once(file: &File, range: &Range<u64>) -> Option<Bytes> {
    let mut piece = vec![0; usize::try_from(range.end - range.start).ok()?];
    let into = &mut [IoSliceMut::new(&mut piece)];
    let read = rustix::io::preadv2(file, into, range.start, ReadWriteFlags::NOWAIT);
    (read == Ok(piece.len())).then(|| piece.into())
}

fn read(file: &File, range: Range<u64>) -> io::Result<Bytes> {
    let mut piece = vec![0; usize::try_from(range.end - range.start).unwrap_or(0)];
    file.read_exact_at(&mut piece, range.start)?;
    Ok(piece.into())
}

fn frame((here, claimed): &(Marks, Marks)) -> Bytes {
    let bits = |marks: &Marks| -> Vec<u8> {
        let byte =
            |eight: &[bool]| eight.iter().rev().fold(0, |byte, mark| byte << 1 | u8::from(*mark));
        marks.chunks(8).map(byte).collect()
    };
    [bits(here), bits(claimed)].concat().into()
}

/// `bytes=0-9`
fn parse_range(text: &str) -> Option<Range<u64>> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last).then_some(())?;
    Some(first..last.checked_add(1)?)
}

fn refusal(status: StatusCode, sentence: &'static str) -> Response<Body> {
    let never = |never: Infallible| match never {};
    let body = Full::new(Bytes::from_static(sentence.as_bytes())).map_err(never);
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = status;
    response
}
