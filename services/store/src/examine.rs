//! Looking at what is in the store without fetching it, for audits: what is missing, short,
//! damaged or extra is an answer here and not an error.

use std::collections::{BTreeMap, BTreeSet};

use futures::TryStreamExt;
use object_store::path::Path;
use wire::{Digest, v1};

use crate::{
    error::{Fault, GetError},
    manifest::{MANIFEST, MAX_FILES, Manifest, SUMS, TreeFile},
    parts::PARTS,
    path::RelativePath,
    store::{Store, Wanted},
};

/// An object that is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    pub url: String,
    pub what: &'static str,
    /// Sizes or digests, where there is something to compare.
    pub expected: Option<String>,
    pub found: Option<String>,
}

/// A tree's manifest, if it can be used, and what is wrong with the directory by names and sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct Examined {
    pub manifest: Option<Manifest>,
    pub flaws: Vec<Flaw>,
    /// Files that are not in the store because somebody wanted it so.
    pub elsewhere: BTreeSet<String>,
}

/// Told of bytes as they are hashed.
pub type Seen<'a> = &'a (dyn Fn(u64) + Send + Sync);

impl Store {
    /// Reads the tree's manifest and lists its directory.
    ///
    /// # Errors
    /// When the store cannot be asked.
    pub async fn examine_tree(&self, tree: &v1::Tree) -> Result<Examined, GetError> {
        let manifest = match self.manifest(tree).await {
            Ok(manifest) => manifest,
            Err(error) => {
                let flaws = vec![self.flaw(error, tree)?];
                return Ok(Examined { manifest: None, flaws, elsewhere: BTreeSet::new() });
            }
        };
        let root = RelativePath::new(&*tree.path)?;
        let mut found = self.list(&root).await?;
        found.remove(MANIFEST);
        found.remove(PARTS);
        let sums = manifest.to_sums();
        let wanted = manifest.files.iter().map(|file| (file.path.as_str(), file.bytes));
        let (mut flaws, mut elsewhere) = (Vec::new(), BTreeSet::new());
        for (path, bytes) in wanted.chain([(SUMS, sums.len() as u64)]) {
            let url = format!("{}/{root}/{path}", self.at.url);
            match found.remove(path) {
                None if manifest.is_elsewhere() && path != SUMS => {
                    elsewhere.insert(path.to_owned());
                }
                None => flaws.push(Flaw::missing(url)),
                Some(size) if size != bytes => flaws.push(Flaw::size(url, bytes, size)),
                Some(_) => {}
            }
        }
        if manifest.has_neighbours() {
            found.clear();
        }
        flaws.extend(found.into_keys().map(|path| Flaw {
            url: format!("{}/{root}/{path}", self.at.url),
            what: "is in no manifest",
            expected: None,
            found: None,
        }));
        Ok(Examined { manifest: Some(manifest), flaws, elsewhere })
    }

    /// The names below a directory, with their sizes; more than a tree may have are left out.
    pub(crate) async fn list(&self, root: &RelativePath) -> Result<BTreeMap<String, u64>, Fault> {
        let key = Path::parse(root.as_str()).expect("stricter than object_store's");
        let below = format!("{root}/");
        let mut found = BTreeMap::new();
        let mut listing = self.at.objects.list(Some(&key));
        loop {
            match listing.try_next().await {
                Ok(Some(meta)) if found.len() < 2 * MAX_FILES => {
                    let path = meta.location.as_ref();
                    let name = path.strip_prefix(&below).unwrap_or(path);
                    found.insert(name.to_owned(), meta.size);
                }
                Ok(_) | Err(object_store::Error::NotFound { .. }) => return Ok(found),
                Err(source) => return Err(self.at.fault(&key, source)),
            }
        }
    }

    /// Whether the blob is there, by its size.
    ///
    /// # Errors
    /// When the store cannot be asked.
    pub async fn examine_blob(&self, blob: &v1::Blob) -> Result<Option<Flaw>, GetError> {
        let wanted = match self.wanted_blob(blob) {
            Ok(wanted) => wanted,
            Err(error) => return self.flaw(error, &v1::Tree::default()).map(Some),
        };
        let Wanted { key, url, bytes, .. } = wanted;
        match object_store::ObjectStoreExt::head(&*self.at.objects, &key).await {
            Ok(meta) if meta.size == bytes => Ok(None),
            Ok(meta) => Ok(Some(Flaw::size(url, bytes, meta.size))),
            Err(object_store::Error::NotFound { .. }) => Ok(Some(Flaw::missing(url))),
            Err(source) => Err(self.at.fault(&key, source).into()),
        }
    }

    /// Hashes one file of a tree.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn hash_tree_file(
        &self,
        tree: &v1::Tree,
        file: &TreeFile,
        seen: Seen<'_>,
    ) -> Result<Option<Flaw>, GetError> {
        let root = RelativePath::new(&*tree.path)?;
        self.hash(self.wanted_file(&root, file), tree, seen).await
    }

    /// Hashes the `B3SUMS` of a tree.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn hash_sums(
        &self,
        tree: &v1::Tree,
        manifest: &Manifest,
    ) -> Result<Option<Flaw>, GetError> {
        let sums = manifest.to_sums();
        let file = TreeFile {
            path: RelativePath::new(SUMS)?,
            bytes: sums.len() as u64,
            digest: Digest::of(sums.as_bytes()),
        };
        self.hash_tree_file(tree, &file, &|_| ()).await
    }

    /// Hashes a blob.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn hash_blob(
        &self,
        blob: &v1::Blob,
        seen: Seen<'_>,
    ) -> Result<Option<Flaw>, GetError> {
        self.hash(self.wanted_blob(blob)?, &v1::Tree::default(), seen).await
    }

    async fn hash(
        &self,
        wanted: Wanted,
        tree: &v1::Tree,
        seen: Seen<'_>,
    ) -> Result<Option<Flaw>, GetError> {
        let hashed = async {
            let mut chunks = self.verified(wanted).await?;
            while let Some(chunk) = chunks.try_next().await? {
                seen(chunk.len() as u64);
            }
            Ok(())
        };
        match hashed.await {
            Ok(()) => Ok(None),
            Err(error) => self.flaw(error, tree).map(Some),
        }
    }

    /// What an error says of the object, unless it says something of the store.
    fn flaw(&self, error: GetError, tree: &v1::Tree) -> Result<Flaw, GetError> {
        let at = format!("{}/{}", self.at.url, tree.path);
        Ok(match error {
            GetError::Fault(Fault::Missing { url, .. }) => Flaw::missing(url),
            GetError::Corrupt { url, expected, found, .. } => {
                Flaw { url, what: "is damaged", expected: Some(expected), found: Some(found) }
            }
            GetError::Manifest { url, source } => {
                let found = Some(source.to_string());
                Flaw { url, what: "is no manifest that can be used", expected: None, found }
            }
            GetError::Digest(error) => {
                let found = Some(error.to_string());
                Flaw { url: at, what: "is named by what is no digest", expected: None, found }
            }
            GetError::Path(error) => {
                let found = Some(error.to_string());
                Flaw { url: at, what: "has a name that may not be used", expected: None, found }
            }
            other => return Err(other),
        })
    }
}

impl Flaw {
    fn missing(url: String) -> Self {
        Self { url, what: "is not there", expected: None, found: None }
    }

    fn size(url: String, expected: u64, found: u64) -> Self {
        let bytes = |count: u64| Some(format!("{count} bytes"));
        Self { url, what: "has another size", expected: bytes(expected), found: bytes(found) }
    }
}
