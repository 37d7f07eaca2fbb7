//! The cache of one repository, in the layout that all tools of Hugging Face share; that of a data
//! set begins with `datasets--`:
//!
//! ```text
//! models--org--name/refs/main                       the commit of a branch
//! models--org--name/blobs/<etag>                    the bytes of a file
//! models--org--name/snapshots/<commit>/config.json  a relative link to a blob
//! .locks/models--org--name/<etag>.lock              held while the blob is downloaded
//! datasets--org--name/trees/<commit>.json           the names and sizes of a commit's files
//! ```

use std::{
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use tokio::fs;

use crate::{
    error::{RequestError, SILENCE_TIMEOUT},
    repo_kind::RepoKind,
};

/// As often as Hugging Face's tools look whether a lock is free, roughly.
const LOCK_INTERVAL: Duration = Duration::from_millis(100);
const COMMIT_CHARS: usize = 40;
const REF_BYTES_MAX: usize = 256;

pub(crate) struct RepoCache {
    dir: PathBuf,
    locks: PathBuf,
}

/// The lock of a blob, held until it is dropped.
pub(crate) struct BlobLock(std::fs::File);

impl Drop for BlobLock {
    fn drop(&mut self) {
        // Closing the file unlocks it as well.
        let _ = self.0.unlock();
    }
}

pub(crate) fn is_commit(revision: &str) -> bool {
    revision.len() == COMMIT_CHARS && revision.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns true for a relative path below the directory of a repository.
pub(crate) fn is_file_path(name: &str) -> bool {
    name.split('/').all(|part| !["", ".", ".."].contains(&part)) && !name.contains(['\\', '\0'])
}

impl RepoCache {
    pub(crate) fn new(cache: &Path, kind: RepoKind, repo: &str) -> Self {
        let folder = format!("{}--{}", kind.plural(), repo.replace('/', "--"));
        Self { dir: cache.join(&folder), locks: cache.join(".locks").join(folder) }
    }

    /// Returns the path of a file in the snapshot of a commit, whether it exists or not.
    pub(crate) fn snapshot_path(&self, commit: &str, name: &str) -> PathBuf {
        self.dir.join("snapshots").join(commit).join(name)
    }

    pub(crate) fn blob_path(&self, etag: &str) -> PathBuf {
        self.dir.join("blobs").join(etag)
    }

    /// Returns the path of a file at a revision, if it is in the cache.
    pub(crate) async fn find_file(&self, revision: &str, name: &str) -> Option<PathBuf> {
        let commit = match is_commit(revision) {
            true => revision.to_owned(),
            false => self.read_ref(revision).await?,
        };
        let path = self.snapshot_path(&commit, name);
        fs::try_exists(&path).await.ok()?.then_some(path)
    }

    /// Returns the commit of a branch or tag when it was last asked for.
    pub(crate) async fn read_ref(&self, revision: &str) -> Option<String> {
        let text = fs::read_to_string(self.dir.join("refs").join(revision)).await.ok()?;
        let commit = text.trim();
        (commit.len() <= REF_BYTES_MAX && is_file_path(commit)).then(|| commit.to_owned())
    }

    /// Records the commit of a branch or tag. Other tools never see a part of it.
    pub(crate) async fn write_ref(&self, revision: &str, commit: &str) -> io::Result<()> {
        if revision == commit || self.read_ref(revision).await.as_deref() == Some(commit) {
            return Ok(());
        }
        write_whole(&self.dir.join("refs").join(revision), commit.as_bytes()).await
    }

    /// Returns the names and sizes of a commit's files as JSON, if a tool has listed them.
    pub(crate) async fn read_tree(&self, commit: &str) -> Option<Vec<u8>> {
        fs::read(self.tree_path(commit)).await.ok()
    }

    pub(crate) async fn write_tree(&self, commit: &str, json: &[u8]) -> io::Result<()> {
        write_whole(&self.tree_path(commit), json).await
    }

    fn tree_path(&self, commit: &str) -> PathBuf {
        self.dir.join("trees").join(format!("{commit}.json"))
    }

    /// Waits for the lock of a blob, which excludes the downloads of other processes. Fails if the
    /// holder downloads nothing for [`SILENCE_TIMEOUT`].
    pub(crate) async fn lock_blob(&self, etag: &str) -> Result<BlobLock, RequestError> {
        let path = self.locks.join(format!("{etag}.lock"));
        create_parent(&path).await?;
        let mut holder = (self.count_partial_bytes(etag).await, Instant::now());
        loop {
            if let Some(lock) = try_lock(&path)? {
                return Ok(lock);
            }
            tokio::time::sleep(LOCK_INTERVAL).await;
            let partial = self.count_partial_bytes(etag).await;
            if partial != holder.0 {
                holder = (partial, Instant::now());
            } else if holder.1.elapsed() > SILENCE_TIMEOUT {
                return Err(format!("another process holds {}", path.display()).into());
            }
        }
    }

    /// Returns how many bytes of a blob there are in files that are not complete yet. Each tool
    /// appends something of its own to their names.
    async fn count_partial_bytes(&self, etag: &str) -> u64 {
        let Ok(mut blobs) = fs::read_dir(self.dir.join("blobs")).await else { return 0 };
        let mut bytes = 0;
        while let Ok(Some(entry)) = blobs.next_entry().await {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(etag) && name.ends_with(".incomplete") {
                bytes += entry.metadata().await.map_or(0, |meta| meta.len());
            }
        }
        bytes
    }

    /// Links a file of a snapshot to its blob, and returns the path of the link.
    pub(crate) async fn link_file(
        &self,
        commit: &str,
        name: &str,
        etag: &str,
    ) -> io::Result<PathBuf> {
        let path = self.snapshot_path(commit, name);
        if fs::try_exists(&path).await? {
            return Ok(path);
        }
        create_parent(&path).await?;
        // From the directory of the file to the directory of the repository.
        let up = "../".repeat(2 + name.matches('/').count());
        // A link to a blob that somebody removed.
        let _ = fs::remove_file(&path).await;
        match fs::symlink(format!("{up}blobs/{etag}"), &path).await {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(path),
        }
    }
}

/// Writes a file of which other processes never see a part.
async fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    static TEMP_FILES: AtomicU64 = AtomicU64::new(0);
    create_parent(path).await?;
    let number = TEMP_FILES.fetch_add(1, Ordering::Relaxed);
    let temp = path.with_added_extension(format!("{}-{number}.tmp", std::process::id()));
    fs::write(&temp, content).await?;
    fs::rename(temp, path).await
}

async fn create_parent(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(path)).await
}

/// Returns `None` if the lock is not free. Opening and locking do not wait.
fn try_lock(path: &Path) -> io::Result<Option<BlobLock>> {
    let file = std::fs::File::options().write(true).create(true).truncate(false).open(path)?;
    match file.try_lock() {
        Err(std::fs::TryLockError::WouldBlock) => return Ok(None),
        Err(std::fs::TryLockError::Error(error)) => return Err(error),
        Ok(()) => {}
    }
    // Some versions of other tools remove the file, so that two processes could hold two locks.
    let is_same = std::fs::metadata(path).is_ok_and(|there| {
        file.metadata().is_ok_and(|here| (here.dev(), here.ino()) == (there.dev(), there.ino()))
    });
    Ok(is_same.then_some(BlobLock(file)))
}
