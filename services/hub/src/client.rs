//! Files of models, by the hub's own client library, which reads `HF_ENDPOINT`, `HF_TOKEN` and
//! `HF_HOME` (and their kin) as Hugging Face's other tools do.

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

use crate::{ModelId, Revision};

/// A hub that sends nothing for so long is not waited for.
const SILENCE: Duration = Duration::from_secs(60);

/// A file's bytes as they come.
pub type Bytes = BoxStream<'static, Result<bytes::Bytes, HubError>>;

/// Told how many bytes of a file have come.
pub type Seen = Arc<dyn Fn(u64) + Send + Sync>;

/// The hub and its cache on this machine. Clones share one connection pool, which is set up
/// when something is first asked for.
#[derive(Clone)]
pub struct Hub {
    endpoint: Option<String>,
    cache: PathBuf,
    offline: bool,
    client: Arc<OnceCell<HFClient>>,
}

#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("HF_HUB_OFFLINE is set, so the hub is not asked (H101)")]
    Offline,
    #[error("set up the hub's client; check HF_ENDPOINT, HF_TOKEN and HF_HOME (H102)")]
    Settings(#[source] HFError),
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
    #[error("the hub sent nothing of {what} for {} s (H105)", SILENCE.as_secs())]
    Silent { what: String },
    #[error("fetch {what} from the hub (H105)")]
    Failed {
        what: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl HubError {
    /// Whether the same call may succeed later without anybody doing something.
    pub fn may_pass(&self) -> bool {
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

/// Where Hugging Face's tools keep what they download, on this machine.
pub fn cache_dir() -> PathBuf {
    hf_hub::resolve_cache_dir()
}

impl Hub {
    /// As the environment says. Touches no network.
    pub fn from_env() -> Self {
        let offline = std::env::var("HF_HUB_OFFLINE").unwrap_or_default().to_lowercase();
        Self {
            endpoint: None,
            cache: cache_dir(),
            offline: ["1", "on", "yes", "true"].contains(&offline.as_str()),
            client: Arc::default(),
        }
    }

    /// A hub at another address, with a cache of its own.
    pub fn at(endpoint: &str, cache: &Path) -> Self {
        Self {
            endpoint: Some(endpoint.to_owned()),
            cache: cache.to_owned(),
            offline: false,
            client: Arc::default(),
        }
    }

    /// Where its files are on this machine.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    async fn model(&self, repo: &str) -> Result<HFRepository<RepoTypeModel>, HubError> {
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

    /// The snapshot of a model in the cache, if its `config.json` is there.
    ///
    /// # Errors
    /// When the client cannot be set up.
    pub async fn cached(&self, id: &ModelId) -> Result<Option<PathBuf>, HubError> {
        let model = self.model(&id.repo).await?;
        let file = model
            .download_file()
            .filename("config.json")
            .maybe_revision(id.revision.clone())
            .local_files_only(true)
            .send()
            .await;
        Ok(file.ok().and_then(|file| Some(file.parent()?.to_owned())))
    }

    /// A file of a model in the cache, downloaded if it is not there.
    ///
    /// # Errors
    /// When the hub does not have it, refuses it, or cannot be reached.
    pub async fn file(&self, id: &ModelId, name: &str, seen: Seen) -> Result<PathBuf, HubError> {
        let what = format!("{name} of {id}");
        if self.offline {
            return Err(HubError::Offline);
        }
        let heard = Arc::new(Heard { count: AtomicU64::new(0), seen });
        let model = self.model(&id.repo).await?;
        let download = model
            .download_file()
            .filename(name)
            .maybe_revision(id.revision.clone())
            .progress(heard.clone())
            .send();
        let mut download = std::pin::pin!(download);
        loop {
            let before = heard.count.load(Ordering::Relaxed);
            match tokio::time::timeout(SILENCE, &mut download).await {
                Ok(done) => return done.map_err(|source| HubError::new(&what, source)),
                Err(_) if heard.count.load(Ordering::Relaxed) != before => {}
                Err(_) => return Err(HubError::Silent { what }),
            }
        }
    }

    /// A file's bytes from an offset on, without the cache. They are whoever's: compare their
    /// digest.
    ///
    /// # Errors
    /// When the hub does not have it, refuses it, or cannot be reached.
    pub async fn stream(
        &self,
        revision: &Revision,
        name: &str,
        (from, bytes): (u64, u64),
    ) -> Result<Bytes, HubError> {
        if self.offline {
            return Err(HubError::Offline);
        }
        let Revision { repo, commit } = revision;
        let what = format!("{name} of {repo}@{commit}");
        let model = self.model(repo).await?;
        let asked = model
            .download_file_stream()
            .filename(name)
            .revision(commit.clone())
            .maybe_range((from > 0).then_some(from..bytes))
            .send();
        let Ok(answered) = tokio::time::timeout(SILENCE, asked).await else {
            return Err(HubError::Silent { what });
        };
        let (_, chunks) = answered.map_err(|source| HubError::new(&what, source))?;
        Ok(futures::stream::unfold(Some((chunks, what)), next).boxed())
    }
}

type Chunks = Box<dyn Stream<Item = hf_hub::HFResult<bytes::Bytes>> + Send + Unpin>;
type Rest = Option<(Chunks, String)>;

/// The next chunk; an error is the last.
async fn next(rest: Rest) -> Option<(Result<bytes::Bytes, HubError>, Rest)> {
    let (mut chunks, what) = rest?;
    match tokio::time::timeout(SILENCE, chunks.next()).await {
        Ok(None) => None,
        Ok(Some(Ok(chunk))) => Some((Ok(chunk), Some((chunks, what)))),
        Ok(Some(Err(source))) => Some((Err(HubError::new(&what, source)), None)),
        Err(_) => Some((Err(HubError::Silent { what }), None)),
    }
}

/// Counts what a download says, to tell a slow one from a dead one.
struct Heard {
    count: AtomicU64,
    seen: Seen,
}

impl ProgressHandler for Heard {
    fn on_progress(&self, event: &ProgressEvent) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let ProgressEvent::Download(event) = event else { return };
        match event {
            DownloadEvent::Progress { files } => {
                files.iter().for_each(|file| (self.seen)(file.bytes_completed));
            }
            DownloadEvent::AggregateProgress { bytes_completed, .. } => {
                (self.seen)(*bytes_completed);
            }
            DownloadEvent::Start { .. } | DownloadEvent::Complete => {}
        }
    }
}
