//! The fleet's store over the gateway's port, for members without its keys: decides who may do
//! what and what is bounded; the objects are `store`'s business. What is said is in
//! `store::door_protocol`.

mod answer;
mod ask;
mod rights;
mod transfer;

use std::time::Duration;

use authority::Caller;
use axum::{
    Router,
    body::{Body, to_bytes},
    extract::{Request, State},
    http::{
        HeaderMap, HeaderValue, Response, StatusCode,
        header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, LOCATION},
    },
    routing::any,
};
use futures::TryStreamExt;
use serde::Serialize;
use store::{
    Fault, Objects, PARTS_MAX, PIECE_BYTES_MAX, ReceiveError, RelativePath, Signed as What, Store,
    door_protocol::{Begun, Completing, IDENTITY, Listing, PATH, Sent, Signed},
};
use tokio::time::timeout;

use self::{
    answer::Refusal,
    ask::{Ask, Asked},
    rights::Act,
    transfer::Transfers,
};

/// What the store has for anything but bytes; clients wait as long for an answer.
const STORE_LIMIT: Duration = Duration::from_secs(45);
/// Hashing what was uploaded, and S3 putting parts together, take their time.
const COMPLETE_LIMIT: Duration = Duration::from_secs(280);
/// Names of as many parts as an upload may have.
const COMPLETING_BYTES_MAX: usize = PARTS_MAX * 128;
/// Of a manifest that is compared with another.
const MANIFEST_BYTES_MAX: u64 = 16 << 20;
const MANIFEST: &str = "manifest.json";

type Answer = Result<Response<Body>, Refusal>;

/// Routes that expect a [`Caller`] in each request's extensions, from a layer in front of them.
pub fn routes(store: &Store) -> Router {
    let door = Door { objects: store.objects(), transfers: Transfers::new() };
    let object = format!("{PATH}/{{*key}}");
    let root = format!("{PATH}/");
    Router::new().route(&root, any(serve)).route(&object, any(serve)).with_state(door)
}

#[derive(Clone)]
struct Door {
    objects: Objects,
    transfers: Transfers,
}

async fn serve(State(door): State<Door>, request: Request) -> Response<Body> {
    let answered = door.answer(request).await;
    answered.unwrap_or_else(Refusal::into_response)
}

impl Door {
    async fn answer(&self, request: Request) -> Answer {
        let (head, body) = request.into_parts();
        let caller = head.extensions.get::<Caller>().ok_or(Refusal::Stranger)?;
        let ask = ask::parse(&head.method, &head.uri, &head.headers)?;
        let owner = caller.name.as_str();
        check(caller, &ask)?;
        match ask {
            Ask::Hello => self.hello().await,
            Ask::Get { key, range, head: true, .. } => self.head(&key, range).await,
            Ask::Get { key, range, through, .. } => self.get(&key, range, through).await,
            Ask::List { below, directories } => self.list(&below, directories).await,
            Ask::Put { key, bytes } => self.put((owner, &key), bytes, body).await,
            Ask::Begin { key } => {
                // Manifests come whole, to be looked at.
                if is_manifest(&key) {
                    return Err(Refusal::Parts { key: key.to_string() });
                }
                let there = self.is_kept(&key).await?;
                let begin = self.objects.begin(owner, &key);
                let upload = if there { None } else { Some(in_time(begin).await?) };
                json(&Begun { upload })
            }
            Ask::PutPart { key, part, bytes } => {
                small(bytes)?;
                let permit = self.transfers.permit(bytes).await?;
                let body = transfer::incoming(body);
                let part = self.objects.put_part((owner, &key), &part, body, bytes).await?;
                drop(permit);
                json(&Sent { part })
            }
            Ask::Sign { key, bytes, part } => self.sign(&key, bytes, part).await,
            Ask::Complete { key, upload, bytes } => {
                self.complete((owner, &key), &upload, bytes, body).await
            }
            Ask::Abort { key, upload } => {
                in_time(self.objects.abort(owner, &key, &upload)).await?;
                Ok(nothing())
            }
            Ask::Copy { from, to } => {
                if !self.is_kept(&to).await? {
                    limited(COMPLETE_LIMIT, self.objects.copy(&from, &to)).await?;
                }
                Ok(nothing())
            }
            Ask::Remove { key } => {
                in_time(self.objects.remove(&key)).await?;
                Ok(nothing())
            }
        }
    }

    async fn hello(&self) -> Answer {
        in_time(self.objects.answers()).await?;
        let mut response = nothing();
        if let Some(name) = in_time(self.objects.identity()).await?
            && let Ok(name) = HeaderValue::from_str(name.trim())
        {
            response.headers_mut().insert(IDENTITY, name);
        }
        Ok(response)
    }

    async fn head(&self, key: &RelativePath, range: Option<Asked>) -> Answer {
        let size = in_time(self.objects.size(key)).await?;
        let mut response = Response::new(Body::empty());
        describe(&mut response, range, size)?;
        Ok(response)
    }

    async fn get(&self, key: &RelativePath, range: Option<Asked>, through: bool) -> Answer {
        if !through && let Some(url) = in_time(self.objects.sign(key, &What::Get)).await? {
            return redirect(&url);
        }
        let permit = self.transfers.permit(0).await?;
        let size = in_time(self.objects.size(key)).await?;
        let mut response = Response::new(Body::empty());
        let range = describe(&mut response, range, size)?;
        if !range.is_empty() {
            let pieces = in_time(self.objects.read(key, range)).await?;
            *response.body_mut() = transfer::outgoing(pieces, permit);
        }
        Ok(response)
    }

    async fn list(&self, below: &RelativePath, directories: bool) -> Answer {
        json(&if directories {
            let directories = in_time(self.objects.directories(below)).await?;
            Listing { directories, ..Listing::default() }
        } else {
            let objects = in_time(self.objects.list(below)).await?;
            Listing { objects, ..Listing::default() }
        })
    }

    async fn put(&self, (owner, key): (&str, &RelativePath), bytes: u64, body: Body) -> Answer {
        small(bytes)?;
        let permit = self.transfers.permit(bytes).await?;
        let mut body = Box::pin(transfer::incoming(body));
        if self.is_kept(key).await? {
            // Read to its end, for a client is told nothing before.
            while body.try_next().await?.is_some() {}
            return Ok(nothing());
        }
        if is_manifest(key) && in_time(self.exists(key)).await? {
            self.compare(key, bytes, body).await?;
            return Ok(nothing());
        }
        self.objects.put((owner, key), body, bytes).await?;
        drop(permit);
        Ok(nothing())
    }

    /// A manifest that is there stays; the same again is fine.
    async fn compare(
        &self,
        key: &RelativePath,
        bytes: u64,
        mut body: impl futures::Stream<Item = Result<bytes::Bytes, ReceiveError>> + Unpin,
    ) -> Result<(), Refusal> {
        let committed = || Refusal::Committed { key: key.to_string() };
        let size = in_time(self.objects.size(key)).await?;
        if size != bytes || size > MANIFEST_BYTES_MAX {
            return Err(committed());
        }
        let (mut theirs, mut ours) = (Vec::new(), Vec::new());
        while let Some(piece) = body.try_next().await? {
            theirs.extend_from_slice(&piece);
            if theirs.len() as u64 > size {
                return Err(committed());
            }
        }
        let mut pieces = in_time(self.objects.read(key, 0..size)).await?;
        while let Some(piece) = pieces.try_next().await? {
            ours.extend_from_slice(&piece);
        }
        if ours == theirs { Ok(()) } else { Err(committed()) }
    }

    /// An address for a piece of an object; manifests come here, to be looked at.
    async fn sign(&self, key: &RelativePath, bytes: u64, part: Option<(String, usize)>) -> Answer {
        if part.is_none() && self.is_kept(key).await? {
            return json(&Signed { url: None, there: true });
        }
        if is_manifest(key) || small(bytes).is_err() {
            return json(&Signed::default());
        }
        let what = match part {
            None => What::Put,
            Some((upload, index)) => What::Part { upload, index },
        };
        let url = in_time(self.objects.sign(key, &what)).await?;
        json(&Signed { url, there: false })
    }

    async fn complete(
        &self,
        (owner, key): (&str, &RelativePath),
        upload: &str,
        bytes: u64,
        body: Body,
    ) -> Answer {
        let body = to_bytes(body, COMPLETING_BYTES_MAX).await;
        let body = body.map_err(|error| Refusal::Body(error.to_string()))?;
        let Completing { parts } =
            serde_json::from_slice(&body).map_err(|error| Refusal::Body(error.to_string()))?;
        if parts.len() > PARTS_MAX {
            return Err(Refusal::Body(format!("more than {PARTS_MAX} parts")));
        }
        if is_manifest(key) {
            return Err(Refusal::Parts { key: key.to_string() });
        }
        // An upload may be older than the manifest that makes its file a part of what is committed.
        if self.is_kept(key).await? {
            in_time(self.objects.abort(owner, key, upload)).await?;
            return Ok(nothing());
        }
        let complete = self.objects.complete((owner, key), upload, parts, bytes);
        limited(COMPLETE_LIMIT, complete).await?;
        Ok(nothing())
    }

    /// A file of a run's tree whose manifest is there: it is part of what was committed.
    async fn is_kept(&self, key: &RelativePath) -> Result<bool, Refusal> {
        let segments: Vec<&str> = key.as_str().split('/').collect();
        let ["runs", run, kind, tree, _, ..] = segments[..] else { return Ok(false) };
        let manifest = RelativePath::new(format!("runs/{run}/{kind}/{tree}/{MANIFEST}"));
        let Ok(manifest) = manifest else { return Ok(false) };
        if manifest == *key {
            return Ok(false);
        }
        Ok(in_time(self.exists(&manifest)).await? && in_time(self.exists(key)).await?)
    }

    async fn exists(&self, key: &RelativePath) -> Result<bool, Fault> {
        match self.objects.size(key).await {
            Ok(_) => Ok(true),
            Err(fault) if fault.is_missing() => Ok(false),
            Err(fault) => Err(fault),
        }
    }
}

fn check(caller: &Caller, ask: &Ask) -> Result<(), Refusal> {
    let (act, key) = match ask {
        Ask::Hello => return Ok(()),
        Ask::Get { key, .. } | Ask::List { below: key, .. } => (Act::Read, key),
        Ask::Remove { key } => (Act::Remove, key),
        Ask::Copy { from, to } => {
            rights::check(caller, Act::Read, from)?;
            (Act::Write, to)
        }
        Ask::Put { key, .. }
        | Ask::Begin { key }
        | Ask::PutPart { key, .. }
        | Ask::Sign { key, .. }
        | Ask::Complete { key, .. }
        | Ask::Abort { key, .. } => (Act::Write, key),
    };
    Ok(rights::check(caller, act, key)?)
}

fn small(bytes: u64) -> Result<(), ReceiveError> {
    let limit = PIECE_BYTES_MAX;
    if bytes > limit { Err(ReceiveError::TooLarge { bytes, limit }) } else { Ok(()) }
}

fn is_manifest(key: &RelativePath) -> bool {
    key.as_str().rsplit('/').next() == Some(MANIFEST)
}

async fn in_time<T, E>(work: impl Future<Output = Result<T, E>>) -> Result<T, Refusal>
where
    Refusal: From<E>,
{
    limited(STORE_LIMIT, work).await
}

async fn limited<T, E>(
    limit: Duration,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, Refusal>
where
    Refusal: From<E>,
{
    match timeout(limit, work).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(Refusal::Slow { seconds: limit.as_secs() }),
    }
}

/// Which bytes are answered, and the headers that say so.
fn describe(
    response: &mut Response<Body>,
    asked: Option<Asked>,
    size: u64,
) -> Result<std::ops::Range<u64>, Refusal> {
    let range = match asked {
        None => 0..size,
        Some(asked) => {
            let range = asked.of(size).ok_or(Refusal::Range { size })?;
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            let text = format!("bytes {}-{}/{size}", range.start, range.end - 1);
            set(response.headers_mut(), CONTENT_RANGE, &text);
            range
        }
    };
    let headers = response.headers_mut();
    set(headers, CONTENT_LENGTH, &(range.end - range.start).to_string());
    set(headers, CONTENT_TYPE, "application/octet-stream");
    set(headers, ACCEPT_RANGES, "bytes");
    Ok(range)
}

/// What could not be a header's value is left out: it is ours, and digits and words.
fn set(headers: &mut HeaderMap, name: axum::http::HeaderName, text: &str) {
    if let Ok(value) = HeaderValue::from_str(text) {
        headers.insert(name, value);
    }
}

fn redirect(url: &str) -> Answer {
    let mut response = nothing();
    *response.status_mut() = StatusCode::TEMPORARY_REDIRECT;
    set(response.headers_mut(), LOCATION, url);
    Ok(response)
}

fn nothing() -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}

fn json<T: Serialize>(value: &T) -> Answer {
    let text = serde_json::to_vec(value).map_err(|error| Refusal::Body(error.to_string()))?;
    let mut response = Response::new(Body::from(text));
    set(response.headers_mut(), CONTENT_TYPE, "application/json");
    Ok(response)
}
