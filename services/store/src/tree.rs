//! Trees: plain directories that count from the moment their manifest is there.

use std::path::Path as FsPath;

use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::{ObjectStoreExt, path::Path};
use wire::{Digest, v1};

use crate::{
    error::{GetError, PutError},
    manifest::{About, MANIFEST, MAX_MANIFEST_BYTES, Manifest, ManifestError, SUMS, TreeFile},
    path::{RelativePath, TreePlace},
    scan,
    store::{Store, Wanted, blocking},
};

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
        let (manifest, json) = described(dir, about).await?;
        let digest = Digest::of(&json);
        let root = place.path(digest);
        let tree = v1::Tree { path: root.to_string(), manifest: digest.to_string() };
        if self.is_published(&root, &json).await? {
            return Ok(tree);
        }
        for file in &manifest.files {
            let source = dir.join(file.path.as_str());
            let key = key_of(&root, file.path.as_str());
            self.put_file(&key, &source, file.digest, file.bytes).await?;
        }
        self.put_bytes(&key_of(&root, SUMS), manifest.to_sums().into()).await?;
        self.put_bytes(&key_of(&root, MANIFEST), json).await?;
        Ok(tree)
    }

    /// The manifest that publishing would write, and its digest; nothing is stored.
    ///
    /// # Errors
    /// When the directory could not be published.
    pub async fn describe(dir: &FsPath, about: About) -> Result<(Manifest, Digest), PutError> {
        let (manifest, json) = described(dir, about).await?;
        Ok((manifest, Digest::of(&json)))
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
        let wanted = Wanted { key: key.clone(), url, digest, bytes };
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
        Wanted { url: self.at.url_of(&key), key, digest: file.digest, bytes: file.bytes }
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
