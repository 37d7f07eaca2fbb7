//! Trees: plain directories that count from the moment their manifest is there.

use std::{
    path::Path as FsPath,
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::{ObjectStoreExt, path::Path};
use wire::{Digest, v1};

use crate::{
    base::{COPY_BYTES_MIN, parts_of},
    error::{Fault, GetError, PutError},
    manifest::{About, MANIFEST, MAX_MANIFEST_BYTES, Manifest, ManifestError, SUMS, TreeFile},
    parts::{LIST_BYTES_MAX, PARTS, PartLists},
    path::{RelativePath, TreePlace},
    scan,
    store::{Store, Wanted, blocking},
};

/// Large files that were put lately; forgetting one costs an upload.
const REMEMBERED_MAX: usize = 256;

/// A file's bytes; the last item is an error when they were not the file's.
pub type ByteStream = BoxStream<'static, Result<Bytes, GetError>>;

impl Store {
    /// Publishes every file below `dir` (top-level `B3SUMS` and a `manifest.json` of ours are
    /// written anew). Nothing counts before the manifest, which is written last; what was
    /// published before with the same files and `about` is not uploaded again.
    ///
    /// # Errors
    /// When the directory cannot be published, changes meanwhile, or the store refuses or fails.
    pub async fn publish_tree(
        &self,
        dir: &FsPath,
        place: &TreePlace,
        about: About,
    ) -> Result<v1::Tree, PutError> {
        Ok(self.publish(dir, place, about).await?.0)
    }

    /// The tree, and what it holds.
    pub(crate) async fn publish(
        &self,
        dir: &FsPath,
        place: &TreePlace,
        about: About,
    ) -> Result<(v1::Tree, Manifest), PutError> {
        let (manifest, json) = described(dir, about).await?;
        let digest = Digest::of(&json);
        let root = place.path(digest);
        let tree = v1::Tree { path: root.to_string(), manifest: digest.to_string() };
        if self.is_published(&root, &json).await? {
            return Ok((tree, manifest));
        }
        let mut lists = PartLists::default();
        for file in &manifest.files {
            let source = dir.join(file.path.as_str());
            let key = key_of(&root, file.path.as_str());
            if file.bytes >= COPY_BYTES_MIN {
                let before = lock(&self.at.put).get(&file.digest).cloned();
                if let Some(before) = before
                    && self.copied(&before, &key, file.bytes).await
                {
                    lists.add(file.digest, parts_of(source).await);
                    continue;
                }
            }
            lists.add(file.digest, self.put_file(&key, &source, file.digest, file.bytes).await?);
        }
        self.put_part_lists(&root, &lists).await?;
        self.put_bytes(&key_of(&root, SUMS), manifest.to_sums().into()).await?;
        self.put_bytes(&key_of(&root, MANIFEST), json).await?;
        self.remember(&root, &manifest);
        Ok((tree, manifest))
    }

    /// The next tree may have the same tokenizer.
    fn remember(&self, root: &RelativePath, manifest: &Manifest) {
        let mut put = lock(&self.at.put);
        for file in manifest.files.iter().filter(|file| file.bytes >= COPY_BYTES_MIN) {
            if put.len() >= REMEMBERED_MAX {
                put.clear();
            }
            put.insert(file.digest, key_of(root, file.path.as_str()));
        }
    }

    /// The manifest that publishing would write, and its digest; nothing is stored.
    ///
    /// # Errors
    /// When the directory could not be published.
    pub async fn describe(dir: &FsPath, about: About) -> Result<(Manifest, Digest), PutError> {
        let (manifest, json) = described(dir, about).await?;
        Ok((manifest, Digest::of(&json)))
    }

    /// What tells who fetches a part of a file whether it is right.
    pub(crate) async fn put_part_lists(
        &self,
        root: &RelativePath,
        lists: &PartLists,
    ) -> Result<(), Fault> {
        match lists.to_json() {
            Some(json) => self.put_bytes(&key_of(root, PARTS), json.into()).await,
            None => Ok(()),
        }
    }

    /// Of a tree's large files. It only says how they may be fetched: without it they are fetched
    /// otherwise.
    pub(crate) async fn part_lists(&self, root: &RelativePath) -> PartLists {
        match self.small_file(root, PARTS, LIST_BYTES_MAX).await {
            Ok(Some(json)) => PartLists::parse(&json),
            _ => PartLists::default(),
        }
    }

    pub(crate) async fn is_published(
        &self,
        root: &RelativePath,
        json: &Bytes,
    ) -> Result<bool, PutError> {
        let key = key_of(root, MANIFEST);
        let got = match self.at.objects.get(&key).await {
            Ok(got) => got,
            Err(object_store::Error::NotFound { .. }) => return Ok(false),
            Err(source) => return Err(self.at.fault(&key, source).into()),
        };
        let occupied = PutError::Occupied { url: self.at.url_of(&key) };
        if got.meta.size != json.len() as u64 {
            return Err(occupied);
        }
        let found = got.bytes().await.map_err(|source| self.at.fault(&key, source))?;
        if found == *json { Ok(true) } else { Err(occupied) }
    }

    /// What the tree holds, verified against its digest.
    ///
    /// # Errors
    /// When it is missing, damaged or not acceptable, or the store fails.
    pub async fn manifest(&self, tree: &v1::Tree) -> Result<Manifest, GetError> {
        let digest = tree.manifest.parse()?;
        let json = self.manifest_json(&RelativePath::new(&*tree.path)?, digest).await?;
        self.parse_manifest(tree, &json)
    }

    pub(crate) fn parse_manifest(
        &self,
        tree: &v1::Tree,
        json: &[u8],
    ) -> Result<Manifest, GetError> {
        Manifest::parse(json).map_err(|source| {
            let url = format!("{}/{}/{MANIFEST}", self.at.url, tree.path);
            GetError::Manifest { url, source }
        })
    }

    pub(crate) async fn manifest_json(
        &self,
        root: &RelativePath,
        digest: Digest,
    ) -> Result<Bytes, GetError> {
        self.until_undamaged(|| self.fetch_manifest(root, digest)).await
    }

    async fn fetch_manifest(&self, root: &RelativePath, digest: Digest) -> Result<Bytes, GetError> {
        let key = key_of(root, MANIFEST);
        let fault = |source| self.at.fault(&key, source);
        let got = self.at.objects.get(&key).await.map_err(fault)?;
        let url = self.at.url_of(&key);
        let bytes = got.meta.size;
        if bytes > MAX_MANIFEST_BYTES {
            return Err(GetError::Manifest { url, source: ManifestError::TooLarge });
        }
        let json = got.bytes().await.map_err(fault)?;
        let wanted = Wanted { key: key.clone(), url, digest, bytes, parts: None };
        wanted.check((Digest::of(&json), json.len() as u64))?;
        Ok(json)
    }

    /// Streams one file of a tree, e.g. to export it. Nothing of it may be trusted before the
    /// stream has ended without an error.
    ///
    /// # Errors
    /// When the tree or the file is missing or damaged, or the store fails.
    pub async fn read_file(&self, tree: &v1::Tree, path: &str) -> Result<ByteStream, GetError> {
        let manifest = self.manifest(tree).await?;
        let root = RelativePath::new(&*tree.path)?;
        let Some(file) = manifest.file(path) else {
            let url = format!("{}/{root}", self.at.url);
            return Err(GetError::NoSuchFile { url, path: path.to_owned() });
        };
        if manifest.is_elsewhere() {
            return Err(GetError::nowhere(&manifest, file, "not in the store, by choice".into()));
        }
        self.verified(self.wanted_file(&root, file)).await
    }

    pub(crate) fn wanted_file(&self, root: &RelativePath, file: &TreeFile) -> Wanted {
        let key = key_of(root, file.path.as_str());
        let (url, digest, bytes) = (self.at.url_of(&key), file.digest, file.bytes);
        Wanted { key, url, digest, bytes, parts: None }
    }
}

/// A directory's manifest, and its bytes.
async fn described(dir: &FsPath, about: About) -> Result<(Manifest, Bytes), PutError> {
    let scanned = dir.to_owned();
    let files = blocking(move || scan::scan(&scanned)).await?;
    let undescribed = |source| PutError::Manifest { path: dir.to_owned(), source };
    let manifest = Manifest::new(files, about).map_err(undescribed)?;
    let json = Bytes::from(manifest.to_json().map_err(undescribed)?);
    Ok((manifest, json))
}

/// Joined and not `Path::from`, which would percent-encode names.
pub(crate) fn key_of(root: &RelativePath, file: &str) -> Path {
    Path::parse(format!("{root}/{file}")).expect("a relative path is stricter than object_store's")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
