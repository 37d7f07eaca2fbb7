//! Writes of objects: small ones in one request, large ones in parts, up to four at a time, and
//! files of a directory as copies. The bytes are hashed while they are sent, so a file that changes
//! meanwhile is not committed.

mod journal;
mod local_copy;
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

use self::journal::{SentPart, UploadIdentity, UploadJournal};
use crate::{
    blocking::run_blocking,
    error::{PutError, StorageError},
    file_hashing,
    limits::PART_BYTES,
    parts::{PartHasher, PartHashes},
    store::Store,
};

/// Together with the part that is being read they use 5 × 16 MiB of memory.
const PARTS_IN_FLIGHT: usize = 4;
/// S3 allows 10 000.
const MAX_PARTS: u64 = 9_000;
const ABORT_TIMEOUT: Duration = Duration::from_secs(30);

struct PartReader {
    file: File,
    hasher: PartHasher,
    part_bytes: u64,
}

struct FileChanged;

impl PartReader {
    /// Returns the next part, and a running digest of the file up to the part's end.
    async fn next(mut self) -> io::Result<(Self, Bytes, Digest)> {
        run_blocking(move || {
            let expected = self.part_bytes.min(self.file.metadata()?.len());
            let mut part = Vec::with_capacity(usize::try_from(expected).unwrap_or(0));
            (&self.file).take(self.part_bytes).read_to_end(&mut part)?;
            self.hasher.update(&part);
            let digest = self.hasher.running_digest();
            Ok((self, Bytes::from(part), digest))
        })
        .await
    }

    fn finish_matching(
        self,
        digest: Digest,
        bytes: u64,
    ) -> Result<Option<PartHashes>, FileChanged> {
        let (found, count, parts) = self.hasher.finish();
        if (found, count) == (digest, bytes) { Ok(parts) } else { Err(FileChanged) }
    }
}

impl Store {
    pub(crate) async fn put_bytes(&self, key: &Path, bytes: Bytes) -> Result<(), StorageError> {
        let put = self.backend.objects.put(key, bytes.into()).await;
        put.map(|_| ()).map_err(|source| self.backend.storage_error(key, source))
    }

    /// Uploads a file and returns its part hashes.
    ///
    /// If this future is dropped midway, a later upload of the same file to the same place within
    /// 12 hours continues with the parts that exist. After that time this user's next large upload
    /// into the store, or [`Store::remove_leftovers`], aborts the upload. Otherwise it stays on an
    /// S3 server until the bucket's lifecycle rule (`AbortIncompleteMultipartUpload`) removes it.
    pub(crate) async fn put_file(
        &self,
        key: &Path,
        path: &FsPath,
        digest: Digest,
        bytes: u64,
    ) -> Result<Option<PartHashes>, PutError> {
        if let Some(target) = self.local_path(key) {
            return self.put_local_copy(path, target?, key, (digest, bytes)).await;
        }
        let part_bytes = PART_BYTES.max((bytes / MAX_PARTS).next_power_of_two());
        if bytes > part_bytes {
            return self.put_multipart(key, path, (digest, bytes, part_bytes)).await;
        }
        let (source, part, _) =
            open_source(path, bytes, part_bytes).await?.next().await.map_err(read_error(path))?;
        let parts = source.finish_matching(digest, bytes).map_err(changed_error(path))?;
        self.put_bytes(key, part).await?;
        Ok(parts)
    }

    /// Uploads a file in parts and records them in a journal. If a resumed upload fails for good,
    /// it begins again once. After a transient failure the journal stays for the next attempt.
    async fn put_multipart(
        &self,
        key: &Path,
        path: &FsPath,
        (digest, bytes, part_bytes): (Digest, u64, u64),
    ) -> Result<Option<PartHashes>, PutError> {
        self.abort_abandoned_uploads().await;
        let what = UploadIdentity { url: self.backend.object_url(key), digest, bytes, part_bytes };
        let directory = self.backend.journal_dir.clone();
        let mut journal =
            run_blocking(move || UploadJournal::open(directory.as_deref(), what)).await;
        let resumed = journal.upload.is_some();
        let sent =
            self.send_missing_parts(key, path, &mut journal, (digest, bytes, part_bytes)).await;
        match sent {
            // The store may have dropped the parts of an earlier process.
            Err(PutError::Storage(fault)) if resumed && !fault.is_transient() => {
                tracing::info!(%fault, "cannot resume an upload; starting it again");
                self.abandon_upload(key, &mut journal).await;
            }
            // The next attempt continues this upload.
            Err(PutError::Storage(fault)) if fault.is_transient() => return Err(fault.into()),
            Err(error) => {
                self.abandon_upload(key, &mut journal).await;
                journal.delete_file();
                return Err(error);
            }
            Ok(parts) => {
                journal.delete_file();
                return Ok(parts);
            }
        }
        let sent =
            self.send_missing_parts(key, path, &mut journal, (digest, bytes, part_bytes)).await;
        if !matches!(&sent, Err(PutError::Storage(fault)) if fault.is_transient()) {
            if sent.is_err() {
                self.abandon_upload(key, &mut journal).await;
            }
            journal.delete_file();
        }
        sent
    }

    /// Aborts the uploads that this user began on this host and abandoned, and returns their
    /// number. Stops at the first transient failure.
    pub(crate) async fn abort_abandoned_uploads(&self) -> u64 {
        let Some(directory) = self.backend.journal_dir.clone() else { return 0 };
        let below = format!("{}/", self.backend.url);
        let abandoned =
            run_blocking(move || UploadJournal::find_abandoned(&directory, &below)).await;
        let mut aborted = 0;
        for (mut journal, key) in abandoned {
            let (Ok(key), Some(upload)) = (Path::parse(key), journal.upload.take()) else {
                journal.delete_file();
                continue;
            };
            let abort =
                tokio::time::timeout(ABORT_TIMEOUT, self.backend.abort_upload(&key, &upload)).await;
            match abort
                .map(|abort| abort.map_err(|source| self.backend.storage_error(&key, source)))
            {
                Ok(Ok(())) => aborted += 1,
                // The upload does not exist any more, or this user may not abort it.
                Ok(Err(fault)) if !fault.is_transient() => {}
                // The journal stays for a later attempt. A store that is unreachable now would fail
                // the other aborts too.
                Ok(Err(_)) | Err(_) => return aborted,
            }
            journal.delete_file();
        }
        aborted
    }

    /// Aborts an upload that failed for good, so that its parts do not stay on the server.
    async fn abandon_upload(&self, key: &Path, journal: &mut UploadJournal) {
        let Some(upload) = journal.upload.take() else { return };
        let aborted =
            tokio::time::timeout(ABORT_TIMEOUT, self.backend.abort_upload(key, &upload)).await;
        if !matches!(aborted, Ok(Ok(()))) {
            tracing::warn!(
                url = self.backend.object_url(key),
                "parts of a failed upload may remain"
            );
        }
    }

    async fn send_missing_parts(
        &self,
        key: &Path,
        path: &FsPath,
        journal: &mut UploadJournal,
        (digest, bytes, part_bytes): (Digest, u64, u64),
    ) -> Result<Option<PartHashes>, PutError> {
        let fault = |source| self.backend.storage_error(key, source);
        let upload = match journal.upload.clone() {
            Some(upload) => upload,
            None => {
                let Some(upload) = self.backend.begin_upload(key).await.map_err(fault)? else {
                    // The object exists already; only its part hashes are needed.
                    let file = path.to_owned();
                    let found = run_blocking(move || {
                        file_hashing::hash_open_file(&File::open(file)?, &|_| ())
                    })
                    .await;
                    let (found, count, parts) = found.map_err(read_error(path))?;
                    let same = (found, count) == (digest, bytes);
                    return if same { Ok(parts) } else { Err(changed_error(path)(FileChanged)) };
                };
                log_journal_error(journal.record_begin(&upload));
                upload
            }
        };
        let source = open_source(path, bytes, part_bytes).await?;
        let source = self.send_parts((key, &upload), path, source, journal).await?;
        let parts = source.finish_matching(digest, bytes).map_err(changed_error(path))?;
        let names = journal.sent.values().map(|part| part.name.clone()).collect();
        match self.backend.complete_upload(key, &upload, names, bytes).await {
            Ok(()) => Ok(parts),
            // A first attempt may have succeeded although its reply was lost, possibly in an
            // earlier process.
            Err(_) if self.is_complete(key, bytes).await => Ok(parts),
            Err(source) => Err(fault(source).into()),
        }
    }

    /// Sends each part that the journal does not contain with the same digest.
    async fn send_parts(
        &self,
        (key, upload): (&Path, &String),
        path: &FsPath,
        mut source: PartReader,
        journal: &mut UploadJournal,
    ) -> Result<PartReader, PutError> {
        let mut in_flight = JoinSet::new();
        let part_bytes = source.part_bytes;
        for index in 0.. {
            let (part, digest);
            (source, part, digest) = source.next().await.map_err(read_error(path))?;
            let last = part.is_empty();
            let there = journal.sent.get(&index).is_some_and(|sent| sent.digest == digest);
            if !last && !there {
                let (at, key, upload) = (self.backend.clone(), key.clone(), upload.clone());
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
                        let sent =
                            sent.map_err(|source| self.backend.storage_error(key, source))?;
                        log_journal_error(journal.record_part(sent));
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
        self.backend.objects.head(key).await.is_ok_and(|meta| meta.size == bytes)
    }
}

async fn open_source(path: &FsPath, bytes: u64, part_bytes: u64) -> Result<PartReader, PutError> {
    let file = tokio::fs::File::open(path).await.map_err(read_error(path))?.into_std().await;
    Ok(PartReader { file, hasher: PartHasher::new(bytes), part_bytes })
}

fn read_error(path: &FsPath) -> impl Fn(io::Error) -> PutError {
    let path = path.to_owned();
    move |source| PutError::Read { path: path.clone(), source }
}

fn changed_error(path: &FsPath) -> impl Fn(FileChanged) -> PutError {
    let path = path.to_owned();
    move |FileChanged| PutError::Changed { path: path.clone() }
}

/// Logs a failed journal write; a part that is not in the journal is sent again next time.
fn log_journal_error(written: io::Result<()>) {
    if let Err(error) = written {
        tracing::debug!(%error, "could not write the upload journal");
    }
}
