//! Verification of the content of a store for audits. A missing, short, damaged or extra object is
//! a result here and not an error.

use std::collections::{BTreeMap, BTreeSet};

use futures::TryStreamExt;
use object_store::path::Path;
use wire::{Digest, v1};

use crate::{
    error::{GetError, StorageError},
    file_hashing::ByteProgress,
    manifest::{MANIFEST, MAX_FILES, SUMS_FILE, TreeFile, TreeManifest},
    parts::PARTS_FILE,
    path::RelativePath,
    removal::{REMOVAL_FILE, TreeRemoval},
    store::{Store, WantedObject},
};

/// A defect of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectDefect {
    pub url: String,
    /// The defect, as a phrase that follows the URL.
    pub problem: &'static str,
    pub expected: Option<String>,
    pub found: Option<String>,
}

/// The report on a tree, by the names and sizes in its directory.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifyReport {
    /// The manifest, if it can be used.
    pub manifest: Option<TreeManifest>,
    pub defects: Vec<ObjectDefect>,
    /// Paths of files that are outside the store by the user's choice.
    pub external: BTreeSet<String>,
    /// The record of the tree's removal, if it was removed on purpose. It has no defects then.
    pub removal: Option<TreeRemoval>,
}

impl Store {
    /// Compares the names and sizes in a tree's directory with its manifest. Hashes no files.
    pub async fn examine_tree(&self, tree: &v1::Tree) -> Result<VerifyReport, GetError> {
        let manifest = match self.read_manifest(tree).await {
            Ok(manifest) => manifest,
            Err(error) => {
                let (removal, defects) = match error {
                    GetError::Removed { removal, .. } => (Some(removal), Vec::new()),
                    error => (None, vec![self.defect_from_error(error, tree)?]),
                };
                let external = BTreeSet::new();
                return Ok(VerifyReport { manifest: None, defects, external, removal });
            }
        };
        let root = RelativePath::new(&*tree.path)?;
        let mut found = self.list_directory(&root).await?;
        found.remove(MANIFEST);
        found.remove(PARTS_FILE);
        found.remove(REMOVAL_FILE);
        let sums = manifest.to_sums();
        let wanted = manifest.files.iter().map(|file| (file.path.as_str(), file.bytes));
        let (mut flaws, mut elsewhere) = (Vec::new(), BTreeSet::new());
        for (path, bytes) in wanted.chain([(SUMS_FILE, sums.len() as u64)]) {
            let url = format!("{}/{root}/{path}", self.backend.url);
            match found.remove(path) {
                None if manifest.is_external() && path != SUMS_FILE => {
                    elsewhere.insert(path.to_owned());
                }
                None => flaws.push(ObjectDefect::missing_object(url)),
                Some(size) if size != bytes => {
                    flaws.push(ObjectDefect::wrong_size(url, bytes, size));
                }
                Some(_) => {}
            }
        }
        if manifest.allows_other_files() {
            found.clear();
        }
        flaws.extend(found.into_keys().map(|path| ObjectDefect {
            url: format!("{}/{root}/{path}", self.backend.url),
            problem: "is in no manifest",
            expected: None,
            found: None,
        }));
        let (manifest, removal) = (Some(manifest), None);
        Ok(VerifyReport { manifest, defects: flaws, external: elsewhere, removal })
    }

    /// Lists names with their sizes in bytes, at most twice as many as a tree may have.
    pub(crate) async fn list_directory(
        &self,
        root: &RelativePath,
    ) -> Result<BTreeMap<String, u64>, StorageError> {
        let key = Path::parse(root.as_str()).expect("stricter than object_store's");
        let below = format!("{root}/");
        let mut found = BTreeMap::new();
        let mut listing = self.backend.objects.list(Some(&key));
        loop {
            match listing.try_next().await {
                Ok(Some(meta)) if found.len() < 2 * MAX_FILES => {
                    let path = meta.location.as_ref();
                    let name = path.strip_prefix(&below).unwrap_or(path);
                    found.insert(name.to_owned(), meta.size);
                }
                Ok(_) | Err(object_store::Error::NotFound { .. }) => return Ok(found),
                Err(source) => return Err(self.backend.storage_error(&key, source)),
            }
        }
    }

    /// Checks that a blob exists with the right size.
    pub async fn examine_blob(&self, blob: &v1::Blob) -> Result<Option<ObjectDefect>, GetError> {
        let wanted = match self.wanted_blob(blob) {
            Ok(wanted) => wanted,
            Err(error) => return self.defect_from_error(error, &v1::Tree::default()).map(Some),
        };
        let WantedObject { key, url, bytes, .. } = wanted;
        match object_store::ObjectStoreExt::head(&*self.backend.objects, &key).await {
            Ok(meta) if meta.size == bytes => Ok(None),
            Ok(meta) => Ok(Some(ObjectDefect::wrong_size(url, bytes, meta.size))),
            Err(object_store::Error::NotFound { .. }) => {
                Ok(Some(ObjectDefect::missing_object(url)))
            }
            Err(source) => Err(self.backend.storage_error(&key, source).into()),
        }
    }

    /// Hashes one file of a tree, and returns its defect if there is one.
    pub async fn hash_tree_file(
        &self,
        tree: &v1::Tree,
        file: &TreeFile,
        seen: ByteProgress<'_>,
    ) -> Result<Option<ObjectDefect>, GetError> {
        let root = RelativePath::new(&*tree.path)?;
        self.hash_object(self.wanted_file(&root, file), tree, seen).await
    }

    /// Hashes the `B3SUMS` of a tree, and returns its defect if there is one.
    pub async fn hash_sums(
        &self,
        tree: &v1::Tree,
        manifest: &TreeManifest,
    ) -> Result<Option<ObjectDefect>, GetError> {
        let sums = manifest.to_sums();
        let file = TreeFile {
            path: RelativePath::new(SUMS_FILE)?,
            bytes: sums.len() as u64,
            digest: Digest::hash_bytes(sums.as_bytes()),
        };
        self.hash_tree_file(tree, &file, &|_| ()).await
    }

    /// Hashes a blob, and returns its defect if there is one.
    pub async fn hash_blob(
        &self,
        blob: &v1::Blob,
        seen: ByteProgress<'_>,
    ) -> Result<Option<ObjectDefect>, GetError> {
        self.hash_object(self.wanted_blob(blob)?, &v1::Tree::default(), seen).await
    }

    async fn hash_object(
        &self,
        wanted: WantedObject,
        tree: &v1::Tree,
        seen: ByteProgress<'_>,
    ) -> Result<Option<ObjectDefect>, GetError> {
        let hashed = async {
            let mut chunks = self.stream_verified(wanted).await?;
            while let Some(chunk) = chunks.try_next().await? {
                seen(chunk.len() as u64);
            }
            Ok(())
        };
        match hashed.await {
            Ok(()) => Ok(None),
            Err(error) => self.defect_from_error(error, tree).map(Some),
        }
    }

    /// Converts an error about an object to a defect; returns errors about the store itself.
    fn defect_from_error(
        &self,
        error: GetError,
        tree: &v1::Tree,
    ) -> Result<ObjectDefect, GetError> {
        let at = format!("{}/{}", self.backend.url, tree.path);
        Ok(match error {
            GetError::Storage(StorageError::Missing { url, .. }) => {
                ObjectDefect::missing_object(url)
            }
            GetError::Corrupt { url, expected, found, .. } => ObjectDefect {
                url,
                problem: "is damaged",
                expected: Some(expected),
                found: Some(found),
            },
            GetError::Manifest { url, source } => {
                let found = Some(source.to_string());
                ObjectDefect { url, problem: "is not a usable manifest", expected: None, found }
            }
            GetError::Digest(error) => {
                let found = Some(error.to_string());
                ObjectDefect {
                    url: at,
                    problem: "has a name that is not a digest",
                    expected: None,
                    found,
                }
            }
            GetError::Path(error) => {
                let found = Some(error.to_string());
                ObjectDefect {
                    url: at,
                    problem: "has a name that may not be used",
                    expected: None,
                    found,
                }
            }
            other => return Err(other),
        })
    }
}

impl ObjectDefect {
    fn missing_object(url: String) -> Self {
        Self { url, problem: "is not there", expected: None, found: None }
    }

    fn wrong_size(url: String, expected: u64, found: u64) -> Self {
        let bytes = |count: u64| Some(format!("{count} bytes"));
        Self { url, problem: "has another size", expected: bytes(expected), found: bytes(found) }
    }
}
