//! Writing objects: small ones in one request, large ones in parts, a few at a time. The
//! bytes are hashed as they leave, so a file that changes meanwhile is not committed.

use std::{
    fs::File,
    io::{self, Read},
    path::Path as FsPath,
    time::Duration,
};

use bytes::Bytes;
use object_store::{MultipartUpload, ObjectStoreExt, path::Path};
use tokio::task::JoinSet;
use wire::Digest;

use crate::{
    error::{Fault, PutError},
    store::{Store, blocking},
};

pub(crate) const PART_BYTES: u64 = 16 << 20;
/// With the part being read, 5 × 16 MiB of memory.
const PARTS_IN_FLIGHT: usize = 4;
/// S3 allows 10 000.
const MAX_PARTS: u64 = 9_000;
const ABORT_TIMEOUT: Duration = Duration::from_secs(30);

/// A file that is read part by part, off the runtime.
struct Source {
    file: File,
    hasher: blake3::Hasher,
    part_bytes: u64,
}

impl Source {
    async fn next(mut self) -> io::Result<(Self, Bytes)> {
        blocking(move || {
            let expected = self.part_bytes.min(self.file.metadata()?.len());
            let mut part = Vec::with_capacity(usize::try_from(expected).unwrap_or(0));
            (&self.file).take(self.part_bytes).read_to_end(&mut part)?;
            self.hasher.update(&part);
            Ok((self, Bytes::from(part)))
        })
        .await
    }

    fn read_all_of(&self, digest: Digest, bytes: u64) -> bool {
        self.hasher.count() == bytes && Digest::from(self.hasher.finalize()) == digest
    }
}

impl Store {
    pub(crate) async fn put_bytes(&self, key: &Path, bytes: Bytes) -> Result<(), Fault> {
        let put = self.at.objects.put(key, bytes.into()).await;
        put.map(|_| ()).map_err(|source| self.at.fault(key, source))
    }

    /// Uploads a file whose digest and size were found before.
    ///
    /// When this future is dropped midway, parts may stay on an S3 server until the bucket's
    /// lifecycle rule (`AbortIncompleteMultipartUpload`) removes them.
    pub(crate) async fn put_file(
        &self,
        key: &Path,
        path: &FsPath,
        digest: Digest,
        bytes: u64,
    ) -> Result<(), PutError> {
        let unread = |source| PutError::Read { path: path.to_owned(), source };
        let file = tokio::fs::File::open(path).await.map_err(unread)?.into_std().await;
        let part_bytes = PART_BYTES.max((bytes / MAX_PARTS).next_power_of_two());
        let source = Source { file, hasher: blake3::Hasher::new(), part_bytes };
        if bytes > part_bytes {
            return self.put_parts(key, path, source, (digest, bytes)).await;
        }
        let (source, part) = source.next().await.map_err(unread)?;
        if !source.read_all_of(digest, bytes) {
            return Err(PutError::Changed { path: path.to_owned() });
        }
        Ok(self.put_bytes(key, part).await?)
    }

    async fn put_parts(
        &self,
        key: &Path,
        path: &FsPath,
        source: Source,
        (digest, bytes): (Digest, u64),
    ) -> Result<(), PutError> {
        let begun = self.at.objects.put_multipart(key).await;
        let mut upload = begun.map_err(|source| self.at.fault(key, source))?;
        let sent = match self.send_parts(upload.as_mut(), key, path, source).await {
            Ok(source) if source.read_all_of(digest, bytes) => Ok(()),
            Ok(_) => Err(PutError::Changed { path: path.to_owned() }),
            Err(error) => Err(error),
        };
        if let Err(error) = sent {
            let aborted = tokio::time::timeout(ABORT_TIMEOUT, upload.abort()).await;
            if !matches!(aborted, Ok(Ok(()))) {
                tracing::warn!(url = self.at.url_of(key), "parts of a failed upload remain");
            }
            return Err(error);
        }
        match upload.complete().await {
            Ok(_) => Ok(()),
            // The reply to a first, successful try may have been lost.
            Err(_) if self.is_complete(key, bytes).await => Ok(()),
            Err(source) => Err(self.at.fault(key, source).into()),
        }
    }

    async fn send_parts(
        &self,
        upload: &mut dyn MultipartUpload,
        key: &Path,
        path: &FsPath,
        mut source: Source,
    ) -> Result<Source, PutError> {
        let mut in_flight = JoinSet::new();
        loop {
            let read = source.next().await;
            let part;
            (source, part) =
                read.map_err(|source| PutError::Read { path: path.to_owned(), source })?;
            let last = part.is_empty();
            if !last {
                in_flight.spawn(upload.put_part(part.into()));
            }
            while in_flight.len() >= PARTS_IN_FLIGHT || last {
                match in_flight.join_next().await {
                    None => return Ok(source),
                    Some(Ok(sent)) => sent.map_err(|source| self.at.fault(key, source))?,
                    Some(Err(panic)) => std::panic::resume_unwind(panic.into_panic()),
                }
            }
        }
    }

    async fn is_complete(&self, key: &Path, bytes: u64) -> bool {
        self.at.objects.head(key).await.is_ok_and(|meta| meta.size == bytes)
    }
}
