//! Where a box's facts are read from: its own file system, or a capture of another's. What was
//! read can be kept, so that a capture holds exactly that and nothing private.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Files of sysfs and procfs are far smaller, but for the mappings of a large process; more is not
/// read.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Entries of a directory that are looked at.
const ENTRIES_MAX: usize = 65_536;

/// Leaves of a file what may be shown to others. Applied twice it leaves the same.
pub type Keep = fn(&[u8]) -> Vec<u8>;

/// Names of a directory that may be shown to others.
pub type KeepName = fn(&str) -> bool;

/// The Python environment that trains, wherever it lies.
pub(crate) const PYTHON: &str = "/@python";
/// The user's home.
pub(crate) const HOME: &str = "/@home";
/// Where checkpoints and models are written.
pub(crate) const DATA: &str = "/@data";

/// Reads below a root. Paths are absolute and without `..`: `/sys/…`, `/proc/…`, `/etc/…`.
pub trait Files {
    /// # Errors
    /// As the file system has them; a capture knows "not found" and what it recorded.
    fn read(&self, path: &str) -> io::Result<Vec<u8>>;

    /// Of a file that holds private things too: what `keep` leaves of it. A capture never sees
    /// the rest.
    ///
    /// # Errors
    /// As [`Files::read`].
    fn read_part(&self, path: &str, keep: Keep) -> io::Result<Vec<u8>> {
        self.read(path).map(|bytes| keep(&bytes))
    }

    /// Names in a directory, sorted; none where there is no such directory.
    fn list(&self, path: &str) -> Vec<String> {
        self.list_part(path, |_| true)
    }

    /// Of a directory that tells of private things too: the names that `keep` allows.
    fn list_part(&self, path: &str, keep: KeepName) -> Vec<String>;

    /// Of a directory of small files: those whose names `names` allows, and of each what `keep`
    /// leaves of it. One of which nothing is left is not told of.
    fn read_parts(&self, path: &str, names: KeepName, keep: Keep) -> Vec<(String, Vec<u8>)> {
        let read = |name: String| {
            let bytes = self.read_part(&format!("{path}/{name}"), keep).ok()?;
            (!bytes.is_empty()).then_some((name, bytes))
        };
        self.list_part(path, names).into_iter().filter_map(read).collect()
    }

    /// Opens a device for reading and writing and closes it again.
    ///
    /// # Errors
    /// Why it cannot be used.
    fn open_device(&self, path: &str) -> io::Result<()>;

    /// Whether this user may open a device, without doing so: that would wake the card.
    ///
    /// # Errors
    /// Why it may not be opened.
    fn may_open(&self, path: &str) -> io::Result<()>;

    /// What the link leads to, as written in it.
    fn link(&self, path: &str) -> Option<String>;

    /// Bytes this user may still write where the directory lies.
    fn free_bytes(&self, path: &str) -> Option<u64>;
}

/// This box, or a tree of files that looks like one.
#[derive(Debug, Clone)]
pub struct Live {
    root: PathBuf,
    /// Directories that have a name of their own here, lest a capture tell whose they are.
    places: BTreeMap<&'static str, PathBuf>,
}

impl Live {
    /// `root` is `/` but for tests.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), places: BTreeMap::new() }
    }

    /// Also looks at the environment of this interpreter. `<venv>/bin/python` is a link to one
    /// elsewhere: what counts is where it lies.
    #[must_use]
    pub fn with_python(self, interpreter: &Path) -> Self {
        match interpreter.parent().and_then(Path::parent) {
            Some(prefix) => self.with(PYTHON, prefix),
            None => self,
        }
    }

    /// Also looks for variables in this user's start files.
    #[must_use]
    pub fn with_home(self, home: &Path) -> Self {
        self.with(HOME, home)
    }

    /// Also looks at the room where checkpoints and models are written.
    #[must_use]
    pub fn with_data(self, directory: &Path) -> Self {
        self.with(DATA, directory)
    }

    fn with(mut self, name: &'static str, directory: &Path) -> Self {
        self.places.insert(name, directory.to_owned());
        self
    }

    fn place(&self, path: &str) -> PathBuf {
        let named = self.places.iter().find_map(|(name, directory)| {
            let below = path.strip_prefix(name)?;
            Some(directory.join(below.trim_start_matches('/')))
        });
        named.unwrap_or_else(|| self.root.join(path.trim_start_matches('/')))
    }
}

impl Files for Live {
    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        let place = self.place(path);
        // A pipe or a device would block or answer for ever.
        if !std::fs::metadata(&place)?.is_file() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut bytes = Vec::new();
        std::fs::File::open(place)?.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn list_part(&self, path: &str, keep: KeepName) -> Vec<String> {
        let entries = std::fs::read_dir(self.place(path)).into_iter().flatten().flatten();
        let names =
            entries.take(ENTRIES_MAX).filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.filter(|name| keep(name)).collect();
        names.sort();
        names
    }

    fn open_device(&self, path: &str) -> io::Result<()> {
        std::fs::OpenOptions::new().read(true).write(true).open(self.place(path)).map(drop)
    }

    fn may_open(&self, path: &str) -> io::Result<()> {
        use rustix::fs::Access;
        Ok(rustix::fs::access(self.place(path), Access::READ_OK | Access::WRITE_OK)?)
    }

    fn link(&self, path: &str) -> Option<String> {
        std::fs::read_link(self.place(path)).ok()?.into_os_string().into_string().ok()
    }

    fn free_bytes(&self, path: &str) -> Option<u64> {
        let place = self.places.get(path)?;
        // What does not exist yet will lie where its parent does.
        let exists = place.ancestors().find(|place| place.exists())?;
        let room = rustix::fs::statvfs(exists).ok()?;
        Some(room.f_bavail.saturating_mul(room.f_frsize))
    }
}

/// What one look at a path found. A capture is these, by path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    File(Vec<u8>),
    Names(Vec<String>),
    Link(String),
    /// Of a directory: bytes that may be written.
    Free(u64),
    /// Of a device: usable.
    Usable,
    /// The operating system's error number.
    Failed(i32),
}

/// Everything that was looked at, and what was there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Capture {
    pub seen: BTreeMap<String, Seen>,
}

/// Passes looks on, and keeps what they found.
pub struct Recording<'a> {
    files: &'a dyn Files,
    capture: RefCell<Capture>,
}

impl<'a> Recording<'a> {
    pub fn new(files: &'a dyn Files) -> Self {
        Self { files, capture: RefCell::default() }
    }

    pub fn finish(self) -> Capture {
        self.capture.into_inner()
    }

    fn keep(&self, path: &str, seen: Seen) {
        self.capture.borrow_mut().seen.insert(path.to_owned(), seen);
    }
}

/// Where the system gives no number.
const NO_NUMBER: i32 = 5;

fn failed(error: &io::Error) -> Seen {
    Seen::Failed(error.raw_os_error().unwrap_or(NO_NUMBER))
}

impl Files for Recording<'_> {
    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        let read = self.files.read(path);
        self.keep(path, read.as_ref().map_or_else(failed, |bytes| Seen::File(bytes.clone())));
        read
    }

    fn read_part(&self, path: &str, keep: Keep) -> io::Result<Vec<u8>> {
        let read = self.files.read_part(path, keep);
        self.keep(path, read.as_ref().map_or_else(failed, |bytes| Seen::File(bytes.clone())));
        read
    }

    fn list_part(&self, path: &str, keep: KeepName) -> Vec<String> {
        let names = self.files.list_part(path, keep);
        self.keep(path, Seen::Names(names.clone()));
        names
    }

    fn read_parts(&self, path: &str, names: KeepName, keep: Keep) -> Vec<(String, Vec<u8>)> {
        let parts = self.files.read_parts(path, names, keep);
        self.keep(path, Seen::Names(parts.iter().map(|(name, _)| name.clone()).collect()));
        for (name, bytes) in &parts {
            self.keep(&format!("{path}/{name}"), Seen::File(bytes.clone()));
        }
        parts
    }

    fn open_device(&self, path: &str) -> io::Result<()> {
        let opened = self.files.open_device(path);
        self.keep(path, opened.as_ref().map_or_else(failed, |()| Seen::Usable));
        opened
    }

    fn may_open(&self, path: &str) -> io::Result<()> {
        let may = self.files.may_open(path);
        self.keep(path, may.as_ref().map_or_else(failed, |()| Seen::Usable));
        may
    }

    fn link(&self, path: &str) -> Option<String> {
        let link = self.files.link(path);
        if let Some(link) = &link {
            self.keep(path, Seen::Link(link.clone()));
        }
        link
    }

    fn free_bytes(&self, path: &str) -> Option<u64> {
        let free = self.files.free_bytes(path);
        if let Some(bytes) = free {
            self.keep(path, Seen::Free(bytes));
        }
        free
    }
}

const NOT_FOUND: i32 = 2;

impl Files for Capture {
    fn read(&self, path: &str) -> io::Result<Vec<u8>> {
        match self.seen.get(path) {
            Some(Seen::File(bytes)) => Ok(bytes.clone()),
            Some(Seen::Failed(number)) => Err(io::Error::from_raw_os_error(*number)),
            _ => Err(io::Error::from_raw_os_error(NOT_FOUND)),
        }
    }

    fn list_part(&self, path: &str, keep: KeepName) -> Vec<String> {
        match self.seen.get(path) {
            Some(Seen::Names(names)) => names.iter().filter(|name| keep(name)).cloned().collect(),
            _ => Vec::new(),
        }
    }

    fn open_device(&self, path: &str) -> io::Result<()> {
        match self.seen.get(path) {
            Some(Seen::Usable) => Ok(()),
            Some(Seen::Failed(number)) => Err(io::Error::from_raw_os_error(*number)),
            _ => Err(io::Error::from_raw_os_error(NOT_FOUND)),
        }
    }

    fn may_open(&self, path: &str) -> io::Result<()> {
        self.open_device(path)
    }

    fn link(&self, path: &str) -> Option<String> {
        match self.seen.get(path) {
            Some(Seen::Link(link)) => Some(link.clone()),
            _ => None,
        }
    }

    fn free_bytes(&self, path: &str) -> Option<u64> {
        match self.seen.get(path) {
            Some(Seen::Free(bytes)) => Some(*bytes),
            _ => None,
        }
    }
}

/// Text of a small file, trimmed; `None` where it cannot be read.
pub(crate) fn text(files: &dyn Files, path: &str) -> Option<String> {
    let bytes = files.read(path).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// Of a file that holds private things too, what `keep` leaves, as text.
pub(crate) fn part(files: &dyn Files, path: &str, keep: Keep) -> String {
    let bytes = files.read_part(path, keep).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The lines or other parts of a text that `is_kept` names, as they stood.
pub(crate) fn keep_parts(bytes: &[u8], separator: u8, is_kept: fn(&[u8]) -> bool) -> Vec<u8> {
    let kept: Vec<&[u8]> =
        bytes.split(|byte| *byte == separator).filter(|part| is_kept(part)).collect();
    kept.join(&separator)
}

/// A number that stands alone in a file.
pub(crate) fn number(files: &dyn Files, path: &str) -> Option<u64> {
    text(files, path)?.parse().ok()
}

/// The last part of a path.
pub(crate) fn last(path: &str) -> &str {
    Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default()
}
