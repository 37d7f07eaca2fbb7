//! Reading objects in order, in bounded memory, and comparing them with their digest.

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
    error::{CacheError, Fault, GetError},
    files,
    store::{Store, Wanted, blocking},
    tree::ByteStream,
    upload::PART_BYTES,
};

/// Ranges asked for at once; each is its own request, so none meets the request timeout.
const RANGES_IN_FLIGHT: usize = 4;
const LOCAL_CHUNK: usize = 1 << 20;
/// Chunks that are there already and go to another thread together.
const WRITTEN_AT_ONCE: usize = 256;
/// What came damaged from a remote store is asked for so often in all: bits flip on the way too.
const FETCHES: u32 = 4;
/// Below this, hashing is shorter than a trip to another thread.
const HASH_INLINE: usize = 128 << 10;

impl Wanted {
    pub(crate) fn corrupt(&self, found: impl Into<String>, same_size: bool) -> GetError {
        let expected = format!("{} of {} bytes", self.digest, self.bytes);
        GetError::Corrupt { url: self.url.clone(), expected, found: found.into(), same_size }
    }

    pub(crate) fn check_size(&self, size: u64) -> Result<(), GetError> {
        if size == self.bytes { Ok(()) } else { Err(self.corrupt(format!("{size} bytes"), false)) }
    }

    pub(crate) fn check(&self, (digest, size): (Digest, u64)) -> Result<(), GetError> {
        self.check_size(size)?;
        if digest == self.digest { Ok(()) } else { Err(self.corrupt(digest.to_string(), true)) }
    }
}

impl Store {
    /// Unverified chunks in order, after the object's size was compared.
    pub(crate) async fn chunks(
        &self,
        wanted: &Wanted,
    ) -> Result<BoxStream<'static, Result<Bytes, Fault>>, GetError> {
        if let Some(path) = self.local_path(&wanted.key) {
            let url = wanted.url.clone();
            let fault = move |source| Fault::from_io(url.clone(), source);
            let file = tokio::fs::File::open(path?).await.map_err(&fault)?;
            wanted.check_size(file.metadata().await.map_err(&fault)?.len())?;
            return Ok(ReaderStream::with_capacity(file, LOCAL_CHUNK).map_err(fault).boxed());
        }
        let at = self.at.clone();
        let key = wanted.key.clone();
        let fault = move |source| at.fault(&key, source);
        if wanted.bytes <= PART_BYTES {
            let got = self.at.objects.get(&wanted.key).await.map_err(&fault)?;
            wanted.check_size(got.meta.size)?;
            return Ok(got.into_stream().map_err(fault).boxed());
        }
        let meta = self.at.objects.head(&wanted.key).await.map_err(&fault)?;
        wanted.check_size(meta.size)?;
        Ok(self.ranges(wanted).map_err(fault).boxed())
    }

    fn ranges(
        &self,
        wanted: &Wanted,
    ) -> impl futures::Stream<Item = object_store::Result<Bytes>> + Send + 'static {
        let (objects, key, bytes) = (self.at.objects.clone(), wanted.key.clone(), wanted.bytes);
        let starts = (0..bytes.div_ceil(PART_BYTES)).map(|n| n * PART_BYTES);
        let get = move |start: u64| {
            let (objects, key): (_, Path) = (objects.clone(), key.clone());
            let range = start..bytes.min(start + PART_BYTES);
            let options = GetOptions::new().with_range(Some(range));
            // As it comes: making one piece of it would copy all once more.
            async move {
                objects.get_opts(&key, options).await?.into_stream().try_collect::<Vec<_>>().await
            }
        };
        // Each is read while what came before is hashed and written, and ended with the stream.
        let task = move |start| AbortOnDropHandle::new(tokio::spawn(get(start)));
        let got = stream::iter(starts).map(task).buffered(RANGES_IN_FLIGHT);
        let pieces = got.map(|got| match got {
            Ok(got) => got,
            Err(source) => Err(object_store::Error::JoinError { source }),
        });
        pieces.map_ok(|pieces| stream::iter(pieces.into_iter().map(Ok))).try_flatten()
    }

    /// Chunks in order; the last item is an error when the whole is not what was wanted.
    pub(crate) async fn verified(&self, wanted: Wanted) -> Result<ByteStream, GetError> {
        let chunks = self.chunks(&wanted).await?;
        let state = (chunks, blake3::Hasher::new(), wanted);
        Ok(stream::try_unfold(state, |(mut chunks, hasher, wanted)| async move {
            let Some(chunk) = chunks.try_next().await? else {
                wanted.check((hasher.finalize().into(), hasher.count()))?;
                return Ok(None);
            };
            let (hasher, chunk) = hash_chunk(hasher, chunk).await;
            Ok(Some((chunk, (chunks, hasher, wanted))))
        })
        .boxed())
    }

    pub(crate) async fn read_all(&self, wanted: &Wanted, limit: u64) -> Result<Bytes, GetError> {
        let (url, bytes) = (wanted.url.clone(), wanted.bytes);
        let Some(capacity) = usize::try_from(bytes).ok().filter(|_| bytes <= limit) else {
            return Err(GetError::TooLarge { url, bytes, limit });
        };
        self.until_undamaged(|| async {
            let mut all = BytesMut::with_capacity(capacity);
            let mut chunks = self.verified(wanted.clone()).await?;
            while let Some(chunk) = chunks.try_next().await? {
                all.extend_from_slice(&chunk);
            }
            Ok(all.freeze())
        })
        .await
    }

    /// Fetches again what came damaged over a network. What is damaged in the store stays so.
    pub(crate) async fn until_undamaged<T, F>(
        &self,
        mut fetch: impl FnMut() -> F,
    ) -> Result<T, GetError>
    where
        F: Future<Output = Result<T, GetError>>,
    {
        let fetches = if self.at.local.is_some() { 1 } else { FETCHES };
        for _ in 1..fetches {
            match fetch().await {
                Err(error @ GetError::Corrupt { same_size: true, .. }) => {
                    tracing::warn!(%error, "fetched damaged; fetching again");
                }
                done => return done,
            }
        }
        fetch().await
    }

    /// Fills an empty file of this machine; what it holds after an error is to be thrown away.
    /// `at` is its path, for messages.
    pub(crate) async fn fetch_into(
        &self,
        wanted: &Wanted,
        file: File,
        at: &FsPath,
    ) -> Result<File, GetError> {
        if let Some(path) = self.local_path(&wanted.key) {
            let (path, wanted, at) = (path?, wanted.clone(), at.to_owned());
            return blocking(move || copy_local(&path, file, &at, &wanted)).await;
        }
        let mut chunks = self.chunks(wanted).await?.try_ready_chunks(WRITTEN_AT_ONCE);
        let mut sink = (file, blake3::Hasher::new());
        while let Some(chunks) = chunks.try_next().await.map_err(|failed| failed.1)? {
            let write = move || {
                for chunk in chunks {
                    sink.0.write_all(&chunk)?;
                    sink.1.update(&chunk);
                }
                Ok(sink)
            };
            let written: io::Result<_> = blocking(write).await;
            sink = written.map_err(|source| CacheError::io("write", at, source))?;
        }
        wanted.check((sink.1.finalize().into(), sink.1.count()))?;
        Ok(sink.0)
    }
}

/// Shares the blocks where the file system can, else copies. Never a hard link: the store's
/// file must not be writable through a job's directory.
fn copy_local(path: &FsPath, to: File, at: &FsPath, wanted: &Wanted) -> Result<File, GetError> {
    let fault = |source| Fault::from_io(wanted.url.clone(), source);
    let from = File::open(path).map_err(fault)?;
    wanted.check_size(from.metadata().map_err(fault)?.len())?;
    let copied = files::copy(&from, &to);
    let (digest, bytes, _) = copied.map_err(|source| CacheError::io("write", at, source))?;
    wanted.check((digest, bytes))?;
    Ok(to)
}

pub(crate) async fn hash_chunk(
    mut hasher: blake3::Hasher,
    chunk: Bytes,
) -> (blake3::Hasher, Bytes) {
    if chunk.len() <= HASH_INLINE {
        hasher.update(&chunk);
        return (hasher, chunk);
    }
    blocking(move || {
        hasher.update(&chunk);
        (hasher, chunk)
    })
    .await
}
