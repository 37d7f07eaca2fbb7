//! Trees in the cache: directories of hard links, completed aside and renamed into place.

use std::{
    fs::{self, File, FileTimes},
    io::{self, Write},
    path::Path,
    sync::Arc,
    time::SystemTime,
};

use bytes::Bytes;
use wire::{Digest, v1};

use super::{Cache, CachedBlob, CachedTree, Inner, lock, read_only, space::Temp, used_now};
use crate::{
    error::{CacheError, GetError},
    manifest::{MANIFEST, Manifest, SUMS, TreeFile},
    parts::{PartLists, Parts},
    path::RelativePath,
    store::{Store, blocking},
};

impl Cache {
    /// A tree as a local directory, with what is missing or damaged fetched. Whoever asks for
    /// one that is being fetched, in this process or another, waits for that fetch. A tree
    /// that is there needs no store.
    ///
    /// # Errors
    /// When it is missing or damaged in the store, does not fit, or store or disk fail.
    pub async fn tree(&self, store: &Store, tree: &v1::Tree) -> Result<CachedTree, GetError> {
        let digest: Digest = tree.manifest.parse()?;
        let root = RelativePath::new(&*tree.path)?;
        let path = self.inner.space.dir().join("trees").join(digest.to_hex());
        let _flight = self.fly(&format!("t-{}", digest.to_hex())).await?;
        let (inner, at) = (self.inner.clone(), path.clone());
        if let Some((json, in_use)) = blocking(move || inner.hold_tree(&at, digest)).await? {
            let manifest = store.parse_manifest(tree, &json)?;
            self.place_all(store, &root, &manifest, &path).await?;
            // Eviction goes by it; failing only makes the tree look older.
            let _ = in_use.set_times(FileTimes::new().set_modified(SystemTime::now()));
            return Ok(CachedTree { path, manifest, _in_use: in_use });
        }
        let json = store.manifest_json(&root, digest).await?;
        let manifest = store.parse_manifest(tree, &json)?;
        let inner = self.inner.clone();
        let (in_use, staged) = blocking(move || inner.space.stage()).await?;
        self.place_all(store, &root, &manifest, staged.path()).await?;
        let (inner, at, sums) = (self.inner.clone(), path.clone(), manifest.to_sums());
        blocking(move || inner.complete(staged, &at, &json, &sums)).await?;
        Ok(CachedTree { path, manifest, _in_use: in_use })
    }

    /// One file of a tree, for what is to be known before all of it is fetched; `None` when the
    /// tree has none of that name, or a larger one.
    ///
    /// # Errors
    /// As [`Cache::tree`].
    pub async fn file_of(
        &self,
        store: &Store,
        tree: &v1::Tree,
        name: &str,
        limit: u64,
    ) -> Result<Option<Vec<u8>>, GetError> {
        let digest: Digest = tree.manifest.parse()?;
        let root = RelativePath::new(&*tree.path)?;
        let at = self.inner.space.dir().join("trees").join(digest.to_hex());
        let inner = self.inner.clone();
        let (json, _in_use) = match blocking(move || inner.hold_tree(&at, digest)).await? {
            Some((json, in_use)) => (json, Some(in_use)),
            None => (store.manifest_json(&root, digest).await?, None),
        };
        let manifest = store.parse_manifest(tree, &json)?;
        let Some(file) = manifest.file(name).filter(|file| file.bytes <= limit) else {
            return Ok(None);
        };
        let mut here = self.locate(&manifest, vec![file.clone()]).await;
        let (path, _held) = match here.remove(name) {
            Some(path) => (path, None),
            None => {
                let wanted = store.wanted_file(&root, file);
                let held = self.fetch_file(store, wanted, (&manifest, file)).await?;
                (held.path().to_owned(), Some(held))
            }
        };
        let from = path.clone();
        let read = blocking(move || fs::read(from)).await;
        Ok(Some(read.map_err(|source| CacheError::io("read", path, source))?))
    }

    async fn place_all(
        &self,
        store: &Store,
        root: &RelativePath,
        manifest: &Manifest,
        dir: &Path,
    ) -> Result<(), GetError> {
        let (inner, files, at) = (self.inner.clone(), manifest.files.clone(), dir.to_owned());
        let absent = blocking(move || inner.absent(&at, files)).await?;
        let mut here = self.locate(manifest, absent.clone()).await;
        let to_fetch = absent.iter().filter(|file| !here.contains_key(file.path.as_str()));
        self.inner.space.check_fits(to_fetch.clone().map(|file| file.bytes).sum())?;
        let lists = self.part_lists(store, root, to_fetch).await;
        for file in absent {
            let target = dir.join(file.path.as_str());
            let inner = self.inner.clone();
            if let Some(path) = here.remove(file.path.as_str()) {
                blocking(move || inner.link_local(&path, target)).await?;
                continue;
            }
            let mut wanted = store.wanted_file(root, &file);
            wanted.parts = lists.of(file.digest, file.bytes).map(Arc::new);
            let held = self.fetch_file(store, wanted, (manifest, &file)).await?;
            blocking(move || inner.link(&held, &target, &file)).await?;
        }
        Ok(())
    }

    /// The parts of files that peers may have, where there is more than a directory to fetch from.
    async fn part_lists(
        &self,
        store: &Store,
        root: &RelativePath,
        mut files: impl Iterator<Item = &TreeFile>,
    ) -> PartLists {
        let with_peers = self.inner.peers.is_some() && store.at.local.is_none();
        if !with_peers || !files.any(|file| Parts::part_bytes(file.bytes).is_some()) {
            return PartLists::default();
        }
        store.part_lists(root).await
    }
}

impl Inner {
    /// The manifest of a tree that is there, and the hold on it.
    fn hold_tree(&self, path: &Path, digest: Digest) -> Result<Option<(Bytes, File)>, CacheError> {
        let failed = |source| CacheError::io("use", path, source);
        let Some(in_use) = lock::share(path).map_err(failed)? else { return Ok(None) };
        match fs::read(path.join(MANIFEST)) {
            Ok(json) if Digest::of(&json) == digest => return Ok(Some((json.into(), in_use))),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        tracing::warn!(path = %path.display(), "a cached tree was damaged and is built again");
        let doomed = self.space.temp();
        fs::rename(path, doomed.path()).map_err(failed)?;
        Ok(None)
    }

    /// Files of a tree that are not where they should be, or not as they should be.
    fn absent(&self, dir: &Path, files: Vec<TreeFile>) -> Result<Vec<TreeFile>, CacheError> {
        let mut absent = Vec::new();
        for file in files {
            if !self.is_placed(&dir.join(file.path.as_str()), &file)? {
                absent.push(file);
            }
        }
        Ok(absent)
    }

    fn is_placed(&self, path: &Path, wanted: &TreeFile) -> Result<bool, CacheError> {
        let failed = |source| CacheError::io("use", path, source);
        if let Some(intact) = self.is_linked(path, wanted) {
            return Ok(intact);
        }
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            opened => opened.map_err(failed)?,
        };
        let intact = self.verified.is_intact(&file, wanted.digest, wanted.bytes).map_err(failed)?;
        if intact {
            used_now(&file);
        }
        Ok(intact)
    }

    /// Links a held file into a tree; where links are not possible, copies it.
    fn link(&self, from: &CachedBlob, to: &Path, wanted: &TreeFile) -> Result<(), CacheError> {
        let failed = |source| CacheError::io("link", to, source);
        fs::create_dir_all(to.parent().unwrap_or(to)).map_err(failed)?;
        let temp = self.space.temp();
        if fs::hard_link(from.path(), temp.path()).is_ok() {
            return temp.rename(to).map_err(failed);
        }
        let (mut copy, temp) = self.space.reserve(wanted.bytes)?;
        let mut source = File::open(from.path()).map_err(failed)?;
        io::copy(&mut source, &mut copy).map_err(failed)?;
        copy.set_permissions(read_only()).map_err(failed)?;
        temp.rename(to).map_err(failed)
    }

    /// The rename makes the tree exist.
    fn complete(
        &self,
        staged: Temp,
        path: &Path,
        json: &[u8],
        sums: &str,
    ) -> Result<(), CacheError> {
        for (name, bytes) in [(MANIFEST, json), (SUMS, sums.as_bytes())] {
            let (mut file, temp) = self.space.reserve(bytes.len() as u64)?;
            let at = staged.path().join(name);
            let write = || {
                file.write_all(bytes)?;
                file.set_permissions(read_only())?;
                temp.rename(&at)
            };
            write().map_err(|source| CacheError::io("write", &at, source))?;
        }
        staged.rename(path).map_err(|source| CacheError::io("complete", path, source))
    }
}
