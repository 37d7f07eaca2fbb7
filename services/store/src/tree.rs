//! Trees: plain directories that exist from the moment when their manifest is written.

use std::{
    path::Path as FsPath,
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use object_store::{ObjectStoreExt, path::Path};
use wire::{Digest, v1};

use crate::{
    blocking::run_blocking,
    copy::{COPY_BYTES_MIN, compute_parts},
    download::VerifiedStream,
    error::{GetError, PutError, StorageError},
    manifest::{
        MANIFEST, MAX_MANIFEST_BYTES, ManifestError, SUMS_FILE, TreeFile, TreeManifest,
        TreeMetadata,
    },
    parts::{LIST_BYTES_MAX, PARTS_FILE, PartLists},
    path::{RelativePath, TreePlace},
    scan,
    store::{Store, WantedObject},
};

/// The largest number of remembered large files; forgetting one costs an upload.
const REMEMBERED_MAX: usize = 256;

impl Store {
    /// Publishes every file below `dir`, the manifest last. A top-level `B3SUMS`, and a
    /// `manifest.json` written by a store, are generated again. A tree that was published before
    /// with the same files and metadata is not uploaded again.
    pub async fn publish_tree(
        &self,
        dir: &FsPath,
        place: &TreePlace,
        about: TreeMetadata,
    ) -> Result<v1::Tree, PutError> {
        Ok(self.publish_with_manifest(dir, place, about).await?.0)
    }

    pub(crate) async fn publish_with_manifest(
        &self,
        dir: &FsPath,
        place: &TreePlace,
        about: TreeMetadata,
    ) -> Result<(v1::Tree, TreeManifest), PutError> {
        let (manifest, json) = build_manifest(dir, about).await?;
        let digest = Digest::hash_bytes(&json);
        let root = place.tree_path(digest);
        let tree = v1::Tree { path: root.to_string(), manifest: digest.to_string() };
        if self.is_published(&root, &json).await? {
            return Ok((tree, manifest));
        }
        let mut lists = PartLists::default();
        for file in &manifest.files {
            let source = dir.join(file.path.as_str());
            let key = object_key(&root, file.path.as_str());
            if file.bytes >= COPY_BYTES_MIN {
                let before = lock_mutex(&self.backend.recent_files).get(&file.digest).cloned();
                if let Some(before) = before
                    && self.copy_within_store(&before, &key, file.bytes).await
                {
                    lists.add_parts(file.digest, compute_parts(source).await);
                    continue;
                }
            }
            lists.add_parts(
                file.digest,
                self.put_file(&key, &source, file.digest, file.bytes).await?,
            );
        }
        self.put_part_lists(&root, &lists).await?;
        self.put_bytes(&object_key(&root, SUMS_FILE), manifest.to_sums().into()).await?;
        self.put_bytes(&object_key(&root, MANIFEST), json).await?;
        self.remember_files(&root, &manifest);
        Ok((tree, manifest))
    }

    /// Remembers the keys of large files, such as a tokenizer: the next tree may contain the same.
    fn remember_files(&self, root: &RelativePath, manifest: &TreeManifest) {
        let mut put = lock_mutex(&self.backend.recent_files);
        for file in manifest.files.iter().filter(|file| file.bytes >= COPY_BYTES_MIN) {
            if put.len() >= REMEMBERED_MAX {
                put.clear();
            }
            put.insert(file.digest, object_key(root, file.path.as_str()));
        }
    }

    /// Returns the manifest that publishing would write, and its digest; stores nothing.
    pub async fn describe_directory(
        dir: &FsPath,
        about: TreeMetadata,
    ) -> Result<(TreeManifest, Digest), PutError> {
        let (manifest, json) = build_manifest(dir, about).await?;
        Ok((manifest, Digest::hash_bytes(&json)))
    }

    pub(crate) async fn put_part_lists(
        &self,
        root: &RelativePath,
        lists: &PartLists,
    ) -> Result<(), StorageError> {
        match lists.to_json() {
            Some(json) => self.put_bytes(&object_key(root, PARTS_FILE), json.into()).await,
            None => Ok(()),
        }
    }

    /// Reads the part hashes. The list only speeds up fetching, so an unreadable list counts as
    /// empty.
    pub(crate) async fn read_part_lists(&self, root: &RelativePath) -> PartLists {
        match self.read_small_file(root, PARTS_FILE, LIST_BYTES_MAX).await {
            Ok(Some(json)) => PartLists::parse(&json),
            _ => PartLists::default(),
        }
    }

    /// Fails if the directory contains another manifest.
    pub(crate) async fn is_published(
        &self,
        root: &RelativePath,
        json: &Bytes,
    ) -> Result<bool, PutError> {
        let key = object_key(root, MANIFEST);
        let got = match self.backend.objects.get(&key).await {
            Ok(got) => got,
            Err(object_store::Error::NotFound { .. }) => return Ok(false),
            Err(source) => return Err(self.backend.storage_error(&key, source).into()),
        };
        let occupied = PutError::Occupied { url: self.backend.object_url(&key) };
        if got.meta.size != json.len() as u64 {
            return Err(occupied);
        }
        let found = got.bytes().await.map_err(|source| self.backend.storage_error(&key, source))?;
        if found == *json { Ok(true) } else { Err(occupied) }
    }

    /// Returns the manifest of a tree, verified against its digest.
    pub async fn read_manifest(&self, tree: &v1::Tree) -> Result<TreeManifest, GetError> {
        let digest = tree.manifest.parse()?;
        let json = self.read_manifest_json(&RelativePath::new(&*tree.path)?, digest).await?;
        self.parse_manifest(tree, &json)
    }

    pub(crate) fn parse_manifest(
        &self,
        tree: &v1::Tree,
        json: &[u8],
    ) -> Result<TreeManifest, GetError> {
        TreeManifest::parse(json).map_err(|source| {
            let url = format!("{}/{}/{MANIFEST}", self.backend.url, tree.path);
            GetError::Manifest { url, source }
        })
    }

    pub(crate) async fn read_manifest_json(
        &self,
        root: &RelativePath,
        digest: Digest,
    ) -> Result<Bytes, GetError> {
        match self.retry_if_damaged(|| self.fetch_manifest_once(root, digest)).await {
            Ok(json) => Ok(json),
            Err(error) => Err(self.explain_missing(root, error).await),
        }
    }

    async fn fetch_manifest_once(
        &self,
        root: &RelativePath,
        digest: Digest,
    ) -> Result<Bytes, GetError> {
        let key = object_key(root, MANIFEST);
        let fault = |source| self.backend.storage_error(&key, source);
        let got = self.backend.objects.get(&key).await.map_err(fault)?;
        let url = self.backend.object_url(&key);
        let bytes = got.meta.size;
        if bytes > MAX_MANIFEST_BYTES {
            return Err(GetError::Manifest { url, source: ManifestError::TooLarge });
        }
        let json = got.bytes().await.map_err(fault)?;
        let wanted = WantedObject { key: key.clone(), url, digest, bytes, parts: None };
        wanted.check_content((Digest::hash_bytes(&json), json.len() as u64))?;
        Ok(json)
    }

    /// Returns the current, unverified content of a file, or `None` when it does not exist.
    pub async fn read_small_file(
        &self,
        root: &RelativePath,
        name: &str,
        limit: u64,
    ) -> Result<Option<Bytes>, GetError> {
        let path = root.join(&RelativePath::new(name)?)?;
        let key = Path::parse(path.as_str()).expect("stricter than object_store's");
        let fault = |source| self.backend.storage_error(&key, source);
        let got = match self.backend.objects.get(&key).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            got => got.map_err(fault)?,
        };
        let bytes = got.meta.size;
        if bytes > limit {
            return Err(GetError::TooLarge { url: self.backend.object_url(&key), bytes, limit });
        }
        Ok(Some(got.bytes().await.map_err(fault)?))
    }

    /// Streams one file of a tree, for example to export it. The bytes must not be trusted before
    /// the stream has ended without an error.
    pub async fn stream_tree_file(
        &self,
        tree: &v1::Tree,
        path: &str,
    ) -> Result<VerifiedStream, GetError> {
        let manifest = self.read_manifest(tree).await?;
        let root = RelativePath::new(&*tree.path)?;
        let Some(file) = manifest.find_file(path) else {
            let url = format!("{}/{root}", self.backend.url);
            return Err(GetError::NoSuchFile { url, path: path.to_owned() });
        };
        if manifest.is_external() {
            return Err(GetError::unavailable_file(
                &manifest,
                file,
                "not in the store, by choice".into(),
            ));
        }
        self.stream_verified(self.wanted_file(&root, file)).await
    }

    pub(crate) fn wanted_file(&self, root: &RelativePath, file: &TreeFile) -> WantedObject {
        let key = object_key(root, file.path.as_str());
        let (url, digest, bytes) = (self.backend.object_url(&key), file.digest, file.bytes);
        WantedObject { key, url, digest, bytes, parts: None }
    }
}

pub(crate) async fn build_manifest(
    dir: &FsPath,
    about: TreeMetadata,
) -> Result<(TreeManifest, Bytes), PutError> {
    let scanned = dir.to_owned();
    let files = run_blocking(move || scan::scan_directory(&scanned)).await?;
    let undescribed = |source| PutError::Manifest { path: dir.to_owned(), source };
    let manifest = TreeManifest::new(files, about).map_err(undescribed)?;
    let json = Bytes::from(manifest.to_json().map_err(undescribed)?);
    Ok((manifest, json))
}

/// Joins the parts as text, because `Path::from` would percent-encode names.
pub(crate) fn object_key(root: &RelativePath, file: &str) -> Path {
    Path::parse(format!("{root}/{file}")).expect("a relative path is stricter than object_store's")
}

fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
