//! Writing objects: small ones in one request, large ones in parts, a few at a time, files of a
//! directory as copies. The bytes are hashed as they leave, so a file that changes meanwhile is not
//! committed.

mod journal;
mod local;
mod multipart;

use std::{
    fs::File,
    io::{self, Read},
    path::Path as FsPath,
    time::Duration,
};

use bytes::Bytes;
use object_store::{ObjectStoreExt, path::Path};
use tokio::task::JoinSet;
use wire::Digest;

use self::journal::{Journal, SentPart, What};
use crate::{
    error::{Fault, PutError},
    files,
    parts::{PartHasher, Parts},
    store::{Store, blocking},
};
pub(crate) use journal::directory as journal_directory;

pub(crate) const PART_BYTES: u64 = 16 << 20;
/// With the part being read, 5 × 16 MiB of memory.
const PARTS_IN_FLIGHT: usize = 4;
/// S3 allows 10 000.
const MAX_PARTS: u64 = 9_000;
const ABORT_TIMEOUT: Duration = Duration::from_secs(30);

/// A file that is read part by part, off the runtime.
struct Source {
    file: File,
    hasher: PartHasher,
    part_bytes: u64,
}

/// Between two readings.
struct Changed;

impl Source {
    /// The next part, and a digest of the file up to its end.
    async fn next(mut self) -> io::Result<(Self, Bytes, Digest)> {
        blocking(move || {
            let expected = self.part_bytes.min(self.file.metadata()?.len());
            let mut part = Vec::with_capacity(usize::try_from(expected).unwrap_or(0));
            (&self.file).take(self.part_bytes).read_to_end(&mut part)?;
            self.hasher.update(&part);
            let digest = self.hasher.so_far();
            Ok((self, Bytes::from(part), digest))
        })
        .await
    }

    /// The parts of what was read, if it was that file.
    fn read_all_of(self, digest: Digest, bytes: u64) -> Result<Option<Parts>, Changed> {
        let (found, count, parts) = self.hasher.finish();
        if (found, count) == (digest, bytes) { Ok(parts) } else { Err(Changed) }
    }
}

impl Store {
    pub(crate) async fn put_bytes(&self, key: &Path, bytes: Bytes) -> Result<(), Fault> {
        let put = self.at.objects.put(key, bytes.into()).await;
        put.map(|_| ()).map_err(|source| self.at.fault(key, source))
    }

    /// Uploads a file whose digest and size were found before; what its parts are is found on the
    /// way.
    ///
    /// When this future is dropped midway, who uploads the same to the same place within hours goes
    /// on with the parts that are there. What nobody goes on with stays on an S3 server until the
    /// bucket's lifecycle rule (`AbortIncompleteMultipartUpload`) removes it.
    pub(crate) async fn put_file(
        &self,
        key: &Path,
        path: &FsPath,
        digest: Digest,
        bytes: u64,
    ) -> Result<Option<Parts>, PutError> {
        if let Some(target) = self.local_path(key) {
            return self.put_copy(path, target?, key, (digest, bytes)).await;
        }
        let part_bytes = PART_BYTES.max((bytes / MAX_PARTS).next_power_of_two());
        if bytes > part_bytes {
            return self.put_parts(key, path, (digest, bytes, part_bytes)).await;
        }
        let (source, part, _) =
            open(path, bytes, part_bytes).await?.next().await.map_err(unread(path))?;
        let parts = source.read_all_of(digest, bytes).map_err(changed(path))?;
        self.put_bytes(key, part).await?;
        Ok(parts)
    }

    async fn put_parts(
        &self,
        key: &Path,
        path: &FsPath,
        (digest, bytes, part_bytes): (Digest, u64, u64),
    ) -> Result<Option<Parts>, PutError> {
        let what = What { url: self.at.url_of(key), digest, bytes, part_bytes };
        let directory = self.at.journals.clone();
        let mut journal = blocking(move || Journal::open(directory.as_deref(), what)).await;
        let resumed = journal.upload.is_some();
        let sent = self.send_all(key, path, &mut journal, (digest, bytes, part_bytes)).await;
        match sent {
            // The store may have forgotten what an earlier process sent.
            Err(PutError::Fault(fault)) if resumed && !fault.may_pass() => {
                tracing::info!(%fault, "an upload cannot be gone on with and is begun again");
                self.give_up(key, &mut journal).await;
            }
            // Whoever comes next goes on with it.
            Err(PutError::Fault(fault)) if fault.may_pass() => return Err(fault.into()),
            Err(error) => {
                self.give_up(key, &mut journal).await;
                journal.forget();
                return Err(error);
            }
            Ok(parts) => {
                journal.forget();
                return Ok(parts);
            }
        }
        let sent = self.send_all(key, path, &mut journal, (digest, bytes, part_bytes)).await;
        if !matches!(&sent, Err(PutError::Fault(fault)) if fault.may_pass()) {
            if sent.is_err() {
                self.give_up(key, &mut journal).await;
            }
            journal.forget();
        }
        sent
    }

    /// Nobody goes on with an upload that failed for good.
    async fn give_up(&self, key: &Path, journal: &mut Journal) {
        let Some(upload) = journal.upload.take() else { return };
        let aborted = tokio::time::timeout(ABORT_TIMEOUT, self.at.abort(key, &upload)).await;
        if !matches!(aborted, Ok(Ok(()))) {
            tracing::warn!(url = self.at.url_of(key), "parts of a failed upload may remain");
        }
    }

    /// Sends what is not there yet, and completes the upload.
    async fn send_all(
        &self,
        key: &Path,
        path: &FsPath,
        journal: &mut Journal,
        (digest, bytes, part_bytes): (Digest, u64, u64),
    ) -> Result<Option<Parts>, PutError> {
        let fault = |source| self.at.fault(key, source);
        let upload = match journal.upload.clone() {
            Some(upload) => upload,
            None => {
                let Some(upload) = self.at.begin(key).await.map_err(fault)? else {
                    // It is there, and only its parts are asked for.
                    let file = path.to_owned();
                    let found = blocking(move || files::hash(&File::open(file)?, &|_| ())).await;
                    let (found, count, parts) = found.map_err(unread(path))?;
                    let same = (found, count) == (digest, bytes);
                    return if same { Ok(parts) } else { Err(changed(path)(Changed)) };
                };
                note(journal.begin(&upload));
                upload
            }
        };
        let source = open(path, bytes, part_bytes).await?;
        let source = self.send_parts((key, &upload), path, source, journal).await?;
        let parts = source.read_all_of(digest, bytes).map_err(changed(path))?;
        let names = journal.sent.values().map(|part| part.name.clone()).collect();
        match self.at.complete(key, &upload, names, bytes).await {
            Ok(()) => Ok(parts),
            // The reply to a first, successful try may have been lost, with its process even.
            Err(_) if self.is_complete(key, bytes).await => Ok(parts),
            Err(source) => Err(fault(source).into()),
        }
    }

    async fn send_parts(
        &self,
        (key, upload): (&Path, &String),
        path: &FsPath,
        mut source: Source,
        journal: &mut Journal,
    ) -> Result<Source, PutError> {
        let mut in_flight = JoinSet::new();
        let part_bytes = source.part_bytes;
        for index in 0.. {
            let (part, digest);
            (source, part, digest) = source.next().await.map_err(unread(path))?;
            let last = part.is_empty();
            let there = journal.sent.get(&index).is_some_and(|sent| sent.digest == digest);
            if !last && !there {
                let (at, key, upload) = (self.at.clone(), key.clone(), upload.clone());
                in_flight.spawn(async move {
                    let place = (index, index as u64 * part_bytes);
                    let name = at.put_part(&key, &upload, place, part).await?;
                    Ok(SentPart { index, name, digest })
                });
            }
            while in_flight.len() >= PARTS_IN_FLIGHT || (last && !in_flight.is_empty()) {
                match in_flight.join_next().await {
                    None => break,
                    Some(Ok(sent)) => {
                        let sent = sent.map_err(|source| self.at.fault(key, source))?;
                        note(journal.sent(sent));
                    }
                    Some(Err(panic)) => std::panic::resume_unwind(panic.into_panic()),
                }
            }
            if last {
                break;
            }
        }
        Ok(source)
    }

    async fn is_complete(&self, key: &Path, bytes: u64) -> bool {
        self.at.objects.head(key).await.is_ok_and(|meta| meta.size == bytes)
    }
}

async fn open(path: &FsPath, bytes: u64, part_bytes: u64) -> Result<Source, PutError> {
    let file = tokio::fs::File::open(path).await.map_err(unread(path))?.into_std().await;
    Ok(Source { file, hasher: PartHasher::new(bytes), part_bytes })
}

fn unread(path: &FsPath) -> impl Fn(io::Error) -> PutError {
    let path = path.to_owned();
    move |source| PutError::Read { path: path.clone(), source }
}

fn changed(path: &FsPath) -> impl Fn(Changed) -> PutError {
    let path = path.to_owned();
    move |Changed| PutError::Changed { path: path.clone() }
}

/// What could not be written down is sent again by whoever comes next.
fn note(written: io::Result<()>) {
    if let Err(error) = written {
        tracing::debug!(%error, "writing down what was uploaded");
    }
}
