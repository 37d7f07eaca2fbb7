//! Journals of large uploads: they record the parts that are in the store, so that a publisher that
//! was killed can continue. One file per upload in the user's cache directory, appended part by
//! part; a killed process leaves at worst a torn line, which is ignored.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};
use wire::Digest;

/// Stores drop unfinished uploads; a gateway drops them after a day.
const JOURNAL_TTL: Duration = Duration::from_secs(12 * 3600);
/// The age at which a journal is deleted although its upload could not be aborted. The store then
/// has to remove the upload itself.
const DISCARD_AGE: Duration = Duration::from_secs(14 * 24 * 3600);
/// The largest number of journals; above it, the next upload is not recorded.
const JOURNALS_MAX: usize = 64;
/// Ten thousand parts and their names.
const FILE_BYTES_MAX: u64 = 4 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UploadIdentity {
    pub(super) url: String,
    pub(super) digest: Digest,
    pub(super) bytes: u64,
    /// The size of each part but the last, in bytes.
    pub(super) part_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SentPart {
    pub(super) index: usize,
    /// The store's name of the part, needed to complete the upload.
    pub(super) name: String,
    /// The running digest of the file up to the end of the part, at the time of sending.
    pub(super) digest: Digest,
}

#[derive(Serialize, Deserialize)]
struct JournalHeader {
    what: UploadIdentity,
    upload: String,
}

/// The record of one upload. Without a file it ends with the process.
#[derive(Debug)]
pub(super) struct UploadJournal {
    /// The locked file and its path, if the upload is recorded.
    file: Option<(File, PathBuf)>,
    identity: UploadIdentity,
    /// The store's name of the upload, once it is begun.
    pub(super) upload: Option<String>,
    pub(super) sent: BTreeMap<usize, SentPart>,
}

impl UploadJournal {
    /// Reads the journal that an earlier process left for this upload. The journal is not recorded
    /// if another process holds it or the directory cannot be used. Blocking.
    pub(super) fn open(directory: Option<&Path>, what: UploadIdentity) -> Self {
        let none = |what| Self { file: None, identity: what, upload: None, sent: BTreeMap::new() };
        let Some(directory) = directory else { return none(what) };
        match Self::read(directory, what.clone()) {
            Ok(Some(journal)) => journal,
            Ok(None) => none(what),
            Err(error) => {
                let directory = directory.display();
                tracing::debug!(%error, %directory, "could not record an upload");
                none(what)
            }
        }
    }

    /// Returns `None` if another process holds the file or there are too many journals.
    fn read(directory: &Path, what: UploadIdentity) -> io::Result<Option<Self>> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let name = Digest::hash_bytes(format!("{}\n{}", what.url, what.digest).as_bytes()).to_hex();
        let path = directory.join(name);
        if !path.exists() && !has_room(directory)? {
            return Ok(None);
        }
        let mut options = File::options();
        let options = options.create(true).read(true).append(true).mode(0o600);
        let mut file = options.open(&path)?;
        if file.try_lock().is_err() {
            return Ok(None);
        }
        let mut text = Vec::new();
        (&mut file).take(FILE_BYTES_MAX).read_to_end(&mut text)?;
        let mut lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let begun =
            lines.next().and_then(|line| serde_json::from_slice::<JournalHeader>(line).ok());
        let fresh = is_younger(&file.metadata()?, JOURNAL_TTL);
        let mut journal =
            Self { file: Some((file, path)), identity: what, upload: None, sent: BTreeMap::new() };
        match begun.filter(|begun| fresh && begun.what == journal.identity) {
            Some(begun) => {
                journal.upload = Some(begun.upload);
                let sent = lines.filter_map(|line| serde_json::from_slice(line).ok());
                journal.sent = sent.map(|part: SentPart| (part.index, part)).collect();
            }
            None => journal.clear()?,
        }
        Ok(Some(journal))
    }

    /// Returns the expired journals of uploads below the URL `below`, with the keys of the objects.
    /// They are locked, so that no other process aborts the same uploads. Blocking.
    pub(super) fn find_abandoned(directory: &Path, below: &str) -> Vec<(Self, String)> {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let abandoned = entries.filter_map(|entry| {
            let path = entry.path();
            let mut file = File::options().read(true).append(true).open(&path).ok()?;
            if is_younger(&file.metadata().ok()?, JOURNAL_TTL) || file.try_lock().is_err() {
                return None;
            }
            let mut text = Vec::new();
            (&mut file).take(FILE_BYTES_MAX).read_to_end(&mut text).ok()?;
            let mut lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
            let JournalHeader { what, upload } = serde_json::from_slice(lines.next()?).ok()?;
            let key = what.url.strip_prefix(below)?.to_owned();
            let (file, upload) = (Some((file, path)), Some(upload));
            Some((Self { file, identity: what, upload, sent: BTreeMap::new() }, key))
        });
        abandoned.take(JOURNALS_MAX).collect()
    }

    /// Records the begin of an upload and drops the parts of an earlier one. Blocking.
    pub(super) fn record_begin(&mut self, upload: &str) -> io::Result<()> {
        self.clear()?;
        self.upload = Some(upload.to_owned());
        let begun = JournalHeader { what: self.identity.clone(), upload: upload.to_owned() };
        self.append_line(&serde_json::to_vec(&begun)?)
    }

    pub(super) fn record_part(&mut self, part: SentPart) -> io::Result<()> {
        let line = serde_json::to_vec(&part)?;
        self.sent.insert(part.index, part);
        self.append_line(&line)
    }

    fn append_line(&mut self, line: &[u8]) -> io::Result<()> {
        let Some((file, _)) = &mut self.file else { return Ok(()) };
        file.write_all(&[b"\n", line, b"\n"].concat())
    }

    fn clear(&mut self) -> io::Result<()> {
        (self.upload, self.sent) = (None, BTreeMap::new());
        let Some((file, _)) = &self.file else { return Ok(()) };
        file.set_len(0)
    }

    pub(super) fn delete_file(mut self) {
        if let Some((_, path)) = self.file.take() {
            // A journal that cannot be deleted does not match later uploads and expires.
            let _ = fs::remove_file(path);
        }
    }
}

/// Returns true for an unknown modification time, and for one in the future.
fn is_younger(meta: &fs::Metadata, limit: Duration) -> bool {
    let age = meta.modified().ok().and_then(|at| SystemTime::now().duration_since(at).ok());
    age.is_none_or(|age| age < limit)
}

/// Deletes old journals and returns true if there is room for another one.
fn has_room(directory: &Path) -> io::Result<bool> {
    let mut kept = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        // Another process deleted it meanwhile.
        let Ok(meta) = entry.metadata() else { continue };
        if is_younger(&meta, JOURNAL_TTL) {
            kept += 1;
        } else if !is_younger(&meta, DISCARD_AGE) {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(kept < JOURNALS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn what() -> UploadIdentity {
        let digest = Digest::hash_bytes(b"x");
        UploadIdentity { url: "s3://b/k".into(), digest, bytes: 40, part_bytes: 16 }
    }

    fn part(index: usize) -> SentPart {
        SentPart { index, name: format!("etag-{index}"), digest: Digest::hash_bytes(b"p") }
    }

    #[test]
    fn an_upload_is_resumed_by_one_process_at_a_time_until_it_ends() {
        let dir = tempfile::tempdir().unwrap();
        let open = || UploadJournal::open(Some(dir.path()), what());
        let mut first = open();
        first.record_begin("u-1").unwrap();
        first.record_part(part(1)).unwrap();
        assert_eq!(open().upload, None, "another is at it");
        let path = first.file.as_ref().unwrap().1.clone();
        drop(first);
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"\n{\"torn").unwrap();
        let second = open();
        assert_eq!(second.upload.as_deref(), Some("u-1"));
        assert_eq!(Vec::from_iter(second.sent.values().cloned()), [part(1)]);
        second.delete_file();
        assert_eq!(open().upload, None);
    }

    #[test]
    fn a_journal_of_another_file_or_an_expired_one_is_not_resumed() {
        let dir = tempfile::tempdir().unwrap();
        UploadJournal::open(Some(dir.path()), what()).record_begin("u-1").unwrap();
        let larger = UploadIdentity { part_bytes: 32, ..what() };
        assert_eq!(UploadJournal::open(Some(dir.path()), larger).upload, None);
        let mut old = UploadJournal::open(Some(dir.path()), what());
        old.record_begin("u-2").unwrap();
        let long_ago = SystemTime::now() - 2 * JOURNAL_TTL;
        old.file.take().unwrap().0.set_modified(long_ago).unwrap();
        assert_eq!(UploadJournal::open(Some(dir.path()), what()).upload, None);
    }
}
