//! Uploads to the hub's large file storage, by the batch protocol of Git LFS. It has the transfers
//! that the hub offers: `basic` is one request, `multipart` is one request a part.

use std::{
    collections::BTreeMap,
    io::{Read, SeekFrom},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use data_encoding::HEXLOWER;
use futures::StreamExt;
use reqwest::{
    Body, Method, RequestBuilder, Response, Url,
    header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, ETAG},
};
use ring::digest::{Context, SHA256};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    fs::File,
    io::{AsyncReadExt, AsyncSeekExt},
    time::timeout,
};
use tokio_util::io::ReaderStream;

use crate::{
    client::run_blocking,
    error::{RequestError, SILENCE_TIMEOUT},
    hub_http::{HubHttp, check_status, read_json, send},
    retry::retry_request,
};

const MEDIA_TYPE: &str = "application/vnd.git-lfs+json";
/// The hub takes no more in one batch.
const BATCH_OBJECTS_MAX: usize = 100;
const PARTS_MAX: u64 = 10_000;
const READ_BYTES: usize = 256 << 10;

/// A callback with the number of bytes that were just sent.
pub type SentCallback = Arc<dyn Fn(u64) + Send + Sync>;

/// A file for large file storage.
pub(crate) struct LfsObject {
    /// Its path in the repository.
    pub(crate) name: String,
    pub(crate) source: PathBuf,
    pub(crate) sha256: String,
    pub(crate) size: u64,
}

#[derive(Deserialize)]
struct BatchAnswer {
    objects: Vec<BatchObject>,
}

#[derive(Deserialize)]
struct BatchObject {
    oid: String,
    /// Absent if the storage has the object.
    actions: Option<LfsActions>,
    error: Option<LfsError>,
}

#[derive(Deserialize)]
struct LfsActions {
    upload: LfsAction,
    verify: Option<LfsAction>,
}

#[derive(Deserialize)]
struct LfsAction {
    href: String,
    /// For a transfer in parts: its `chunk_size`, and the address of each part by number.
    #[serde(default)]
    header: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
struct LfsError {
    message: String,
}

impl LfsObject {
    pub(crate) async fn from_file(
        name: &str,
        source: &Path,
        size: u64,
    ) -> Result<Self, RequestError> {
        let path = source.to_owned();
        let sha256 = run_blocking(move || hash_file(&path)).await?;
        Ok(Self { name: name.to_owned(), source: source.to_owned(), sha256, size })
    }
}

fn hash_file(path: &Path) -> std::io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let (mut context, mut buffer) = (Context::new(&SHA256), vec![0; READ_BYTES]);
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok(HEXLOWER.encode(context.finish().as_ref()));
        }
        context.update(&buffer[..count]);
    }
}

/// Uploads the objects that the storage lacks.
pub(crate) async fn upload_objects(
    http: &HubHttp,
    repo: &str,
    revision: &str,
    objects: &[LfsObject],
    sent: &SentCallback,
) -> Result<(), RequestError> {
    let by_digest: BTreeMap<&str, &LfsObject> =
        objects.iter().map(|object| (object.sha256.as_str(), object)).collect();
    let distinct: Vec<&LfsObject> = by_digest.values().copied().collect();
    for batch in distinct.chunks(BATCH_OBJECTS_MAX) {
        let list = |object: &&LfsObject| json!({ "oid": object.sha256, "size": object.size });
        let body = json!({
            "operation": "upload",
            "transfers": ["basic", "multipart"],
            "objects": batch.iter().map(list).collect::<Vec<_>>(),
            "hash_algo": "sha256",
            "ref": { "name": revision },
        });
        let url = http.hub_url(&format!("{repo}.git/info/lfs/objects/batch"));
        let answer: BatchAnswer = read_json(send(post_lfs(http, url, &body)).await?).await?;
        for answered in answer.objects {
            let object = by_digest.get(answered.oid.as_str()).ok_or("it answers another object")?;
            match answered {
                BatchObject { error: Some(error), .. } => return Err(error.message.into()),
                BatchObject { actions: Some(actions), .. } => {
                    upload_object(http, object, &actions, sent).await?;
                }
                _ => {}
            }
        }
    }
    Ok(())
}

fn post_lfs(http: &HubHttp, url: Url, body: &Value) -> RequestBuilder {
    let request = http.start_request(Method::POST, url).header(ACCEPT, MEDIA_TYPE);
    request.header(CONTENT_TYPE, MEDIA_TYPE).body(body.to_string())
}

async fn upload_object(
    http: &HubHttp,
    object: &LfsObject,
    LfsActions { upload, verify }: &LfsActions,
    sent: &SentCallback,
) -> Result<(), RequestError> {
    let to = parse_url(&upload.href)?;
    match upload.header.get("chunk_size") {
        None => drop(put_range(http, &to, &object.source, (0, object.size), sent).await?),
        Some(chunk) => {
            let chunk = read_number(chunk).ok_or("its part size is not a number")?;
            let parts = upload_parts(http, object, &upload.header, chunk, sent).await?;
            let body = json!({ "oid": object.sha256, "parts": parts });
            check_status(send(post_lfs(http, to, &body)).await?).await?;
        }
    }
    if let Some(verify) = verify {
        let body = json!({ "oid": object.sha256, "size": object.size });
        let request = http.start_request(Method::POST, parse_url(&verify.href)?).json(&body);
        check_status(send(request).await?).await?;
    }
    Ok(())
}

/// Returns the number and etag of each part.
async fn upload_parts(
    http: &HubHttp,
    object: &LfsObject,
    header: &BTreeMap<String, Value>,
    chunk: u64,
    sent: &SentCallback,
) -> Result<Vec<Value>, RequestError> {
    let urls: BTreeMap<u64, &str> =
        header.iter().filter_map(|(part, url)| Some((part.parse().ok()?, url.as_str()?))).collect();
    let wanted = object.size.div_ceil(chunk.max(1));
    if wanted > PARTS_MAX || !urls.keys().copied().eq(1..=wanted) {
        return Err("its parts do not make up the file".into());
    }
    let mut parts = Vec::new();
    for (part, url) in urls {
        let from = (part - 1) * chunk;
        let range = (from, chunk.min(object.size - from));
        let response = put_range(http, &parse_url(url)?, &object.source, range, sent).await?;
        let etag = response.headers().get(ETAG).and_then(|etag| etag.to_str().ok());
        let etag = etag.ok_or("the storage gave no etag for a part")?;
        parts.push(json!({ "partNumber": part, "etag": etag }));
    }
    Ok(parts)
}

/// Sends bytes of a file from an offset, again if the storage fails.
async fn put_range(
    http: &HubHttp,
    url: &Url,
    path: &Path,
    range: (u64, u64),
    sent: &SentCallback,
) -> Result<Response, RequestError> {
    retry_request(async || put_range_once(http, url.clone(), path, range, sent.clone()).await).await
}

/// Fails if nothing was sent for [`SILENCE_TIMEOUT`].
async fn put_range_once(
    http: &HubHttp,
    url: Url,
    path: &Path,
    (from, bytes): (u64, u64),
    seen: SentCallback,
) -> Result<Response, RequestError> {
    let mut file = File::open(path).await?;
    file.seek(SeekFrom::Start(from)).await?;
    let chunk_count = Arc::new(AtomicU64::new(0));
    let count = chunk_count.clone();
    let chunks = ReaderStream::with_capacity(file.take(bytes), READ_BYTES).inspect(move |chunk| {
        count.fetch_add(1, Ordering::Relaxed);
        seen(chunk.as_ref().map_or(0, |chunk| chunk.len() as u64));
    });
    let request = http.start_request(Method::PUT, url);
    // Storage does not accept a body whose length it learns at the end.
    let request = request.header(CONTENT_LENGTH, bytes).body(Body::wrap_stream(chunks));
    let mut sent = std::pin::pin!(request.send());
    loop {
        let before = chunk_count.load(Ordering::Relaxed);
        match timeout(SILENCE_TIMEOUT, &mut sent).await {
            Ok(response) => return check_status(response?).await,
            Err(_) if chunk_count.load(Ordering::Relaxed) != before => {}
            Err(_) => return Err(RequestError::Silent),
        }
    }
}

fn parse_url(text: &str) -> Result<Url, RequestError> {
    Url::parse(text).map_err(|_| "it names no address to upload to".into())
}

fn read_number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}
