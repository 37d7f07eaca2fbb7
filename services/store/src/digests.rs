//! Digests of files that are not ours, remembered between processes, so that large weights are
//! hashed once and not at every use.
//!
//! One line a file, appended, so that processes may share it and a killed one leaves at worst a
//! torn line, which is no line. It is believed for a file whose inode, size and times of
//! modification and change are the same: writing to a file, even with its modification time put
//! back, changes one of them.

use std::{
    collections::BTreeMap,
    fs::{self, File, Metadata},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};
use wire::Digest;

use crate::{examine::Seen, files};

/// Longer, and the older half is forgotten.
const FILE_BYTES_MAX: u64 = 2 << 20;
/// What is read of a file that something else made long.
const READ_BYTES_MAX: u64 = 2 * FILE_BYTES_MAX;
/// A file that was written to just now may be written to again within one tick of its clock;
/// some file systems tick every two seconds.
const SETTLED: Duration = Duration::from_secs(2);

/// What is known of the files of one user, or of one cache.
#[derive(Debug)]
pub struct Digests {
    path: Option<PathBuf>,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// The file as it was read, to see when another process added to it.
    read: Option<Looks>,
    digests: BTreeMap<Looks, Digest>,
}

/// What must not change for a digest to be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Looks {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(flatten)]
    looks: Looks,
    digest: Digest,
}

impl Digests {
    /// Kept in that file, which is created when there is something to remember.
    pub fn at(path: PathBuf) -> Self {
        Self { path: Some(path), known: Mutex::default() }
    }

    /// Kept in the user's cache directory; nowhere when there is none.
    pub fn of_user() -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(variable("HOME")?).join(".cache")));
        let path = cache.map(|cache| cache.join("flotilla/digests.jsonl"));
        Self { path, known: Mutex::default() }
    }

    /// The digest and size of a file, hashed unless it was before and nothing touched it since.
    /// Told of bytes as they are dealt with.
    pub(crate) fn of(&self, path: &Path, seen: Seen<'_>) -> io::Result<(Digest, u64)> {
        let file = File::open(path)?;
        let looks = Looks::of(&file.metadata()?);
        if let Some(digest) = self.recall(looks) {
            seen(looks.bytes);
            return Ok((digest, looks.bytes));
        }
        let (digest, bytes, _) = files::hash(&file, seen)?;
        let after = file.metadata()?;
        let settled = after.modified()?.elapsed().is_ok_and(|age| age >= SETTLED);
        if Looks::of(&after) == looks && bytes == looks.bytes && settled {
            self.remember(looks, digest);
        }
        Ok((digest, bytes))
    }

    fn recall(&self, looks: Looks) -> Option<Digest> {
        let path = self.path.as_ref()?;
        let now = fs::metadata(path).ok().map(|meta| Looks::of(&meta));
        let mut known = self.known();
        if known.read != now {
            known.digests = read(path);
            known.read = now;
        }
        known.digests.get(&looks).copied()
    }

    /// What cannot be remembered is hashed again.
    fn remember(&self, looks: Looks, digest: Digest) {
        let Some(path) = &self.path else { return };
        if let Err(error) = append(path, &Line { looks, digest }) {
            tracing::debug!(path = %path.display(), %error, "remembering a file's digest");
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Looks {
    fn of(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            bytes: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

/// In the order of the file; lines that are none are left out.
fn lines(path: &Path) -> Vec<Line> {
    let mut text = Vec::new();
    let Ok(file) = File::open(path) else { return Vec::new() };
    if file.take(READ_BYTES_MAX).read_to_end(&mut text).is_err() {
        return Vec::new();
    }
    text.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

fn read(path: &Path) -> BTreeMap<Looks, Digest> {
    lines(path).into_iter().map(|line| (line.looks, line.digest)).collect()
}

fn append(path: &Path, line: &Line) -> io::Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent)?;
    if fs::metadata(path).is_ok_and(|meta| meta.len() > FILE_BYTES_MAX) {
        halve(path)?;
    }
    let mut text = serde_json::to_vec(line)?;
    // Begun on a line of its own, whatever a killed process left.
    text.insert(0, b'\n');
    text.push(b'\n');
    File::options().create(true).append(true).mode(0o600).open(path)?.write_all(&text)
}

/// What another process adds meanwhile is lost, and hashed again.
fn halve(path: &Path) -> io::Result<()> {
    let lines = lines(path);
    let mut text = Vec::new();
    for line in &lines[lines.len() / 2..] {
        serde_json::to_writer(&mut text, line)?;
        text.push(b'\n');
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let aside = path.with_extension(format!("{}-{}", std::process::id(), now.as_nanos()));
    let written = fs::write(&aside, text).and_then(|()| fs::rename(&aside, path));
    if written.is_err() {
        // It says nothing that the error does not.
        let _ = fs::remove_file(&aside);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which is read in several pieces.
    fn long(bytes: &[u8]) -> Vec<u8> {
        bytes.repeat(300_000)
    }

    /// A file that was last written to long ago.
    fn old(path: &Path, bytes: &[u8]) {
        fs::write(path, long(bytes)).unwrap();
        let long_ago = SystemTime::now() - Duration::from_secs(3600);
        File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
    }

    fn hashed(digests: &Digests, path: &Path) -> (Digest, bool) {
        let chunks = Mutex::new(0);
        let (digest, _) = digests.of(path, &|_| *chunks.lock().unwrap() += 1).unwrap();
        // Recalling tells of the file once.
        (digest, *chunks.lock().unwrap() > 1)
    }

    #[test]
    fn a_file_is_hashed_once_until_something_touches_it() {
        let dir = tempfile::tempdir().unwrap();
        let (memo, file) = (dir.path().join("cache/digests.jsonl"), dir.path().join("weights"));
        old(&file, b"0123456789");
        assert_eq!(
            hashed(&Digests::at(memo.clone()), &file),
            (Digest::of(&long(b"0123456789")), true)
        );
        let other_process = Digests::at(memo);
        assert_eq!(hashed(&other_process, &file), (Digest::of(&long(b"0123456789")), false));
        // In place, with the modification time put back.
        let before = fs::metadata(&file).unwrap().modified().unwrap();
        let open = File::options().write(true).open(&file).unwrap();
        (&open).write_all(&long(b"9876543210")).unwrap();
        open.set_modified(before).unwrap();
        assert_eq!(hashed(&other_process, &file), (Digest::of(&long(b"9876543210")), true));
        assert_eq!(hashed(&other_process, &file), (Digest::of(&long(b"9876543210")), false));
    }

    #[test]
    fn a_file_written_to_just_now_is_not_believed_to_stay() {
        let dir = tempfile::tempdir().unwrap();
        let (memo, file) = (dir.path().join("digests.jsonl"), dir.path().join("weights"));
        fs::write(&file, long(b"x")).unwrap();
        let digests = Digests::at(memo.clone());
        assert!(hashed(&digests, &file).1 && hashed(&digests, &file).1);
        assert!(!memo.exists());
    }

    #[test]
    fn what_is_remembered_is_bounded_and_survives_torn_lines() {
        let dir = tempfile::tempdir().unwrap();
        let (memo, file) = (dir.path().join("digests.jsonl"), dir.path().join("weights"));
        old(&file, b"x");
        let digests = Digests::at(memo.clone());
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
