//! Objects by key, for a process that serves a store to others: read in ranges, received in one
//! piece or in parts, or signed so that the bytes do not pass through the server. This module knows
//! no callers and no HTTP; the caller decides on permissions.
//!
//! Bytes from the network count when the object is complete: they are received beside the store's
//! files and renamed, or received by S3. If the key contains a digest, the bytes must match it.

mod key_digest;
mod register;
mod staged_uploads;

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

use self::key_digest::digest_prefix;
use crate::{
    backend::StoreBackend,
    blocking::run_blocking,
    error::StorageError,
    internal_directory::read_or_create_identity,
    limits::{OBJECT_BYTES_MAX, PIECE_BYTES_MAX},
    manifest::MAX_FILES,
    path::RelativePath,
    store::Store,
};
pub use staged_uploads::ReceiveError;

/// The largest number of keys in a listing: a tree's files, and as many that do not belong to it.
pub const LISTED_MAX: usize = 2 * MAX_FILES + 3;
/// The validity of a signed URL: time for one piece over a slow uplink.
const SIGNED_URL_TTL: Duration = Duration::from_secs(900);
const READ_CHUNK: usize = 256 << 10;

/// The objects of a store, addressed by key.
///
/// A small object arrives with [`put_object`](Self::put_object). A large one arrives in parts:
///
/// ```text
/// begin_upload(owner, key)              -> upload
/// put_part((owner, key), part, body)    -> name   (repeat; the same part again is allowed)
/// complete_upload((owner, key), names)            (or abort_upload)
/// ```
///
/// In a directory an upload belongs to its owner and key, so one member cannot reach the upload of
/// another.
#[derive(Clone)]
pub struct StoreObjects {
    backend: Arc<StoreBackend>,
}

/// The unverified bytes of an object, in order.
pub type ObjectStream = BoxStream<'static, Result<Bytes, StorageError>>;

/// The position of one part in an upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartPosition {
    pub upload: String,
    /// The number of the part, from 0.
    pub index: usize,
    /// The offset of the part in the object, in bytes.
    pub offset: u64,
}

/// The one action that a signed URL permits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SignedAction {
    Get,
    Put,
    /// `index` counts from 0.
    Part {
        upload: String,
        index: usize,
    },
}

impl Store {
    /// Returns the objects of this store by key, to serve them to others.
    pub fn objects_by_key(&self) -> StoreObjects {
        StoreObjects { backend: self.backend.clone() }
    }
}

impl StoreObjects {
    /// Returns true if the objects are files of this machine, to which bytes are written as they
    /// arrive; otherwise each piece is in memory until it is sent on.
    pub fn are_local(&self) -> bool {
        self.backend.local.is_some()
    }

    /// Returns the size of an object in bytes.
    pub async fn object_size(&self, key: &RelativePath) -> Result<u64, StorageError> {
        let key = object_path(key);
        let head = self.backend.objects.head(&key).await;
        head.map(|meta| meta.size).map_err(|source| self.backend.storage_error(&key, source))
    }

    /// Streams a byte range of an object.
    pub async fn read_range(
        &self,
        key: &RelativePath,
        range: Range<u64>,
    ) -> Result<ObjectStream, StorageError> {
        let key = object_path(key);
        if let Some(file) = self.local_file(&key) {
            return self.read_local_range(&key, file?, range).await;
        }
        let (at, at_key) = (self.backend.clone(), key.clone());
        let options = GetOptions::new().with_range(Some(range));
        let got = self.backend.objects.get_opts(&key, options).await;
        let got = got.map_err(|source| self.backend.storage_error(&key, source))?;
        Ok(got.into_stream().map_err(move |source| at.storage_error(&at_key, source)).boxed())
    }

    async fn read_local_range(
        &self,
        key: &Path,
        file: PathBuf,
        range: Range<u64>,
    ) -> Result<ObjectStream, StorageError> {
        let url = self.backend.object_url(key);
        let fault = move |source| StorageError::from_io(url.clone(), source);
        let opened = run_blocking(move || {
            let mut file = File::open(file)?;
            file.seek(SeekFrom::Start(range.start))?;
            Ok::<_, std::io::Error>((file, range.end - range.start))
        });
        let (file, bytes) = opened.await.map_err(&fault)?;
        let file = tokio::io::AsyncReadExt::take(tokio::fs::File::from_std(file), bytes);
        Ok(ReaderStream::with_capacity(file, READ_CHUNK).map_err(fault).boxed())
    }

    /// Returns a URL that permits one action for 15 minutes to anyone who has it, or `None` when
    /// the store is a directory.
    pub async fn sign_url(
        &self,
        key: &RelativePath,
        what: &SignedAction,
    ) -> Result<Option<String>, StorageError> {
        let Some(bucket) = &self.backend.bucket else { return Ok(None) };
        let key = object_path(key);
        let (method, options) = match what {
            SignedAction::Get => (Method::GET, SignedUrlOptions::default()),
            SignedAction::Put => (Method::PUT, SignedUrlOptions::default()),
            SignedAction::Part { upload, index } => {
                let query = [("partNumber", (index + 1).to_string()), ("uploadId", upload.clone())];
                (Method::PUT, SignedUrlOptions::default().with_query(query))
            }
        };
        let at = bucket.full_key(&key);
        let signed = bucket.s3.signed_url_opts(method, &at, SIGNED_URL_TTL, &options).await;
        signed
            .map(|url| Some(url.to_string()))
            .map_err(|source| self.backend.storage_error(&key, source))
    }

    /// Receives an object of `bytes` bytes, at most [`PIECE_BYTES_MAX`]. In a directory the staged
    /// upload is named after `owner` and key, so that no other member can reach it.
    pub async fn put_object(
        &self,
        (owner, key): (&str, &RelativePath),
        body: impl Stream<Item = Result<Bytes, ReceiveError>> + Send,
        bytes: u64,
    ) -> Result<(), ReceiveError> {
        check_limit(bytes, PIECE_BYTES_MAX)?;
        let at = object_path(key);
        if let Some(target) = self.local_file(&at) {
            let target = target?;
            // The staged file is removed unless it becomes an object, also if this future is
            // dropped.
            let piece = self.upload_staging()?.begin_piece(owner, key, bytes).await?;
            let received = async {
                staged_uploads::write_at_offset(piece.file_path(), 0, bytes, body).await?;
                staged_uploads::commit_upload(
                    piece.file_path().to_owned(),
                    target,
                    bytes,
                    digest_prefix(key),
                )
                .await
            };
            return received.await.map_err(|error| error.with_url(&self.backend.object_url(&at)));
        }
        let body = collect_body(body, bytes).await?;
        staged_uploads::check_key_digest(key, &body)?;
        let put = self.backend.objects.put(&at, body.into()).await;
        put.map_err(|source| self.backend.storage_error(&at, source))?;
        Ok(())
    }

    /// Begins an upload in parts and returns its name. The parts survive a restart of this process;
    /// they are kept until the upload is completed, aborted or abandoned.
    pub async fn begin_upload(
        &self,
        owner: &str,
        key: &RelativePath,
    ) -> Result<String, ReceiveError> {
        let at = object_path(key);
        match &self.backend.bucket {
            None => self.upload_staging()?.begin_upload(owner, key).await,
            Some(_) => register::begin_recorded(self.backend.clone(), owner, at).await,
        }
    }

    /// Receives a part of `bytes` bytes and returns its name for
    /// [`complete_upload`](Self::complete_upload). Receiving the same part again is allowed.
    pub async fn put_part(
        &self,
        (owner, key): (&str, &RelativePath),
        part: &PartPosition,
        body: impl Stream<Item = Result<Bytes, ReceiveError>> + Send,
        bytes: u64,
    ) -> Result<String, ReceiveError> {
        check_limit(bytes, PIECE_BYTES_MAX)?;
        check_limit(part.offset.saturating_add(bytes), OBJECT_BYTES_MAX)?;
        let at = object_path(key);
        let Some(bucket) = &self.backend.bucket else {
            let staged = self.upload_staging()?.upload_path(owner, key, &part.upload)?;
            self.upload_staging()?.check_member_bytes(owner, bytes).await?;
            let written = staged_uploads::write_at_offset(&staged, part.offset, bytes, body).await;
            written.map_err(|error| error.with_url(&self.backend.object_url(&at)))?;
            return Ok(format!("{}-{bytes}", part.offset));
        };
        let body = collect_body(body, bytes).await?;
        let (at, upload) = (bucket.full_key(&at), part.upload.clone());
        let put = bucket.s3.put_part(&at, &upload, part.index, body.into()).await;
        Ok(put.map_err(|source| self.backend.storage_error(&object_path(key), source))?.content_id)
    }

    /// Makes an upload an object. The call may be repeated when its answer was lost.
    pub async fn complete_upload(
        &self,
        (owner, key): (&str, &RelativePath),
        upload: &str,
        parts: Vec<String>,
        bytes: u64,
    ) -> Result<(), ReceiveError> {
        let at = object_path(key);
        let completed = match &self.backend.bucket {
            None => {
                let staged = self.upload_staging()?.upload_path(owner, key, upload)?;
                let target = self.local_file(&at).ok_or(ReceiveError::NoUpload)??;
                let committed =
                    staged_uploads::commit_upload(staged, target, bytes, digest_prefix(key)).await;
                committed.map_err(|error| error.with_url(&self.backend.object_url(&at)))
            }
            Some(bucket) => {
                let parts = parts.into_iter().map(|content_id| PartId { content_id }).collect();
                let (place, upload) = (bucket.full_key(&at), upload.to_owned());
                let completed = bucket.s3.complete_multipart(&place, &upload, parts).await;
                if completed.is_ok() {
                    register::remove_record(&self.backend, owner, &at, &upload).await;
                }
                completed
                    .map(|_| ())
                    .map_err(|source| self.backend.storage_error(&at, source).into())
            }
        };
        match completed {
            Err(ReceiveError::NoUpload | ReceiveError::Storage(_))
                if self.object_size(key).await.is_ok_and(|size| size == bytes) =>
            {
                Ok(())
            }
            done => done,
        }
    }

    /// Ends an upload and removes its parts.
    pub async fn abort_upload(
        &self,
        owner: &str,
        key: &RelativePath,
        upload: &str,
    ) -> Result<(), ReceiveError> {
        let at = object_path(key);
        let Some(bucket) = &self.backend.bucket else {
            staged_uploads::discard_upload(self.upload_staging()?.upload_path(owner, key, upload)?)
                .await;
            return Ok(());
        };
        let aborted = bucket.s3.abort_multipart(&bucket.full_key(&at), &upload.to_owned()).await;
        if matches!(aborted, Ok(()) | Err(object_store::Error::NotFound { .. })) {
            register::remove_record(&self.backend, owner, &at, upload).await;
        }
        Ok(aborted.map_err(|source| self.backend.storage_error(&at, source))?)
    }

    /// Removes an object, and the directories of its tree that become empty.
    pub async fn remove_object(&self, key: &RelativePath) -> Result<(), StorageError> {
        let at = object_path(key);
        self.backend
            .objects
            .delete(&at)
            .await
            .map_err(|source| self.backend.storage_error(&at, source))?;
        if let Some(file) = self.local_file(&at) {
            let (file, directories) = (file?, tree_directory_count(key));
            // A directory that is not empty stays.
            run_blocking(move || {
                let above = file.ancestors().skip(1).take(directories);
                above.map(std::fs::remove_dir).take_while(Result::is_ok).for_each(drop);
            })
            .await;
        }
        Ok(())
    }

    /// Copies an object within the store.
    pub async fn copy_object(
        &self,
        from: &RelativePath,
        to: &RelativePath,
    ) -> Result<(), StorageError> {
        let (from, to) = (object_path(from), object_path(to));
        self.backend
            .copy(&from, &to)
            .await
            .map_err(|source| self.backend.storage_error(&to, source))
    }

    /// Returns true if the key contains a digest, against which the bytes are verified as they
    /// arrive.
    pub fn is_content_addressed(key: &RelativePath) -> bool {
        digest_prefix(key).is_some()
    }

    /// Lists the keys below a directory with their sizes, at most [`LISTED_MAX`].
    pub async fn list_objects(
        &self,
        below: &RelativePath,
    ) -> Result<BTreeMap<String, u64>, StorageError> {
        let prefix = object_path(below);
        let listed = self.backend.objects.list(Some(&prefix)).take(LISTED_MAX);
        let listed = listed.map_ok(|meta| (meta.location.to_string(), meta.size));
        match listed.try_collect().await {
            Err(object_store::Error::NotFound { .. }) => Ok(BTreeMap::new()),
            listed => listed.map_err(|source| self.backend.storage_error(&prefix, source)),
        }
    }

    /// Lists the directories directly below a directory, at most [`LISTED_MAX`].
    pub async fn list_directories(
        &self,
        below: &RelativePath,
    ) -> Result<Vec<String>, StorageError> {
        let prefix = object_path(below);
        match self.backend.objects.list_with_delimiter(Some(&prefix)).await {
            Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
            Err(source) => Err(self.backend.storage_error(&prefix, source)),
            Ok(listed) => {
                let names = listed.common_prefixes.iter().take(LISTED_MAX);
                Ok(names.map(ToString::to_string).collect())
            }
        }
    }

    /// Checks that the store answers.
    pub async fn check_reachable(&self) -> Result<(), StorageError> {
        let key = Path::from("check");
        match self.backend.objects.head(&key).await {
            Ok(_) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(self.backend.storage_error(&key, source)),
        }
    }

    /// Returns an identity that only this directory has, with which a process checks that a
    /// directory at the same path is the same one. Returns `None` for a bucket, whose name
    /// identifies it.
    pub async fn store_identity(&self) -> Result<Option<String>, StorageError> {
        let Some(root) = self.root_directory() else { return Ok(None) };
        let url = self.backend.url.clone();
        let identity = run_blocking(move || read_or_create_identity(&root)).await;
        identity.map(Some).map_err(|source| StorageError::from_io(url, source))
    }

    fn root_directory(&self) -> Option<PathBuf> {
        self.backend.url.strip_prefix("file://").map(PathBuf::from)
    }

    fn upload_staging(&self) -> Result<staged_uploads::UploadStaging, ReceiveError> {
        let root = self.root_directory().ok_or(ReceiveError::NoUpload)?;
        Ok(staged_uploads::UploadStaging::new(root, self.backend.url.clone()))
    }

    fn local_file(&self, key: &Path) -> Option<Result<PathBuf, StorageError>> {
        let local = self.backend.local.as_ref()?;
        Some(
            local.path_to_filesystem(key).map_err(|source| self.backend.storage_error(key, source)),
        )
    }
}

fn object_path(key: &RelativePath) -> Path {
    Path::parse(key.as_str()).expect("stricter than object_store's")
}

fn check_limit(bytes: u64, limit: u64) -> Result<(), ReceiveError> {
    if bytes > limit { Err(ReceiveError::TooLarge { bytes, limit }) } else { Ok(()) }
}

async fn collect_body(
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

/// Counts the directories of a key that belong to its tree: two for `runs/r-1/resume/c0-s8-…/a/b`.
fn tree_directory_count(key: &RelativePath) -> usize {
    const TREES_LIE_AT: usize = 3;
    key.as_str().split('/').count().saturating_sub(TREES_LIE_AT + 1)
}
