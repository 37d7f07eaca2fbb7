//! Base models: trees whose files may be outside the store. A base is named by the digest of its
//! manifest. A host that has files with the listed digests has the base, independent of their
//! origin.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    path::{Path as FsPath, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use futures::TryStreamExt;
use hub::ModelRevision;
use object_store::{ObjectStoreExt, path::Path};
use serde_json::json;
use wire::{Digest, v1};

use crate::{
    digest_cache::DigestCache,
    error::{GetError, PutError, StorageError},
    file_hashing,
    manifest::{MANIFEST, SUMS_FILE, TreeFile, TreeManifest, TreeMetadata},
    parts::{PARTS_FILE, PartHashes, PartLists},
    path::{RelativePath, TreePlace},
    store::{Store, WantedObject, run_blocking},
    tree::object_key,
    verification::ByteProgress,
};

/// Largest number of published bases that are searched for files to share with a new one.
const SIBLINGS_MAX: usize = 256;
/// Smallest file in bytes that is copied within the store instead of uploaded.
pub(crate) const COPY_BYTES_MIN: u64 = 1 << 20;

/// The choice which files of a base go into the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UploadMode {
    /// Files that the store does not contain.
    Missing,
    /// All files, even if the store contains them.
    All,
    /// No files: agents find or download them.
    Nothing,
}

/// A directory of the store that may be a base.
#[derive(Debug, Clone)]
pub struct StoreDirectory {
    /// The tree and its manifest, if the directory was published or registered before.
    pub published: Option<(v1::Tree, TreeManifest)>,
    /// Sizes in bytes by name, without the files that the store writes itself.
    pub files: BTreeMap<String, u64>,
}

impl TreeManifest {
    /// The metadata key with the location of the files.
    const FILES_KEY: &str = "files";
    /// The value of [`Self::FILES_KEY`] for files outside the store.
    const EXTERNAL_FILES: &str = "elsewhere";
    /// The metadata key of a directory that may contain other files.
    const OTHERS_KEY: &str = "others";

    /// Returns true if the files are outside the store by the user's choice.
    pub fn is_external(&self) -> bool {
        self.about.get(Self::FILES_KEY).is_some_and(|files| files == Self::EXTERNAL_FILES)
    }

    /// Returns true if the directory existed before the manifest, so that it may contain files that
    /// are not part of the tree.
    pub(crate) fn allows_other_files(&self) -> bool {
        self.about.contains_key(Self::OTHERS_KEY)
    }

    /// Returns the repository and commit of the files on the hub, if they came from there.
    pub fn hub_revision(&self) -> Option<ModelRevision> {
        let text = |key| Some(self.about.get(key)?.as_str()?.to_owned());
        let (repo, commit) = (text("repo")?, text("revision")?);
        // Every member with write access to the store can write a manifest, so its text is checked.
        format!("{repo}@{commit}").parse::<hub::ModelId>().ok()?;
        Some(ModelRevision { repo, commit })
    }

    /// Returns true for a whole model: the tree contains `config.json`, as opposed to an adapter, a
    /// dataset or an archive.
    pub(crate) fn is_model(&self) -> bool {
        self.find_file("config.json").is_some()
    }
}

impl Store {
    /// Publishes the named files of a directory as a base; see [`Store::publish_tree`].
    ///
    /// # Errors
    /// When a file cannot be read or changes meanwhile, or the store refuses or fails.
    pub async fn publish_base(
        &self,
        (dir, names): (&FsPath, &[RelativePath]),
        place: &TreePlace,
        revision: Option<ModelRevision>,
        upload: UploadMode,
        (digests, seen): (Arc<DigestCache>, Arc<dyn Fn(u64) + Send + Sync>),
    ) -> Result<v1::Tree, PutError> {
        let mut about = TreeMetadata::new();
        if let Some(ModelRevision { repo, commit }) = revision {
            about.insert("repo".into(), repo.into());
            about.insert("revision".into(), commit.into());
        }
        if upload == UploadMode::Nothing {
            about.insert(TreeManifest::FILES_KEY.into(), TreeManifest::EXTERNAL_FILES.into());
        }
        let (at, named) = (dir.to_owned(), names.to_vec());
        let files = run_blocking(move || describe_files(&at, named, &digests, &*seen)).await?;
        let (manifest, json) = encode_manifest(dir, files, about)?;
        let digest = Digest::hash_bytes(&json);
        let root = place.tree_path(digest);
        let tree = v1::Tree { path: root.to_string(), manifest: digest.to_string() };
        let is_new = !self.is_published(&root, &json).await?;
        let mut lists = PartLists::default();
        if upload == UploadMode::All || (is_new && upload == UploadMode::Missing) {
            lists = self.put_base_files((dir, upload), place, &root, &manifest).await?;
        }
        if is_new {
            self.put_part_lists(&root, &lists).await?;
            self.put_bytes(&object_key(&root, SUMS_FILE), manifest.to_sums().into()).await?;
            self.put_bytes(&object_key(&root, MANIFEST), json).await?;
        }
        Ok(tree)
    }

    /// Uploads the files of a base, or copies them from sibling bases, and returns their part
    /// hashes.
    async fn put_base_files(
        &self,
        (dir, upload): (&FsPath, UploadMode),
        place: &TreePlace,
        root: &RelativePath,
        manifest: &TreeManifest,
    ) -> Result<PartLists, PutError> {
        let (mut siblings, mut lists) = (None, PartLists::default());
        for file in &manifest.files {
            let key = object_key(root, file.path.as_str());
            let source = dir.join(file.path.as_str());
            if upload == UploadMode::Missing {
                // The directory name contains the digest of the manifest. So a file of that name
                // and size was uploaded for this base, by a submission that did not finish.
                if self.has_object(&key, file.bytes).await? {
                    lists.add_parts(file.digest, compute_parts(source).await);
                    continue;
                }
                if file.bytes >= COPY_BYTES_MIN {
                    if siblings.is_none() {
                        siblings = Some(self.sibling_files(place).await?);
                    }
                    let same = siblings.as_ref().and_then(|known| known.get(&file.digest));
                    if let Some(same) = same
                        && self.copy_within_store(same, &key, file.bytes).await
                    {
                        lists.add_parts(file.digest, compute_parts(source).await);
                        continue;
                    }
                }
            }
            lists.add_parts(
                file.digest,
                self.put_file(&key, &source, file.digest, file.bytes).await?,
            );
        }
        Ok(lists)
    }

    /// Returns the keys of files of other trees in the parent directory of `place`, by digest.
    async fn sibling_files(
        &self,
        place: &TreePlace,
    ) -> Result<BTreeMap<Digest, Path>, StorageError> {
        let parent = place.parent_path();
        let key = Path::parse(parent.as_str()).expect("stricter than object_store's");
        let listed = self.backend.objects.list_with_delimiter(Some(&key)).await;
        let listed = listed.map_err(|source| self.backend.storage_error(&key, source))?;
        let mut known = BTreeMap::new();
        for prefix in listed.common_prefixes.iter().take(SIBLINGS_MAX) {
            // Bases that cannot be read are skipped.
            let Ok(root) = RelativePath::new(prefix.as_ref()) else { continue };
            let Ok(Some((_, manifest))) = self.find_published(&root).await else { continue };
            if manifest.is_external() {
                continue;
            }
            for file in &manifest.files {
                known.insert(file.digest, object_key(&root, file.path.as_str()));
            }
        }
        Ok(known)
    }

    /// Copies an object within the store and reports whether the copy is complete. If it is not,
    /// the caller uploads the file.
    pub(crate) async fn copy_within_store(&self, from: &Path, to: &Path, bytes: u64) -> bool {
        let whole = self.has_object(from, bytes).await.unwrap_or(false);
        whole
            && self.backend.copy(from, to).await.is_ok()
            && self.has_object(to, bytes).await.unwrap_or(false)
    }

    /// Returns the tree in a directory with its manifest, if there is a manifest.
    async fn find_published(
        &self,
        root: &RelativePath,
    ) -> Result<Option<(v1::Tree, TreeManifest)>, GetError> {
        let Some(json) =
            self.read_small_file(root, MANIFEST, crate::manifest::MAX_MANIFEST_BYTES).await?
        else {
            return Ok(None);
        };
        let manifest = Digest::hash_bytes(&json).to_string();
        let tree = v1::Tree { path: root.to_string(), manifest };
        let manifest = self.parse_manifest(&tree, &json)?;
        Ok(Some((tree, manifest)))
    }

    /// Returns the content of a directory, independent of who wrote it.
    ///
    /// # Errors
    /// When the store fails, or the directory contains an invalid `manifest.json`.
    pub async fn read_directory(&self, root: &RelativePath) -> Result<StoreDirectory, GetError> {
        let published = self.find_published(root).await?;
        let mut files = self.list_directory(root).await?;
        files.remove(MANIFEST);
        files.remove(SUMS_FILE);
        files.remove(PARTS_FILE);
        Ok(StoreDirectory { published, files })
    }

    /// Returns the current, unverified content of a file, or `None` when it does not exist.
    ///
    /// # Errors
    /// When the file is larger than `limit` bytes, or the store fails.
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

    /// Makes the named files of a directory a tree at their present place: each file is read once,
    /// and the manifest is written beside them.
    ///
    /// # Errors
    /// When a file does not exist, or the store refuses or fails.
    pub async fn register_in_place(
        &self,
        root: &RelativePath,
        names: &BTreeMap<String, u64>,
        seen: ByteProgress<'_>,
    ) -> Result<v1::Tree, RegisterInPlaceError> {
        let mut files = Vec::new();
        for (name, bytes) in names {
            let path = RelativePath::new(name.as_str()).map_err(GetError::from)?;
            files.push(self.describe_object(root, path, *bytes, seen).await?);
        }
        let about = TreeMetadata::from([(TreeManifest::OTHERS_KEY.to_owned(), json!("ignored"))]);
        let (manifest, json) = encode_manifest(FsPath::new(root.as_str()), files, about)?;
        let tree =
            v1::Tree { path: root.to_string(), manifest: Digest::hash_bytes(&json).to_string() };
        self.put_bytes(&object_key(root, SUMS_FILE), manifest.to_sums().into()).await?;
        self.put_bytes(&object_key(root, MANIFEST), json).await?;
        Ok(tree)
    }

    /// Hashes an object and returns its entry for a manifest.
    async fn describe_object(
        &self,
        root: &RelativePath,
        path: RelativePath,
        bytes: u64,
        seen: ByteProgress<'_>,
    ) -> Result<TreeFile, GetError> {
        let key = object_key(root, path.as_str());
        let url = self.backend.object_url(&key);
        // The digest is unknown, so the read compares only the size.
        let wanted = WantedObject { key, url, digest: Digest::hash_bytes(b""), bytes, parts: None };
        let mut chunks = self.stream_chunks(&wanted).await?;
        let mut hasher = blake3::Hasher::new();
        while let Some(chunk) = chunks.try_next().await? {
            seen(chunk.len() as u64);
            hasher = crate::download::hash_chunk(hasher, chunk).await.0;
        }
        wanted.check_size(hasher.count())?;
        Ok(TreeFile { path, bytes, digest: hasher.finalize().into() })
    }
}

/// The reason why a directory of the store was not made a tree.
#[derive(Debug, thiserror::Error)]
pub enum RegisterInPlaceError {
    /// A file could not be read.
    #[error(transparent)]
    Get(#[from] GetError),
    /// The manifest could not be written.
    #[error(transparent)]
    Put(#[from] PutError),
}

impl From<StorageError> for RegisterInPlaceError {
    fn from(fault: StorageError) -> Self {
        Self::Put(fault.into())
    }
}

/// Computes the part hashes of a file that need not be sent. Returns `None` when the file is
/// unreadable or small; it is then fetched without peers.
pub(crate) async fn compute_parts(file: PathBuf) -> Option<PartHashes> {
    run_blocking(move || file_hashing::hash_open_file(&File::open(file)?, &|_| ())).await.ok()?.2
}

/// Builds a manifest and its JSON.
fn encode_manifest(
    dir: &FsPath,
    files: Vec<TreeFile>,
    about: TreeMetadata,
) -> Result<(TreeManifest, Bytes), PutError> {
    let undescribed = |source| PutError::Manifest { path: dir.to_owned(), source };
    let manifest = TreeManifest::new(files, about).map_err(undescribed)?;
    let json = Bytes::from(manifest.to_json().map_err(undescribed)?);
    Ok((manifest, json))
}

/// Hashes files and returns their entries for a manifest, without duplicates. Blocking.
fn describe_files(
    dir: &FsPath,
    names: Vec<RelativePath>,
    digests: &DigestCache,
    seen: ByteProgress<'_>,
) -> Result<Vec<TreeFile>, PutError> {
    let unique: BTreeSet<RelativePath> = names.into_iter().collect();
    let describe = |path: RelativePath| {
        let disk = dir.join(path.as_str());
        match digests.digest_file(&disk, seen) {
            Ok((digest, bytes)) => Ok(TreeFile { path, bytes, digest }),
            Err(source) => Err(PutError::Read { path: disk, source }),
        }
    };
    unique.into_iter().map(describe).collect()
}
