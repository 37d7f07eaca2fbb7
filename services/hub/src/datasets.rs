//! Splits of data sets: found at a commit, and downloaded to the cache.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};
use tokio::fs;

use crate::{
    DatasetName, DatasetSplitError, HubClient, HubError, ModelId,
    client::{BytesCallback, revision_of, run_blocking},
    dataset_files::{CONVERTED_REVISION, SplitFiles, choose_split},
    error::RequestError,
    hub_http::encode_component,
    repo_cache::{RepoCache, is_commit, is_file_path},
    repo_kind::RepoKind,
};

/// Files of one split.
const FILES_MAX: usize = 2000;

/// The reason why a split is not available.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    #[error(transparent)]
    Hub(#[from] HubError),
    #[error("data set {name}")]
    Split {
        name: String,
        #[source]
        source: DatasetSplitError,
    },
    #[error(
        "data set {name} has {count} {unit}, the limit is {limit}; choose a smaller split (D105)"
    )]
    TooLarge { name: String, count: u64, unit: &'static str, limit: u64 },
}

/// A split of a data set in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetSplit {
    /// The name with commit, config and split.
    pub pinned: DatasetName,
    /// The names of its files in the repository and their paths here, in the order of their rows.
    pub files: Vec<(String, PathBuf)>,
}

/// The hub's description of a commit.
#[derive(Deserialize)]
struct CommitInfo {
    sha: String,
    #[serde(default)]
    siblings: Vec<FileInfo>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FileInfo {
    #[serde(rename = "rfilename")]
    name: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    blob_id: String,
    lfs: Option<LfsInfo>,
}

#[derive(Deserialize)]
struct LfsInfo {
    sha256: String,
    size: u64,
}

/// The files of a commit, in the form in which all tools keep them in the cache.
#[derive(Serialize, Deserialize)]
struct CommitTree {
    format_version: u32,
    files: BTreeMap<String, TreeFile>,
}

#[derive(Serialize, Deserialize)]
struct TreeFile {
    size: u64,
    blob_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    lfs_sha256: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lfs_size: Option<u64>,
}

impl TreeFile {
    /// Returns the size of the file. Some hubs list another `size` for large files.
    fn byte_count(&self) -> u64 {
        self.size.max(self.lfs_size.unwrap_or(0))
    }
}

const TREE_FORMAT_VERSION: u32 = 1;

/// The files of a revision, at its commit.
struct CommitListing {
    commit: String,
    tree: CommitTree,
}

impl From<CommitInfo> for CommitListing {
    fn from(CommitInfo { sha, siblings }: CommitInfo) -> Self {
        let file = |FileInfo { name, size, blob_id, lfs }| {
            let (lfs_sha256, lfs_size) = lfs.map(|it: LfsInfo| (it.sha256, it.size)).unzip();
            (name, TreeFile { size, blob_id, lfs_sha256, lfs_size })
        };
        let files = siblings.into_iter().map(file).collect();
        Self { commit: sha, tree: CommitTree { format_version: TREE_FORMAT_VERSION, files } }
    }
}

impl HubClient {
    /// Downloads a split whose files have at most `bytes_max` bytes, unless the cache has it. With
    /// no revision this is the hub's conversion to parquet, or else the files on the default branch.
    /// If the hub cannot be asked, it is the split that the cache has of the revision.
    pub async fn download_split(
        &self,
        name: &DatasetName,
        bytes_max: u64,
        seen: BytesCallback,
    ) -> Result<DatasetSplit, DatasetError> {
        let (listing, chosen) = self.find_split(name).await?;
        let sizes = chosen.files.iter().filter_map(|name| listing.tree.files.get(name));
        let bytes = sizes.map(TreeFile::byte_count).fold(0, u64::saturating_add);
        let files = chosen.files.len() as u64;
        let too_large = |count, unit, limit| {
            let name = name.to_string();
            DatasetError::TooLarge { name, count, unit, limit }
        };
        let check = |count, unit, limit| match count > limit {
            true => Err(too_large(count, unit, limit)),
            false => Ok(()),
        };
        check(files, "files", FILES_MAX as u64)?;
        check(bytes, "bytes", bytes_max)?;
        let id = ModelId { repo: name.id.repo.clone(), revision: Some(listing.commit) };
        let (mut files, mut bytes) = (Vec::new(), 0_u64);
        for file in chosen.files {
            let (kind, rest) = (RepoKind::Dataset, bytes_max - bytes);
            let path = match self.download_repo_file(kind, &id, (&file, rest), seen.clone()).await {
                Err(HubError::TooLarge { bytes: size, .. }) => {
                    return Err(too_large(bytes.saturating_add(size), "bytes", bytes_max));
                }
                path => path?,
            };
            // The cache may have a file of another size than the hub lists.
            let written = fs::metadata(&path).await;
            let failed = |error: std::io::Error| HubError::for_download(&file, error.into());
            bytes = bytes.saturating_add(written.map_err(failed)?.len());
            check(bytes, "bytes", bytes_max)?;
            files.push((file, path));
        }
        let (config, split) = (Some(chosen.config), Some(chosen.split));
        Ok(DatasetSplit { pinned: DatasetName { id, config, split }, files })
    }

    async fn find_split(
        &self,
        name: &DatasetName,
    ) -> Result<(CommitListing, SplitFiles), DatasetError> {
        let failed = |source| DatasetError::Split { name: name.to_string(), source };
        if name.id.revision.is_none() {
            let converted =
                ModelId { revision: Some(CONVERTED_REVISION.to_owned()), ..name.id.clone() };
            match self.list_files(&converted).await {
                Ok(listing) => match choose_listed(&listing, name) {
                    Err(DatasetSplitError::Partial { .. } | DatasetSplitError::NoFiles) => {}
                    chosen => return Ok((listing, chosen.map_err(failed)?)),
                },
                Err(HubError::Missing { .. } | HubError::Offline) => {}
                // The cache has the other files if there was no conversion when they were fetched.
                Err(error) if error.is_transient() && self.has_listing(&name.id).await => {}
                Err(error) => return Err(error.into()),
            }
        }
        let listing = self.list_files(&name.id).await?;
        let chosen = choose_listed(&listing, name).map_err(failed)?;
        Ok((listing, chosen))
    }

    async fn has_listing(&self, id: &ModelId) -> bool {
        let cache = RepoCache::new(self.cache_path(), RepoKind::Dataset, &id.repo);
        read_cached_listing(&cache, revision_of(id)).await.is_some()
    }

    /// Returns the files of a revision, from the cache if the hub cannot be asked.
    async fn list_files(&self, id: &ModelId) -> Result<CommitListing, HubError> {
        let revision = revision_of(id);
        let cache = RepoCache::new(self.cache_path(), RepoKind::Dataset, &id.repo);
        let cached = read_cached_listing(&cache, revision).await;
        if self.is_offline() || (is_commit(revision) && cached.is_some()) {
            return cached.ok_or(HubError::Offline);
        }
        let what = format!("data set {id}");
        let listing = match self.request_listing(&id.repo, revision).await? {
            Ok(listing) => listing,
            Err(error) if error.is_transient() && cached.is_some() => {
                return cached.ok_or(HubError::Offline);
            }
            Err(error) => return Err(HubError::for_download(&what, error)),
        };
        let json = serde_json::to_vec(&listing.tree).expect("names and sizes are JSON");
        let written = async {
            cache.write_tree(&listing.commit, &json).await?;
            cache.write_ref(revision, &listing.commit).await
        };
        let failed = |error: std::io::Error| HubError::for_download(&what, error.into());
        written.await.map_err(failed)?;
        Ok(listing)
    }

    /// Fails at once if the hub must not be asked.
    async fn request_listing(
        &self,
        repo: &str,
        revision: &str,
    ) -> Result<Result<CommitListing, RequestError>, HubError> {
        let http = self.http().await?;
        let path = format!("api/datasets/{repo}/revision/{}", encode_component(revision));
        let mut url = http.hub_url(&path);
        url.set_query(Some("blobs=true"));
        let asked = async {
            let info: CommitInfo = http.get_json(url).await?;
            if !is_commit(&info.sha) {
                return Err("its answer has no usable commit; it may not be a hub".into());
            }
            Ok(info.into())
        };
        Ok(asked.await)
    }
}

fn choose_listed(
    listing: &CommitListing,
    name: &DatasetName,
) -> Result<SplitFiles, DatasetSplitError> {
    let names = listing.tree.files.keys();
    let names: Vec<String> = names.filter(|name| is_file_path(name)).cloned().collect();
    choose_split(&names, name)
}

async fn read_cached_listing(cache: &RepoCache, revision: &str) -> Option<CommitListing> {
    let commit = match is_commit(revision) {
        true => revision.to_owned(),
        false => cache.read_ref(revision).await?,
    };
    let json = cache.read_tree(&commit).await?;
    let tree: Option<CommitTree> = run_blocking(move || serde_json::from_slice(&json).ok()).await;
    let tree = tree.filter(|tree| tree.format_version == TREE_FORMAT_VERSION)?;
    Some(CommitListing { commit, tree })
}
