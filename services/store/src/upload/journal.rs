//! Which parts of a large upload are in the store already, so that a publisher that was killed goes
//! on with them. One file an upload, in the user's cache, appended part by part: a killed process
//! leaves at worst a torn line, which is no line.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};
use wire::Digest;

/// Stores forget what nobody ended; a gateway after a day.
const GOOD_FOR: Duration = Duration::from_secs(12 * 3600);
/// Kept at once; with more, nothing is remembered of the next.
const JOURNALS_MAX: usize = 64;
/// Ten thousand parts and their names.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// What is uploaded, and where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct What {
    pub(super) url: String,
    pub(super) digest: Digest,
    pub(super) bytes: u64,
    pub(super) part_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SentPart {
    pub(super) index: usize,
    /// The store's, to complete the upload with.
    pub(super) name: String,
    /// Of the file up to its end, as it was then.
    pub(super) digest: Digest,
}

#[derive(Serialize, Deserialize)]
struct Begun {
    what: What,
    upload: String,
}

/// What is known of one upload. Without a file it is forgotten with the process.
#[derive(Debug)]
pub(super) struct Journal {
    file: Option<(File, PathBuf)>,
    what: What,
    pub(super) upload: Option<String>,
    pub(super) sent: BTreeMap<usize, SentPart>,
}

/// Where journals are kept, as the environment has it.
pub(crate) fn directory(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    cache.is_absolute().then(|| cache.join("flotilla/uploads"))
}

impl Journal {
    /// What an earlier process left of this upload, if it did and no other is at it. Blocking.
    pub(super) fn open(directory: Option<&Path>, what: What) -> Self {
        let none = |what| Self { file: None, what, upload: None, sent: BTreeMap::new() };
        let Some(directory) = directory else { return none(what) };
        match Self::read(directory, what.clone()) {
            Ok(Some(journal)) => journal,
            Ok(None) => none(what),
            Err(error) => {
                let directory = directory.display();
                tracing::debug!(%error, %directory, "an upload is not remembered");
                none(what)
            }
        }
    }

    fn read(directory: &Path, what: What) -> io::Result<Option<Self>> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let name = Digest::of(format!("{}\n{}", what.url, what.digest).as_bytes()).to_hex();
        let path = directory.join(name);
        if !path.exists() && !room(directory)? {
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
        let begun = lines.next().and_then(|line| serde_json::from_slice::<Begun>(line).ok());
        let fresh = is_fresh(&file.metadata()?);
        let mut journal =
            Self { file: Some((file, path)), what, upload: None, sent: BTreeMap::new() };
        match begun.filter(|begun| fresh && begun.what == journal.what) {
            Some(begun) => {
                journal.upload = Some(begun.upload);
                let sent = lines.filter_map(|line| serde_json::from_slice(line).ok());
                journal.sent = sent.map(|part: SentPart| (part.index, part)).collect();
            }
            None => journal.clear()?,
        }
        Ok(Some(journal))
    }

    /// An upload was begun: what was known of another is of no use. Blocking.
    pub(super) fn begin(&mut self, upload: &str) -> io::Result<()> {
        self.clear()?;
        self.upload = Some(upload.to_owned());
        let begun = Begun { what: self.what.clone(), upload: upload.to_owned() };
        self.append(&serde_json::to_vec(&begun)?)
    }

    /// A part is there. Blocking.
    pub(super) fn sent(&mut self, part: SentPart) -> io::Result<()> {
        let line = serde_json::to_vec(&part)?;
        self.sent.insert(part.index, part);
        self.append(&line)
    }

    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        let Some((file, _)) = &mut self.file else { return Ok(()) };
        file.write_all(&[b"\n", line, b"\n"].concat())
    }

    fn clear(&mut self) -> io::Result<()> {
        (self.upload, self.sent) = (None, BTreeMap::new());
        let Some((file, _)) = &self.file else { return Ok(()) };
        file.set_len(0)
    }

    /// The upload is over.
    pub(super) fn forget(mut self) {
        if let Some((_, path)) = self.file.take() {
            // One that stays is of no use to the next, and forgotten in its time.
            let _ = fs::remove_file(path);
        }
    }
}

fn is_fresh(meta: &fs::Metadata) -> bool {
    let age = meta.modified().ok().and_then(|at| SystemTime::now().duration_since(at).ok());
    age.is_none_or(|age| age < GOOD_FOR)
}

/// Whether there is room for one more, without those whose time is over.
fn room(directory: &Path) -> io::Result<bool> {
    let mut kept = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        // Another's that is over meanwhile.
        let Ok(meta) = entry.metadata() else { continue };
        if is_fresh(&meta) {
            kept += 1;
        } else {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(kept < JOURNALS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn what() -> What {
        let digest = Digest::of(b"x");
        What { url: "s3://b/k".into(), digest, bytes: 40, part_bytes: 16 }
    }

    fn part(index: usize) -> SentPart {
        SentPart { index, name: format!("etag-{index}"), digest: Digest::of(b"p") }
    }

    #[test]
    fn an_upload_is_gone_on_with_by_one_process_at_a_time_until_it_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Journal::open(Some(dir.path()), what());
        let mut first = open();
        first.begin("u-1").unwrap();
        first.sent(part(1)).unwrap();
        assert_eq!(open().upload, None, "another is at it");
        let path = first.file.as_ref().unwrap().1.clone();
        drop(first);
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"\n{\"torn").unwrap();
        let second = open();
        assert_eq!(second.upload.as_deref(), Some("u-1"));
        assert_eq!(Vec::from_iter(second.sent.values().cloned()), [part(1)]);
        second.forget();
        assert_eq!(open().upload, None);
    }

    #[test]
    fn what_is_of_another_file_or_too_old_is_not_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        Journal::open(Some(dir.path()), what()).begin("u-1").unwrap();
        let larger = What { part_bytes: 32, ..what() };
        assert_eq!(Journal::open(Some(dir.path()), larger).upload, None);
        let mut old = Journal::open(Some(dir.path()), what());
        old.begin("u-2").unwrap();
        let long_ago = SystemTime::now() - 2 * GOOD_FOR;
        old.file.take().unwrap().0.set_modified(long_ago).unwrap();
        assert_eq!(Journal::open(Some(dir.path()), what()).upload, None);
    }
}
