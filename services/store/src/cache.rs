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
    blocking::run_blocking,
    digest_cache::DigestCache,
    error::{CacheError, GetError},
    manifest::TreeManifest,
    peers::{self, PeerNode},
    store::{Store, WantedObject},
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

struct CacheInner {
    quota: DiskQuota,
    verified: VerifiedFiles,
    local_models: LocalModels,
    hub: Option<HubClient>,
    peers: Option<PeerNode>,
}

/// A verified file of the cache, which is not evicted while this value exists.
#[derive(Debug)]
pub struct CachedBlob {
    path: PathBuf,
    _in_use: File,
}

/// A verified directory of the cache, which is not evicted while this value exists. Its files are
/// read-only and shared with other trees: copy a file before changing it.
#[derive(Debug)]
pub struct CachedTree {
    path: PathBuf,
    manifest: TreeManifest,
    _in_use: File,
}

impl CachedBlob {
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl CachedTree {
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn manifest(&self) -> &TreeManifest {
        &self.manifest
    }
}

impl FileCache {
    /// Opens a cache and creates the directory if absent. `max_bytes` bounds all its content,
    /// including files that are being fetched; it must be at least the size of the largest tree in
    /// use.
    pub fn open(dir: &Path, max_bytes: u64) -> Result<Self, CacheError> {
        Self::open_with_sources(dir, max_bytes, ExternalSources::default())
    }

    /// Opens a cache as [`FileCache::open`] does, with other sources beside the store.
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
    pub async fn fetch_blob(&self, store: &Store, blob: &v1::Blob) -> Result<CachedBlob, GetError> {
        self.fetch_object(store, store.wanted_blob(blob)?).await
    }

    /// Fetches an object unless it is cached, under its fetch lock.
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

    async fn lock_fetch(&self, name: &str) -> Result<FetchLock, CacheError> {
        let path = self.inner.quota.cache_dir().join("locks").join(name);
        FetchLock::acquire_lock(&path)
            .await
            .map_err(|source| CacheError::from_io("lock", path, source))
    }

    async fn find_cached(&self, wanted: &WantedObject) -> Result<Option<CachedBlob>, CacheError> {
        let (inner, digest, bytes) = (self.inner.clone(), wanted.digest, wanted.bytes);
        let path = self.blob_path(digest);
        run_blocking(move || inner.hold_blob(&path, digest, bytes)).await
    }

    /// Downloads an object, with peers if its part hashes are known.
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

    /// Opens a file for a peer and protects it from eviction while it is open. The receiver
    /// verifies the content. Blocking.
    pub(crate) fn open_unverified(&self, digest: Digest) -> Option<File> {
        file_lock::open_shared(&self.blob_path(digest)).ok()?
    }

    async fn reserve_space(&self, bytes: u64) -> Result<(File, TempPath), CacheError> {
        let inner = self.inner.clone();
        run_blocking(move || inner.quota.reserve_file(bytes)).await
    }

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

/// Sets the access time, which decides the order of eviction; after a failure the file only looks
/// older.
fn mark_used(file: &File) {
    let _ = file.set_times(FileTimes::new().set_accessed(SystemTime::now()));
}

fn read_only_mode() -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o444)
}
