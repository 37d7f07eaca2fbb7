//! The hub client. It reads `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and related variables, and shares
//! the cache with Hugging Face's tools.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use bounded_http::TransferPace;
use futures::{StreamExt, stream::BoxStream};
use reqwest::{Response, StatusCode};
use tokio::{fs, sync::OnceCell};

use crate::{
    ModelId, ModelRevision,
    error::{HubError, RequestError},
    hub_http::{FileMetadata, HubHttp, next_chunk},
    partial_blob::PartialBlob,
    repo_cache::{RepoCache, is_commit, is_file_path},
    repo_kind::RepoKind,
    settings::HubSettings,
};

const DEFAULT_REVISION: &str = "main";
const CONFIG_FILE: &str = "config.json";

pub type HubByteStream = BoxStream<'static, Result<bytes::Bytes, HubError>>;

/// A callback with the number of bytes downloaded of a file so far.
pub type BytesCallback = Arc<dyn Fn(u64) + Send + Sync>;

/// A client of the hub and of its cache on this machine. Clones share one connection pool, which is
/// set up at the first request.
#[derive(Clone)]
pub struct HubClient {
    settings: Arc<HubSettings>,
    http: Arc<OnceCell<HubHttp>>,
}

impl HubClient {
    /// Creates a client with the settings of the environment. Uses no network.
    pub fn from_env() -> Self {
        Self::new(HubSettings::from_variables(&|name| std::env::var_os(name)))
    }

    /// Creates a client of a hub at another address, with its own cache and without a token.
    pub fn with_endpoint(endpoint: &str, cache: &Path) -> Self {
        let (endpoint, cache) = (endpoint.to_owned(), cache.to_owned());
        Self::new(HubSettings { endpoint, token: None, cache, offline: false })
    }

    /// Returns a client with another token.
    pub fn with_token(&self, token: &str) -> Self {
        Self::new(HubSettings {
            token: Some(token.to_owned()),
            ..HubSettings::clone(&self.settings)
        })
    }

    fn new(settings: HubSettings) -> Self {
        Self { settings: Arc::new(settings), http: Arc::default() }
    }

    pub fn cache_path(&self) -> &Path {
        &self.settings.cache
    }

    /// Returns true if the hub must not be asked.
    pub(crate) fn is_offline(&self) -> bool {
        self.settings.offline
    }

    /// Fails if the hub must not be asked.
    pub(crate) async fn http(&self) -> Result<&HubHttp, HubError> {
        let HubSettings { endpoint, token, offline, .. } = &*self.settings;
        if *offline {
            return Err(HubError::Offline);
        }
        self.http.get_or_try_init(async || HubHttp::new(endpoint, token.as_deref())).await
    }

    /// Returns the snapshot directory of a model in the cache, if its `config.json` is there.
    pub async fn find_snapshot(&self, id: &ModelId) -> Option<PathBuf> {
        let cache = RepoCache::new(self.cache_path(), RepoKind::Model, &id.repo);
        let file = cache.find_file(revision_of(id), CONFIG_FILE).await?;
        Some(file.parent()?.to_owned())
    }

    /// Returns the path of a model's file in the cache, downloaded if it is missing. If the hub
    /// cannot be asked, this is the file that the cache has of the revision.
    pub async fn download_file(
        &self,
        id: &ModelId,
        name: &str,
        seen: BytesCallback,
    ) -> Result<PathBuf, HubError> {
        self.download_repo_file(RepoKind::Model, id, (name, u64::MAX), seen).await
    }

    /// Downloads a file of any repository with at most so many bytes, as
    /// [`HubClient::download_file`] does.
    pub(crate) async fn download_repo_file(
        &self,
        kind: RepoKind,
        id: &ModelId,
        (name, bytes_max): (&str, u64),
        seen: BytesCallback,
    ) -> Result<PathBuf, HubError> {
        let what = format!("{name} of {id}");
        let failed = |error| HubError::for_download(&what, error);
        if !is_file_path(name) {
            return Err(failed("it is not the path of a file".into()));
        }
        let revision = revision_of(id);
        let cache = RepoCache::new(self.cache_path(), kind, &id.repo);
        let cached = cache.find_file(revision, name).await;
        if let Some(path) = cached.clone().filter(|_| is_commit(revision) || self.settings.offline)
        {
            return Ok(path);
        }
        let http = self.http().await?;
        let metadata = match http.read_metadata(http.file_url(kind, &id.repo, revision, name)).await
        {
            Ok(metadata) => metadata,
            Err(error) => return cached.filter(|_| error.is_transient()).ok_or(failed(error)),
        };
        if metadata.size > bytes_max {
            return Err(HubError::TooLarge { what, bytes: metadata.size, limit: bytes_max });
        }
        fetch_blob(http, &cache, &metadata, &seen).await.map_err(failed)?;
        let linked = async {
            let path = cache.link_file(&metadata.commit, name, &metadata.etag).await?;
            cache.write_ref(revision, &metadata.commit).await?;
            Ok(path)
        };
        linked.await.map_err(|error: std::io::Error| failed(error.into()))
    }

    /// Streams a file from an offset, without the cache; the range is the offset and the file's
    /// size. The bytes are not verified: compare their digest.
    pub async fn stream_file(
        &self,
        revision: &ModelRevision,
        name: &str,
        (from, bytes): (u64, u64),
    ) -> Result<HubByteStream, HubError> {
        let ModelRevision { repo, commit } = revision;
        let what = format!("{name} of {repo}@{commit}");
        let http = self.http().await?;
        let url = http.file_url(RepoKind::Model, repo, commit, name);
        let opened = http.open_file(url, (from, Some(bytes))).await.and_then(|response| {
            if from > 0 && response.status() != StatusCode::PARTIAL_CONTENT {
                return Err("it cannot continue a download".into());
            }
            Ok(response)
        });
        let response = opened.map_err(|error| HubError::for_download(&what, error))?;
        let rest = Some((response, TransferPace::default(), what));
        Ok(futures::stream::unfold(rest, next_item).boxed())
    }
}

pub(crate) fn revision_of(id: &ModelId) -> &str {
    id.revision.as_deref().unwrap_or(DEFAULT_REVISION)
}

/// Downloads a blob unless the cache has it, with the lock that all tools use.
async fn fetch_blob(
    http: &HubHttp,
    cache: &RepoCache,
    metadata: &FileMetadata,
    seen: &BytesCallback,
) -> Result<(), RequestError> {
    let blob = cache.blob_path(&metadata.etag);
    if fs::try_exists(&blob).await? {
        return Ok(());
    }
    let lock = cache.lock_blob(&metadata.etag).await?;
    if fs::try_exists(&blob).await? {
        return Ok(());
    }
    let (path, described) = (blob.clone(), metadata.clone());
    let opened = run_blocking(move || PartialBlob::open(lock, &path, &described)).await;
    let mut partial = opened?;
    if !partial.is_complete() {
        let range = (partial.byte_count(), None);
        let mut response = http.open_file(metadata.location.clone(), range).await?;
        if response.status() != StatusCode::PARTIAL_CONTENT {
            partial = run_blocking(move || partial.restart()).await?;
        }
        let mut pace = TransferPace::default();
        while let Some(chunk) = next_chunk(&mut response, &mut pace).await? {
            partial = run_blocking(move || partial.append(&chunk)).await?;
            seen(partial.byte_count());
        }
    }
    run_blocking(move || partial.commit()).await
}

/// Runs work that blocks, outside of the threads of asynchronous tasks.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
    }
}

/// The answer, its pace and the description of the file; `None` after an error.
type DownloadRest = Option<(Response, TransferPace, String)>;

/// Returns the next chunk and the rest; an error is the last item.
async fn next_item(rest: DownloadRest) -> Option<(Result<bytes::Bytes, HubError>, DownloadRest)> {
    let (mut response, mut pace, what) = rest?;
    match next_chunk(&mut response, &mut pace).await {
        Ok(None) => None,
        Ok(Some(chunk)) => Some((Ok(chunk), Some((response, pace, what)))),
        Err(error) => Some((Err(HubError::for_download(&what, error)), None)),
    }
}
