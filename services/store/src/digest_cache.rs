//! Digests of files that belong to the user, remembered between processes, so that large weights
//! are hashed once and not at every use.
//!
//! The file has one line per digest. Lines are appended, so that several processes may share the
//! file, and a killed process leaves at worst a torn line, which is ignored. A digest is trusted
//! for a file whose inode, size, modification time and change time are the same: writing to a file
//! changes one of them, even if the modification time is reset.

use std::{
    collections::BTreeMap,
    fs::{self, File, Metadata},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use wire::Digest;

use crate::file_hashing::{self, ByteProgress};

/// The size above which the older half of the file is dropped.
const FILE_BYTES_MAX: u64 = 2 << 20;
const READ_BYTES_MAX: u64 = 2 * FILE_BYTES_MAX;
/// The age of the last write after which a digest is remembered: some file systems' clocks tick
/// every two seconds, so a file may be written twice within one tick.
const SETTLED_AFTER: Duration = Duration::from_secs(2);

/// The remembered digests of the files of one user, or of one cache.
#[derive(Debug)]
pub struct DigestCache {
    path: Option<PathBuf>,
    known: Mutex<KnownDigests>,
}

#[derive(Debug, Default)]
struct KnownDigests {
    /// The attributes at the last read, to detect lines that another process added.
    read_at: Option<FileAttributes>,
    digests: BTreeMap<FileAttributes, Digest>,
}

/// Attributes that must be unchanged for a digest to be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct FileAttributes {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

#[derive(Serialize, Deserialize)]
struct DigestLine {
    #[serde(flatten)]
    looks: FileAttributes,
    digest: Digest,
}

impl DigestCache {
    /// Uses the file at `path`, which is created with the first digest.
    pub fn at_path(path: PathBuf) -> Self {
        Self { path: Some(path), known: Mutex::default() }
    }

    /// Uses a file in the user's cache directory, or no file if there is no such directory.
    pub fn for_user() -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(variable("HOME")?).join(".cache")));
        let path = cache.map(|cache| cache.join("flotilla/digests.jsonl"));
        Self { path, known: Mutex::default() }
    }

    /// Returns the digest and the size of a file; hashes it unless its attributes are unchanged.
    pub(crate) fn digest_file(
        &self,
        path: &Path,
        seen: ByteProgress<'_>,
    ) -> io::Result<(Digest, u64)> {
        let file = File::open(path)?;
        let looks = FileAttributes::from_metadata(&file.metadata()?);
        if let Some(digest) = self.recall_digest(looks) {
            seen(looks.bytes);
            return Ok((digest, looks.bytes));
        }
        let (digest, bytes, _) = file_hashing::hash_open_file(&file, seen)?;
        let after = file.metadata()?;
        let settled = after.modified()?.elapsed().is_ok_and(|age| age >= SETTLED_AFTER);
        if FileAttributes::from_metadata(&after) == looks && bytes == looks.bytes && settled {
            self.remember_digest(looks, digest);
        }
        Ok((digest, bytes))
    }

    fn recall_digest(&self, looks: FileAttributes) -> Option<Digest> {
        let path = self.path.as_ref()?;
        let now = fs::metadata(path).ok().map(|meta| FileAttributes::from_metadata(&meta));
        let mut known = self.lock_known();
        if known.read_at != now {
            known.digests = read_digests(path);
            known.read_at = now;
        }
        known.digests.get(&looks).copied()
    }

    /// Appends a digest. If that fails, the file is hashed again at the next use.
    fn remember_digest(&self, looks: FileAttributes, digest: Digest) {
        let Some(path) = &self.path else { return };
        if let Err(error) = append_line(path, &DigestLine { looks, digest }) {
            tracing::debug!(path = %path.display(), %error, "remembering a file's digest");
        }
    }

    fn lock_known(&self) -> MutexGuard<'_, KnownDigests> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FileAttributes {
    fn from_metadata(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            bytes: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

fn read_lines(path: &Path) -> Vec<DigestLine> {
    let mut text = Vec::new();
    let Ok(file) = File::open(path) else { return Vec::new() };
    if file.take(READ_BYTES_MAX).read_to_end(&mut text).is_err() {
        return Vec::new();
    }
    text.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

/// Reads the digests; of several lines with the same attributes the last counts.
fn read_digests(path: &Path) -> BTreeMap<FileAttributes, Digest> {
    read_lines(path).into_iter().map(|line| (line.looks, line.digest)).collect()
}

fn append_line(path: &Path, line: &DigestLine) -> io::Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent)?;
    if fs::metadata(path).is_ok_and(|meta| meta.len() > FILE_BYTES_MAX) {
        drop_older_half(path)?;
    }
    let mut text = serde_json::to_vec(line)?;
    // The line break in front ends a torn line of a killed process.
    text.insert(0, b'\n');
    text.push(b'\n');
    File::options().create(true).append(true).mode(0o600).open(path)?.write_all(&text)
}

/// Keeps the newer half of the lines. Lines that another process adds meanwhile are lost; those
/// files are hashed again.
fn drop_older_half(path: &Path) -> io::Result<()> {
    let lines = read_lines(path);
    let mut text = Vec::new();
    for line in &lines[lines.len() / 2..] {
        serde_json::to_writer(&mut text, line)?;
        text.push(b'\n');
    }
    let now = wire::clock::unix_time().as_nanos();
    let aside = path.with_extension(format!("{}-{now}", std::process::id()));
    let written = fs::write(&aside, text).and_then(|()| fs::rename(&aside, path));
    if written.is_err() {
        let _ = fs::remove_file(&aside);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns content that is read in several pieces.
    fn long(bytes: &[u8]) -> Vec<u8> {
        bytes.repeat(300_000)
    }

    /// Writes a file with an old modification time.
    fn old(path: &Path, bytes: &[u8]) {
        fs::write(path, long(bytes)).unwrap();
        let long_ago = std::time::SystemTime::now() - Duration::from_secs(3600);
        File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
    }

    fn hashed(digests: &DigestCache, path: &Path) -> (Digest, bool) {
        let chunks = Mutex::new(0);
        let (digest, _) = digests.digest_file(path, &|_| *chunks.lock().unwrap() += 1).unwrap();
        // A recalled digest reports progress once.
        (digest, *chunks.lock().unwrap() > 1)
    }

    #[test]
    fn a_file_is_hashed_once_until_something_touches_it() {
        let dir = tempfile::tempdir().unwrap();
        let (memo, file) = (dir.path().join("cache/digests.jsonl"), dir.path().join("weights"));
        old(&file, b"0123456789");
        assert_eq!(
            hashed(&DigestCache::at_path(memo.clone()), &file),
            (Digest::hash_bytes(&long(b"0123456789")), true)
        );
        let other_process = DigestCache::at_path(memo);
        assert_eq!(
            hashed(&other_process, &file),
            (Digest::hash_bytes(&long(b"0123456789")), false)
        );
        // Written in place, with the modification time put back.
        let before = fs::metadata(&file).unwrap().modified().unwrap();
        let open = File::options().write(true).open(&file).unwrap();
        (&open).write_all(&long(b"9876543210")).unwrap();
        open.set_modified(before).unwrap();
        assert_eq!(hashed(&other_process, &file), (Digest::hash_bytes(&long(b"9876543210")), true));
        assert_eq!(
            hashed(&other_process, &file),
            (Digest::hash_bytes(&long(b"9876543210")), false)
        );
    }

    #[test]
    fn a_file_written_to_just_now_is_not_believed_to_stay() {
        let dir = tempfile::tempdir().unwrap();
        let (memo, file) = (dir.path().join("digests.jsonl"), dir.path().join("weights"));
        fs::write(&file, long(b"x")).unwrap();
        let digests = DigestCache::at_path(memo.clone());
        assert!(hashed(&digests, &file).1 && hashed(&digests, &file).1);
        assert!(!memo.exists());
    }

    #[test]
    fn what_is_remembered_is_bounded_and_survives_torn_lines() {
        let dir = tempfile::tempdir().unwrap();
        let (memo, file) = (dir.path().join("digests.jsonl"), dir.path().join("weights"));
        old(&file, b"x");
        let digests = DigestCache::at_path(memo.clone());
        hashed(&digests, &file);
        let line = fs::read(&memo).unwrap();
        let torn = line[..line.len() / 2].to_vec();
        fs::write(&memo, [torn, line.repeat(20_000)].concat()).unwrap();
        assert!(fs::metadata(&memo).unwrap().len() > FILE_BYTES_MAX);
        let other = dir.path().join("other");
        old(&other, b"y");
        assert!(hashed(&digests, &other).1);
        assert!(fs::metadata(&memo).unwrap().len() <= FILE_BYTES_MAX);
        assert!(!hashed(&digests, &other).1 && !hashed(&digests, &file).1);
    }
}
