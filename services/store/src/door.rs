//! A store behind a fleet's gateway, for boxes without its keys: objects over HTTP with the
//! member's bearer. An S3 store's bytes take the short way, by addresses that the gateway signs;
//! where those cannot be reached, they come through the gateway.

pub mod protocol;
mod request;
mod upload;

use std::{
    fmt,
    path::{Path as FsPath, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream, stream::BoxStream};
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result, path::Path,
};
use reqwest::Method;

use self::{
    protocol::{Listing, SIGN_BYTES_MIN},
    request::{Answer, Client},
    upload::DoorUpload,
};
use crate::{error::OpenError, objects::identity_file, upload::PART_BYTES};
pub use request::Refusal;

/// Deciding which way to take may take so long.
const IDENTITY_LIMIT: Duration = Duration::from_secs(10);
const IDENTITY_TRIES: u32 = 10;
const IDENTITY_PAUSE: Duration = Duration::from_millis(200);

/// How a member reaches its fleet's store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Door {
    /// `host:port` of the gateway; several with one port, separated by commas, where it may move.
    pub gateway: String,
    /// The fleet's certificate authority, a PEM file; without one the gateway is spoken to in the
    /// clear, which tests do.
    pub ca: Option<PathBuf>,
    /// What the member shows. Read for each request, for it is renewed.
    pub bearer: Option<PathBuf>,
}

impl Door {
    /// As an address of a store.
    pub fn url(&self) -> String {
        let scheme = if self.ca.is_some() { "https" } else { "http" };
        let first = self.gateway.split(',').next().unwrap_or_default();
        format!("{scheme}://{first}{}", protocol::PATH)
    }

    fn hosts(&self) -> Vec<String> {
        let host = |address: &str| {
            let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
            host.trim_matches(['[', ']']).to_owned()
        };
        self.gateway.split(',').map(host).collect()
    }

    /// Whether that directory of this machine is the store behind the gateway. What cannot be
    /// told is no.
    pub async fn leads_to(&self, directory: &FsPath) -> bool {
        let Ok(client) = Client::new(self) else { return false };
        let there = tokio::time::timeout(IDENTITY_LIMIT, identity(&client)).await;
        // Asked first, for the answer may be why the directory has a name.
        let here = tokio::fs::read_to_string(identity_file(directory)).await;
        matches!((there, here), (Ok(Some(there)), Ok(here)) if there == here.trim())
    }
}

/// Asked again where it is refused, for a gateway hears of a new member a moment after it.
async fn identity(client: &Client) -> Option<String> {
    for _ in 0..IDENTITY_TRIES {
        match client.identity().await {
            Ok(identity) => return identity,
            Err(_) => tokio::time::sleep(IDENTITY_PAUSE).await,
        }
    }
    None
}

/// The objects behind a door.
#[derive(Clone)]
pub(crate) struct DoorObjects {
    client: Arc<Client>,
}

impl DoorObjects {
    pub(crate) fn new(door: &Door) -> std::result::Result<Self, OpenError> {
        Ok(Self { client: Arc::new(Client::new(door)?) })
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) async fn check(&self) -> Result<()> {
        self.client.identity().await.map(|_| ())
    }
}

impl fmt::Debug for DoorObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DoorObjects").field(&self.client.base()).finish()
    }
}

impl fmt::Display for DoorObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Of what is on its way when a body breaks off.
struct Rest {
    client: Arc<Client>,
    key: Path,
    next: u64,
    end: u64,
    answer: Option<Answer>,
}

impl Rest {
    /// The next piece; what broke off is asked for again from there.
    async fn piece(mut self) -> Result<Option<(Bytes, Self)>> {
        while self.next < self.end {
            let mut answer = match self.answer.take() {
                Some(answer) => answer,
                None => self.client.get(&self.key, Some(self.next..self.end)).await?,
            };
            match answer.piece().await {
                Some(piece) => {
                    let wanted = usize::try_from(self.end - self.next).unwrap_or(usize::MAX);
                    let piece = piece.slice(..piece.len().min(wanted));
                    self.next += piece.len() as u64;
                    self.answer = Some(answer);
                    return Ok(Some((piece, self)));
                }
                None => self.client.pause().await,
            }
        }
        Ok(None)
    }
}

fn meta(location: &Path, size: u64) -> ObjectMeta {
    let last_modified = Default::default();
    ObjectMeta { location: location.clone(), last_modified, size, e_tag: None, version: None }
}

fn unsupported(what: &str) -> Error {
    Error::NotSupported { source: format!("the gateway's store has no {what}").into() }
}

fn put_result(e_tag: Option<String>) -> PutResult {
    PutResult { e_tag, version: None, extensions: Default::default() }
}

#[async_trait]
impl ObjectStore for DoorObjects {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        _: PutOptions,
    ) -> Result<PutResult> {
        let bytes = Bytes::from(payload);
        if bytes.len() as u64 <= PART_BYTES {
            self.client.put(location, bytes).await?;
            return Ok(put_result(None));
        }
        let part = usize::try_from(PART_BYTES).unwrap_or(usize::MAX);
        let mut upload = DoorUpload::begin(self.client.clone(), location).await?;
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
        Ok(Box::new(DoorUpload::begin(self.client.clone(), location).await?))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        if options.head {
            let size = self.client.head(location).await?;
            let payload = GetResultPayload::Stream(stream::empty().boxed());
            return Ok(result(payload, meta(location, size), 0..size));
        }
        let range = match options.range {
            None => None,
            Some(GetRange::Bounded(range)) => Some(range),
            Some(GetRange::Offset(start)) => Some(start..self.client.head(location).await?),
            Some(GetRange::Suffix(count)) => {
                let size = self.client.head(location).await?;
                Some(size.saturating_sub(count)..size)
            }
        };
        let answer = self.client.get(location, range).await?;
        let (range, size) = (answer.range(), answer.size());
        let rest = Rest {
            client: self.client.clone(),
            key: location.clone(),
            next: range.start,
            end: range.end,
            answer: Some(answer),
        };
        let pieces = stream::try_unfold(rest, Rest::piece).boxed();
        Ok(result(GetResultPayload::Stream(pieces), meta(location, size), range))
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
                    client.plain(Method::DELETE, &key, &[], None).await?;
                    Ok(key)
                }
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (client, prefix) = (self.client.clone(), prefix.cloned());
        let listed = async move {
            let prefix = prefix.ok_or_else(|| unsupported("listing of everything"))?;
            let listing: Listing = client.list(&prefix, "all").await?;
            // A name that is none here is not one of ours.
            let objects = listing
                .objects
                .into_iter()
                .filter_map(|(key, size)| Some(Ok(meta(&Path::parse(key).ok()?, size))));
            Ok::<_, Error>(stream::iter(objects.collect::<Vec<_>>()))
        };
        stream::once(listed).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let prefix = prefix.ok_or_else(|| unsupported("listing of everything"))?;
        let listing = self.client.list(prefix, "directories").await?;
        let names = listing.directories.into_iter();
        let common_prefixes = names.filter_map(|name| Path::parse(name).ok()).collect();
        Ok(ListResult { common_prefixes, objects: Vec::new(), extensions: Default::default() })
    }

    async fn copy_opts(&self, from: &Path, to: &Path, _: CopyOptions) -> Result<()> {
        self.client.plain(Method::POST, to, &[("copy", from.as_ref())], None).await.map(|_| ())
    }
}

fn result(payload: GetResultPayload, meta: ObjectMeta, range: std::ops::Range<u64>) -> GetResult {
    let (attributes, extensions) = Default::default();
    GetResult { payload, meta, range, attributes, extensions }
}

/// Whether a piece is worth asking for an address to send it to.
fn is_large(bytes: &Bytes) -> bool {
    bytes.len() as u64 >= SIGN_BYTES_MIN
}
