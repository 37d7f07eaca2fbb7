//! A bounded directory of fetched files that all processes of a host share.
//!
//! `b3/<aa>/<hex>` contains files by digest, `trees/<manifest hex>/` directories of hard links to
//! them, `tmp/` unfinished files, and `locks/` one lock per fetch in progress. There is no index:
//! sizes, links and times on disk are the state, so a killed process leaves nothing that another
//! process would trust wrongly.
//!
//! Files of base models that exist on this machine are not fetched: their tree contains symbolic
//! links to them. Those files belong to the user. They do not count against the limit, they are
//! never removed, and they are checked again before each use, because the user may change them at
//! any time.
//!
//! Every file is hashed when it is fetched, and again when a process first uses it; after that its
//! inode, size and modification time must not change.

mod assemble_tree;
mod disk_quota;
mod external_sources;
mod file_lock;
mod local_models;
mod publish;
mod verified_files;

use std::{
    fmt,
    fs::{self, File, FileTimes},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use hub::HubClient;
use wire::{Digest, v1};

use self::{
    disk_quota::{DiskQuota, TempPath},
    file_lock::FetchLock,
    local_models::LocalModels,
    verified_files::VerifiedFiles,
};
use crate::{
    digest_cache::DigestCache,
    error::{CacheError, GetError},
    manifest::TreeManifest,
    peers::{self, PeerNode},
    store::{Store, WantedObject, run_blocking},
};
pub use external_sources::ExternalSources;

/// A cache of verified files and trees. Clones share the list of files that this process has
/// verified.
///
/// Use of a tree: find missing files on this machine, then fetch them from the store and from
/// peers, then from the hub; link all files; return a [`CachedTree`] whose files are not evicted
/// while it exists. Only one process of a host fetches a file; others wait for it. If space is
/// needed, the least recently used files are evicted.
#[derive(Clone)]
pub struct FileCache {
    inner: Arc<CacheInner>,
}

/// The shared state of the clones of a cache.
struct CacheInner {
    /// The directory and its size limit.
    quota: DiskQuota,
    /// Files that this process has hashed.
    verified: VerifiedFiles,
    /// Base models on this machine.
    local_models: LocalModels,
    /// The hub, if it may be used.
    hub: Option<HubClient>,
    /// The exchange with other agents, if enabled.
    peers: Option<PeerNode>,
}

/// A verified file of the cache, which is not evicted while this value exists.
#[derive(Debug)]
pub struct CachedBlob {
    path: PathBuf,
    /// A shared lock against eviction.
    _in_use: File,
}

/// A verified directory of the cache, which is not evicted while this value exists. Its files are
/// read-only and shared with other trees: copy a file before changing it.
#[derive(Debug)]
pub struct CachedTree {
    path: PathBuf,
    manifest: TreeManifest,
    /// A shared lock against eviction.
    _in_use: File,
}

impl CachedBlob {
    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl CachedTree {
    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the manifest of the tree.
    pub fn manifest(&self) -> &TreeManifest {
        &self.manifest
    }
}

impl FileCache {
    /// Opens a cache and creates the directory if absent. `max_bytes` bounds all its content,
    /// including files that are being fetched; it must be at least the size of the largest tree in
    /// use.
    ///
    /// # Errors
    /// When the directory cannot be created.
    pub fn open(dir: &Path, max_bytes: u64) -> Result<Self, CacheError> {
        Self::open_with_sources(dir, max_bytes, ExternalSources::default())
    }

    /// Opens a cache as [`FileCache::open`] does, with other sources beside the store.
    ///
    /// # Errors
    /// When the directory cannot be created.
    pub fn open_with_sources(
        dir: &Path,
        max_bytes: u64,
        elsewhere: ExternalSources,
    ) -> Result<Self, CacheError> {
        let space = DiskQuota::open(dir, max_bytes)?;
        let ExternalSources { models, hub, peers } = elsewhere;
        let local =
            LocalModels::new(models, DigestCache::at_path(space.cache_dir().join("digests.jsonl")));
        let verified = VerifiedFiles::default();
        Ok(Self {
            inner: Arc::new(CacheInner { quota: space, verified, local_models: local, hub, peers }),
        })
    }

    /// Returns a blob as a local file, and fetches it if missing. If another task or process is
    /// fetching it, waits for that fetch.
    ///
    /// # Errors
    /// When the blob is missing or damaged in the store, does not fit, or store or disk fail.
    pub async fn fetch_blob(&self, store: &Store, blob: &v1::Blob) -> Result<CachedBlob, GetError> {
        self.fetch_object(store, store.wanted_blob(blob)?).await
    }

    /// Returns an object as a local file, and fetches it if missing, under the object's fetch lock.
    async fn fetch_object(
        &self,
        store: &Store,
        wanted: WantedObject,
    ) -> Result<CachedBlob, GetError> {
        if let Some(held) = self.find_cached(&wanted).await? {
            return Ok(held);
        }
        let _flight = self.lock_fetch(&format!("b-{}", wanted.digest.to_hex())).await?;
        match self.find_cached(&wanted).await? {
            Some(held) => Ok(held),
            None => self.download_object(store, wanted).await,
        }
    }

    /// Acquires the fetch lock of the given name.
    async fn lock_fetch(&self, name: &str) -> Result<FetchLock, CacheError> {
        let path = self.inner.quota.cache_dir().join("locks").join(name);
        FetchLock::acquire_lock(&path)
            .await
            .map_err(|source| CacheError::from_io("lock", path, source))
    }

    /// Returns the file of an object, if it is in the cache and undamaged.
    async fn find_cached(&self, wanted: &WantedObject) -> Result<Option<CachedBlob>, CacheError> {
        let (inner, digest, bytes) = (self.inner.clone(), wanted.digest, wanted.bytes);
        let path = self.blob_path(digest);
        run_blocking(move || inner.hold_blob(&path, digest, bytes)).await
    }

    /// Downloads an object from the store, with peers if its part hashes are known.
    async fn download_object(
        &self,
        store: &Store,
        wanted: WantedObject,
    ) -> Result<CachedBlob, GetError> {
        if let (Some(peers), Some(parts)) = (&self.inner.peers, &wanted.parts) {
            let (file, temp) = self.reserve_space(wanted.bytes).await?;
            let fetched =
                peers::fetch_with_peers(peers, store, (&wanted, parts.clone()), file, temp.path());
            let (file, entry) = fetched.await?;
            let held = self.commit_file(file, temp, wanted.digest).await;
            // From here on peers get the file from the cache.
            drop(entry);
            return held;
        }
        let fetch_once = async || {
            let (file, temp) = self.reserve_space(wanted.bytes).await?;
            Ok((store.fetch_into_file(&wanted, file, temp.path()).await?, temp))
        };
        let (file, temp) = store.retry_if_damaged(fetch_once).await?;
        if let Some(peers) = &self.inner.peers {
            peers.count_from_store(wanted.bytes);
        }
        self.commit_file(file, temp, wanted.digest).await
    }

    /// Opens a file of the cache for a peer and protects it from eviction while it is open. The
    /// content is not checked here, because the receiver verifies it. Blocking.
    pub(crate) fn open_unverified(&self, digest: Digest) -> Option<File> {
        file_lock::open_shared(&self.blob_path(digest)).ok()?
    }

    /// Makes room for `bytes` bytes and creates a file of that size.
    async fn reserve_space(&self, bytes: u64) -> Result<(File, TempPath), CacheError> {
        let inner = self.inner.clone();
        run_blocking(move || inner.quota.reserve_file(bytes)).await
    }

    /// Renames a file whose bytes were just verified to its place in the cache.
    async fn commit_file(
        &self,
        file: File,
        temp: TempPath,
        digest: Digest,
    ) -> Result<CachedBlob, GetError> {
        let (inner, path) = (self.inner.clone(), self.blob_path(digest));
        let committed = run_blocking(move || {
            let failed = |source| CacheError::from_io("commit", &path, source);
            file.set_permissions(read_only_mode()).map_err(failed)?;
            fs::create_dir_all(path.parent().unwrap_or(&path)).map_err(failed)?;
            temp.rename_to(&path).map_err(failed)?;
            inner.verified.record_file(&file, digest).map_err(failed)?;
            Ok(CachedBlob { path, _in_use: file })
        });
        committed.await
    }

    /// Returns the path of a file by digest.
    fn blob_path(&self, digest: Digest) -> PathBuf {
        let hex = digest.to_hex();
        self.inner.quota.cache_dir().join("b3").join(&hex[..2]).join(hex)
    }
}

impl CacheInner {
    /// Opens a cached file, protects it from eviction and verifies it. Returns `None` if it is
    /// missing or damaged. Blocking.
    fn hold_blob(
        &self,
        path: &Path,
        digest: Digest,
        bytes: u64,
    ) -> Result<Option<CachedBlob>, CacheError> {
        let failed = |source| CacheError::from_io("use", path, source);
        let Some(file) = file_lock::open_shared(path).map_err(failed)? else { return Ok(None) };
        if self.verified.is_intact(&file, digest, bytes).map_err(failed)? {
            mark_used(&file);
            return Ok(Some(CachedBlob { path: path.to_owned(), _in_use: file }));
        }
        // The file is not removed: the next fetch renames the new file over it.
        tracing::warn!(path = %path.display(), "a cached file is damaged and is fetched again");
        Ok(None)
    }
}

impl fmt::Debug for FileCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cache").field(&self.inner.quota.cache_dir()).finish()
    }
}

/// Sets the access time, which decides the order of eviction. A failure (for example because this
/// process does not own the file) only makes the file look older.
fn mark_used(file: &File) {
    let _ = file.set_times(FileTimes::new().set_accessed(SystemTime::now()));
}

/// Returns the file mode 0444.
fn read_only_mode() -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o444)
}
