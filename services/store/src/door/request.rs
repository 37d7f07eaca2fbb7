//! Requests to a gateway, and what is done when one fails: the bearer is read anew, the network
//! or the gateway is waited for, what was refused is told in the gateway's own words.

use std::{
    error::Error as StdError,
    io,
    net::SocketAddr,
    ops::Range,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

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
    Door, is_large,
    protocol::{
        ANSWER_BYTES_MAX, Begun, Completing, IDENTITY, Listing, SERVER_NAME, Sent, Signed, THROUGH,
    },
};
use crate::{
    error::OpenError,
    location::{CONNECT_TIMEOUT, REQUEST_TIMEOUT, retry},
};

/// Between two pieces of a body, and before an answer to what has none.
const SILENCE: Duration = Duration::from_secs(60);
/// A bearer that is refused may just be renewed.
const REFUSALS: u32 = 3;
/// How long signed addresses are left alone that could not be reached.
const DETOUR: Duration = Duration::from_secs(300);
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 32 << 20;
const SENTENCE_BYTES_MAX: usize = 4096;
const STORE: &str = "door";

/// What the gateway said when it refused.
#[derive(Debug, thiserror::Error)]
#[error("{sentence}")]
pub struct Refusal {
    pub sentence: String,
}

/// A gateway, and the addresses that it sends us to.
#[derive(Debug)]
pub(crate) struct Client {
    base: Url,
    gateway: reqwest::Client,
    /// Shows nobody a bearer.
    others: reqwest::Client,
    bearer: Option<PathBuf>,
    detour: Mutex<Option<Instant>>,
}

/// A request that may be sent more than once.
struct Call<'a> {
    method: Method,
    key: &'a Path,
    query: Vec<(&'a str, String)>,
    range: Option<Range<u64>>,
    body: Option<Bytes>,
}

/// What became of one try.
enum Try {
    Answered(Response),
    /// What was to be sent is there already.
    There,
    Refused(Error),
    /// The bearer, or an address that was signed too long ago.
    Unwelcome(Error),
    Failed(Error),
}

/// A body that comes, and which part of the object it is.
pub(super) struct Answer {
    response: Response,
    range: Range<u64>,
    size: u64,
}

impl Answer {
    fn new(response: Response) -> Result<Self> {
        let headers = response.headers();
        let (range, size) = match headers.get(CONTENT_RANGE) {
            Some(value) => value.to_str().ok().and_then(parse_range).ok_or_else(|| odd("range"))?,
            None => {
                let bytes = response.content_length().ok_or_else(|| odd("length"))?;
                (0..bytes, bytes)
            }
        };
        Ok(Self { response, range, size })
    }

    pub(super) fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// `None` when nothing more comes, though it may be missing.
    pub(super) async fn piece(&mut self) -> Option<Bytes> {
        timeout(SILENCE, self.response.chunk()).await.ok()?.ok()?
    }
}

/// `bytes 0-9/100`
fn parse_range(text: &str) -> Option<(Range<u64>, u64)> {
    let (range, size) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let size = size.parse().ok()?;
    (first <= last && last < size).then_some((first..last + 1, size))
}

fn odd(what: &str) -> Error {
    failed(format!("the answer has no {what} that can be used"))
}

fn failed(source: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
    Error::Generic { store: STORE, source: source.into() }
}

/// Every address of the gateway's hosts, whatever name the certificate has.
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

impl Client {
    pub(super) fn new(door: &Door) -> std::result::Result<Self, OpenError> {
        let url = door.url();
        let refused = |reason: String| OpenError::Url { url: url.clone(), reason };
        let settings = |source: Box<dyn StdError + Send + Sync>| OpenError::Settings {
            url: url.clone(),
            source,
        };
        let address = Url::parse(&url).map_err(|error| refused(error.to_string()))?;
        let mut base = address;
        let builder = builder().redirect(Policy::none()).no_proxy();
        let builder = match &door.ca {
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
                builder.tls_certs_only(ca).dns_resolver(GatewayHosts(door.hosts())).https_only(true)
            }
        };
        let gateway = builder.build().map_err(|error| settings(error.into()))?;
        let others = || self::builder().redirect(Policy::none());
        // A box without certificate authorities (an image of the program alone) trusts nobody: what
        // is not in the clear comes through the gateway.
        let others = others().build().or_else(|_| others().tls_certs_only([]).build());
        let others = others.map_err(|error| settings(error.into()))?;
        let bearer = door.bearer.clone();
        Ok(Self { base, gateway, others, bearer, detour: Mutex::default() })
    }

    pub(super) fn base(&self) -> &str {
        self.base.as_str()
    }

    pub(super) async fn head(&self, key: &Path) -> Result<u64> {
        let answer = self.call(&Call::new(Method::HEAD, key)).await?;
        let length = answer.headers().get(reqwest::header::CONTENT_LENGTH);
        length.and_then(|value| value.to_str().ok()?.parse().ok()).ok_or_else(|| odd("length"))
    }

    pub(super) async fn get(&self, key: &Path, range: Option<Range<u64>>) -> Result<Answer> {
        let empty = range.as_ref().is_some_and(Range::is_empty);
        let call = Call { range: range.filter(|_| !empty), ..Call::new(Method::GET, key) };
        Answer::new(self.call(&call).await?)
    }

    pub(super) async fn put(&self, key: &Path, bytes: Bytes) -> Result<()> {
        let call = Call { body: Some(bytes), ..Call::new(Method::PUT, key) };
        self.answer(&call).await.map(|_| ())
    }

    /// The upload's name, or `None` when the object is there already.
    pub(crate) async fn begin(&self, key: &Path) -> Result<Option<String>> {
        let answer = self.plain(Method::POST, key, &[("begin", "")], None).await?;
        Ok(json::<Begun>(answer).await?.upload)
    }

    /// What the part is called.
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
        let call = Call { query, body: Some(bytes), ..Call::new(Method::PUT, key) };
        let answer = self.call(&call).await?;
        if let Some(name) = answer.headers().get(ETAG) {
            return Ok(name.to_str().map_err(|_| odd("etag"))?.to_owned());
        }
        Ok(json::<Sent>(answer).await?.part)
    }

    pub(crate) async fn complete(
        &self,
        key: &Path,
        upload: &str,
        parts: Vec<String>,
        bytes: u64,
    ) -> Result<()> {
        let size = bytes.to_string();
        let query = [("complete", size.as_str()), ("upload", upload)];
        let body = serde_json::to_vec(&Completing { parts }).map_err(failed)?;
        self.plain(Method::POST, key, &query, Some(body.into())).await.map(|_| ())
    }

    pub(crate) async fn abort(&self, key: &Path, upload: &str) -> Result<()> {
        self.plain(Method::DELETE, key, &[("upload", upload)], None).await.map(|_| ())
    }

    pub(super) async fn list(&self, below: &Path, what: &str) -> Result<Listing> {
        json(self.plain(Method::GET, below, &[("list", what)], None).await?).await
    }

    /// Whether the store answers, and its name.
    pub(super) async fn identity(&self) -> Result<Option<String>> {
        let root = Path::default();
        let answered = self.call(&Call::new(Method::HEAD, &root)).await?;
        let name = answered.headers().get(IDENTITY);
        Ok(name.and_then(|name| name.to_str().ok()).map(str::to_owned))
    }

    pub(super) async fn plain(
        &self,
        method: Method,
        key: &Path,
        query: &[(&str, &str)],
        body: Option<Bytes>,
    ) -> Result<Response> {
        let query = query.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        self.call(&Call { query, body, ..Call::new(method, key) }).await
    }

    /// Before something is asked for again that broke off.
    pub(super) async fn pause(&self) {
        sleep(delay(0)).await;
    }

    async fn call(&self, call: &Call<'_>) -> Result<Response> {
        self.answer(call).await?.ok_or_else(|| odd("content"))
    }

    /// Until it is answered or refused, or for as long as a store may be away. `None` when what
    /// was to be sent is there already.
    async fn answer(&self, call: &Call<'_>) -> Result<Option<Response>> {
        let started = Instant::now();
        let (mut tries, mut refusals) = (0, 0);
        loop {
            let error = match self.attempt(call).await {
                Try::Answered(response) => return Ok(Some(response)),
                Try::There => return Ok(None),
                Try::Refused(error) => return Err(error),
                Try::Unwelcome(error) => {
                    refusals += 1;
                    if refusals >= REFUSALS {
                        return Err(error);
                    }
                    error
                }
                Try::Failed(error) => error,
            };
            if started.elapsed() >= retry().retry_timeout {
                return Err(error);
            }
            tracing::debug!(%error, tries, "the store's gateway is asked again");
            sleep(delay(tries)).await;
            tries += 1;
        }
    }

    async fn attempt(&self, call: &Call<'_>) -> Try {
        match self.signed_for(call).await {
            Ok(Some(Signed { there: true, .. })) => return Try::There,
            Ok(Some(Signed { url: Some(url), .. })) => return self.elsewhere(call, &url).await,
            Ok(_) => {}
            Err(tried) => return tried,
        }
        match self.send(call, &call.query, call.body.clone()).await {
            Try::Answered(answer) if answer.status() == StatusCode::TEMPORARY_REDIRECT => {
                let to = answer.headers().get(LOCATION).and_then(|to| to.to_str().ok());
                match to.map(str::to_owned) {
                    Some(to) => self.elsewhere(call, &to).await,
                    None => Try::Failed(odd("address")),
                }
            }
            tried => tried,
        }
    }

    /// Where a large piece is sent instead, if anywhere.
    async fn signed_for(&self, call: &Call<'_>) -> std::result::Result<Option<Signed>, Try> {
        let Some(body) = call.body.as_ref().filter(|body| is_large(body)) else { return Ok(None) };
        if call.method != Method::PUT || self.is_on_detour() {
            return Ok(None);
        }
        let mut query = vec![("sign", body.len().to_string())];
        query.extend(call.query.iter().filter(|(name, _)| *name != "offset").cloned());
        let asking = Call::new(Method::POST, call.key);
        match self.send(&asking, &query, None).await {
            Try::Answered(answer) => match json(answer).await {
                Ok(signed) => Ok(Some(signed)),
                Err(error) => Err(Try::Failed(error)),
            },
            tried => Err(tried),
        }
    }

    async fn send(&self, call: &Call<'_>, query: &[(&str, String)], body: Option<Bytes>) -> Try {
        let mut url = self.base.clone();
        {
            let Ok(mut segments) = url.path_segments_mut() else { return Try::Failed(odd("URL")) };
            // An empty key leaves a slash at the end, which is the store itself.
            segments.extend(call.key.as_ref().split('/'));
        }
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let mut request = self.gateway.request(call.method.clone(), url).headers(call.headers());
        if self.is_on_detour() {
            request = request.header(THROUGH, "1");
        }
        if let Some(path) = &self.bearer {
            match tokio::fs::read_to_string(path).await {
                Ok(bearer) => {
                    request = request.header(AUTHORIZATION, format!("Bearer {}", bearer.trim()));
                }
                // It may just be renewed; a kit without one helps nobody.
                Err(error) => {
                    let said = format!("cannot read {}: {error}", path.display());
                    return Try::Unwelcome(refusal(call.key, said));
                }
            }
        }
        let patience = patience(body.as_ref());
        let request = match body {
            Some(body) => request.body(body),
            None => request,
        };
        match timeout(patience, request.send()).await {
            Err(_) => Try::Failed(failed("no answer came")),
            Ok(Err(error)) => Try::Failed(failed(error.without_url())),
            Ok(Ok(answer)) => judge(call.key, answer).await,
        }
    }

    /// To an address that was signed for this one request. What is wrong with it is no refusal:
    /// the gateway allowed it.
    async fn elsewhere(&self, call: &Call<'_>, url: &str) -> Try {
        let request = self.others.request(call.method.clone(), url).headers(call.headers());
        let patience = patience(call.body.as_ref());
        let request = match &call.body {
            Some(body) => request.body(body.clone()),
            None => request,
        };
        let answer = match timeout(patience, request.send()).await {
            Err(_) => return Try::Failed(failed("the store's own server did not answer")),
            Ok(Err(error)) => {
                if error.is_connect() {
                    self.detour();
                }
                // A signed address is a secret for some minutes.
                return Try::Failed(failed(error.without_url()));
            }
            Ok(Ok(answer)) => answer,
        };
        let status = answer.status();
        if status.is_success() {
            return Try::Answered(answer);
        }
        match status {
            StatusCode::NOT_FOUND => Try::Refused(missing(call.key, "the store's server".into())),
            _ if status.is_server_error() => Try::Failed(failed(format!("answered {status}"))),
            _ => {
                let said = format!("the store's own server answered {status} to a signed address");
                Try::Unwelcome(refusal(call.key, said))
            }
        }
    }

    fn is_on_detour(&self) -> bool {
        let until = *self.detour.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    fn detour(&self) {
        tracing::info!("the store's own server cannot be reached from here: using the gateway");
        let until = Some(Instant::now() + DETOUR);
        *self.detour.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }
}

impl<'a> Call<'a> {
    fn new(method: Method, key: &'a Path) -> Self {
        Self { method, key, query: Vec::new(), range: None, body: None }
    }

    fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if let Some(range) = &self.range {
            let text = format!("bytes={}-{}", range.start, range.end - 1);
            headers.insert(RANGE, text.parse().expect("digits and a dash"));
        }
        headers
    }
}

fn builder() -> ClientBuilder {
    reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_initial_stream_window_size(STREAM_WINDOW)
        .http2_initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(Duration::from_secs(20))
        .http2_keep_alive_timeout(Duration::from_secs(20))
}

fn patience(body: Option<&Bytes>) -> Duration {
    if body.is_some() { REQUEST_TIMEOUT } else { SILENCE }
}

/// What an answer of the gateway means.
async fn judge(key: &Path, answer: Response) -> Try {
    let status = answer.status();
    if status.is_success() || status == StatusCode::TEMPORARY_REDIRECT {
        return Try::Answered(answer);
    }
    let said = sentence(answer).await;
    let said = if said.is_empty() { format!("the gateway answered {status}") } else { said };
    match status {
        StatusCode::NOT_FOUND => Try::Refused(missing(key, said)),
        StatusCode::UNAUTHORIZED => Try::Unwelcome(refusal(key, said)),
        StatusCode::INSUFFICIENT_STORAGE => {
            Try::Refused(failed(format!("InsufficientStorage: {said}")))
        }
        StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => Try::Failed(failed(said)),
        _ if status.is_client_error() => Try::Refused(refusal(key, said)),
        _ => Try::Failed(failed(said)),
    }
}

fn missing(key: &Path, said: String) -> Error {
    Error::NotFound { path: key.to_string(), source: Box::new(Refusal { sentence: said }) }
}

fn refusal(key: &Path, sentence: String) -> Error {
    Error::PermissionDenied { path: key.to_string(), source: Box::new(Refusal { sentence }) }
}

async fn sentence(answer: Response) -> String {
    let bytes = body(answer, SENTENCE_BYTES_MAX).await.unwrap_or_default();
    String::from_utf8_lossy(&bytes).trim().to_owned()
}

async fn json<T: DeserializeOwned>(answer: Response) -> Result<T> {
    let bytes = body(answer, ANSWER_BYTES_MAX).await?;
    serde_json::from_slice(&bytes).map_err(failed)
}

async fn body(mut answer: Response, limit: usize) -> Result<Bytes> {
    let mut all = BytesMut::new();
    loop {
        let piece = timeout(SILENCE, answer.chunk()).await;
        let piece = piece.map_err(|_| failed("the answer stopped coming"))?;
        let Some(piece) = piece.map_err(|error| failed(error.without_url()))? else {
            return Ok(all.freeze());
        };
        if all.len() + piece.len() > limit {
            return Err(failed(format!("the answer has more than {limit} bytes")));
        }
        all.extend_from_slice(&piece);
    }
}

/// As long as for a store of its own, with some difference between boxes.
fn delay(tries: u32) -> Duration {
    let backoff = retry().backoff;
    let longest = backoff.init_backoff.saturating_mul(1 << tries.min(10)).min(backoff.max_backoff);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
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
