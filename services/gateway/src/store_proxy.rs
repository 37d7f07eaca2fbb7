//! The object-store proxy: the fleet's store over the gateway's port, for members without its keys.
//! Decides who may do what and limits sizes and times; the crate `store` reads and writes the
//! objects and documents the HTTP protocol.

mod error;
mod permissions;
mod request;
mod transfer;

use std::time::Duration;

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
use identity::GatewayCaller;
use serde::Serialize;
use store::{
    PARTS_MAX, PIECE_BYTES_MAX, ReceiveError, RelativePath, SignedAction as What, StorageError,
    Store, StoreObjects,
    proxy_protocol::{
        BeginUploadReply, CompleteUploadRequest, IDENTITY_HEADER, ListObjectsReply, PutPartReply,
        STORE_PATH, SignUrlReply,
    },
};
use tokio::time::timeout;

use self::{
    error::StoreProxyError,
    permissions::StoreAction,
    request::{ByteRange, StoreRequest},
    transfer::TransferLimiter,
};

/// The limit of operations that transfer no file data; clients wait as long for an answer.
const STORE_LIMIT: Duration = Duration::from_secs(45);
/// The limit to complete an upload or copy an object: hashing, and S3 assembles parts.
const COMPLETE_LIMIT: Duration = Duration::from_secs(280);
/// The names of the most parts that an upload may have.
const COMPLETE_BODY_BYTES_MAX: usize = PARTS_MAX * 128;
/// The largest manifest that is compared with an existing one.
const MANIFEST_BYTES_MAX: u64 = 16 << 20;
const MANIFEST: &str = "manifest.json";

type ProxyResult = Result<Response<Body>, StoreProxyError>;

/// Builds routes that expect a [`GatewayCaller`] in the extensions of each request.
pub fn build_routes(store: &Store) -> Router {
    let proxy = StoreProxy { objects: store.objects_by_key(), transfers: TransferLimiter::new() };
    let object = format!("{STORE_PATH}/{{*key}}");
    let root = format!("{STORE_PATH}/");
    Router::new()
        .route(&root, any(handle_request))
        .route(&object, any(handle_request))
        .with_state(proxy)
}

/// The object-store proxy. For each request it does these steps:
///
/// 1. Parse the method, path and headers to a [`StoreRequest`].
/// 2. Check that the caller may read, write or remove the key ([`permissions`]).
/// 3. Reject or skip writes to committed files: a file in a run's tree whose manifest exists
///    never changes.
/// 4. Redirect to a signed URL if the store has one and the client accepts it; otherwise
///    transfer the bytes under a [`TransferPermit`].
#[derive(Clone)]
struct StoreProxy {
    objects: StoreObjects,
    transfers: TransferLimiter,
}

async fn handle_request(State(proxy): State<StoreProxy>, request: Request) -> Response<Body> {
    let answered = proxy.answer_request(request).await;
    answered.unwrap_or_else(StoreProxyError::into_response)
}

impl StoreProxy {
    async fn answer_request(&self, request: Request) -> ProxyResult {
        let (head, body) = request.into_parts();
        let caller =
            head.extensions.get::<GatewayCaller>().ok_or(StoreProxyError::Unauthenticated)?;
        let ask = request::parse_request(&head.method, &head.uri, &head.headers)?;
        let owner = caller.name.as_str();
        check_permission(caller, &ask)?;
        match ask {
            StoreRequest::Hello => self.answer_hello().await,
            StoreRequest::Get { key, range, head: true, .. } => self.head_object(&key, range).await,
            StoreRequest::Get { key, range, without_redirect, .. } => {
                self.get_object((owner, &key), range, without_redirect).await
            }
            StoreRequest::List { below, directories } => self.list_keys(&below, directories).await,
            StoreRequest::Put { key, bytes } => self.put_object((owner, &key), bytes, body).await,
            StoreRequest::Begin { key } => {
                // A manifest is sent in one piece, so that it can be checked.
                if is_manifest(&key) {
                    return Err(StoreProxyError::ManifestInParts { key: key.to_string() });
                }
                let there = self.is_committed(&key).await?;
                let begin = self.objects.begin_upload(owner, &key);
                let upload = if there { None } else { Some(run_in_time(begin).await?) };
                json_response(&BeginUploadReply { upload })
            }
            StoreRequest::PutPart { key, part, bytes } => {
                check_piece_size(bytes)?;
                let held = self.held_bytes(&key, bytes);
                let permit = self.transfers.acquire_permit(owner, held).await?;
                let body = transfer::receive_body(body);
                let part = self.objects.put_part((owner, &key), &part, body, bytes).await?;
                drop(permit);
                json_response(&PutPartReply { part })
            }
            StoreRequest::Sign { key, bytes, part } => self.sign_upload(&key, bytes, part).await,
            StoreRequest::Complete { key, upload, bytes } => {
                self.complete_upload((owner, &key), &upload, bytes, body).await
            }
            StoreRequest::Abort { key, upload } => {
                run_in_time(self.objects.abort_upload(owner, &key, &upload)).await?;
                Ok(no_content())
            }
            StoreRequest::Copy { from, to } => {
                // The store verifies its bytes as they arrive.
                if is_manifest(&to) || StoreObjects::is_content_addressed(&to) {
                    return Err(StoreProxyError::Copy { key: to.to_string() });
                }
                if !self.is_committed(&to).await? {
                    run_with_limit(COMPLETE_LIMIT, self.objects.copy_object(&from, &to)).await?;
                }
                Ok(no_content())
            }
            StoreRequest::Remove { key } => {
                run_in_time(self.objects.remove_object(&key)).await?;
                Ok(no_content())
            }
        }
    }

    /// Checks that the store answers, and returns its identity in a header.
    async fn answer_hello(&self) -> ProxyResult {
        run_in_time(self.objects.check_reachable()).await?;
        let mut response = no_content();
        if let Some(name) = run_in_time(self.objects.store_identity()).await?
            && let Ok(name) = HeaderValue::from_str(name.trim())
        {
            response.headers_mut().insert(IDENTITY_HEADER, name);
        }
        Ok(response)
    }

    async fn head_object(&self, key: &RelativePath, range: Option<ByteRange>) -> ProxyResult {
        let size = run_in_time(self.objects.object_size(key)).await?;
        let mut response = Response::new(Body::empty());
        set_range_headers(&mut response, range, size)?;
        Ok(response)
    }

    /// Returns an object or a range of it, or a redirect to a signed URL unless
    /// `without_redirect` is set.
    async fn get_object(
        &self,
        (caller, key): (&str, &RelativePath),
        range: Option<ByteRange>,
        without_redirect: bool,
    ) -> ProxyResult {
        if !without_redirect
            && let Some(url) = run_in_time(self.objects.sign_url(key, &What::Get)).await?
        {
            return redirect_to(&url);
        }
        let permit = self.transfers.acquire_permit(caller, 0).await?;
        let size = run_in_time(self.objects.object_size(key)).await?;
        let mut response = Response::new(Body::empty());
        let range = set_range_headers(&mut response, range, size)?;
        if !range.is_empty() {
            let bytes = range.end - range.start;
            let pieces = run_in_time(self.objects.read_range(key, range)).await?;
            *response.body_mut() = transfer::send_object(pieces, bytes, permit);
        }
        Ok(response)
    }

    async fn list_keys(&self, below: &RelativePath, directories: bool) -> ProxyResult {
        json_response(&if directories {
            let directories = run_in_time(self.objects.list_directories(below)).await?;
            ListObjectsReply { directories, ..ListObjectsReply::default() }
        } else {
            let objects = run_in_time(self.objects.list_objects(below)).await?;
            ListObjectsReply { objects, ..ListObjectsReply::default() }
        })
    }

    /// Writes an object. A committed file stays as it is; its new body is read and discarded.
    async fn put_object(
        &self,
        (owner, key): (&str, &RelativePath),
        bytes: u64,
        body: Body,
    ) -> ProxyResult {
        check_piece_size(bytes)?;
        let held = self.held_bytes(key, bytes);
        let permit = self.transfers.acquire_permit(owner, held).await?;
        let mut body = Box::pin(transfer::receive_body(body));
        if self.is_committed(key).await? {
            // Read the whole body, as a client expects no response before its end.
            while body.try_next().await?.is_some() {}
            return Ok(no_content());
        }
        if is_manifest(key) && run_in_time(self.object_exists(key)).await? {
            self.compare_manifest(key, bytes, body).await?;
            return Ok(no_content());
        }
        self.objects.put_object((owner, key), body, bytes).await?;
        drop(permit);
        Ok(no_content())
    }

    /// Returns the number of bytes of a body that are in memory at once: all of them if they are sent
    /// to a bucket in one piece, or compared.
    fn held_bytes(&self, key: &RelativePath, bytes: u64) -> u64 {
        if self.objects.are_local() && !is_manifest(key) { 0 } else { bytes }
    }

    /// Accepts bytes that are equal to the existing manifest, which never changes.
    async fn compare_manifest(
        &self,
        key: &RelativePath,
        bytes: u64,
        mut body: impl futures::Stream<Item = Result<bytes::Bytes, ReceiveError>> + Unpin,
    ) -> Result<(), StoreProxyError> {
        let committed = || StoreProxyError::Committed { key: key.to_string() };
        let size = run_in_time(self.objects.object_size(key)).await?;
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
        let mut pieces = run_in_time(self.objects.read_range(key, 0..size)).await?;
        while let Some(piece) = pieces.try_next().await? {
            ours.extend_from_slice(&piece);
        }
        if ours == theirs { Ok(()) } else { Err(committed()) }
    }

    /// Returns a signed URL. Manifests and small pieces get none, as the gateway must check a
    /// manifest; committed files are reported as existing.
    async fn sign_upload(
        &self,
        key: &RelativePath,
        bytes: u64,
        part: Option<(String, usize)>,
    ) -> ProxyResult {
        if part.is_none() && self.is_committed(key).await? {
            return json_response(&SignUrlReply { url: None, there: true });
        }
        if is_manifest(key) || check_piece_size(bytes).is_err() {
            return json_response(&SignUrlReply::default());
        }
        let what = match part {
            None => What::Put,
            Some((upload, index)) => What::Part { upload, index },
        };
        let url = run_in_time(self.objects.sign_url(key, &what)).await?;
        json_response(&SignUrlReply { url, there: false })
    }

    /// Completes an upload, or aborts it if the file was committed in the meantime.
    async fn complete_upload(
        &self,
        (owner, key): (&str, &RelativePath),
        upload: &str,
        bytes: u64,
        body: Body,
    ) -> ProxyResult {
        let body = to_bytes(body, COMPLETE_BODY_BYTES_MAX).await;
        let body = body.map_err(|error| StoreProxyError::InvalidBody(error.to_string()))?;
        let CompleteUploadRequest { parts } = serde_json::from_slice(&body)
            .map_err(|error| StoreProxyError::InvalidBody(error.to_string()))?;
        if parts.len() > PARTS_MAX {
            return Err(StoreProxyError::InvalidBody(format!("more than {PARTS_MAX} parts")));
        }
        if is_manifest(key) {
            return Err(StoreProxyError::ManifestInParts { key: key.to_string() });
        }
        // An upload may have begun before the manifest was written that commits its file.
        if self.is_committed(key).await? {
            run_in_time(self.objects.abort_upload(owner, key, upload)).await?;
            return Ok(no_content());
        }
        let complete = self.objects.complete_upload((owner, key), upload, parts, bytes);
        run_with_limit(COMPLETE_LIMIT, complete).await?;
        Ok(no_content())
    }

    /// Returns true for an existing file in the tree of a run or model whose manifest exists too.
    async fn is_committed(&self, key: &RelativePath) -> Result<bool, StoreProxyError> {
        let segments: Vec<&str> = key.as_str().split('/').collect();
        let tree = match segments[..] {
            ["runs", run, kind, tree, _, ..] => format!("runs/{run}/{kind}/{tree}"),
            ["models", tree, _, ..] => format!("models/{tree}"),
            _ => return Ok(false),
        };
        let Ok(manifest) = RelativePath::new(format!("{tree}/{MANIFEST}")) else {
            return Ok(false);
        };
        if manifest == *key {
            return Ok(false);
        }
        Ok(run_in_time(self.object_exists(&manifest)).await?
            && run_in_time(self.object_exists(key)).await?)
    }

    async fn object_exists(&self, key: &RelativePath) -> Result<bool, StorageError> {
        match self.objects.object_size(key).await {
            Ok(_) => Ok(true),
            Err(fault) if fault.is_missing() => Ok(false),
            Err(fault) => Err(fault),
        }
    }
}

fn check_permission(caller: &GatewayCaller, ask: &StoreRequest) -> Result<(), StoreProxyError> {
    let (act, key) = match ask {
        StoreRequest::Hello => return Ok(()),
        StoreRequest::Get { key, .. } | StoreRequest::List { below: key, .. } => {
            (StoreAction::Read, key)
        }
        StoreRequest::Remove { key } => (StoreAction::Remove, key),
        StoreRequest::Copy { from, to } => {
            permissions::check_access(caller, StoreAction::Read, from)?;
            (StoreAction::Write, to)
        }
        StoreRequest::Put { key, .. }
        | StoreRequest::Begin { key }
        | StoreRequest::PutPart { key, .. }
        | StoreRequest::Sign { key, .. }
        | StoreRequest::Complete { key, .. }
        | StoreRequest::Abort { key, .. } => (StoreAction::Write, key),
    };
    Ok(permissions::check_access(caller, act, key)?)
}

fn check_piece_size(bytes: u64) -> Result<(), ReceiveError> {
    let limit = PIECE_BYTES_MAX;
    if bytes > limit { Err(ReceiveError::TooLarge { bytes, limit }) } else { Ok(()) }
}

fn is_manifest(key: &RelativePath) -> bool {
    key.as_str().rsplit('/').next() == Some(MANIFEST)
}

async fn run_in_time<T, E>(work: impl Future<Output = Result<T, E>>) -> Result<T, StoreProxyError>
where
    StoreProxyError: From<E>,
{
    run_with_limit(STORE_LIMIT, work).await
}

async fn run_with_limit<T, E>(
    limit: Duration,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, StoreProxyError>
where
    StoreProxyError: From<E>,
{
    match timeout(limit, work).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(StoreProxyError::TimedOut { seconds: limit.as_secs() }),
    }
}

/// Sets the length and range headers of a response, and returns the range of bytes to send.
fn set_range_headers(
    response: &mut Response<Body>,
    asked: Option<ByteRange>,
    size: u64,
) -> Result<std::ops::Range<u64>, StoreProxyError> {
    let range = match asked {
        None => 0..size,
        Some(asked) => {
            let range = asked.resolve_range(size).ok_or(StoreProxyError::Range { size })?;
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            let text = format!("bytes {}-{}/{size}", range.start, range.end - 1);
            set_header(response.headers_mut(), CONTENT_RANGE, &text);
            range
        }
    };
    let headers = response.headers_mut();
    set_header(headers, CONTENT_LENGTH, &(range.end - range.start).to_string());
    set_header(headers, CONTENT_TYPE, "application/octet-stream");
    set_header(headers, ACCEPT_RANGES, "bytes");
    Ok(range)
}

/// Skips values that are not valid in a header; ours are digits and words.
fn set_header(headers: &mut HeaderMap, name: axum::http::HeaderName, text: &str) {
    if let Ok(value) = HeaderValue::from_str(text) {
        headers.insert(name, value);
    }
}

fn redirect_to(url: &str) -> ProxyResult {
    let mut response = no_content();
    *response.status_mut() = StatusCode::TEMPORARY_REDIRECT;
    set_header(response.headers_mut(), LOCATION, url);
    Ok(response)
}

fn no_content() -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}

fn json_response<T: Serialize>(value: &T) -> ProxyResult {
    let text = serde_json::to_vec(value)
        .map_err(|error| StoreProxyError::InvalidBody(error.to_string()))?;
    let mut response = Response::new(Body::from(text));
    set_header(response.headers_mut(), CONTENT_TYPE, "application/json");
    Ok(response)
}
