//! Objects by key, for who serves a store to others: read in ranges, received in one piece or in
//! parts, or signed for, so that their bytes need not pass. Knows no callers and no HTTP; what a
//! caller may do was decided before.
//!
//! What comes over the network counts when it is whole: it is received beside the store's files
//! and renamed, or received by S3. A key that says what its bytes must be is held to it.

mod stage;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Seek, SeekFrom},
    ops::Range,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt, TryStreamExt, stream::BoxStream};
use object_store::{
    GetOptions, ObjectStore, ObjectStoreExt,
    multipart::{MultipartStore, PartId},
    path::Path,
    signer::{Method, SignedUrlOptions, Signer},
};
use tokio_util::io::ReaderStream;

use crate::{
    error::Fault,
    location::Location,
    manifest::{MANIFEST, MAX_FILES},
    path::RelativePath,
    store::{Store, blocking},
};
pub use stage::ReceiveError;
pub(crate) use stage::identity_file;

/// As large as a part may be, and what is sent in one piece.
pub const PIECE_BYTES_MAX: u64 = 64 << 20;
/// No file of a model is larger.
pub const OBJECT_BYTES_MAX: u64 = 1 << 40;
/// S3 allows 10 000.
pub const PARTS_MAX: usize = 10_000;
/// A tree's files, and as many that do not belong to it.
pub const LISTED_MAX: usize = 2 * MAX_FILES + 3;
/// How long a signed address is good for: one piece over a slow uplink.
const SIGNED_FOR: Duration = Duration::from_secs(900);
const READ_CHUNK: usize = 256 << 10;
/// Of the name of a tree's directory, as `TreePlace` makes it.
const SUFFIX_HEX: usize = 12;

/// A store's objects.
#[derive(Clone)]
pub struct Objects {
    at: Arc<Location>,
}

/// Bytes of an object, in order.
pub type Pieces = BoxStream<'static, Result<Bytes, Fault>>;

/// One piece of an upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    pub upload: String,
    /// From 0.
    pub index: usize,
    pub offset: u64,
}

/// What a signed address lets its holder do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Signed {
    Get,
    Put,
    Part { upload: String, index: usize },
}

impl Store {
    pub fn objects(&self) -> Objects {
        Objects { at: self.at.clone() }
    }
}

impl Objects {
    /// # Errors
    /// When there is no such object, or the store fails.
    pub async fn size(&self, key: &RelativePath) -> Result<u64, Fault> {
        let key = path(key);
        let head = self.at.objects.head(&key).await;
        head.map(|meta| meta.size).map_err(|source| self.at.fault(&key, source))
    }

    /// # Errors
    /// When there is no such object, or the store fails.
    pub async fn read(&self, key: &RelativePath, range: Range<u64>) -> Result<Pieces, Fault> {
        let key = path(key);
        if let Some(file) = self.file(&key) {
            return self.read_file(&key, file?, range).await;
        }
        let (at, at_key) = (self.at.clone(), key.clone());
        let options = GetOptions::new().with_range(Some(range));
        let got = self.at.objects.get_opts(&key, options).await;
        let got = got.map_err(|source| self.at.fault(&key, source))?;
        Ok(got.into_stream().map_err(move |source| at.fault(&at_key, source)).boxed())
    }

    async fn read_file(
        &self,
        key: &Path,
        file: PathBuf,
        range: Range<u64>,
    ) -> Result<Pieces, Fault> {
        let url = self.at.url_of(key);
        let fault = move |source| Fault::from_io(url.clone(), source);
        let opened = blocking(move || {
            let mut file = File::open(file)?;
            file.seek(SeekFrom::Start(range.start))?;
            Ok::<_, std::io::Error>((file, range.end - range.start))
        });
        let (file, bytes) = opened.await.map_err(&fault)?;
        let file = tokio::io::AsyncReadExt::take(tokio::fs::File::from_std(file), bytes);
        Ok(ReaderStream::with_capacity(file, READ_CHUNK).map_err(fault).boxed())
    }

    /// An address that does this one thing for some minutes, whoever has it; `None` when the
    /// store is a directory.
    ///
    /// # Errors
    /// When there are no keys to sign with.
    pub async fn sign(&self, key: &RelativePath, what: &Signed) -> Result<Option<String>, Fault> {
        let Some(bucket) = &self.at.bucket else { return Ok(None) };
        let key = path(key);
        let (method, options) = match what {
            Signed::Get => (Method::GET, SignedUrlOptions::default()),
            Signed::Put => (Method::PUT, SignedUrlOptions::default()),
            Signed::Part { upload, index } => {
                let query = [("partNumber", (index + 1).to_string()), ("uploadId", upload.clone())];
                (Method::PUT, SignedUrlOptions::default().with_query(query))
            }
        };
        let at = bucket.path(&key);
        let signed = bucket.s3.signed_url_opts(method, &at, SIGNED_FOR, &options).await;
        signed.map(|url| Some(url.to_string())).map_err(|source| self.at.fault(&key, source))
    }

    /// Receives an object of that size, of at most [`PIECE_BYTES_MAX`]. `owner` and key make
    /// uploads of others unreachable.
    ///
    /// # Errors
    /// When it is too large, not what its key says or not whole, or the store fails.
    pub async fn put(
        &self,
        (owner, key): (&str, &RelativePath),
        body: impl Stream<Item = Result<Bytes, ReceiveError>> + Send,
        bytes: u64,
    ) -> Result<(), ReceiveError> {
        at_most(bytes, PIECE_BYTES_MAX)?;
        let at = path(key);
        if let Some(target) = self.file(&at) {
            let target = target?;
            let upload = self.stage()?.begin(owner, key).await?;
            let staged = self.stage()?.at(owner, key, &upload)?;
            let received = async {
                stage::write(&staged, 0, bytes, body).await?;
                stage::commit(staged.clone(), target, bytes, named(key)).await
            };
            let received = received.await;
            if received.is_err() {
                stage::discard(staged).await;
            }
            return received.map_err(|error| error.at(&self.at.url_of(&at)));
        }
        let body = collect(body, bytes).await?;
        stage::check_named(key, &body)?;
        let put = self.at.objects.put(&at, body.into()).await;
        put.map_err(|source| self.at.fault(&at, source))?;
        Ok(())
    }

    /// Begins an upload in parts; they are kept until it is completed or aborted, whatever
    /// becomes of this process, but not for ever.
    ///
    /// # Errors
    /// When too many are in progress, or the store fails.
    pub async fn begin(&self, owner: &str, key: &RelativePath) -> Result<String, ReceiveError> {
        let at = path(key);
        let Some(bucket) = &self.at.bucket else { return self.stage()?.begin(owner, key).await };
        let begun = bucket.s3.create_multipart(&bucket.path(&at)).await;
        Ok(begun.map_err(|source| self.at.fault(&at, source))?)
    }

    /// Receives a part; the same one again is fine. What comes back names it for `complete`.
    ///
    /// # Errors
    /// When it is too large or not whole, there is no such upload, or the store fails.
    pub async fn put_part(
        &self,
        (owner, key): (&str, &RelativePath),
        part: &Part,
        body: impl Stream<Item = Result<Bytes, ReceiveError>> + Send,
        bytes: u64,
    ) -> Result<String, ReceiveError> {
        at_most(bytes, PIECE_BYTES_MAX)?;
        at_most(part.offset.saturating_add(bytes), OBJECT_BYTES_MAX)?;
        let at = path(key);
        let Some(bucket) = &self.at.bucket else {
            let staged = self.stage()?.at(owner, key, &part.upload)?;
            let written = stage::write(&staged, part.offset, bytes, body).await;
            written.map_err(|error| error.at(&self.at.url_of(&at)))?;
            return Ok(format!("{}-{bytes}", part.offset));
        };
        let body = collect(body, bytes).await?;
        let (at, upload) = (bucket.path(&at), part.upload.clone());
        let put = bucket.s3.put_part(&at, &upload, part.index, body.into()).await;
        Ok(put.map_err(|source| self.at.fault(&path(key), source))?.content_id)
    }

    /// Makes an upload an object; once more, after its answer was lost, is fine.
    ///
    /// # Errors
    /// When it is not whole or not what its key says, there is no such upload, or the store fails.
    pub async fn complete(
        &self,
        (owner, key): (&str, &RelativePath),
        upload: &str,
        parts: Vec<String>,
        bytes: u64,
    ) -> Result<(), ReceiveError> {
        let at = path(key);
        let completed = match &self.at.bucket {
            None => {
                let staged = self.stage()?.at(owner, key, upload)?;
                let target = self.file(&at).ok_or(ReceiveError::NoUpload)??;
                let committed = stage::commit(staged.clone(), target, bytes, named(key)).await;
                if matches!(committed, Err(ReceiveError::Differs { .. })) {
                    stage::discard(staged).await;
                }
                committed.map_err(|error| error.at(&self.at.url_of(&at)))
            }
            Some(bucket) => {
                let parts = parts.into_iter().map(|content_id| PartId { content_id }).collect();
                let (place, upload) = (bucket.path(&at), upload.to_owned());
                let completed = bucket.s3.complete_multipart(&place, &upload, parts).await;
                completed.map(|_| ()).map_err(|source| self.at.fault(&at, source).into())
            }
        };
        match completed {
            Err(ReceiveError::NoUpload | ReceiveError::Fault(_))
                if self.size(key).await.is_ok_and(|size| size == bytes) =>
            {
                Ok(())
            }
            done => done,
        }
    }

    /// # Errors
    /// When the store fails.
    pub async fn abort(
        &self,
        owner: &str,
        key: &RelativePath,
        upload: &str,
    ) -> Result<(), ReceiveError> {
        let at = path(key);
        let Some(bucket) = &self.at.bucket else {
            stage::discard(self.stage()?.at(owner, key, upload)?).await;
            return Ok(());
        };
        let aborted = bucket.s3.abort_multipart(&bucket.path(&at), &upload.to_owned()).await;
        Ok(aborted.map_err(|source| self.at.fault(&at, source))?)
    }

    /// Removes an object, and the directories of its tree that are empty without it.
    ///
    /// # Errors
    /// When there is no such object, or the store fails.
    pub async fn remove(&self, key: &RelativePath) -> Result<(), Fault> {
        let at = path(key);
        self.at.objects.delete(&at).await.map_err(|source| self.at.fault(&at, source))?;
        if let Some(file) = self.file(&at) {
            let (file, directories) = (file?, directories_of_tree(key));
            // One that is not empty stays.
            blocking(move || {
                let above = file.ancestors().skip(1).take(directories);
                above.map(std::fs::remove_dir).take_while(Result::is_ok).for_each(drop);
            })
            .await;
        }
        Ok(())
    }

    /// # Errors
    /// When there is no such object, or the store refuses or fails.
    pub async fn copy(&self, from: &RelativePath, to: &RelativePath) -> Result<(), Fault> {
        let (from, to) = (path(from), path(to));
        self.at.objects.copy(&from, &to).await.map_err(|source| self.at.fault(&to, source))
    }

    /// The keys below a directory with their sizes, [`LISTED_MAX`] at most.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn list(&self, below: &RelativePath) -> Result<BTreeMap<String, u64>, Fault> {
        let prefix = path(below);
        let listed = self.at.objects.list(Some(&prefix)).take(LISTED_MAX);
        let listed = listed.map_ok(|meta| (meta.location.to_string(), meta.size));
        match listed.try_collect().await {
            Err(object_store::Error::NotFound { .. }) => Ok(BTreeMap::new()),
            listed => listed.map_err(|source| self.at.fault(&prefix, source)),
        }
    }

    /// The directories directly below one, [`LISTED_MAX`] at most.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn directories(&self, below: &RelativePath) -> Result<Vec<String>, Fault> {
        let prefix = path(below);
        match self.at.objects.list_with_delimiter(Some(&prefix)).await {
            Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
            Err(source) => Err(self.at.fault(&prefix, source)),
            Ok(listed) => {
                let names = listed.common_prefixes.iter().take(LISTED_MAX);
                Ok(names.map(ToString::to_string).collect())
            }
        }
    }

    /// Whether the store answers.
    ///
    /// # Errors
    /// When it does not.
    pub async fn answers(&self) -> Result<(), Fault> {
        let key = Path::from("check");
        match self.at.objects.head(&key).await {
            Ok(_) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(self.at.fault(&key, source)),
        }
    }

    /// A name for this directory that no other store has, so that who sees a directory of that
    /// path can tell whether it is this one. `None` for a bucket, whose name is enough.
    ///
    /// # Errors
    /// When the directory cannot be written to.
    pub async fn identity(&self) -> Result<Option<String>, Fault> {
        let Some(root) = self.root() else { return Ok(None) };
        let url = self.at.url.clone();
        let identity = blocking(move || stage::identity(&root)).await;
        identity.map(Some).map_err(|source| Fault::from_io(url, source))
    }

    fn root(&self) -> Option<PathBuf> {
        self.at.url.strip_prefix("file://").map(PathBuf::from)
    }

    fn stage(&self) -> Result<stage::Stage, ReceiveError> {
        let root = self.root().ok_or(ReceiveError::NoUpload)?;
        Ok(stage::Stage::new(root, self.at.url.clone()))
    }

    fn file(&self, key: &Path) -> Option<Result<PathBuf, Fault>> {
        let local = self.at.local.as_ref()?;
        Some(local.path_to_filesystem(key).map_err(|source| self.at.fault(key, source)))
    }
}

fn path(key: &RelativePath) -> Path {
    Path::parse(key.as_str()).expect("stricter than object_store's")
}

fn at_most(bytes: u64, limit: u64) -> Result<(), ReceiveError> {
    if bytes > limit { Err(ReceiveError::TooLarge { bytes, limit }) } else { Ok(()) }
}

async fn collect(
    body: impl Stream<Item = Result<Bytes, ReceiveError>>,
    bytes: u64,
) -> Result<Bytes, ReceiveError> {
    let mut body = std::pin::pin!(body);
    let mut all = BytesMut::with_capacity(usize::try_from(bytes).unwrap_or(0));
    while let Some(piece) = body.try_next().await? {
        all.extend_from_slice(&piece);
        if all.len() as u64 > bytes {
            break;
        }
    }
    let got = all.len() as u64;
    if got == bytes { Ok(all.freeze()) } else { Err(ReceiveError::Size { expected: bytes, got }) }
}

/// What the digest of a key's bytes begins with, in hex, for keys that say it: blobs and the
/// manifests of trees that were published.
fn named(key: &RelativePath) -> Option<String> {
    let segments: Vec<&str> = key.as_str().split('/').collect();
    let hex = |text: &str| text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    match segments[..] {
        ["blobs", _, name] if name.len() == 64 && hex(name) => Some(name.to_owned()),
        ["runs" | "models", .., tree, MANIFEST] => {
            let (_, suffix) = tree.rsplit_once('-')?;
            (suffix.len() == SUFFIX_HEX && hex(suffix)).then(|| suffix.to_owned())
        }
        _ => None,
    }
}

/// How many directories of a key are its tree's: of `runs/r-1/resume/c0-s8-…/a/b`, two.
fn directories_of_tree(key: &RelativePath) -> usize {
    const TREES_LIE_AT: usize = 3;
    key.as_str().split('/').count().saturating_sub(TREES_LIE_AT + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_blobs_and_of_published_manifests_say_what_their_bytes_are() {
        let hex = "ab".repeat(32);
        for (key, expected) in [
            (format!("blobs/ab/{hex}"), Some(hex.as_str())),
            ("runs/r-1/checkpoints/c0-s1-0123456789ab/manifest.json".into(), Some("0123456789ab")),
            ("models/base-0123456789ab/manifest.json".into(), Some("0123456789ab")),
            ("models/base-0123456789ab/config.json".into(), None),
            ("models/of-mine/manifest.json".into(), None),
            ("blobs/ab/short".into(), None),
        ] {
            let key = RelativePath::new(key).unwrap();
            assert_eq!(named(&key).as_deref(), expected, "{key}");
        }
    }
}
