//! The bound: room is made and taken under one lock, so that concurrent fetches of several
//! processes cannot exceed it together. The least recently used goes first.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use super::lock;
use crate::error::CacheError;

pub(crate) struct Space {
    dir: PathBuf,
    max_bytes: u64,
}

/// Something in `tmp/`, removed on drop unless it was renamed.
pub(crate) struct Temp {
    path: PathBuf,
}

struct Survey {
    bytes: u64,
    /// Oldest first.
    candidates: BTreeMap<(LastUse, PathBuf), Candidate>,
}

/// Seconds and nanoseconds.
type LastUse = (i64, i64);

enum Candidate {
    /// A file no tree links to.
    Blob {
        bytes: u64,
    },
    Tree,
}

impl Temp {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn rename(self, to: &Path) -> io::Result<()> {
        fs::rename(&self.path, to)
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        // After a rename there is nothing left to remove; else the next sweep does what this
        // could not.
        let _ = remove(&self.path);
    }
}

impl Space {
    pub(crate) fn open(dir: &Path, max_bytes: u64) -> Result<Self, CacheError> {
        let dir = std::path::absolute(dir).map_err(|source| CacheError::io("find", dir, source))?;
        for part in ["b3", "trees", "tmp", "locks"] {
            let path = dir.join(part);
            fs::create_dir_all(&path).map_err(|source| CacheError::io("create", path, source))?;
        }
        Ok(Self { dir, max_bytes })
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn check_fits(&self, bytes: u64) -> Result<(), CacheError> {
        if bytes <= self.max_bytes { Ok(()) } else { Err(self.full(bytes, 0)) }
    }

    /// Makes room and takes it: the file has its full size at once.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<(File, Temp), CacheError> {
        self.check_fits(bytes)?;
        let temp = self.temp();
        let failed = |source| CacheError::io("write", &temp.path, source);
        let _door = self.door()?;
        self.sweep().map_err(failed)?;
        self.make_room(bytes)?;
        let file = File::options().read(true).write(true).create_new(true).open(&temp.path);
        let file = file.map_err(failed)?;
        file.lock_shared().map_err(failed)?;
        allocate(&file, bytes).map_err(failed)?;
        Ok((file, temp))
    }

    /// An empty directory in `tmp/`, held as in use.
    pub(crate) fn stage(&self) -> Result<(File, Temp), CacheError> {
        let temp = self.temp();
        let failed = |source| CacheError::io("create", &temp.path, source);
        let _door = self.door()?;
        fs::create_dir(&temp.path).map_err(failed)?;
        let file = File::open(&temp.path).map_err(failed)?;
        file.lock_shared().map_err(failed)?;
        Ok((file, temp))
    }

    /// A name of its own; nothing is created.
    pub(crate) fn temp(&self) -> Temp {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Containers that share the directory may share process ids: hence the time.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        Temp { path: self.dir.join("tmp").join(format!("{}-{now}-{next}", process::id())) }
    }

    /// Held for the time of one eviction at most, never while fetching.
    fn door(&self) -> Result<File, CacheError> {
        let path = self.dir.join("door");
        let lock = || {
            let file = File::options().create(true).truncate(false).write(true).open(&path)?;
            file.lock()?;
            Ok(file)
        };
        lock().map_err(|source| CacheError::io("lock", &path, source))
    }

    /// Removes what killed processes left in `tmp/`: their locks are gone.
    fn sweep(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.dir.join("tmp"))? {
            let path = entry?.path();
            // A link to a file of a base, which is not ours to lock.
            if fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_symlink()) {
                remove_old(&path)?;
                continue;
            }
            let Ok(file) = File::open(&path) else { continue };
            if lock::try_exclusive(&file)? {
                remove(&path)?;
            }
        }
        Ok(())
    }

    fn make_room(&self, needed: u64) -> Result<(), CacheError> {
        loop {
            let mut survey = self.survey()?;
            let mut evicted = false;
            for ((_, path), candidate) in &survey.candidates {
                if survey.bytes.saturating_add(needed) <= self.max_bytes {
                    return Ok(());
                }
                let failed = |source| CacheError::io("evict", path, source);
                if !self.evict(path).map_err(failed)? {
                    continue;
                }
                evicted = true;
                match candidate {
                    Candidate::Blob { bytes } => survey.bytes -= bytes,
                    // Its files became candidates themselves.
                    Candidate::Tree => break,
                }
            }
            if survey.bytes.saturating_add(needed) <= self.max_bytes {
                return Ok(());
            }
            if !evicted {
                return Err(self.full(needed, survey.bytes));
            }
        }
    }

    /// `false` when somebody uses it.
    fn evict(&self, path: &Path) -> io::Result<bool> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            opened => opened?,
        };
        if !lock::try_exclusive(&file)? {
            return Ok(false);
        }
        let meta = file.metadata()?;
        if meta.is_file() && meta.nlink() > 1 {
            // A tree took it since the survey.
            return Ok(false);
        }
        let doomed = self.temp();
        fs::rename(path, &doomed.path)?;
        remove(&doomed.path)?;
        Ok(true)
    }

    fn survey(&self) -> Result<Survey, CacheError> {
        let mut survey = Survey { bytes: 0, candidates: BTreeMap::new() };
        let mut seen = BTreeSet::new();
        let mut add = |meta: &Metadata| {
            let first = seen.insert((meta.dev(), meta.ino()));
            survey.bytes += if first { meta.len() } else { 0 };
        };
        let failed = |source| CacheError::io("measure", &self.dir, source);
        // In the order in which files move, so that none is missed while it does.
        each_file(&self.dir.join("tmp"), &mut |_, meta| add(meta)).map_err(failed)?;
        each_file(&self.dir.join("b3"), &mut |path, meta| {
            add(meta);
            if meta.nlink() == 1 {
                let used = (meta.atime(), meta.atime_nsec());
                survey.candidates.insert((used, path), Candidate::Blob { bytes: meta.len() });
            }
        })
        .map_err(failed)?;
        each_file(&self.dir.join("trees"), &mut |_, meta| add(meta)).map_err(failed)?;
        for (path, meta) in entries(&self.dir.join("trees")).map_err(failed)? {
            // Reading a directory may set its access time, so trees are marked by the other.
            let used = (meta.mtime(), meta.mtime_nsec());
            survey.candidates.insert((used, path), Candidate::Tree);
        }
        Ok(survey)
    }

    fn full(&self, needed: u64, in_use: u64) -> CacheError {
        CacheError::Full { path: self.dir.clone(), needed, limit: self.max_bytes, in_use }
    }
}

fn each_file(dir: &Path, see: &mut impl FnMut(PathBuf, &Metadata)) -> io::Result<()> {
    for (path, meta) in entries(dir)? {
        if meta.is_dir() {
            each_file(&path, see)?;
        } else {
            see(path, &meta);
        }
    }
    Ok(())
}

/// What vanishes meanwhile is not there.
fn entries(dir: &Path) -> io::Result<Vec<(PathBuf, Metadata)>> {
    let absent = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let listing = match fs::read_dir(dir) {
        Err(error) if absent(&error) => return Ok(Vec::new()),
        listing => listing?,
    };
    let mut found = Vec::new();
    for entry in listing {
        let entry = entry?;
        match entry.metadata() {
            Err(error) if absent(&error) => {}
            meta => found.push((entry.path(), meta?)),
        }
    }
    Ok(found)
}

/// A link that is being made has its name in `tmp/` for an instant.
const LINK_AGE: Duration = Duration::from_secs(60);

fn remove_old(link: &Path) -> io::Result<()> {
    let made = fs::symlink_metadata(link).and_then(|meta| meta.modified());
    let is_old = made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > LINK_AGE));
    if is_old { remove(link) } else { Ok(()) }
}

fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// A full disk shows here, before anything is fetched, where the file system can tell.
fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::{fs::FallocateFlags, io::Errno};
    if bytes == 0 {
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => file.set_len(bytes),
        allocated => Ok(allocated?),
    }
}
