//! Base models: trees whose files may lie elsewhere. A base is named by the digest of its
//! manifest; who has files with those digests has the base, wherever they came from.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    path::{Path as FsPath, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use futures::TryStreamExt;
use hub::Revision;
use object_store::{ObjectStoreExt, path::Path};
use serde_json::json;
use wire::{Digest, v1};

use crate::{
    digests::Digests,
    error::{Fault, GetError, PutError},
    examine::Seen,
    files,
    manifest::{About, MANIFEST, Manifest, SUMS, TreeFile},
    parts::{PARTS, PartLists, Parts},
    path::{RelativePath, TreePlace},
    store::{Store, Wanted, blocking},
    tree::key_of,
};

/// Published bases that are looked at for files they share with a new one.
const SIBLINGS_MAX: usize = 256;
/// Below it a copy within the store saves nothing.
pub(crate) const COPY_BYTES_MIN: u64 = 1 << 20;

/// Whether a base's files go into the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Upload {
    /// Those it does not hold.
    Missing,
    /// All of them, again.
    All,
    /// None: agents find or download them.
    Nothing,
}

/// A directory of the store that may be a base.
#[derive(Debug, Clone)]
pub struct Directory {
    /// If it was published or adopted before.
    pub published: Option<(v1::Tree, Manifest)>,
    /// Names and sizes, without what the store keeps for itself.
    pub files: BTreeMap<String, u64>,
}

impl Manifest {
    const FILES: &str = "files";
    const ELSEWHERE: &str = "elsewhere";
    const OTHERS: &str = "others";

    /// The files are not in the store, because somebody wanted it so.
    pub fn is_elsewhere(&self) -> bool {
        self.about.get(Self::FILES).is_some_and(|files| files == Self::ELSEWHERE)
    }

    /// The directory was there first, and may hold what is not part of the tree.
    pub(crate) fn has_neighbours(&self) -> bool {
        self.about.contains_key(Self::OTHERS)
    }

    /// Where the hub has the files, if they came from there.
    pub fn revision(&self) -> Option<Revision> {
        let text = |key| Some(self.about.get(key)?.as_str()?.to_owned());
        let (repo, commit) = (text("repo")?, text("revision")?);
        // A manifest is written by anybody who may write to the store.
        format!("{repo}@{commit}").parse::<hub::ModelId>().ok()?;
        Some(Revision { repo, commit })
    }

    /// A whole model, and not an adapter, a dataset or an archive.
    pub(crate) fn is_model(&self) -> bool {
        self.file("config.json").is_some()
    }
}

impl Store {
    /// Publishes these files of a directory as a base; see [`Store::publish_tree`].
    ///
    /// # Errors
    /// When a file cannot be read, changes meanwhile, or the store refuses or fails.
    pub async fn publish_base(
        &self,
        (dir, names): (&FsPath, &[RelativePath]),
        place: &TreePlace,
        revision: Option<Revision>,
        upload: Upload,
        (digests, seen): (Arc<Digests>, Arc<dyn Fn(u64) + Send + Sync>),
    ) -> Result<v1::Tree, PutError> {
        let mut about = About::new();
        if let Some(Revision { repo, commit }) = revision {
            about.insert("repo".into(), repo.into());
            about.insert("revision".into(), commit.into());
        }
        if upload == Upload::Nothing {
            about.insert(Manifest::FILES.into(), Manifest::ELSEWHERE.into());
        }
        let (at, named) = (dir.to_owned(), names.to_vec());
        let files = blocking(move || describe(&at, named, &digests, &*seen)).await?;
        let (manifest, json) = written(dir, files, about)?;
        let digest = Digest::of(&json);
        let root = place.path(digest);
        let tree = v1::Tree { path: root.to_string(), manifest: digest.to_string() };
        let is_new = !self.is_published(&root, &json).await?;
        let mut lists = PartLists::default();
        if upload == Upload::All || (is_new && upload == Upload::Missing) {
            lists = self.put_missing((dir, upload), place, &root, &manifest).await?;
        }
        if is_new {
            self.put_part_lists(&root, &lists).await?;
            self.put_bytes(&key_of(&root, SUMS), manifest.to_sums().into()).await?;
            self.put_bytes(&key_of(&root, MANIFEST), json).await?;
        }
        Ok(tree)
    }

    async fn put_missing(
        &self,
        (dir, upload): (&FsPath, Upload),
        place: &TreePlace,
        root: &RelativePath,
        manifest: &Manifest,
    ) -> Result<PartLists, PutError> {
        let (mut siblings, mut lists) = (None, PartLists::default());
        for file in &manifest.files {
            let key = key_of(root, file.path.as_str());
            let source = dir.join(file.path.as_str());
            if upload == Upload::Missing {
                // Its directory is named for the manifest, so a file of that name and size was
                // begun for it: by a submission that did not come to its end.
                if self.holds(&key, file.bytes).await? {
                    lists.add(file.digest, parts_of(source).await);
                    continue;
                }
                if file.bytes >= COPY_BYTES_MIN {
                    if siblings.is_none() {
                        siblings = Some(self.siblings(place).await?);
                    }
                    let same = siblings.as_ref().and_then(|known| known.get(&file.digest));
                    if let Some(same) = same
                        && self.copied(same, &key, file.bytes).await
                    {
                        lists.add(file.digest, parts_of(source).await);
                        continue;
                    }
                }
            }
            lists.add(file.digest, self.put_file(&key, &source, file.digest, file.bytes).await?);
        }
        Ok(lists)
    }

    /// Where the store holds files of other trees beside this place.
    async fn siblings(&self, place: &TreePlace) -> Result<BTreeMap<Digest, Path>, Fault> {
        let parent = place.parent();
        let key = Path::parse(parent.as_str()).expect("stricter than object_store's");
        let listed = self.at.objects.list_with_delimiter(Some(&key)).await;
        let listed = listed.map_err(|source| self.at.fault(&key, source))?;
        let mut known = BTreeMap::new();
        for prefix in listed.common_prefixes.iter().take(SIBLINGS_MAX) {
            // What cannot be read is not shared with.
            let Ok(root) = RelativePath::new(prefix.as_ref()) else { continue };
            let Ok(Some((_, manifest))) = self.published(&root).await else { continue };
            if manifest.is_elsewhere() {
                continue;
            }
            for file in &manifest.files {
                known.insert(file.digest, key_of(&root, file.path.as_str()));
            }
        }
        Ok(known)
    }

    /// A copy within the store; a server that refuses is sent the file.
    pub(crate) async fn copied(&self, from: &Path, to: &Path, bytes: u64) -> bool {
        let whole = self.holds(from, bytes).await.unwrap_or(false);
        whole
            && self.at.objects.copy(from, to).await.is_ok()
            && self.holds(to, bytes).await.unwrap_or(false)
    }

    /// The tree at a place, if there is a manifest.
    async fn published(
        &self,
        root: &RelativePath,
    ) -> Result<Option<(v1::Tree, Manifest)>, GetError> {
        let Some(json) =
            self.small_file(root, MANIFEST, crate::manifest::MAX_MANIFEST_BYTES).await?
        else {
            return Ok(None);
        };
        let manifest = Digest::of(&json).to_string();
        let tree = v1::Tree { path: root.to_string(), manifest };
        let manifest = self.parse_manifest(&tree, &json)?;
        Ok(Some((tree, manifest)))
    }

    /// What is at a place, whoever put it there.
    ///
    /// # Errors
    /// When the store fails, or what is there calls itself a manifest and is none.
    pub async fn directory(&self, root: &RelativePath) -> Result<Directory, GetError> {
        let published = self.published(root).await?;
        let mut files = self.list(root).await?;
        files.remove(MANIFEST);
        files.remove(SUMS);
        files.remove(PARTS);
        Ok(Directory { published, files })
    }

    /// A file as it is in the store now, unverified; `None` when it is not there.
    ///
    /// # Errors
    /// When it is larger than the limit, or the store fails.
    pub async fn small_file(
        &self,
        root: &RelativePath,
        name: &str,
        limit: u64,
    ) -> Result<Option<Bytes>, GetError> {
        let path = root.join(&RelativePath::new(name)?)?;
        let key = Path::parse(path.as_str()).expect("stricter than object_store's");
        let fault = |source| self.at.fault(&key, source);
        let got = match self.at.objects.get(&key).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            got => got.map_err(fault)?,
        };
        let bytes = got.meta.size;
        if bytes > limit {
            return Err(GetError::TooLarge { url: self.at.url_of(&key), bytes, limit });
        }
        Ok(Some(got.bytes().await.map_err(fault)?))
    }

    /// Makes these files of a directory a tree where they are: each is read once, and the
    /// manifest is written beside them.
    ///
    /// # Errors
    /// When a file is not there, or the store refuses or fails.
    pub async fn adopt(
        &self,
        root: &RelativePath,
        names: &BTreeMap<String, u64>,
        seen: Seen<'_>,
    ) -> Result<v1::Tree, AdoptError> {
        let mut files = Vec::new();
        for (name, bytes) in names {
            let path = RelativePath::new(name.as_str()).map_err(GetError::from)?;
            files.push(self.describe_object(root, path, *bytes, seen).await?);
        }
        let about = About::from([(Manifest::OTHERS.to_owned(), json!("ignored"))]);
        let (manifest, json) = written(FsPath::new(root.as_str()), files, about)?;
        let tree = v1::Tree { path: root.to_string(), manifest: Digest::of(&json).to_string() };
        self.put_bytes(&key_of(root, SUMS), manifest.to_sums().into()).await?;
        self.put_bytes(&key_of(root, MANIFEST), json).await?;
        Ok(tree)
    }

    async fn describe_object(
        &self,
        root: &RelativePath,
        path: RelativePath,
        bytes: u64,
        seen: Seen<'_>,
    ) -> Result<TreeFile, GetError> {
        let key = key_of(root, path.as_str());
        let url = self.at.url_of(&key);
        // The digest is what is asked for here; only the size is compared.
        let wanted = Wanted { key, url, digest: Digest::of(b""), bytes, parts: None };
        let mut chunks = self.chunks(&wanted).await?;
        let mut hasher = blake3::Hasher::new();
        while let Some(chunk) = chunks.try_next().await? {
            seen(chunk.len() as u64);
            hasher = crate::download::hash_chunk(hasher, chunk).await.0;
        }
        wanted.check_size(hasher.count())?;
        Ok(TreeFile { path, bytes, digest: hasher.finalize().into() })
    }
}

/// Why a directory of the store was not made a tree.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    #[error(transparent)]
    Get(#[from] GetError),
    #[error(transparent)]
    Put(#[from] PutError),
}

impl From<Fault> for AdoptError {
    fn from(fault: Fault) -> Self {
        Self::Put(fault.into())
    }
}

/// Of a file that need not be sent; without them it is fetched without peers.
pub(crate) async fn parts_of(file: PathBuf) -> Option<Parts> {
    blocking(move || files::hash(&File::open(file)?, &|_| ())).await.ok()?.2
}

fn written(
    dir: &FsPath,
    files: Vec<TreeFile>,
    about: About,
) -> Result<(Manifest, Bytes), PutError> {
    let undescribed = |source| PutError::Manifest { path: dir.to_owned(), source };
    let manifest = Manifest::new(files, about).map_err(undescribed)?;
    let json = Bytes::from(manifest.to_json().map_err(undescribed)?);
    Ok((manifest, json))
}

fn describe(
    dir: &FsPath,
    names: Vec<RelativePath>,
    digests: &Digests,
    seen: Seen<'_>,
) -> Result<Vec<TreeFile>, PutError> {
    let unique: BTreeSet<RelativePath> = names.into_iter().collect();
    let describe = |path: RelativePath| {
        let disk = dir.join(path.as_str());
        match digests.of(&disk, seen) {
            Ok((digest, bytes)) => Ok(TreeFile { path, bytes, digest }),
            Err(source) => Err(PutError::Read { path: disk, source }),
        }
    };
    unique.into_iter().map(describe).collect()
}
