//! Trees in the cache: directories of hard links, assembled in `tmp/` and renamed to their place.

use std::{
    fs::{self, File, FileTimes},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use bytes::Bytes;
use wire::{Digest, v1};

use super::{
    CacheInner, CachedBlob, CachedTree, FileCache, disk_quota::TempPath, file_lock, mark_used,
    read_only_mode,
};
use crate::{
    blocking::run_blocking,
    error::{CacheError, GetError},
    manifest::{MANIFEST, SUMS_FILE, TreeFile, TreeManifest},
    parts::{PartHashes, PartLists},
    path::RelativePath,
    store::Store,
};

impl FileCache {
    /// Returns a tree as a local directory, and fetches missing or damaged files. If another task
    /// or process is fetching the tree, waits for that fetch. A tree that is complete in the cache
    /// needs no store.
    pub async fn fetch_tree(&self, store: &Store, tree: &v1::Tree) -> Result<CachedTree, GetError> {
        let digest: Digest = tree.manifest.parse()?;
        let root = RelativePath::new(&*tree.path)?;
        let path = self.tree_path(digest);
        let _flight = self.lock_fetch(&format!("t-{}", digest.to_hex())).await?;
        let (inner, at) = (self.inner.clone(), path.clone());
        if let Some((json, in_use)) = run_blocking(move || inner.hold_tree(&at, digest)).await? {
            let manifest = store.parse_manifest(tree, &json)?;
            self.place_files(store, &root, &manifest, &path).await?;
            // The modification time decides the order of eviction; a failure only makes the tree
            // look older.
            let _ = in_use.set_times(FileTimes::new().set_modified(SystemTime::now()));
            return Ok(CachedTree { path, manifest, _in_use: in_use });
        }
        let json = store.read_manifest_json(&root, digest).await?;
        let manifest = store.parse_manifest(tree, &json)?;
        let inner = self.inner.clone();
        let (in_use, staged) = run_blocking(move || inner.quota.create_staging_dir()).await?;
        self.place_files(store, &root, &manifest, staged.path()).await?;
        let (inner, at, sums) = (self.inner.clone(), path.clone(), manifest.to_sums());
        run_blocking(move || inner.complete_tree(staged, &at, &json, &sums)).await?;
        Ok(CachedTree { path, manifest, _in_use: in_use })
    }

    /// Returns a tree that is complete in the cache; `None` if it is not.
    pub async fn find_tree(&self, tree: &v1::Tree) -> Result<Option<CachedTree>, GetError> {
        let digest: Digest = tree.manifest.parse()?;
        let (inner, path) = (self.inner.clone(), self.tree_path(digest));
        let found = run_blocking(move || inner.hold_complete_tree(&path, digest)).await?;
        let path = self.tree_path(digest);
        Ok(found.map(|(manifest, in_use)| CachedTree { path, manifest, _in_use: in_use }))
    }

    pub(super) fn tree_path(&self, digest: Digest) -> PathBuf {
        self.inner.quota.cache_dir().join("trees").join(digest.to_hex())
    }

    /// Reads one file of a tree without fetching the whole tree. Returns `None` if the tree has no
    /// file of that name, or the file is larger than `limit` bytes.
    pub async fn read_tree_file(
        &self,
        store: &Store,
        tree: &v1::Tree,
        name: &str,
        limit: u64,
    ) -> Result<Option<Vec<u8>>, GetError> {
        let digest: Digest = tree.manifest.parse()?;
        let root = RelativePath::new(&*tree.path)?;
        let at = self.tree_path(digest);
        let inner = self.inner.clone();
        let (json, _in_use) = match run_blocking(move || inner.hold_tree(&at, digest)).await? {
            Some((json, in_use)) => (json, Some(in_use)),
            None => (store.read_manifest_json(&root, digest).await?, None),
        };
        let manifest = store.parse_manifest(tree, &json)?;
        let Some(file) = manifest.find_file(name).filter(|file| file.bytes <= limit) else {
            return Ok(None);
        };
        let mut here = self.find_local_files(&manifest, vec![file.clone()]).await;
        let (path, _held) = match here.remove(name) {
            Some(path) => (path, None),
            None => {
                let wanted = store.wanted_file(&root, file);
                let held = self.fetch_tree_file(store, wanted, (&manifest, file)).await?;
                (held.path().to_owned(), Some(held))
            }
        };
        let from = path.clone();
        let read = run_blocking(move || fs::read(from)).await;
        Ok(Some(read.map_err(|source| CacheError::from_io("read", path, source))?))
    }

    async fn place_files(
        &self,
        store: &Store,
        root: &RelativePath,
        manifest: &TreeManifest,
        dir: &Path,
    ) -> Result<(), GetError> {
        let (inner, files, at) = (self.inner.clone(), manifest.files.clone(), dir.to_owned());
        let absent = run_blocking(move || inner.missing_files(&at, files)).await?;
        let mut here = self.find_local_files(manifest, absent.clone()).await;
        let to_fetch = absent.iter().filter(|file| !here.contains_key(file.path.as_str()));
        self.inner.quota.check_fits(to_fetch.clone().map(|file| file.bytes).sum())?;
        let lists = self.load_part_lists(store, root, to_fetch).await;
        for file in absent {
            let target = dir.join(file.path.as_str());
            let inner = self.inner.clone();
            if let Some(path) = here.remove(file.path.as_str()) {
                run_blocking(move || inner.link_user_file(&path, target)).await?;
                continue;
            }
            let mut wanted = store.wanted_file(root, &file);
            wanted.parts = lists.parts_for(file.digest, file.bytes).map(Arc::new);
            let held = self.fetch_tree_file(store, wanted, (manifest, &file)).await?;
            run_blocking(move || inner.link_file(&held, &target, &file)).await?;
        }
        Ok(())
    }

    /// Reads the part hashes; the list is empty without peers and for a store that is a directory.
    async fn load_part_lists(
        &self,
        store: &Store,
        root: &RelativePath,
        mut files: impl Iterator<Item = &TreeFile>,
    ) -> PartLists {
        let with_peers = self.inner.peers.is_some() && store.backend.local.is_none();
        if !with_peers || !files.any(|file| PartHashes::part_size(file.bytes).is_some()) {
            return PartLists::default();
        }
        store.read_part_lists(root).await
    }
}

impl CacheInner {
    /// Returns the manifest of a cached tree and a lock against eviction. Moves a damaged tree away
    /// and returns `None`. Blocking.
    fn hold_tree(&self, path: &Path, digest: Digest) -> Result<Option<(Bytes, File)>, CacheError> {
        let failed = |source| CacheError::from_io("use", path, source);
        let Some(in_use) = file_lock::open_shared(path).map_err(failed)? else { return Ok(None) };
        match fs::read(path.join(MANIFEST)) {
            Ok(json) if Digest::hash_bytes(&json) == digest => {
                return Ok(Some((json.into(), in_use)));
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        tracing::warn!(path = %path.display(), "a cached tree was damaged and is built again");
        let doomed = self.quota.new_temp_path();
        fs::rename(path, doomed.path()).map_err(failed)?;
        Ok(None)
    }

    /// Returns the manifest of a cached tree with all its files, and a lock against eviction.
    /// Blocking.
    pub(super) fn hold_complete_tree(
        &self,
        path: &Path,
        digest: Digest,
    ) -> Result<Option<(TreeManifest, File)>, CacheError> {
        let Some((json, in_use)) = self.hold_tree(path, digest)? else { return Ok(None) };
        let Ok(manifest) = TreeManifest::parse(&json) else { return Ok(None) };
        let absent = self.missing_files(path, manifest.files.clone())?;
        // The modification time decides the order of eviction.
        let _ = in_use.set_times(FileTimes::new().set_modified(SystemTime::now()));
        Ok(absent.is_empty().then_some((manifest, in_use)))
    }

    /// Blocking.
    pub(super) fn remove_incomplete_tree(&self, path: &Path) -> Result<(), CacheError> {
        let doomed = self.quota.new_temp_path();
        match fs::rename(path, doomed.path()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(CacheError::from_io("use", path, error))
            }
            _ => Ok(()),
        }
    }

    fn missing_files(&self, dir: &Path, files: Vec<TreeFile>) -> Result<Vec<TreeFile>, CacheError> {
        let mut absent = Vec::new();
        for file in files {
            if !self.is_placed(&dir.join(file.path.as_str()), &file)? {
                absent.push(file);
            }
        }
        Ok(absent)
    }

    fn is_placed(&self, path: &Path, wanted: &TreeFile) -> Result<bool, CacheError> {
        let failed = |source| CacheError::from_io("use", path, source);
        if let Some(intact) = self.check_user_link(path, wanted) {
            return Ok(intact);
        }
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            opened => opened.map_err(failed)?,
        };
        let intact = self.verified.is_intact(&file, wanted.digest, wanted.bytes).map_err(failed)?;
        if intact {
            mark_used(&file);
        }
        Ok(intact)
    }

    /// Falls back to a copy where hard links are impossible. Blocking.
    fn link_file(&self, from: &CachedBlob, to: &Path, wanted: &TreeFile) -> Result<(), CacheError> {
        let failed = |source| CacheError::from_io("link", to, source);
        fs::create_dir_all(to.parent().unwrap_or(to)).map_err(failed)?;
        let temp = self.quota.new_temp_path();
        if fs::hard_link(from.path(), temp.path()).is_ok() {
            return temp.rename_to(to).map_err(failed);
        }
        self.copy_file(from.path(), to, wanted.bytes)
    }

    /// Blocking.
    pub(super) fn copy_file(&self, from: &Path, to: &Path, bytes: u64) -> Result<(), CacheError> {
        let failed = |source| CacheError::from_io("copy", to, source);
        fs::create_dir_all(to.parent().unwrap_or(to)).map_err(failed)?;
        let (mut copy, temp) = self.quota.reserve_file(bytes)?;
        let mut source = File::open(from).map_err(failed)?;
        io::copy(&mut source, &mut copy).map_err(failed)?;
        copy.set_permissions(read_only_mode()).map_err(failed)?;
        temp.rename_to(to).map_err(failed)
    }

    /// Writes the manifest and the sums of a tree and renames it to its place; from then on the
    /// tree exists. Blocking.
    pub(super) fn complete_tree(
        &self,
        staged: TempPath,
        path: &Path,
        json: &[u8],
        sums: &str,
    ) -> Result<(), CacheError> {
        for (name, bytes) in [(MANIFEST, json), (SUMS_FILE, sums.as_bytes())] {
            let (mut file, temp) = self.quota.reserve_file(bytes.len() as u64)?;
            let at = staged.path().join(name);
            let write = || {
                file.write_all(bytes)?;
                file.set_permissions(read_only_mode())?;
                temp.rename_to(&at)
            };
            write().map_err(|source| CacheError::from_io("write", &at, source))?;
        }
        staged.rename_to(path).map_err(|source| CacheError::from_io("complete", path, source))
    }
}
