//! The source of a host's facts: its own file system, or a capture of another host. Reads can be
//! recorded, so that a capture contains exactly what was read and nothing private.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Files of sysfs and procfs are far smaller, except the mappings of a large process.
const FILE_BYTES_MAX: u64 = 4 << 20;

const ENTRIES_MAX: usize = 65_536;

/// A filter that returns the parts of a file that may be shared. Applying it twice must give the
/// same result.
pub type ContentFilter = fn(&[u8]) -> Vec<u8>;

/// A filter that accepts the names of a directory that may be shared.
pub type NameFilter = fn(&str) -> bool;

/// The virtual path of the Python environment that trains.
pub(crate) const PYTHON: &str = "/@python";
/// The virtual path of the user's home.
pub(crate) const HOME: &str = "/@home";
/// The virtual path of the directory for checkpoints and models.
pub(crate) const DATA: &str = "/@data";

/// Read access below a root. Paths are absolute and without `..`: `/sys/…`, `/proc/…`, `/etc/…`.
pub trait HostFiles {
    /// Reads a file. A capture fails with "not found" or the recorded error.
    fn read(&self, path: &str) -> io::Result<Vec<u8>>;

    /// Reads a file that also contains private data, and returns the parts that `keep` returns. A
    /// capture never contains the rest.
    fn read_filtered(&self, path: &str, keep: ContentFilter) -> io::Result<Vec<u8>> {
        self.read(path).map(|bytes| keep(&bytes))
    }

    /// Returns the sorted names of a directory; empty if it does not exist.
    fn list_names(&self, path: &str) -> Vec<String> {
        self.list_filtered(path, |_| true)
    }

    /// Returns the names of a directory that `keep` accepts, if the others are private.
    fn list_filtered(&self, path: &str, keep: NameFilter) -> Vec<String>;

    /// Reads the small files of a directory whose names `names` accepts, filtered by `keep`. Files
    /// with no remaining content are omitted.
    fn read_all_filtered(
        &self,
        path: &str,
        names: NameFilter,
        keep: ContentFilter,
    ) -> Vec<(String, Vec<u8>)> {
        let read = |name: String| {
            let bytes = self.read_filtered(&format!("{path}/{name}"), keep).ok()?;
            (!bytes.is_empty()).then_some((name, bytes))
        };
        self.list_filtered(path, names).into_iter().filter_map(read).collect()
    }

    /// Opens a device for reading and writing and closes it again.
    fn open_device(&self, path: &str) -> io::Result<()>;

    /// Checks that this user may open a device, without opening it, which would wake the card.
    fn check_permission(&self, path: &str) -> io::Result<()>;

    /// Returns the target of a symbolic link, as written in it.
    fn read_link(&self, path: &str) -> Option<String>;

    /// Returns the bytes that this user may still write in the file system of the directory.
    fn free_bytes(&self, path: &str) -> Option<u64>;
}

/// The files of this host, or a directory tree with the same layout.
#[derive(Debug, Clone)]
pub struct LiveFiles {
    root: PathBuf,
    /// Directories that have a virtual path, so that a capture does not reveal their owner.
    named_directories: BTreeMap<&'static str, PathBuf>,
}

impl LiveFiles {
    /// Creates access below a root, which is `/` except in tests.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), named_directories: BTreeMap::new() }
    }

    /// Adds the environment of this interpreter. `<venv>/bin/python` is a link to an interpreter
    /// elsewhere; the location of the link counts.
    #[must_use]
    pub fn with_python(self, interpreter: &Path) -> Self {
        match interpreter.parent().and_then(Path::parent) {
            Some(prefix) => self.with_directory(PYTHON, prefix),
            None => self,
        }
    }

    /// Adds the user's start files, which may set variables.
    #[must_use]
    pub fn with_home(self, home: &Path) -> Self {
        self.with_directory(HOME, home)
    }

    /// Adds the directory for checkpoints and models.
    #[must_use]
    pub fn with_data(self, directory: &Path) -> Self {
        self.with_directory(DATA, directory)
    }

    fn with_directory(mut self, name: &'static str, directory: &Path) -> Self {
        self.named_directories.insert(name, directory.to_owned());
        self
    }

    fn resolve_path(&self, path: &str) -> PathBuf {
        let named = self.named_directories.iter().find_map(|(name, directory)| {
            let below = path.strip_prefix(name)?;
            Some(directory.join(below.trim_start_matches('/')))
        });
        named.unwrap_or_else(|| self.root.join(path.trim_start_matches('/')))
    }
}

impl HostFiles for LiveFiles {
    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        let place = self.resolve_path(path);
        // Reading a pipe or a device would block or never end.
        if !std::fs::metadata(&place)?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut bytes = Vec::new();
        std::fs::File::open(place)?.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn list_filtered(&self, path: &str, keep: NameFilter) -> Vec<String> {
        let entries = std::fs::read_dir(self.resolve_path(path)).into_iter().flatten().flatten();
        let names =
            entries.take(ENTRIES_MAX).filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.filter(|name| keep(name)).collect();
        names.sort();
        names
    }

    fn open_device(&self, path: &str) -> io::Result<()> {
        std::fs::OpenOptions::new().read(true).write(true).open(self.resolve_path(path)).map(drop)
    }

    fn check_permission(&self, path: &str) -> io::Result<()> {
        use rustix::fs::Access;
        Ok(rustix::fs::access(self.resolve_path(path), Access::READ_OK | Access::WRITE_OK)?)
    }

    fn read_link(&self, path: &str) -> Option<String> {
        std::fs::read_link(self.resolve_path(path)).ok()?.into_os_string().into_string().ok()
    }

    fn free_bytes(&self, path: &str) -> Option<u64> {
        let place = self.named_directories.get(path)?;
        // A directory that does not exist yet will be in its parent's file system.
        let exists = place.ancestors().find(|place| place.exists())?;
        let room = rustix::fs::statvfs(exists).ok()?;
        Some(room.f_bavail.saturating_mul(room.f_frsize))
    }
}

/// The recorded result of one read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CapturedEntry {
    /// A capture file holds the content of files beside its index.
    #[serde(skip)]
    File(Vec<u8>),
    Names(Vec<String>),
    Link(String),
    /// The free bytes of a directory's file system.
    Free(u64),
    /// A device that can be opened.
    Usable,
    /// The error number of the operating system.
    Failed(i32),
}

/// All recorded reads of a host, by path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostCapture {
    pub entries: BTreeMap<String, CapturedEntry>,
}

/// Access that forwards reads and records their results.
pub struct RecordingFiles<'a> {
    files: &'a dyn HostFiles,
    capture: RefCell<HostCapture>,
}

impl<'a> RecordingFiles<'a> {
    /// Creates a recorder with an empty capture.
    pub fn new(files: &'a dyn HostFiles) -> Self {
        Self { files, capture: RefCell::default() }
    }

    /// Returns the capture.
    pub fn into_capture(self) -> HostCapture {
        self.capture.into_inner()
    }

    fn record_entry(&self, path: &str, seen: CapturedEntry) {
        self.capture.borrow_mut().entries.insert(path.to_owned(), seen);
    }
}

/// EIO, if the system provides no error number.
const UNKNOWN_ERRNO: i32 = 5;

fn failed_entry(error: &io::Error) -> CapturedEntry {
    CapturedEntry::Failed(error.raw_os_error().unwrap_or(UNKNOWN_ERRNO))
}

impl HostFiles for RecordingFiles<'_> {
    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        let read = self.files.read(path);
        self.record_entry(
            path,
            read.as_ref().map_or_else(failed_entry, |bytes| CapturedEntry::File(bytes.clone())),
        );
        read
    }

    fn read_filtered(&self, path: &str, keep: ContentFilter) -> io::Result<Vec<u8>> {
        let read = self.files.read_filtered(path, keep);
        self.record_entry(
            path,
            read.as_ref().map_or_else(failed_entry, |bytes| CapturedEntry::File(bytes.clone())),
        );
        read
    }

    fn list_filtered(&self, path: &str, keep: NameFilter) -> Vec<String> {
        let names = self.files.list_filtered(path, keep);
        self.record_entry(path, CapturedEntry::Names(names.clone()));
        names
    }

    fn read_all_filtered(
        &self,
        path: &str,
        names: NameFilter,
        keep: ContentFilter,
    ) -> Vec<(String, Vec<u8>)> {
        let parts = self.files.read_all_filtered(path, names, keep);
        self.record_entry(
            path,
            CapturedEntry::Names(parts.iter().map(|(name, _)| name.clone()).collect()),
        );
        for (name, bytes) in &parts {
            self.record_entry(&format!("{path}/{name}"), CapturedEntry::File(bytes.clone()));
        }
        parts
    }

    fn open_device(&self, path: &str) -> io::Result<()> {
        let opened = self.files.open_device(path);
        self.record_entry(
            path,
            opened.as_ref().map_or_else(failed_entry, |()| CapturedEntry::Usable),
        );
        opened
    }

    fn check_permission(&self, path: &str) -> io::Result<()> {
        let may = self.files.check_permission(path);
        self.record_entry(path, may.as_ref().map_or_else(failed_entry, |()| CapturedEntry::Usable));
        may
    }

    fn read_link(&self, path: &str) -> Option<String> {
        let link = self.files.read_link(path);
        if let Some(link) = &link {
            self.record_entry(path, CapturedEntry::Link(link.clone()));
        }
        link
    }

    fn free_bytes(&self, path: &str) -> Option<u64> {
        let free = self.files.free_bytes(path);
        if let Some(bytes) = free {
            self.record_entry(path, CapturedEntry::Free(bytes));
        }
        free
    }
}

const ENOENT: i32 = 2;

impl HostFiles for HostCapture {
    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        match self.entries.get(path) {
            Some(CapturedEntry::File(bytes)) => Ok(bytes.clone()),
            Some(CapturedEntry::Failed(number)) => Err(io::Error::from_raw_os_error(*number)),
            _ => Err(io::Error::from_raw_os_error(ENOENT)),
        }
    }

    fn list_filtered(&self, path: &str, keep: NameFilter) -> Vec<String> {
        match self.entries.get(path) {
            Some(CapturedEntry::Names(names)) => {
                names.iter().filter(|name| keep(name)).cloned().collect()
            }
            _ => Vec::new(),
        }
    }

    fn open_device(&self, path: &str) -> io::Result<()> {
        match self.entries.get(path) {
            Some(CapturedEntry::Usable) => Ok(()),
            Some(CapturedEntry::Failed(number)) => Err(io::Error::from_raw_os_error(*number)),
            _ => Err(io::Error::from_raw_os_error(ENOENT)),
        }
    }

    fn check_permission(&self, path: &str) -> io::Result<()> {
        self.open_device(path)
    }

    fn read_link(&self, path: &str) -> Option<String> {
        match self.entries.get(path) {
            Some(CapturedEntry::Link(link)) => Some(link.clone()),
            _ => None,
        }
    }

    fn free_bytes(&self, path: &str) -> Option<u64> {
        match self.entries.get(path) {
            Some(CapturedEntry::Free(bytes)) => Some(*bytes),
            _ => None,
        }
    }
}

/// Returns trimmed text.
pub(crate) fn read_text(files: &dyn HostFiles, path: &str) -> Option<String> {
    let bytes = files.read(path).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

pub(crate) fn read_text_filtered(files: &dyn HostFiles, path: &str, keep: ContentFilter) -> String {
    let bytes = files.read_filtered(path, keep).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

pub(crate) fn keep_parts(bytes: &[u8], separator: u8, is_kept: fn(&[u8]) -> bool) -> Vec<u8> {
    let kept: Vec<&[u8]> =
        bytes.split(|byte| *byte == separator).filter(|part| is_kept(part)).collect();
    kept.join(&separator)
}

pub(crate) fn read_number(files: &dyn HostFiles, path: &str) -> Option<u64> {
    read_text(files, path)?.parse().ok()
}

pub(crate) fn last_component(path: &str) -> &str {
    Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default()
}
