//! The hub client. It uses the hub's own library, which reads `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME`
//! and related variables as Hugging Face's other tools do.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{Stream, StreamExt, stream::BoxStream};
use hf_hub::{
    HFClient, HFError, HFRepository,
    progress::{DownloadEvent, ProgressEvent, ProgressHandler},
    repository::RepoTypeModel,
};
use tokio::sync::OnceCell;

use crate::{ModelId, ModelRevision};

/// The longest time without data.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);

pub type HubByteStream = BoxStream<'static, Result<bytes::Bytes, HubError>>;

/// A callback with the number of bytes downloaded of a file so far.
pub type BytesCallback = Arc<dyn Fn(u64) + Send + Sync>;

/// A client of the hub and of its cache on this machine. Clones share one connection pool, which is
/// set up at the first request.
#[derive(Clone)]
pub struct HubClient {
    endpoint: Option<String>,
    cache: PathBuf,
    offline: bool,
    client: Arc<OnceCell<HFClient>>,
}

/// The reason why the hub did not deliver a file.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("HF_HUB_OFFLINE is set, so the hub is not asked (H101)")]
    Offline,
    #[error("set up the hub's client; check HF_ENDPOINT, HF_TOKEN and HF_HOME (H102)")]
    Settings(#[source] HFError),
    /// Or hidden from this token.
    #[error("the hub has no {what} (or HF_TOKEN may not see it) (H103)")]
    Missing {
        what: String,
        #[source]
        source: HFError,
    },
    #[error(
        "the hub refuses {what}: accept the model's licence on its page, and set HF_TOKEN (H104)"
    )]
    Refused {
        what: String,
        #[source]
        source: HFError,
    },
    #[error("the hub sent nothing of {what} for {} s (H105)", SILENCE_TIMEOUT.as_secs())]
    Silent { what: String },
    #[error("fetch {what} from the hub (H105)")]
    Failed {
        what: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl HubError {
    /// Returns true if the same call may succeed later without a change by the user.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Silent { .. } | Self::Failed { .. })
    }

    fn new(what: &str, source: HFError) -> Self {
        let what = what.to_owned();
        match source {
            HFError::RepoNotFound { .. }
            | HFError::RevisionNotFound { .. }
            | HFError::EntryNotFound { .. }
            | HFError::LocalEntryNotFound { .. } => Self::Missing { what, source },
            HFError::AuthRequired { .. } | HFError::Forbidden { .. } => {
                Self::Refused { what, source }
            }
            HFError::Request { source, .. } => Self::Failed { what, source: source.into() },
            source => Self::Failed { what, source: source.into() },
        }
    }
}

/// Returns the directory in which Hugging Face's tools keep downloads on this machine.
pub fn hub_cache_dir() -> PathBuf {
    hf_hub::resolve_cache_dir()
}

impl HubClient {
    /// Creates a client with the settings of the environment. Uses no network.
    pub fn from_env() -> Self {
        let offline = std::env::var("HF_HUB_OFFLINE").unwrap_or_default().to_lowercase();
        Self {
            endpoint: None,
            cache: hub_cache_dir(),
            offline: ["1", "on", "yes", "true"].contains(&offline.as_str()),
            client: Arc::default(),
        }
    }

    /// Creates a client of a hub at another address, with its own cache.
    pub fn with_endpoint(endpoint: &str, cache: &Path) -> Self {
        Self {
            endpoint: Some(endpoint.to_owned()),
            cache: cache.to_owned(),
            offline: false,
            client: Arc::default(),
        }
    }

    pub fn cache_path(&self) -> &Path {
        &self.cache
    }

    async fn model_repository(&self, repo: &str) -> Result<HFRepository<RepoTypeModel>, HubError> {
        let build = async || {
            let mut builder = HFClient::builder().cache_dir(&self.cache);
            if let Some(endpoint) = &self.endpoint {
                builder = builder.endpoint(endpoint);
            }
            builder.build().map_err(HubError::Settings)
        };
        let client = self.client.get_or_try_init(build).await?;
        let (owner, name) = hf_hub::split_id(repo);
        Ok(client.model(owner, name))
    }

    /// Returns the snapshot directory of a model in the cache, if its `config.json` is there.
    pub async fn find_snapshot(&self, id: &ModelId) -> Result<Option<PathBuf>, HubError> {
        let model = self.model_repository(&id.repo).await?;
        let file = model
            .download_file()
            .filename("config.json")
            .maybe_revision(id.revision.clone())
            .local_files_only(true)
            .send()
            .await;
        Ok(file.ok().and_then(|file| Some(file.parent()?.to_owned())))
    }

    /// Returns the path of a model's file in the cache, downloaded if it is missing.
    pub async fn download_file(
        &self,
        id: &ModelId,
        name: &str,
        seen: BytesCallback,
    ) -> Result<PathBuf, HubError> {
        let what = format!("{name} of {id}");
        if self.offline {
            return Err(HubError::Offline);
        }
        let progress =
            Arc::new(DownloadProgress { event_count: AtomicU64::new(0), on_bytes: seen });
        let model = self.model_repository(&id.repo).await?;
        let download = model
            .download_file()
            .filename(name)
            .maybe_revision(id.revision.clone())
            .progress(progress.clone())
            .send();
        let mut download = std::pin::pin!(download);
        loop {
            let before = progress.event_count.load(Ordering::Relaxed);
            match tokio::time::timeout(SILENCE_TIMEOUT, &mut download).await {
                Ok(done) => return done.map_err(|source| HubError::new(&what, source)),
                Err(_) if progress.event_count.load(Ordering::Relaxed) != before => {}
                Err(_) => return Err(HubError::Silent { what }),
            }
        }
    }

    /// Streams a file from an offset, without the cache; the range is the offset and the file's
    /// size. The bytes are not verified: compare their digest.
    pub async fn stream_file(
        &self,
        revision: &ModelRevision,
        name: &str,
        (from, bytes): (u64, u64),
    ) -> Result<HubByteStream, HubError> {
        if self.offline {
            return Err(HubError::Offline);
        }
        let ModelRevision { repo, commit } = revision;
        let what = format!("{name} of {repo}@{commit}");
        let model = self.model_repository(repo).await?;
        let asked = model
            .download_file_stream()
            .filename(name)
            .revision(commit.clone())
            .maybe_range((from > 0).then_some(from..bytes))
            .send();
        let Ok(answered) = tokio::time::timeout(SILENCE_TIMEOUT, asked).await else {
            return Err(HubError::Silent { what });
        };
        let (_, chunks) = answered.map_err(|source| HubError::new(&what, source))?;
        Ok(futures::stream::unfold(Some((chunks, what)), next_chunk).boxed())
    }
}

type HubChunks = Box<dyn Stream<Item = hf_hub::HFResult<bytes::Bytes>> + Send + Unpin>;
/// The remaining chunks and the description of the file; `None` after an error.
type DownloadRest = Option<(HubChunks, String)>;

/// Returns the next chunk and the rest; an error is the last item.
async fn next_chunk(rest: DownloadRest) -> Option<(Result<bytes::Bytes, HubError>, DownloadRest)> {
    let (mut chunks, what) = rest?;
    match tokio::time::timeout(SILENCE_TIMEOUT, chunks.next()).await {
        Ok(None) => None,
        Ok(Some(Ok(chunk))) => Some((Ok(chunk), Some((chunks, what)))),
        Ok(Some(Err(source))) => Some((Err(HubError::new(&what, source)), None)),
        Err(_) => Some((Err(HubError::Silent { what }), None)),
    }
}

/// Counts a download's events, to distinguish a slow download from a dead one.
struct DownloadProgress {
    event_count: AtomicU64,
    on_bytes: BytesCallback,
}

impl ProgressHandler for DownloadProgress {
    fn on_progress(&self, event: &ProgressEvent) {
        self.event_count.fetch_add(1, Ordering::Relaxed);
        let ProgressEvent::Download(event) = event else { return };
        match event {
            DownloadEvent::Progress { files } => {
                files.iter().for_each(|file| (self.on_bytes)(file.bytes_completed));
            }
            DownloadEvent::AggregateProgress { bytes_completed, .. } => {
                (self.on_bytes)(*bytes_completed);
            }
            DownloadEvent::Start { .. } | DownloadEvent::Complete => {}
        }
    }
}
