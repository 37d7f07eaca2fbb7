//! Requests to the hub. The token is sent to the hub's own address and to no other: files are
//! often on another host, to which the hub redirects with a signed address.

use bounded_http::TransferPace;
use bytes::Bytes;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::{
    Client, Method, RequestBuilder, Response, StatusCode, Url,
    header::{
        ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap,
        HeaderValue, LOCATION, RANGE,
    },
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use crate::{
    error::{BoxedError, HubAnswerError, HubError, RequestError, SILENCE_TIMEOUT},
    repo_cache::is_file_path,
    repo_kind::RepoKind,
};

const USER_AGENT: &str = concat!("flotilla/", env!("CARGO_PKG_VERSION"));
const REDIRECTS_MAX: usize = 10;
/// More than the hub allows for a file.
const FILE_BYTES_MAX: u64 = 1 << 40;
/// The limit of an etag or a commit, which name files of the cache.
const NAME_BYTES_MAX: usize = 200;
const ANSWER_BYTES_MAX: usize = 16 << 20;
const MESSAGE_CHARS_MAX: usize = 500;
const SHA256_HEX_CHARS: usize = 64;

/// Letters, digits and these are the same in an address.
const COMPONENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
const PATH: &AsciiSet = &COMPONENT.remove(b'/');

pub(crate) struct HubHttp {
    client: Client,
    /// Ends without a slash.
    endpoint: Url,
    token: Option<HeaderValue>,
}

/// The hub's description of a file.
#[derive(Debug, Clone)]
pub(crate) struct FileMetadata {
    pub(crate) commit: String,
    /// The name of its blob in the cache.
    pub(crate) etag: String,
    pub(crate) size: u64,
    /// Set for files in large file storage.
    pub(crate) sha256: Option<String>,
    /// The address of its bytes, often on another host.
    pub(crate) location: Url,
}

impl HubHttp {
    pub(crate) fn new(endpoint: &str, token: Option<&str>) -> Result<Self, HubError> {
        let settings = |error: BoxedError| HubError::Settings(error);
        let endpoint = Url::parse(endpoint).map_err(|error| settings(error.into()))?;
        if !["http", "https"].contains(&endpoint.scheme()) || endpoint.query().is_some() {
            return Err(settings("the hub's address is not http:// or https://".into()));
        }
        let bearer = |token| {
            let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
                .map_err(|_| settings("the token has illegal characters".into()))?;
            value.set_sensitive(true);
            Ok(value)
        };
        let client = bounded_http::client_builder().user_agent(USER_AGENT).build();
        let client = client.map_err(|error| settings(error.into()))?;
        Ok(Self { client, endpoint, token: token.map(bearer).transpose()? })
    }

    /// Returns the address of a path of encoded components.
    pub(crate) fn hub_url(&self, path: &str) -> Url {
        let mut url = self.endpoint.clone();
        url.set_path(&format!("{}/{path}", self.endpoint.path().trim_end_matches('/')));
        url
    }

    pub(crate) fn file_url(&self, kind: RepoKind, repo: &str, revision: &str, name: &str) -> Url {
        let (prefix, name) = (kind.url_prefix(), utf8_percent_encode(name, PATH));
        let revision = encode_component(revision);
        self.hub_url(&format!("{prefix}{repo}/resolve/{revision}/{name}"))
    }

    /// Starts a request, which has the token only if it goes to the hub itself.
    pub(crate) fn start_request(&self, method: Method, url: Url) -> RequestBuilder {
        let token = self.token.clone().filter(|_| self.is_hub(&url));
        let request = self.client.request(method, url).header(ACCEPT_ENCODING, "identity");
        match token {
            Some(token) => request.header(AUTHORIZATION, token),
            None => request,
        }
    }

    pub(crate) fn has_token(&self) -> bool {
        self.token.is_some()
    }

    fn is_hub(&self, url: &Url) -> bool {
        url.origin() == self.endpoint.origin()
    }

    /// Asks for a file without its bytes.
    pub(crate) async fn read_metadata(&self, url: Url) -> Result<FileMetadata, RequestError> {
        let inside = |target: &Url| self.is_hub(target);
        let (response, location) = self.follow_redirects(Method::HEAD, url, None, inside).await?;
        if response.status().is_redirection() {
            // The hub's own answer describes a file on another host.
            return parse_metadata(response.headers(), None, location);
        }
        let response = check_status(response).await?;
        let length = read_header(response.headers(), CONTENT_LENGTH.as_str());
        parse_metadata(response.headers(), length, location)
    }

    /// Asks the hub for JSON. Follows redirections within the hub, which it answers for the old name of
    /// a repository.
    pub(crate) async fn get_json<T: DeserializeOwned>(&self, url: Url) -> Result<T, RequestError> {
        let inside = |target: &Url| self.is_hub(target);
        let (response, _) = self.follow_redirects(Method::GET, url, None, inside).await?;
        if response.status().is_redirection() {
            return Err("it redirects to another host".into());
        }
        read_json(response).await
    }

    /// Starts to receive a file from an offset, and up to an end if one is given.
    pub(crate) async fn open_file(
        &self,
        url: Url,
        (from, end): (u64, Option<u64>),
    ) -> Result<Response, RequestError> {
        let range = (from > 0).then(|| {
            let last = end.map(|end| (end - 1).to_string()).unwrap_or_default();
            format!("bytes={from}-{last}")
        });
        let (response, _) =
            self.follow_redirects(Method::GET, url, range.as_deref(), |_| true).await?;
        check_range(check_status(response).await?, from)
    }

    /// Sends a request, also to addresses that it is redirected to and that `may_follow` allows.
    /// Returns the last answer and its address, or that of a redirection that is not followed.
    async fn follow_redirects(
        &self,
        method: Method,
        mut url: Url,
        range: Option<&str>,
        may_follow: impl Fn(&Url) -> bool,
    ) -> Result<(Response, Url), RequestError> {
        for _ in 0..REDIRECTS_MAX {
            let mut request = self.start_request(method.clone(), url.clone());
            if let Some(range) = range {
                request = request.header(RANGE, range);
            }
            let response = send(request).await?;
            match redirect_target(&url, &response)? {
                Some(target) if may_follow(&target) => url = target,
                Some(target) => return Ok((response, target)),
                None => return Ok((response, url)),
            }
        }
        Err("it redirects without end".into())
    }
}

pub(crate) fn encode_component(text: &str) -> String {
    utf8_percent_encode(text, COMPONENT).to_string()
}

/// Sends a request whose body is short.
pub(crate) async fn send(request: RequestBuilder) -> Result<Response, RequestError> {
    let response = timeout(SILENCE_TIMEOUT, request.send()).await;
    Ok(response.map_err(|_| RequestError::Silent)??)
}

/// Returns an error for any answer but a success.
pub(crate) async fn check_status(response: Response) -> Result<Response, RequestError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let header = |name| read_header(response.headers(), name).unwrap_or_default().to_owned();
    let (code, mut message) = (header("x-error-code"), header("x-error-message"));
    if status.is_redirection() {
        // The rest of an address may be a signature, which is a secret.
        let place = header(LOCATION.as_str());
        message = format!("it is at {} now", place.split('?').next().unwrap_or_default());
    }
    if message.is_empty() {
        let body = read_body(response).await.unwrap_or_default();
        let json: Value = serde_json::from_slice(&body).unwrap_or_default();
        message = json["error"].as_str().unwrap_or_default().to_owned();
    }
    let message = message.chars().take(MESSAGE_CHARS_MAX).collect();
    Err(RequestError::Answer(HubAnswerError { status: status.as_u16(), code, message }))
}

/// Returns the next bytes, or `None` at the end.
pub(crate) async fn next_chunk(
    response: &mut Response,
    pace: &mut TransferPace,
) -> Result<Option<Bytes>, RequestError> {
    let chunk = pace.wait_for(response.chunk(), |chunk| match chunk {
        Ok(Some(chunk)) => chunk.len(),
        _ => 0,
    });
    Ok(chunk.await.ok_or(RequestError::Slow)??)
}

/// Reads a successful answer, in JSON.
pub(crate) async fn read_json<T: DeserializeOwned>(response: Response) -> Result<T, RequestError> {
    let body = read_body(check_status(response).await?).await?;
    serde_json::from_slice(&body).map_err(|_| "its answer has another form".into())
}

async fn read_body(mut response: Response) -> Result<Vec<u8>, RequestError> {
    let (mut body, mut pace) = (Vec::new(), TransferPace::default());
    while let Some(chunk) = next_chunk(&mut response, &mut pace).await? {
        if body.len() + chunk.len() > ANSWER_BYTES_MAX {
            return Err("its answer is too long".into());
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

fn read_header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Returns the address of a redirection. One from HTTPS to plain HTTP is an error.
fn redirect_target(from: &Url, response: &Response) -> Result<Option<Url>, RequestError> {
    if !response.status().is_redirection() {
        return Ok(None);
    }
    let target = read_header(response.headers(), LOCATION.as_str());
    let target = target.and_then(|target| from.join(target).ok());
    let target = target.ok_or("it redirects to no address")?;
    if from.scheme() == "https" && target.scheme() != "https" {
        return Err("it redirects to an address without TLS".into());
    }
    Ok(Some(target))
}

fn parse_metadata(
    headers: &HeaderMap,
    length: Option<&str>,
    location: Url,
) -> Result<FileMetadata, RequestError> {
    let linked = read_header(headers, "x-linked-etag").map(normalize_etag);
    let etag = linked.or_else(|| read_header(headers, ETAG.as_str()).map(normalize_etag));
    let name = |text: Option<&str>, what| {
        let is_name = |text: &&str| text.len() <= NAME_BYTES_MAX && is_name(text);
        let text = text.filter(is_name).map(str::to_owned);
        text.ok_or(format!("its answer has no usable {what}; it may not be a hub"))
    };
    let commit = name(read_header(headers, "x-repo-commit"), "commit")?;
    let etag = name(etag, "etag")?;
    let size = read_header(headers, "x-linked-size").or(length);
    let size = size.and_then(|size| size.parse().ok()).filter(|size| *size <= FILE_BYTES_MAX);
    let size = size.ok_or("its answer has no usable size")?;
    let is_sha256 =
        etag.len() == SHA256_HEX_CHARS && etag.bytes().all(|byte| byte.is_ascii_hexdigit());
    let sha256 = (linked.is_some() && is_sha256).then(|| etag.to_lowercase());
    Ok(FileMetadata { commit, etag, size, sha256, location })
}

/// Removes the quotation marks of an etag, and the mark of a weak one.
fn normalize_etag(etag: &str) -> &str {
    etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"')
}

/// Returns true if a file of the cache may have this name.
fn is_name(text: &str) -> bool {
    is_file_path(text) && !text.contains('/') && text.bytes().all(|byte| byte.is_ascii_graphic())
}

fn check_range(response: Response, from: u64) -> Result<Response, RequestError> {
    if response.status() == StatusCode::PARTIAL_CONTENT {
        let range = read_header(response.headers(), CONTENT_RANGE.as_str());
        if !range.is_some_and(|range| range.starts_with(&format!("bytes {from}-"))) {
            return Err("it sent another part than the requested one".into());
        }
    }
    Ok(response)
}
