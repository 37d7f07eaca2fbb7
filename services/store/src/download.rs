//! Reads of objects in order, in bounded memory, verified against their digest.

use std::{
    fs::File,
    io::{self, Write},
    path::Path as FsPath,
};

use bytes::{Bytes, BytesMut};
use futures::{
    StreamExt, TryStreamExt,
    stream::{self, BoxStream},
};
use object_store::{GetOptions, ObjectStore, ObjectStoreExt, path::Path};
use tokio_util::{io::ReaderStream, task::AbortOnDropHandle};
use wire::Digest;

use crate::{
    blocking::run_blocking,
    error::{CacheError, GetError, StorageError},
    file_hashing,
    limits::PART_BYTES,
    store::{Store, WantedObject},
};

/// Each range is its own request, so none reaches the request timeout.
const RANGES_IN_FLIGHT: usize = 4;
const LOCAL_CHUNK: usize = 1 << 20;
const WRITTEN_AT_ONCE: usize = 256;
/// The number of fetches of an object that arrives damaged; bits can also flip in transit.
const FETCH_ATTEMPTS: u32 = 4;
/// The largest chunk that is hashed on the current thread; for less, a switch costs more time.
const INLINE_HASH_BYTES: usize = 128 << 10;

/// The bytes of a file in order. The last item is an error if they do not match the file's digest.
pub type VerifiedStream = BoxStream<'static, Result<Bytes, GetError>>;

impl WantedObject {
    pub(crate) fn corrupt_error(&self, found: impl Into<String>, same_size: bool) -> GetError {
        let expected = format!("{} of {} bytes", self.digest, self.bytes);
        GetError::Corrupt { url: self.url.clone(), expected, found: found.into(), same_size }
    }

    pub(crate) fn check_size(&self, size: u64) -> Result<(), GetError> {
        if size == self.bytes {
            Ok(())
        } else {
            Err(self.corrupt_error(format!("{size} bytes"), false))
        }
    }

    pub(crate) fn check_content(&self, (digest, size): (Digest, u64)) -> Result<(), GetError> {
        self.check_size(size)?;
        if digest == self.digest {
            Ok(())
        } else {
            Err(self.corrupt_error(digest.to_string(), true))
        }
    }
}

impl Store {
    /// Streams the unverified chunks of an object, after a check of its size.
    pub(crate) async fn stream_chunks(
        &self,
        wanted: &WantedObject,
    ) -> Result<BoxStream<'static, Result<Bytes, StorageError>>, GetError> {
        if let Some(path) = self.local_path(&wanted.key) {
            let url = wanted.url.clone();
            let fault = move |source| StorageError::from_io(url.clone(), source);
            let file = tokio::fs::File::open(path?).await.map_err(&fault)?;
            wanted.check_size(file.metadata().await.map_err(&fault)?.len())?;
            return Ok(ReaderStream::with_capacity(file, LOCAL_CHUNK).map_err(fault).boxed());
        }
        let at = self.backend.clone();
        let key = wanted.key.clone();
        let fault = move |source| at.storage_error(&key, source);
        if wanted.bytes <= PART_BYTES {
            let got = self.backend.objects.get(&wanted.key).await.map_err(&fault)?;
            wanted.check_size(got.meta.size)?;
            return Ok(got.into_stream().map_err(fault).boxed());
        }
        let meta = self.backend.objects.head(&wanted.key).await.map_err(&fault)?;
        wanted.check_size(meta.size)?;
        Ok(self.stream_ranges(wanted).map_err(fault).boxed())
    }

    fn stream_ranges(
        &self,
        wanted: &WantedObject,
    ) -> impl futures::Stream<Item = object_store::Result<Bytes>> + Send + 'static {
        let (objects, key, bytes) =
            (self.backend.objects.clone(), wanted.key.clone(), wanted.bytes);
        let starts = (0..bytes.div_ceil(PART_BYTES)).map(|n| n * PART_BYTES);
        let get = move |start: u64| {
            let (objects, key): (_, Path) = (objects.clone(), key.clone());
            let range = start..bytes.min(start + PART_BYTES);
            let options = GetOptions::new().with_range(Some(range));
            // The pieces are kept as they arrive; joining them would copy all bytes again.
            async move {
                objects.get_opts(&key, options).await?.into_stream().try_collect::<Vec<_>>().await
            }
        };
        // A range is read while earlier ones are hashed and written. Dropping the stream ends the
        // tasks.
        let task = move |start| AbortOnDropHandle::new(tokio::spawn(get(start)));
        let got = stream::iter(starts).map(task).buffered(RANGES_IN_FLIGHT);
        let pieces = got.map(|got| match got {
            Ok(got) => got,
            Err(source) => Err(object_store::Error::JoinError { source }),
        });
        pieces.map_ok(|pieces| stream::iter(pieces.into_iter().map(Ok))).try_flatten()
    }

    /// Streams the chunks of an object. The last item is an error if the content is not the
    /// expected one.
    pub(crate) async fn stream_verified(
        &self,
        wanted: WantedObject,
    ) -> Result<VerifiedStream, GetError> {
        let chunks = self.stream_chunks(&wanted).await?;
        let state = (chunks, blake3::Hasher::new(), wanted);
        Ok(stream::try_unfold(state, |(mut chunks, hasher, wanted)| async move {
            let Some(chunk) = chunks.try_next().await? else {
                wanted.check_content((hasher.finalize().into(), hasher.count()))?;
                return Ok(None);
            };
            let (hasher, chunk) = hash_chunk(hasher, chunk).await;
            Ok(Some((chunk, (chunks, hasher, wanted))))
        })
        .boxed())
    }

    /// Returns the verified content of an object of at most `limit` bytes.
    pub(crate) async fn read_verified(
        &self,
        wanted: &WantedObject,
        limit: u64,
    ) -> Result<Bytes, GetError> {
        let (url, bytes) = (wanted.url.clone(), wanted.bytes);
        let Some(capacity) = usize::try_from(bytes).ok().filter(|_| bytes <= limit) else {
            return Err(GetError::TooLarge { url, bytes, limit });
        };
        self.retry_if_damaged(|| async {
            let mut all = BytesMut::with_capacity(capacity);
            let mut chunks = self.stream_verified(wanted.clone()).await?;
            while let Some(chunk) = chunks.try_next().await? {
                all.extend_from_slice(&chunk);
            }
            Ok(all.freeze())
        })
        .await
    }

    /// Repeats a fetch from a remote store that arrived damaged.
    pub(crate) async fn retry_if_damaged<T, F>(
        &self,
        mut fetch: impl FnMut() -> F,
    ) -> Result<T, GetError>
    where
        F: Future<Output = Result<T, GetError>>,
    {
        let fetches = if self.backend.local.is_some() { 1 } else { FETCH_ATTEMPTS };
        for _ in 1..fetches {
            match fetch().await {
                Err(error @ GetError::Corrupt { same_size: true, .. }) => {
                    tracing::warn!(%error, "a file arrived damaged; fetching it again");
                }
                done => return done,
            }
        }
        fetch().await
    }

    /// Fills an empty file and verifies it. After an error its content must be discarded. `at` is
    /// its path, for messages.
    pub(crate) async fn fetch_into_file(
        &self,
        wanted: &WantedObject,
        file: File,
        at: &FsPath,
    ) -> Result<File, GetError> {
        if let Some(path) = self.local_path(&wanted.key) {
            let (path, wanted, at) = (path?, wanted.clone(), at.to_owned());
            return run_blocking(move || copy_local_object(&path, file, &at, &wanted)).await;
        }
        let mut chunks = self.stream_chunks(wanted).await?.try_ready_chunks(WRITTEN_AT_ONCE);
        let mut sink = (file, blake3::Hasher::new());
        while let Some(chunks) = chunks.try_next().await.map_err(|failed| failed.1)? {
            let write = move || {
                for chunk in chunks {
                    sink.0.write_all(&chunk)?;
                    sink.1.update(&chunk);
                }
                Ok(sink)
            };
            let written: io::Result<_> = run_blocking(write).await;
            sink = written.map_err(|source| CacheError::from_io("write", at, source))?;
        }
        wanted.check_content((sink.1.finalize().into(), sink.1.count()))?;
        Ok(sink.0)
    }
}

/// Copies an object of a local store and verifies it. Shares the blocks where the file system can,
/// but never makes a hard link, because the store's file must not be writable through a job's
/// directory. Blocking.
fn copy_local_object(
    path: &FsPath,
    to: File,
    at: &FsPath,
    wanted: &WantedObject,
) -> Result<File, GetError> {
    let fault = |source| StorageError::from_io(wanted.url.clone(), source);
    let from = File::open(path).map_err(fault)?;
    wanted.check_size(from.metadata().map_err(fault)?.len())?;
    let copied = file_hashing::copy_and_hash(&from, &to);
    let (digest, bytes, _) = copied.map_err(|source| CacheError::from_io("write", at, source))?;
    wanted.check_content((digest, bytes))?;
    Ok(to)
}

/// Hashes a chunk, on a blocking thread if it is large.
pub(crate) async fn hash_chunk(
    mut hasher: blake3::Hasher,
    chunk: Bytes,
) -> (blake3::Hasher, Bytes) {
    if chunk.len() <= INLINE_HASH_BYTES {
        hasher.update(&chunk);
        return (hasher, chunk);
    }
    run_blocking(move || {
        hasher.update(&chunk);
        (hasher, chunk)
    })
    .await
}
