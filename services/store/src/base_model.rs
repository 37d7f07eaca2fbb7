//! Base models: trees whose files may be outside the store. A host that has files with the digests
//! of the manifest has the base, independent of their origin.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path as FsPath,
    sync::Arc,
};

use bytes::Bytes;
use futures::TryStreamExt;
use hub::ModelRevision;
use object_store::path::Path;
use serde_json::json;
use wire::{Digest, v1};

use crate::{
    blocking::run_blocking,
    copy::{COPY_BYTES_MIN, compute_parts},
    digest_cache::DigestCache,
    error::{GetError, PutError, StorageError},
    file_hashing::ByteProgress,
    manifest::{MANIFEST, SUMS_FILE, TreeFile, TreeManifest, TreeMetadata},
    parts::{PARTS_FILE, PartLists},
    path::{RelativePath, TreePlace},
    store::{Store, WantedObject},
    tree::object_key,
};

/// Largest number of published bases that are searched for files to share with a new one.
const SIBLINGS_MAX: usize = 256;

/// The choice which files of a base go into the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UploadMode {
    Missing,
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
    const FILES_KEY: &str = "files";
    const EXTERNAL_FILES: &str = "elsewhere";
    /// The key that marks a directory that may contain other files.
    const OTHERS_KEY: &str = "others";

    /// Returns true if the files are outside the store by the user's choice.
    pub fn is_external(&self) -> bool {
        self.about.get(Self::FILES_KEY).is_some_and(|files| files == Self::EXTERNAL_FILES)
    }

    /// Returns true if the directory existed before the manifest, so it may contain other files.
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

    /// Returns true for a whole model, as opposed to an adapter, a dataset or an archive.
    pub(crate) fn is_model(&self) -> bool {
        self.find_file("config.json").is_some()
    }
}

impl Store {
    /// Publishes the named files of a directory as a base; see [`Store::publish_tree`].
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

    /// Uploads the files of a base, or copies them from sibling bases.
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
    pub async fn read_directory(&self, root: &RelativePath) -> Result<StoreDirectory, GetError> {
        let published = self.find_published(root).await?;
        let mut files = self.list_directory(root).await?;
        files.remove(MANIFEST);
        files.remove(SUMS_FILE);
        files.remove(PARTS_FILE);
        Ok(StoreDirectory { published, files })
    }

    /// Makes the named files of a directory a tree at their present place: each file is read once,
    /// and the manifest is written beside them.
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
    #[error(transparent)]
    Get(#[from] GetError),
    #[error(transparent)]
    Put(#[from] PutError),
}

impl From<StorageError> for RegisterInPlaceError {
    fn from(fault: StorageError) -> Self {
        Self::Put(fault.into())
    }
}

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

/// Hashes files and returns their manifest entries, without duplicates. Blocking.
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
