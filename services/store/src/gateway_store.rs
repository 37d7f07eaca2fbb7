//! A client for the store behind a fleet's gateway, for hosts without the store's keys: objects
//! over HTTP with the member's bearer token. Bytes of an S3 store travel directly, over URLs that
//! the gateway signs; if those URLs are unreachable, the bytes are relayed through the gateway.

mod gateway_client;
mod gateway_upload;
pub mod protocol;

use std::{
    fmt,
    path::{Path as FsPath, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use bounded_http::PACE_BYTES_MIN;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream, stream::BoxStream};
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result, path::Path,
};
use reqwest::Method;

use self::{
    gateway_client::{GatewayClient, ObjectBody, generic_error},
    gateway_upload::GatewayUpload,
    protocol::{ListObjectsReply, SIGN_BYTES_MIN},
};
use crate::{error::OpenError, internal_directory::identity_file, limits::PART_BYTES};

const IDENTITY_TIMEOUT: Duration = Duration::from_secs(10);
const IDENTITY_TRIES: u32 = 10;
const IDENTITY_PAUSE: Duration = Duration::from_millis(200);

/// Bodies that may break off, one after the other, before [`PACE_BYTES_MIN`] of an object came.
const BREAKS_MAX: u32 = 10;

/// The settings with which a member reaches its fleet's store through the gateway.
///
/// Each request reads the bearer token from its file. A read is redirected to a signed URL if the
/// store is S3; a large write first asks for one. If a signed URL cannot be reached, requests are
/// relayed through the gateway for 5 minutes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayStore {
    /// `host:port` of the gateway; several hosts with the same port are separated by commas.
    pub gateway: String,
    /// The fleet's certificate authority, a PEM file. Only tests connect without it, unencrypted.
    pub ca: Option<PathBuf>,
    /// The file with the member's bearer token, read for each request, because the token is
    /// renewed.
    pub bearer: Option<PathBuf>,
}

impl GatewayStore {
    /// Returns the URL of the store at the gateway.
    pub(crate) fn store_url(&self) -> String {
        let scheme = if self.ca.is_some() { "https" } else { "http" };
        let first = self.gateway.split(',').next().unwrap_or_default();
        format!("{scheme}://{first}{}", protocol::STORE_PATH)
    }

    /// Returns the hosts without port and brackets.
    fn gateway_hosts(&self) -> Vec<String> {
        let host = |address: &str| {
            let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
            host.trim_matches(['[', ']']).to_owned()
        };
        self.gateway.split(',').map(host).collect()
    }

    /// Returns true if `directory` of this machine is the store behind the gateway, and false if
    /// unknown.
    pub async fn serves_directory(&self, directory: &FsPath) -> bool {
        let Ok(client) = GatewayClient::new(self) else { return false };
        let there = tokio::time::timeout(IDENTITY_TIMEOUT, request_identity(&client)).await;
        // The gateway is asked first, because its answer may create the directory's identity.
        let here = tokio::fs::read_to_string(identity_file(directory)).await;
        matches!((there, here), (Ok(Some(there)), Ok(here)) if there == here.trim())
    }
}

/// Retries, because a gateway may refuse a new member for a moment.
async fn request_identity(client: &GatewayClient) -> Option<String> {
    for _ in 0..IDENTITY_TRIES {
        match client.read_identity().await {
            Ok(identity) => return identity,
            Err(_) => tokio::time::sleep(IDENTITY_PAUSE).await,
        }
    }
    None
}

#[derive(Clone)]
pub(crate) struct GatewayObjectStore {
    client: Arc<GatewayClient>,
}

impl GatewayObjectStore {
    pub(crate) fn new(gateway: &GatewayStore) -> std::result::Result<Self, OpenError> {
        Ok(Self { client: Arc::new(GatewayClient::new(gateway)?) })
    }

    pub(crate) fn gateway_client(&self) -> &GatewayClient {
        &self.client
    }

    pub(crate) async fn check_access(&self) -> Result<()> {
        self.client.read_identity().await.map(|_| ())
    }
}

impl fmt::Debug for GatewayObjectStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GatewayObjects").field(&self.client.base_url()).finish()
    }
}

impl fmt::Display for GatewayObjectStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

struct RemainingBody {
    client: Arc<GatewayClient>,
    key: Path,
    next: u64,
    /// The offset after the last byte.
    end: u64,
    body: Option<ObjectBody>,
    /// Since the last [`PACE_BYTES_MIN`] came.
    breaks: u32,
    bytes: u64,
}

impl RemainingBody {
    /// Requests the rest when a body breaks off. Fails after [`BREAKS_MAX`].
    async fn next_piece(mut self) -> Result<Option<(Bytes, Self)>> {
        while self.next < self.end {
            let mut answer = match self.body.take() {
                Some(answer) => answer,
                None => self.client.get(&self.key, Some(self.next..self.end)).await?,
            };
            match answer.next_piece().await {
                Some(piece) => {
                    let wanted = usize::try_from(self.end - self.next).unwrap_or(usize::MAX);
                    let piece = piece.slice(..piece.len().min(wanted));
                    self.next += piece.len() as u64;
                    self.bytes += piece.len() as u64;
                    if self.bytes >= PACE_BYTES_MIN {
                        (self.breaks, self.bytes) = (0, 0);
                    }
                    self.body = Some(answer);
                    return Ok(Some((piece, self)));
                }
                None if self.breaks >= BREAKS_MAX => {
                    let tries = self.breaks + 1;
                    return Err(generic_error(format!(
                        "the answer broke off, or came too slowly, {tries} times"
                    )));
                }
                None => {
                    self.breaks += 1;
                    self.client.pause_before_retry().await;
                }
            }
        }
        Ok(None)
    }
}

fn object_meta(location: &Path, size: u64) -> ObjectMeta {
    let last_modified = Default::default();
    ObjectMeta { location: location.clone(), last_modified, size, e_tag: None, version: None }
}

fn unsupported_error(what: &str) -> Error {
    Error::NotSupported { source: format!("the gateway's store has no {what}").into() }
}

fn put_result() -> PutResult {
    PutResult { e_tag: None, version: None, extensions: Default::default() }
}

#[async_trait]
impl ObjectStore for GatewayObjectStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        _: PutOptions,
    ) -> Result<PutResult> {
        let bytes = Bytes::from(payload);
        if bytes.len() as u64 <= PART_BYTES {
            self.client.put_object(location, bytes).await?;
            return Ok(put_result());
        }
        let part = usize::try_from(PART_BYTES).unwrap_or(usize::MAX);
        let mut upload = GatewayUpload::begin_upload(self.client.clone(), location).await?;
        for start in (0..bytes.len()).step_by(part) {
            let piece = bytes.slice(start..bytes.len().min(start + part));
            upload.put_part(piece.into()).await?;
        }
        upload.complete().await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Ok(Box::new(GatewayUpload::begin_upload(self.client.clone(), location).await?))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        if options.head {
            let size = self.client.head_object(location).await?;
            let payload = GetResultPayload::Stream(stream::empty().boxed());
            return Ok(get_result(payload, object_meta(location, size), 0..size));
        }
        let range = match options.range {
            None => None,
            Some(GetRange::Bounded(range)) => Some(range),
            Some(GetRange::Offset(start)) => Some(start..self.client.head_object(location).await?),
            Some(GetRange::Suffix(count)) => {
                let size = self.client.head_object(location).await?;
                Some(size.saturating_sub(count)..size)
            }
        };
        let answer = self.client.get(location, range).await?;
        let (range, size) = (answer.byte_range(), answer.object_size());
        let rest = RemainingBody {
            client: self.client.clone(),
            key: location.clone(),
            next: range.start,
            end: range.end,
            body: Some(answer),
            breaks: 0,
            bytes: 0,
        };
        let pieces = stream::try_unfold(rest, RemainingBody::next_piece).boxed();
        Ok(get_result(GetResultPayload::Stream(pieces), object_meta(location, size), range))
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let client = self.client.clone();
        locations
            .and_then(move |key| {
                let client = client.clone();
                async move {
                    client.send_request(Method::DELETE, &key, &[], None).await?;
                    Ok(key)
                }
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (client, prefix) = (self.client.clone(), prefix.cloned());
        let listed = async move {
            let prefix = prefix.ok_or_else(|| unsupported_error("listing of everything"))?;
            let listing: ListObjectsReply = client.list_objects(&prefix, "all").await?;
            // A key that is not a valid path here is not an object of this store.
            let objects = listing
                .objects
                .into_iter()
                .filter_map(|(key, size)| Some(Ok(object_meta(&Path::parse(key).ok()?, size))));
            Ok::<_, Error>(stream::iter(objects.collect::<Vec<_>>()))
        };
        stream::once(listed).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let prefix = prefix.ok_or_else(|| unsupported_error("listing of everything"))?;
        let listing = self.client.list_objects(prefix, "directories").await?;
        let names = listing.directories.into_iter();
        let common_prefixes = names.filter_map(|name| Path::parse(name).ok()).collect();
        Ok(ListResult { common_prefixes, objects: Vec::new(), extensions: Default::default() })
    }

    async fn copy_opts(&self, from: &Path, to: &Path, _: CopyOptions) -> Result<()> {
        self.client
            .send_request(Method::POST, to, &[("copy", from.as_ref())], None)
            .await
            .map(|_| ())
    }
}

fn get_result(
    payload: GetResultPayload,
    meta: ObjectMeta,
    range: std::ops::Range<u64>,
) -> GetResult {
    let (attributes, extensions) = Default::default();
    GetResult { payload, meta, range, attributes, extensions }
}

fn is_worth_signing(bytes: &Bytes) -> bool {
    bytes.len() as u64 >= SIGN_BYTES_MIN
}
