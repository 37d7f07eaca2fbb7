//! Requests to a gateway and their retries: the bearer token is read again for each try, an
//! unreachable network or gateway is waited for, and a refusal is reported with the gateway's
//! message.

use std::{
    error::Error as StdError,
    io,
    net::SocketAddr,
    ops::Range,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bounded_http::TransferPace;
use bytes::{Bytes, BytesMut};
use object_store::{Error, Result, path::Path};
use reqwest::{
    Certificate, ClientBuilder, Method, Response, StatusCode, Url,
    dns::{Addrs, Name, Resolve, Resolving},
    header::{AUTHORIZATION, CONTENT_RANGE, ETAG, HeaderMap, LOCATION, RANGE},
    redirect::Policy,
};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout};

use super::{
    GatewayStore, is_worth_signing,
    protocol::{
        BeginUploadReply, CompleteUploadRequest, IDENTITY_HEADER, ListObjectsReply, PutPartReply,
        RELAY_HEADER, REPLY_BYTES_MAX, SERVER_NAME, SignUrlReply,
    },
};
use crate::{
    error::{GatewayRefusal, OpenError},
    request_settings::{CONNECT_TIMEOUT, REQUEST_TIMEOUT, retry_config},
};

/// The longest time before the answer to a request without a body.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);
/// The number of rejected tokens after which a call fails; the token may just be in renewal.
const REFUSALS_MAX: u32 = 3;
/// The time for which signed URLs are not used after one was unreachable.
const RELAY_DURATION: Duration = Duration::from_secs(300);
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 32 << 20;
const MESSAGE_BYTES_MAX: usize = 4096;
const STORE_NAME: &str = "gateway";

#[derive(Debug)]
pub(crate) struct GatewayClient {
    base: Url,
    gateway: reqwest::Client,
    /// The client for signed URLs, which never sends the bearer token.
    signed_urls: reqwest::Client,
    bearer: Option<PathBuf>,
    /// The time until which all bytes are relayed through the gateway.
    relay_until: Mutex<Option<Instant>>,
}

struct GatewayCall<'a> {
    method: Method,
    key: &'a Path,
    query: Vec<(&'a str, String)>,
    range: Option<Range<u64>>,
    body: Option<Bytes>,
}

enum CallOutcome {
    Answered(Response),
    /// The object exists already; nothing was sent.
    AlreadyStored,
    Refused(Error),
    /// The bearer token or the signed URL was rejected; it may have expired.
    Unauthorized(Error),
    /// The try failed and may be repeated.
    Failed(Error),
}

/// A body that is being received, and its byte range in the object.
pub(super) struct ObjectBody {
    response: Response,
    pace: TransferPace,
    range: Range<u64>,
    size: u64,
}

impl ObjectBody {
    fn new(response: Response) -> Result<Self> {
        let headers = response.headers();
        let (range, size) = match headers.get(CONTENT_RANGE) {
            Some(value) => {
                value.to_str().ok().and_then(parse_range).ok_or_else(|| malformed_reply("range"))?
            }
            None => {
                let bytes = response.content_length().ok_or_else(|| malformed_reply("length"))?;
                (0..bytes, bytes)
            }
        };
        Ok(Self { response, pace: TransferPace::default(), range, size })
    }

    pub(super) fn byte_range(&self) -> Range<u64> {
        self.range.clone()
    }

    pub(super) fn object_size(&self) -> u64 {
        self.size
    }

    /// Returns `None` when the body ended, broke off or came too slowly.
    pub(super) async fn next_piece(&mut self) -> Option<Bytes> {
        next_chunk(&mut self.response, &mut self.pace).await?.ok()?
    }
}

/// Returns the next bytes of an answer, or `None` if they come too slowly.
async fn next_chunk(
    response: &mut Response,
    pace: &mut TransferPace,
) -> Option<reqwest::Result<Option<Bytes>>> {
    let count_bytes = |chunk: &reqwest::Result<Option<Bytes>>| match chunk {
        Ok(Some(chunk)) => chunk.len(),
        _ => 0,
    };
    pace.wait_for(response.chunk(), count_bytes).await
}

/// Parses a `Content-Range` such as `bytes 0-9/100` to the range and the object's size.
fn parse_range(text: &str) -> Option<(Range<u64>, u64)> {
    let (range, size) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let size = size.parse().ok()?;
    (first <= last && last < size).then_some((first..last + 1, size))
}

fn malformed_reply(what: &str) -> Error {
    generic_error(format!("the answer has no {what} that can be used"))
}

/// Builds an error that may be retried.
pub(super) fn generic_error(source: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
    Error::Generic { store: STORE_NAME, source: source.into() }
}

/// Resolves any name to the addresses of all hosts of the gateway.
struct GatewayHosts(Vec<String>);

impl Resolve for GatewayHosts {
    fn resolve(&self, _: Name) -> Resolving {
        let hosts = self.0.clone();
        Box::pin(async move {
            let (mut found, mut failed) = (Vec::<SocketAddr>::new(), None);
            for host in hosts {
                match tokio::net::lookup_host((host, 0)).await {
                    Ok(addresses) => found.extend(addresses),
                    Err(error) => failed = Some(error),
                }
            }
            match failed {
                Some(error) if found.is_empty() => Err(error.into()),
                _ => Ok(Box::new(found.into_iter()) as Addrs),
            }
        })
    }
}

impl GatewayClient {
    pub(super) fn new(gateway: &GatewayStore) -> std::result::Result<Self, OpenError> {
        let (url, bearer) = (gateway.store_url(), gateway.bearer.clone());
        let refused = |reason: String| OpenError::Url { url: url.clone(), reason };
        let settings = |source: Box<dyn StdError + Send + Sync>| OpenError::Settings {
            url: url.clone(),
            source,
        };
        let address = Url::parse(&url).map_err(|error| refused(error.to_string()))?;
        let mut base = address;
        let builder = client_builder().redirect(Policy::none()).no_proxy();
        let builder = match &gateway.ca {
            None => builder.http2_prior_knowledge(),
            Some(path) => {
                let unread = |error: io::Error| {
                    refused(format!(
                        "cannot read the fleet's authority {}: {error}",
                        path.display()
                    ))
                };
                let pem = std::fs::read(path).map_err(unread)?;
                let ca = Certificate::from_pem_bundle(&pem).map_err(|e| settings(e.into()))?;
                base.set_host(Some(SERVER_NAME)).map_err(|error| refused(error.to_string()))?;
                builder
                    .tls_certs_only(ca)
                    .dns_resolver(GatewayHosts(gateway.gateway_hosts()))
                    .https_only(true)
            }
        };
        let gateway = builder.build().map_err(|error| settings(error.into()))?;
        let others = || self::client_builder().redirect(Policy::none());
        // A host without certificate authorities (such as a container image with this program
        // alone) trusts no public server: its TLS traffic goes through the gateway.
        let others = others().build().or_else(|_| others().tls_certs_only([]).build());
        let others = others.map_err(|error| settings(error.into()))?;
        Ok(Self { base, gateway, signed_urls: others, bearer, relay_until: Mutex::default() })
    }

    pub(super) fn base_url(&self) -> &str {
        self.base.as_str()
    }

    pub(super) async fn head_object(&self, key: &Path) -> Result<u64> {
        let answer = self.call_for_reply(&GatewayCall::new(Method::HEAD, key)).await?;
        let length = answer.headers().get(reqwest::header::CONTENT_LENGTH);
        length
            .and_then(|value| value.to_str().ok()?.parse().ok())
            .ok_or_else(|| malformed_reply("length"))
    }

    pub(super) async fn get(&self, key: &Path, range: Option<Range<u64>>) -> Result<ObjectBody> {
        let empty = range.as_ref().is_some_and(Range::is_empty);
        let call =
            GatewayCall { range: range.filter(|_| !empty), ..GatewayCall::new(Method::GET, key) };
        ObjectBody::new(self.call_for_reply(&call).await?)
    }

    pub(super) async fn put_object(&self, key: &Path, bytes: Bytes) -> Result<()> {
        let call = GatewayCall { body: Some(bytes), ..GatewayCall::new(Method::PUT, key) };
        self.call_with_retries(&call).await.map(|_| ())
    }

    /// Begins an upload and returns its name, or `None` when the object exists already.
    pub(crate) async fn begin_upload(&self, key: &Path) -> Result<Option<String>> {
        let answer = self.send_request(Method::POST, key, &[("begin", "")], None).await?;
        Ok(read_json::<BeginUploadReply>(answer).await?.upload)
    }

    /// Sends a part and returns its name for `complete_upload`.
    pub(crate) async fn put_part(
        &self,
        key: &Path,
        upload: &str,
        (index, offset): (usize, u64),
        bytes: Bytes,
    ) -> Result<String> {
        let query = vec![
            ("upload", upload.to_owned()),
            ("part", index.to_string()),
            ("offset", offset.to_string()),
        ];
        let call = GatewayCall { query, body: Some(bytes), ..GatewayCall::new(Method::PUT, key) };
        let answer = self.call_for_reply(&call).await?;
        if let Some(name) = answer.headers().get(ETAG) {
            return Ok(name.to_str().map_err(|_| malformed_reply("etag"))?.to_owned());
        }
        Ok(read_json::<PutPartReply>(answer).await?.part)
    }

    pub(crate) async fn complete_upload(
        &self,
        key: &Path,
        upload: &str,
        parts: Vec<String>,
        bytes: u64,
    ) -> Result<()> {
        let size = bytes.to_string();
        let query = [("complete", size.as_str()), ("upload", upload)];
        let body = serde_json::to_vec(&CompleteUploadRequest { parts }).map_err(generic_error)?;
        self.send_request(Method::POST, key, &query, Some(body.into())).await.map(|_| ())
    }

    pub(crate) async fn abort_upload(&self, key: &Path, upload: &str) -> Result<()> {
        self.send_request(Method::DELETE, key, &[("upload", upload)], None).await.map(|_| ())
    }

    /// Lists objects (`what` is `all`) or directories (`what` is `directories`).
    pub(super) async fn list_objects(&self, below: &Path, what: &str) -> Result<ListObjectsReply> {
        read_json(self.send_request(Method::GET, below, &[("list", what)], None).await?).await
    }

    /// Checks that the store answers, and returns its identity if it has one.
    pub(super) async fn read_identity(&self) -> Result<Option<String>> {
        let root = Path::default();
        let answered = self.call_for_reply(&GatewayCall::new(Method::HEAD, &root)).await?;
        let name = answered.headers().get(IDENTITY_HEADER);
        Ok(name.and_then(|name| name.to_str().ok()).map(str::to_owned))
    }

    pub(super) async fn send_request(
        &self,
        method: Method,
        key: &Path,
        query: &[(&str, &str)],
        body: Option<Bytes>,
    ) -> Result<Response> {
        let query = query.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        self.call_for_reply(&GatewayCall { query, body, ..GatewayCall::new(method, key) }).await
    }

    pub(super) async fn pause_before_retry(&self) {
        sleep(retry_delay(0)).await;
    }

    /// Fails if the reply is missing because the object exists already.
    async fn call_for_reply(&self, call: &GatewayCall<'_>) -> Result<Response> {
        self.call_with_retries(call).await?.ok_or_else(|| malformed_reply("content"))
    }

    /// Sends a call until it is answered or refused, or the retry limit has passed. Returns `None`
    /// when the object exists already.
    async fn call_with_retries(&self, call: &GatewayCall<'_>) -> Result<Option<Response>> {
        let started = Instant::now();
        let (mut tries, mut refusals) = (0, 0);
        loop {
            let error = match self.try_once(call).await {
                CallOutcome::Answered(response) => return Ok(Some(response)),
                CallOutcome::AlreadyStored => return Ok(None),
                CallOutcome::Refused(error) => return Err(error),
                CallOutcome::Unauthorized(error) => {
                    refusals += 1;
                    if refusals >= REFUSALS_MAX {
                        return Err(error);
                    }
                    error
                }
                CallOutcome::Failed(error) => error,
            };
            if started.elapsed() >= retry_config().retry_timeout {
                return Err(error);
            }
            tracing::debug!(%error, tries, "retrying a request to the store's gateway");
            sleep(retry_delay(tries)).await;
            tries += 1;
        }
    }

    /// Sends a call to a signed URL if the gateway offers one, else to the gateway.
    async fn try_once(&self, call: &GatewayCall<'_>) -> CallOutcome {
        match self.request_signed_url(call).await {
            Ok(Some(SignUrlReply { there: true, .. })) => return CallOutcome::AlreadyStored,
            Ok(Some(SignUrlReply { url: Some(url), .. })) => {
                return self.send_to_signed_url(call, &url).await;
            }
            Ok(_) => {}
            Err(tried) => return tried,
        }
        match self.send_to_gateway(call, &call.query, call.body.clone()).await {
            CallOutcome::Answered(answer) if answer.status() == StatusCode::TEMPORARY_REDIRECT => {
                let to = answer.headers().get(LOCATION).and_then(|to| to.to_str().ok());
                match to.map(str::to_owned) {
                    Some(to) => self.send_to_signed_url(call, &to).await,
                    None => CallOutcome::Failed(malformed_reply("address")),
                }
            }
            tried => tried,
        }
    }

    /// Requests a signed URL for a large write; returns `None` for other calls and while relaying.
    async fn request_signed_url(
        &self,
        call: &GatewayCall<'_>,
    ) -> std::result::Result<Option<SignUrlReply>, CallOutcome> {
        let Some(body) = call.body.as_ref().filter(|body| is_worth_signing(body)) else {
            return Ok(None);
        };
        if call.method != Method::PUT || self.is_relaying() {
            return Ok(None);
        }
        let mut query = vec![("sign", body.len().to_string())];
        query.extend(call.query.iter().filter(|(name, _)| *name != "offset").cloned());
        let asking = GatewayCall::new(Method::POST, call.key);
        match self.send_to_gateway(&asking, &query, None).await {
            CallOutcome::Answered(answer) => match read_json(answer).await {
                Ok(signed) => Ok(Some(signed)),
                Err(error) => Err(CallOutcome::Failed(error)),
            },
            tried => Err(tried),
        }
    }

    async fn send_to_gateway(
        &self,
        call: &GatewayCall<'_>,
        query: &[(&str, String)],
        body: Option<Bytes>,
    ) -> CallOutcome {
        let mut url = self.base.clone();
        {
            let Ok(mut segments) = url.path_segments_mut() else {
                return CallOutcome::Failed(malformed_reply("URL"));
            };
            // An empty key leaves a slash at the end, which is the address of the store itself.
            segments.extend(call.key.as_ref().split('/'));
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let mut request =
            self.gateway.request(call.method.clone(), url).headers(call.range_headers());
        if self.is_relaying() {
            request = request.header(RELAY_HEADER, "1");
        }
        if let Some(path) = &self.bearer {
            match tokio::fs::read_to_string(path).await {
                Ok(bearer) => {
                    request = request.header(AUTHORIZATION, format!("Bearer {}", bearer.trim()));
                }
                // The token may just be in renewal. A member whose token file stays missing cannot
                // connect.
                Err(error) => {
                    let message = format!("cannot read {}: {error}", path.display());
                    return CallOutcome::Unauthorized(refusal_error(call.key, message));
                }
            }
        }
        let limit = reply_timeout(body.as_ref());
        let request = match body {
            Some(body) => request.body(body),
            None => request,
        };
        match timeout(limit, request.send()).await {
            Err(_) => CallOutcome::Failed(generic_error("no answer came")),
            Ok(Err(error)) => CallOutcome::Failed(generic_error(error.without_url())),
            Ok(Ok(answer)) => classify_reply(call.key, answer).await,
        }
    }

    /// Sends a request to a signed URL. A failure there is no refusal: the gateway allowed the
    /// request.
    async fn send_to_signed_url(&self, call: &GatewayCall<'_>, url: &str) -> CallOutcome {
        let request =
            self.signed_urls.request(call.method.clone(), url).headers(call.range_headers());
        let limit = reply_timeout(call.body.as_ref());
        let request = match &call.body {
            Some(body) => request.body(body.clone()),
            None => request,
        };
        let answer = match timeout(limit, request.send()).await {
            Err(_) => {
                return CallOutcome::Failed(generic_error("the store's own server did not answer"));
            }
            Ok(Err(error)) => {
                if error.is_connect() {
                    self.start_relaying();
                }
                // A signed URL is a secret while it is valid.
                return CallOutcome::Failed(generic_error(error.without_url()));
            }
            Ok(Ok(answer)) => answer,
        };
        let status = answer.status();
        if status.is_success() {
            return CallOutcome::Answered(answer);
        }
        match status {
            StatusCode::NOT_FOUND => {
                CallOutcome::Refused(not_found_error(call.key, "the store's server".into()))
            }
            _ if status.is_server_error() => {
                CallOutcome::Failed(generic_error(format!("answered {status}")))
            }
            _ => {
                let message =
                    format!("the store's own server answered {status} to a signed address");
                CallOutcome::Unauthorized(refusal_error(call.key, message))
            }
        }
    }

    fn is_relaying(&self) -> bool {
        let until = *self.relay_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    fn start_relaying(&self) {
        tracing::info!("the store's own server cannot be reached from here: using the gateway");
        let until = Some(Instant::now() + RELAY_DURATION);
        *self.relay_until.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }
}

impl<'a> GatewayCall<'a> {
    fn new(method: Method, key: &'a Path) -> Self {
        Self { method, key, query: Vec::new(), range: None, body: None }
    }

    fn range_headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if let Some(range) = &self.range {
            let text = format!("bytes={}-{}", range.start, range.end - 1);
            headers.insert(RANGE, text.parse().expect("digits and a dash"));
        }
        headers
    }
}

fn client_builder() -> ClientBuilder {
    bounded_http::install_crypto_provider();
    reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_initial_stream_window_size(STREAM_WINDOW)
        .http2_initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(Duration::from_secs(20))
        .http2_keep_alive_timeout(Duration::from_secs(20))
}

fn reply_timeout(body: Option<&Bytes>) -> Duration {
    if body.is_some() { REQUEST_TIMEOUT } else { SILENCE_TIMEOUT }
}

async fn classify_reply(key: &Path, answer: Response) -> CallOutcome {
    let status = answer.status();
    if status.is_success() || status == StatusCode::TEMPORARY_REDIRECT {
        return CallOutcome::Answered(answer);
    }
    let message = read_message(answer).await;
    let message =
        if message.is_empty() { format!("the gateway answered {status}") } else { message };
    match status {
        StatusCode::NOT_FOUND => CallOutcome::Refused(not_found_error(key, message)),
        StatusCode::UNAUTHORIZED => CallOutcome::Unauthorized(refusal_error(key, message)),
        StatusCode::INSUFFICIENT_STORAGE => {
            CallOutcome::Refused(generic_error(format!("InsufficientStorage: {message}")))
        }
        StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => {
            CallOutcome::Failed(generic_error(message))
        }
        _ if status.is_client_error() => CallOutcome::Refused(refusal_error(key, message)),
        _ => CallOutcome::Failed(generic_error(message)),
    }
}

fn not_found_error(key: &Path, message: String) -> Error {
    Error::NotFound {
        path: key.to_string(),
        source: Box::new(GatewayRefusal { sentence: message }),
    }
}

fn refusal_error(key: &Path, sentence: String) -> Error {
    Error::PermissionDenied { path: key.to_string(), source: Box::new(GatewayRefusal { sentence }) }
}

async fn read_message(answer: Response) -> String {
    let bytes = read_body(answer, MESSAGE_BYTES_MAX).await.unwrap_or_default();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

async fn read_json<T: DeserializeOwned>(answer: Response) -> Result<T> {
    let bytes = read_body(answer, REPLY_BYTES_MAX).await?;
    serde_json::from_slice(&bytes).map_err(generic_error)
}

async fn read_body(mut answer: Response, limit: usize) -> Result<Bytes> {
    let (mut all, mut pace) = (BytesMut::new(), TransferPace::default());
    loop {
        let piece = next_chunk(&mut answer, &mut pace).await;
        let piece = piece.ok_or_else(|| generic_error("the answer came too slowly"))?;
        let Some(piece) = piece.map_err(|error| generic_error(error.without_url()))? else {
            return Ok(all.freeze());
        };
        if all.len() + piece.len() > limit {
            return Err(generic_error(format!("the answer has more than {limit} bytes")));
        }
        all.extend_from_slice(&piece);
    }
}

/// Returns an exponential backoff, as for other stores, with jitter between hosts.
fn retry_delay(tries: u32) -> Duration {
    let backoff = retry_config().backoff;
    let longest = backoff.init_backoff.saturating_mul(1 << tries.min(10)).min(backoff.max_backoff);
    let now = wire::clock::unix_time();
    longest.mul_f64(0.5 + f64::from(now.subsec_micros() % 1000) / 2000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_makes_no_sense_is_none() {
        assert_eq!(parse_range("bytes 0-9/100"), Some((0..10, 100)));
        for wrong in ["bytes 9-0/100", "bytes 0-100/100", "bytes */0", "0-9/100", "bytes 0-9/*"] {
            assert_eq!(parse_range(wrong), None, "{wrong}");
        }
    }
}
