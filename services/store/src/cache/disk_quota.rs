//! The size limit of the cache. Room is made and reserved under one lock, so that concurrent
//! fetches of several processes cannot exceed the limit together. The least recently used entries
//! are evicted first.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use super::file_lock;
use crate::error::CacheError;

/// The directory of a cache and its size limit.
///
/// A file that some tree links to is not evicted; evicting the tree makes its files candidates.
/// Entries in use hold a shared lock and are skipped.
pub(crate) struct DiskQuota {
    dir: PathBuf,
    max_bytes: u64,
}

/// A path in `tmp/`, removed on drop unless it was renamed.
pub(crate) struct TempPath {
    path: PathBuf,
}

struct SpaceSurvey {
    /// The size of all content in bytes; hard links are counted once.
    bytes: u64,
    /// The least recently used entries come first.
    candidates: BTreeMap<(LastUse, PathBuf), EvictionCandidate>,
}

type LastUse = (i64, i64);

enum EvictionCandidate {
    Blob { bytes: u64 },
    Tree,
}

impl TempPath {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn rename_to(self, to: &Path) -> io::Result<()> {
        fs::rename(&self.path, to)
    }
}

impl Drop for TempPath {
    fn drop(&mut self) {
        // After a rename there is nothing left to remove. A path that cannot be removed here is
        // removed by the next `remove_leftovers`.
        let _ = remove_path(&self.path);
    }
}

impl DiskQuota {
    pub(crate) fn open(dir: &Path, max_bytes: u64) -> Result<Self, CacheError> {
        let dir =
            std::path::absolute(dir).map_err(|source| CacheError::from_io("find", dir, source))?;
        for part in ["b3", "trees", "tmp", "locks"] {
            let path = dir.join(part);
            fs::create_dir_all(&path)
                .map_err(|source| CacheError::from_io("create", path, source))?;
        }
        Ok(Self { dir, max_bytes })
    }

    pub(crate) fn cache_dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn check_fits(&self, bytes: u64) -> Result<(), CacheError> {
        if bytes <= self.max_bytes { Ok(()) } else { Err(self.full_error(bytes, 0)) }
    }

    /// Makes room for a file and creates it with its full size, which takes the room at once.
    /// Blocking.
    pub(crate) fn reserve_file(&self, bytes: u64) -> Result<(File, TempPath), CacheError> {
        self.check_fits(bytes)?;
        let temp = self.new_temp_path();
        let failed = |source| CacheError::from_io("write", &temp.path, source);
        let _lock = self.lock_quota()?;
        self.remove_leftovers().map_err(failed)?;
        self.make_room(bytes)?;
        let file = File::options().read(true).write(true).create_new(true).open(&temp.path);
        let file = file.map_err(failed)?;
        file.lock_shared().map_err(failed)?;
        allocate_file(&file, bytes).map_err(failed)?;
        Ok((file, temp))
    }

    /// Creates an empty directory in `tmp/` and marks it as in use. Blocking.
    pub(crate) fn create_staging_dir(&self) -> Result<(File, TempPath), CacheError> {
        let temp = self.new_temp_path();
        let failed = |source| CacheError::from_io("create", &temp.path, source);
        let _lock = self.lock_quota()?;
        fs::create_dir(&temp.path).map_err(failed)?;
        let file = File::open(&temp.path).map_err(failed)?;
        file.lock_shared().map_err(failed)?;
        Ok((file, temp))
    }

    pub(crate) fn new_temp_path(&self) -> TempPath {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // The time is part of the name because containers that share the directory may share
        // process ids.
        let now = wire::clock::unix_time().as_nanos();
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        TempPath { path: self.dir.join("tmp").join(format!("{}-{now}-{next}", process::id())) }
    }

    /// Locks changes of the used space. Held for the time of making room at most, never during a
    /// fetch.
    fn lock_quota(&self) -> Result<File, CacheError> {
        let path = self.dir.join("door");
        let lock = || {
            let file = File::options().create(true).truncate(false).write(true).open(&path)?;
            file.lock()?;
            Ok(file)
        };
        lock().map_err(|source| CacheError::from_io("lock", &path, source))
    }

    /// Removes entries of `tmp/` whose processes were killed, which shows in their released locks.
    fn remove_leftovers(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.dir.join("tmp"))? {
            let path = entry?.path();
            // A link to a user's file, which must not be locked.
            if fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_symlink()) {
                remove_old_link(&path)?;
                continue;
            }
            let Ok(file) = File::open(&path) else { continue };
            if file_lock::try_lock_exclusive(&file)? {
                remove_path(&path)?;
            }
        }
        Ok(())
    }

    /// Evicts the least recently used entries until `needed` bytes fit.
    fn make_room(&self, needed: u64) -> Result<(), CacheError> {
        loop {
            let mut survey = self.survey_entries()?;
            let mut evicted = false;
            for ((_, path), candidate) in &survey.candidates {
                if survey.bytes.saturating_add(needed) <= self.max_bytes {
                    return Ok(());
                }
                let failed = |source| CacheError::from_io("evict", path, source);
                if !self.evict_entry(path).map_err(failed)? {
                    continue;
                }
                evicted = true;
                match candidate {
                    EvictionCandidate::Blob { bytes } => survey.bytes -= bytes,
                    // The files of the tree are candidates now, so another survey is needed.
                    EvictionCandidate::Tree => break,
                }
            }
            if survey.bytes.saturating_add(needed) <= self.max_bytes {
                return Ok(());
            }
            if !evicted {
                return Err(self.full_error(needed, survey.bytes));
            }
        }
    }

    /// Removes an entry, and returns false if it is in use.
    fn evict_entry(&self, path: &Path) -> io::Result<bool> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            opened => opened?,
        };
        if !file_lock::try_lock_exclusive(&file)? {
            return Ok(false);
        }
        let meta = file.metadata()?;
        if meta.is_file() && meta.nlink() > 1 {
            // A tree linked the file after the survey.
            return Ok(false);
        }
        let doomed = self.new_temp_path();
        fs::rename(path, &doomed.path)?;
        remove_path(&doomed.path)?;
        Ok(true)
    }

    fn survey_entries(&self) -> Result<SpaceSurvey, CacheError> {
        let mut survey = SpaceSurvey { bytes: 0, candidates: BTreeMap::new() };
        let mut seen = BTreeSet::new();
        let mut add = |meta: &Metadata| {
            let first = seen.insert((meta.dev(), meta.ino()));
            survey.bytes += if first { meta.len() } else { 0 };
        };
        let failed = |source| CacheError::from_io("measure", &self.dir, source);
        // Directories are visited in the order in which files move through them, so that a moving
        // file is not missed.
        visit_files(&self.dir.join("tmp"), &mut |_, meta| add(meta)).map_err(failed)?;
        visit_files(&self.dir.join("b3"), &mut |path, meta| {
            add(meta);
            if meta.nlink() == 1 {
                let used = (meta.atime(), meta.atime_nsec());
                survey
                    .candidates
                    .insert((used, path), EvictionCandidate::Blob { bytes: meta.len() });
            }
        })
        .map_err(failed)?;
        visit_files(&self.dir.join("trees"), &mut |_, meta| add(meta)).map_err(failed)?;
        for (path, meta) in list_entries(&self.dir.join("trees")).map_err(failed)? {
            // Reading a directory may set its access time, so the last use of a tree is its
            // modification time.
            let used = (meta.mtime(), meta.mtime_nsec());
            survey.candidates.insert((used, path), EvictionCandidate::Tree);
        }
        Ok(survey)
    }

    fn full_error(&self, needed: u64, in_use: u64) -> CacheError {
        CacheError::Full { path: self.dir.clone(), needed, limit: self.max_bytes, in_use }
    }
}

fn visit_files(dir: &Path, see: &mut impl FnMut(PathBuf, &Metadata)) -> io::Result<()> {
    for (path, meta) in list_entries(dir)? {
        if meta.is_dir() {
            visit_files(&path, see)?;
        } else {
            see(path, &meta);
        }
    }
    Ok(())
}

fn list_entries(dir: &Path) -> io::Result<Vec<(PathBuf, Metadata)>> {
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

/// A link that is being made stays in `tmp/` for an instant only.
const LINK_AGE: Duration = Duration::from_secs(60);

fn remove_old_link(link: &Path) -> io::Result<()> {
    let made = fs::symlink_metadata(link).and_then(|meta| meta.modified());
    let is_old = made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > LINK_AGE));
    if is_old { remove_path(link) } else { Ok(()) }
}

fn remove_path(path: &Path) -> io::Result<()> {
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

/// Allocates the blocks of a file, so that a full disk shows before anything is fetched.
fn allocate_file(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::{fs::FallocateFlags, io::Errno};
    if bytes == 0 {
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => file.set_len(bytes),
        allocated => Ok(allocated?),
    }
}
