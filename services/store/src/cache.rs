//! A bounded directory of fetched files that all processes of a host share.
//!
//! `b3/<aa>/<hex>` holds files by digest, `trees/<manifest hex>/` directories of hard links to
//! them, `tmp/` what is being written, `locks/` one lock per fetch in progress. There is no
//! index: sizes, links and times on disk are the state, so a killed process leaves nothing
//! that the next one would believe.
//!
//! Files of base models that lie on this machine already are not fetched: their tree holds
//! symbolic links to them. They are the user's, so they count for nothing and are never removed,
//! and they are looked at again before each use, for nobody keeps the user from changing them.
//!
//! Every file is hashed when it is fetched and again when a process first uses it; after that
//! its inode, size and modification time must not have changed.

mod assemble;
mod elsewhere;
mod local;
mod lock;
mod publish;
mod space;
mod verify;

use std::{
    fmt,
    fs::{self, File, FileTimes},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use hub::Hub;
use wire::{Digest, v1};

use self::{
    local::Local,
    lock::Flight,
    space::{Space, Temp},
    verify::Verified,
};
use crate::{
    digests::Digests,
    error::{CacheError, GetError},
    manifest::Manifest,
    peers::{self, Peers},
    store::{Store, Wanted, blocking},
};
pub use elsewhere::Elsewhere;

/// Clones share what this process has verified.
#[derive(Clone)]
pub struct Cache {
    inner: Arc<Inner>,
}

struct Inner {
    space: Space,
    verified: Verified,
    local: Local,
    hub: Option<Hub>,
    peers: Option<Peers>,
}

/// A verified file of the cache, which is not evicted while this is held.
#[derive(Debug)]
pub struct CachedBlob {
    path: PathBuf,
    _in_use: File,
}

/// A verified directory of the cache, which is not evicted while this is held. Its files are
/// read-only and shared with other trees: copy what must be changed.
#[derive(Debug)]
pub struct CachedTree {
    path: PathBuf,
    manifest: Manifest,
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

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }
}

impl Cache {
    /// Creates the directory if absent. `max_bytes` bounds all that is in it, files being
    /// fetched included; it must be at least the largest tree that is used.
    ///
    /// # Errors
    /// When the directory cannot be created.
    pub fn open(dir: &Path, max_bytes: u64) -> Result<Self, CacheError> {
        Self::with(dir, max_bytes, Elsewhere::default())
    }

    /// As [`Cache::open`]; files of base models are also looked for elsewhere.
    ///
    /// # Errors
    /// When the directory cannot be created.
    pub fn with(dir: &Path, max_bytes: u64, elsewhere: Elsewhere) -> Result<Self, CacheError> {
        let space = Space::open(dir, max_bytes)?;
        let Elsewhere { models, hub, peers } = elsewhere;
        let local = Local::new(models, Digests::at(space.dir().join("digests.jsonl")));
        let verified = Verified::default();
        Ok(Self { inner: Arc::new(Inner { space, verified, local, hub, peers }) })
    }

    /// A blob as a local file, fetched if it is not there. Whoever asks for one that is being
    /// fetched, in this process or another, waits for that fetch.
    ///
    /// # Errors
    /// When it is missing or damaged in the store, does not fit, or store or disk fail.
    pub async fn blob(&self, store: &Store, blob: &v1::Blob) -> Result<CachedBlob, GetError> {
        self.file(store, store.wanted_blob(blob)?).await
    }

    async fn file(&self, store: &Store, wanted: Wanted) -> Result<CachedBlob, GetError> {
        if let Some(held) = self.held(&wanted).await? {
            return Ok(held);
        }
        let _flight = self.fly(&format!("b-{}", wanted.digest.to_hex())).await?;
        match self.held(&wanted).await? {
            Some(held) => Ok(held),
            None => self.fetch(store, wanted).await,
        }
    }

    async fn fly(&self, name: &str) -> Result<Flight, CacheError> {
        let path = self.inner.space.dir().join("locks").join(name);
        Flight::board(&path).await.map_err(|source| CacheError::io("lock", path, source))
    }

    /// The file if it is there and undamaged.
    async fn held(&self, wanted: &Wanted) -> Result<Option<CachedBlob>, CacheError> {
        let (inner, digest, bytes) = (self.inner.clone(), wanted.digest, wanted.bytes);
        let path = self.path_of(digest);
        blocking(move || inner.hold(&path, digest, bytes)).await
    }

    async fn fetch(&self, store: &Store, wanted: Wanted) -> Result<CachedBlob, GetError> {
        if let (Some(peers), Some(parts)) = (&self.inner.peers, &wanted.parts) {
            let (file, temp) = self.reserve(wanted.bytes).await?;
            let fetched = peers::fetch(peers, store, (&wanted, parts.clone()), file, temp.path());
            let (file, entry) = fetched.await?;
            let held = self.commit(file, temp, wanted.digest).await;
            // Peers have it from there by now.
            drop(entry);
            return held;
        }
        let fetch_once = async || {
            let (file, temp) = self.reserve(wanted.bytes).await?;
            Ok((store.fetch_into(&wanted, file, temp.path()).await?, temp))
        };
        let (file, temp) = store.until_undamaged(fetch_once).await?;
        if let Some(peers) = &self.inner.peers {
            peers.count_whole(wanted.bytes);
        }
        self.commit(file, temp, wanted.digest).await
    }

    /// A file that was fetched from the store or a hub, if it is there, kept from eviction while it
    /// is open. It is not looked at: whoever gets it does. Blocking.
    pub(crate) fn lend(&self, digest: Digest) -> Option<File> {
        lock::share(&self.path_of(digest)).ok()?
    }

    async fn reserve(&self, bytes: u64) -> Result<(File, Temp), CacheError> {
        let inner = self.inner.clone();
        blocking(move || inner.space.reserve(bytes)).await
    }

    /// A file whose bytes were just verified gets its name.
    async fn commit(&self, file: File, temp: Temp, digest: Digest) -> Result<CachedBlob, GetError> {
        let (inner, path) = (self.inner.clone(), self.path_of(digest));
        let committed = blocking(move || {
            let failed = |source| CacheError::io("commit", &path, source);
            file.set_permissions(read_only()).map_err(failed)?;
            fs::create_dir_all(path.parent().unwrap_or(&path)).map_err(failed)?;
            temp.rename(&path).map_err(failed)?;
            inner.verified.note(&file, digest).map_err(failed)?;
            Ok(CachedBlob { path, _in_use: file })
        });
        committed.await
    }

    fn path_of(&self, digest: Digest) -> PathBuf {
        let hex = digest.to_hex();
        self.inner.space.dir().join("b3").join(&hex[..2]).join(hex)
    }
}

impl Inner {
    fn hold(
        &self,
        path: &Path,
        digest: Digest,
        bytes: u64,
    ) -> Result<Option<CachedBlob>, CacheError> {
        let failed = |source| CacheError::io("use", path, source);
        let Some(file) = lock::share(path).map_err(failed)? else { return Ok(None) };
        if self.verified.is_intact(&file, digest, bytes).map_err(failed)? {
            used_now(&file);
            return Ok(Some(CachedBlob { path: path.to_owned(), _in_use: file }));
        }
        // Not removed: whoever fetches it renames the new one over it.
        tracing::warn!(path = %path.display(), "a cached file is damaged and is fetched again");
        Ok(None)
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cache").field(&self.inner.space.dir()).finish()
    }
}

/// The access time is what eviction goes by. Not being its owner only makes a file look older.
fn used_now(file: &File) {
    let _ = file.set_times(FileTimes::new().set_accessed(SystemTime::now()));
}

fn read_only() -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o444)
}
