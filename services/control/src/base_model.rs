//! The model that a run starts from: found, examined and named by digest before any of its files is
//! stored.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use formats::{
    HubCache, ModelConfigError, ModelDirError, ModelOutline, SIDE_FILES, find_model, is_gguf,
    list_weight_files, list_weight_names, peft::AdapterSettingsError,
};
use hub::{HubError, ModelId, ModelRevision};
use spec::UploadSpec;
use store::{
    DigestCache, GetError, PutError, RegisterInPlaceError, RelativePath, TreePlace, UploadMode,
};
use wire::v1;

use crate::{
    FleetControl, StoreAccessError,
    safetensors_check::{self, WeightsError},
    spec_files::{SpecFileError, SpecFiles},
};

const CONFIG_FILE: &str = "config.json";
const TOKENIZER_FILE: &str = "tokenizer.json";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Bound for a configuration, tokenizer or index that is read from a store.
pub(crate) const SMALL_BYTES_MAX: u64 = 64 << 20;

/// The progress of a download or of hashing a base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferProgress {
    /// `downloading` or `hashing`.
    pub activity: &'static str,
    pub bytes: u64,
    /// 0 if the total is not known.
    pub total: u64,
}

/// A callback that receives the progress of transfers.
pub type TransferCallback = Arc<dyn Fn(TransferProgress) + Send + Sync>;

/// Returns a callback for transfers whose progress has no audience.
pub(crate) fn unwatched() -> TransferCallback {
    Arc::new(|_| ())
}

/// The reason why a model cannot be the base of a run.
#[derive(Debug, thiserror::Error)]
pub enum BaseError {
    #[error(transparent)]
    File(#[from] SpecFileError),
    #[error(
        "{path} is a GGUF file, and a run trains, which needs the model as Hugging Face has it: \
         name that directory or org/name. A GGUF file can be measured with `flotilla eval local` \
         and sampled with `flotilla generate` (M102)"
    )]
    Gguf { path: String },
    /// Neither a directory nor a model id.
    #[error("{path} is not a directory (M101), and {reason}")]
    NotFound { path: String, reason: hub::ModelIdError },
    #[error("{path} has no {file}: it is not a complete model; {remedy} (M101)")]
    Incomplete { path: String, file: String, remedy: String },
    #[error(transparent)]
    Config(#[from] ModelConfigError),
    #[error(transparent)]
    Directory(#[from] ModelDirError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Adapter(#[from] AdapterSettingsError),
    #[error(
        "{id} is not a directory here, is not complete in this machine's Hugging Face cache, and \
         could not be downloaded; where the network allows, `hf download {id}`, or copy the model \
         here and name its directory"
    )]
    Download {
        id: String,
        #[source]
        source: HubError,
    },
    #[error(
        "{0:?} lies where flotilla writes; name a directory of your own, or a base's tree (R110)"
    )]
    ReservedPath(String),
    #[error(transparent)]
    Name(#[from] store::PathError),
    #[error(
        "the store has no {path}; copy the model's directory there, or name one of this machine (R110)"
    )]
    NotStored { path: String },
    #[error("examine what is in the store")]
    Get(#[from] GetError),
    #[error("read or write the base's files")]
    Put(#[from] PutError),
    #[error("stage the model's files")]
    Stage(#[source] std::io::Error),
    #[error(transparent)]
    OpenStore(#[from] StoreAccessError),
}

impl From<RegisterInPlaceError> for BaseError {
    fn from(error: RegisterInPlaceError) -> Self {
        match error {
            RegisterInPlaceError::Get(error) => Self::Get(error),
            RegisterInPlaceError::Put(error) => Self::Put(error),
        }
    }
}

impl BaseError {
    /// Returns true if the caller's spec or files are at fault, rather than the fleet.
    pub(crate) fn is_caller_fault(&self) -> bool {
        match self {
            Self::Put(error) => !matches!(error, PutError::Storage(_)),
            Self::Get(error) => !error.is_transient(),
            Self::Stage(_) => false,
            _ => true,
        }
    }
}

struct LocalModel {
    dir: PathBuf,
    name: String,
    /// Set if the directory is a snapshot of the hub's cache.
    revision: Option<ModelRevision>,
}

/// A base in the store.
enum StoredModel {
    Published(v1::Tree),
    /// Not published yet, with the wanted files and their sizes.
    Files {
        root: RelativePath,
        files: BTreeMap<String, u64>,
    },
}

impl FleetControl {
    /// Resolves the name in `base.model` to a tree in the store. `store:PATH` names a directory of
    /// the store; any other name is a local directory, a directory of the hub's cache, or a model
    /// id of the hub. Such a model is examined and published first.
    pub(crate) async fn resolve_model(
        &self,
        name: &str,
        upload: UploadSpec,
        files: &SpecFiles,
        watch: &TransferCallback,
    ) -> Result<v1::Base, BaseError> {
        let tree = match name.strip_prefix("store:") {
            Some(path) => self.resolve_stored_model(path, watch).await?,
            None => {
                let found =
                    self.find_local_model(files.resolve_directory(name)?, name, watch).await?;
                let dir = found.dir.clone();
                let names = run_blocking(move || examine_model(&dir)).await?;
                self.publish_model(&found, &names, upload, watch).await?
            }
        };
        Ok(v1::Base { tree: Some(tree), random_init: false, adapter: None })
    }

    /// Fails as [`FleetControl::resolve_model`] does. Stores nothing; of a model that is only on the
    /// hub it downloads the small files.
    pub(crate) async fn check_model(&self, name: &str, files: &SpecFiles) -> Result<(), BaseError> {
        if let Some(path) = name.strip_prefix("store:") {
            return self.examine_stored_model(path).await.map(drop);
        }
        let path = files.resolve_directory(name)?;
        if let Some(id) = hub_model_id(&path, name)? {
            let is_cached = self.cached_hub_model(&id).await?.is_some();
            return if is_cached {
                Ok(())
            } else {
                self.fetch_hub_small_files(&id, &unwatched()).await.map(drop)
            };
        }
        let dir = local_model_dir(&path, self.hub.cache_path())?;
        run_blocking(move || examine_model(&dir)).await.map(drop)
    }

    async fn publish_model(
        &self,
        found: &LocalModel,
        names: &[RelativePath],
        upload: UploadSpec,
        watch: &TransferCallback,
    ) -> Result<v1::Tree, BaseError> {
        let place = TreePlace::for_model(&found.name).or_else(|_| TreePlace::for_model("model"));
        let place = place.expect("\"model\" is a legal name");
        let upload = match upload {
            UploadSpec::Auto => UploadMode::Missing,
            UploadSpec::Always => UploadMode::All,
            UploadSpec::Never => UploadMode::Nothing,
        };
        let sizes = names.iter().filter_map(|name| found.dir.join(name.as_str()).metadata().ok());
        let total = sizes.map(|meta| meta.len()).sum();
        let seen = byte_meter("hashing", total, watch.clone());
        let digests = Arc::new(DigestCache::for_user());
        let revision = found.revision.clone();
        let store = self.open_store().await?;
        let files = (found.dir.as_path(), names);
        Ok(store.publish_base(files, &place, revision, upload, (digests, Arc::new(seen))).await?)
    }

    async fn find_local_model(
        &self,
        path: PathBuf,
        name: &str,
        watch: &TransferCallback,
    ) -> Result<LocalModel, BaseError> {
        match hub_model_id(&path, name)? {
            Some(id) => self.fetch_hub_model(&id, watch).await,
            None => find_snapshot(&path, self.hub.cache_path()),
        }
    }

    /// Prefers the local cache if the model is complete there. The configuration and the small
    /// files are downloaded first, so that an unsuitable model is rejected before its weights.
    async fn fetch_hub_model(
        &self,
        id: &ModelId,
        watch: &TransferCallback,
    ) -> Result<LocalModel, BaseError> {
        let dir = match self.cached_hub_model(id).await? {
            Some(dir) => dir,
            None => {
                // The small files may rule the model out.
                let dir = self.fetch_hub_small_files(id, watch).await?;
                for name in list_weight_names(&dir)? {
                    self.fetch_hub_file(id, &name, watch)
                        .await
                        .map_err(|source| BaseError::Download { id: id.to_string(), source })?;
                }
                dir
            }
        };
        let name = id.repo.rsplit('/').next().unwrap_or("model").to_owned();
        Ok(LocalModel { name, revision: ModelRevision::from_snapshot_path(&dir), dir })
    }

    /// Returns the model's directory in the hub's cache if it is complete there. Fails if it is
    /// complete and cannot be trained.
    async fn cached_hub_model(&self, id: &ModelId) -> Result<Option<PathBuf>, BaseError> {
        let Some(dir) = self.hub.find_snapshot(id).await else { return Ok(None) };
        let examined = dir.clone();
        match run_blocking(move || examine_model(&examined)).await {
            // An incomplete cached model may be completed by a download.
            Err(BaseError::Incomplete { .. } | BaseError::Directory(_) | BaseError::Weights(_)) => {
                Ok(None)
            }
            examined => examined.map(|_| Some(dir)),
        }
    }

    pub(crate) async fn fetch_hub_file(
        &self,
        id: &ModelId,
        name: &str,
        watch: &TransferCallback,
    ) -> Result<PathBuf, HubError> {
        let (seen, doing) = (watch.clone(), "downloading");
        let seen =
            Arc::new(move |bytes| seen(TransferProgress { activity: doing, bytes, total: 0 }));
        self.hub.download_file(id, name, seen).await
    }

    /// Downloads all files of a model but its weights, and returns their directory. Fails if such a
    /// model cannot be trained.
    async fn fetch_hub_small_files(
        &self,
        id: &ModelId,
        watch: &TransferCallback,
    ) -> Result<PathBuf, BaseError> {
        let failed = |source| BaseError::Download { id: id.to_string(), source };
        let config = match self.fetch_hub_file(id, CONFIG_FILE, watch).await {
            Err(HubError::Missing { .. }) if id.repo.to_lowercase().ends_with("gguf") => {
                return Err(BaseError::Gguf { path: id.to_string() });
            }
            config => config.map_err(failed)?,
        };
        let dir = config.parent().unwrap_or(&config).to_owned();
        ModelOutline::from_dir(&dir)?;
        for name in SIDE_FILES.iter().chain([&INDEX_FILE]) {
            match self.fetch_hub_file(id, name, watch).await {
                Err(HubError::Missing { .. }) => {}
                fetched => fetched.map(drop).map_err(failed)?,
            }
        }
        require_file(&dir, TOKENIZER_FILE)?;
        // The settings of the tokenizer may name code.
        ModelOutline::from_dir(&dir)?;
        Ok(dir)
    }

    /// Registers files that a user copied to the store.
    async fn resolve_stored_model(
        &self,
        path: &str,
        watch: &TransferCallback,
    ) -> Result<v1::Tree, BaseError> {
        match self.examine_stored_model(path).await? {
            StoredModel::Published(tree) => Ok(tree),
            StoredModel::Files { root, files } => {
                let seen = byte_meter("hashing", files.values().sum(), watch.clone());
                Ok(self.open_store().await?.register_in_place(&root, &files, &seen).await?)
            }
        }
    }

    /// Accepts a published tree, or the files of a complete model that a user copied there.
    async fn examine_stored_model(&self, path: &str) -> Result<StoredModel, BaseError> {
        let root = RelativePath::new(path.trim_end_matches('/'))?;
        let store = self.open_store().await?;
        let found = store.read_directory(&root).await?;
        let names: BTreeMap<String, u64> = match &found.published {
            Some((_, manifest)) => {
                let files = manifest.files.iter();
                files.map(|file| (file.path.to_string(), file.bytes)).collect()
            }
            None => found.files.clone(),
        };
        if names.is_empty() {
            return Err(BaseError::NotStored { path: format!("{}/{root}", store.url()) });
        }
        if let Some(name) = names.keys().find(|name| name.ends_with(".gguf"))
            && !names.contains_key(CONFIG_FILE)
        {
            return Err(BaseError::Gguf { path: format!("{}/{root}/{name}", store.url()) });
        }
        let ours = ["runs", "blobs"].contains(&root.as_str().split('/').next().unwrap_or(""));
        match &found.published {
            // The publisher, who had the files, examined them at publication.
            Some((tree, manifest)) if manifest.is_external() => {
                return Ok(StoredModel::Published(tree.clone()));
            }
            None if ours => return Err(BaseError::ReservedPath(path.to_owned())),
            _ => {}
        }
        let staged = tempfile::tempdir().map_err(BaseError::Stage)?;
        for name in [CONFIG_FILE, "generation_config.json", "tokenizer_config.json", INDEX_FILE] {
            if !names.contains_key(name) {
                continue;
            }
            let bytes =
                store.read_small_file(&root, name, SMALL_BYTES_MAX).await?.unwrap_or_default();
            tokio::fs::write(staged.path().join(name), bytes).await.map_err(BaseError::Stage)?;
        }
        let url = format!("{}/{root}", store.url());
        let files = examine_listing(staged.path(), &names, &url)?;
        Ok(match found.published {
            Some((tree, _)) => StoredModel::Published(tree),
            None => StoredModel::Files { root, files },
        })
    }
}

/// Returns the hub's id of a model that is not a local directory. Fails if the name is neither.
fn hub_model_id(path: &Path, name: &str) -> Result<Option<ModelId>, BaseError> {
    if path.is_dir() {
        return Ok(None);
    }
    if is_gguf(path) {
        return Err(BaseError::Gguf { path: path.display().to_string() });
    }
    let not_found = |reason| BaseError::NotFound { path: path.display().to_string(), reason };
    name.parse::<ModelId>().map(Some).map_err(not_found)
}

fn byte_meter(
    doing: &'static str,
    total: u64,
    watch: TransferCallback,
) -> impl Fn(u64) + Send + Sync + 'static {
    let done = AtomicU64::new(0);
    move |more| {
        let bytes = done.fetch_add(more, Ordering::Relaxed) + more;
        watch(TransferProgress { activity: doing, bytes, total });
    }
}

/// Returns the directory of the model in a directory, which may be one of the hub's cache.
pub(crate) fn local_model_dir(path: &Path, hub_cache: &Path) -> Result<PathBuf, BaseError> {
    Ok(find_snapshot(path, hub_cache)?.dir)
}

/// Returns the model in a directory; for a model of the hub's cache, its snapshot. Fails with
/// [`BaseError::Gguf`] if there is only a GGUF model.
fn find_snapshot(path: &Path, hub_cache: &Path) -> Result<LocalModel, BaseError> {
    let name_of = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    if let (Some(gguf), false) =
        (find_gguf(path), path.join("snapshots").is_dir() || path.join(CONFIG_FILE).exists())
    {
        return Err(BaseError::Gguf { path: gguf.display().to_string() });
    }
    let dir = find_model(&path.to_string_lossy(), &HubCache::at_directory(hub_cache))?;
    let revision = ModelRevision::from_snapshot_path(&dir);
    let hub_name = revision.as_ref().and_then(|revision| revision.repo.rsplit('/').next());
    let name = hub_name.map(str::to_owned).or_else(|| name_of(&dir));
    Ok(LocalModel { name: name.unwrap_or_else(|| "model".into()), revision, dir })
}

/// Checks that a model's configuration, tokenizer and weights can be trained, and returns the names
/// of its files.
fn examine_model(dir: &Path) -> Result<Vec<RelativePath>, BaseError> {
    ModelOutline::from_dir(dir)?;
    require_file(dir, TOKENIZER_FILE)?;
    let mut names = BTreeSet::from([CONFIG_FILE.to_owned()]);
    let side = SIDE_FILES.iter().chain([&INDEX_FILE]).filter(|name| dir.join(name).exists());
    names.extend(side.map(|name| (*name).to_owned()));
    for file in list_weight_files(dir)? {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        safetensors_check::check_weights(&file)?;
        names.insert(name);
    }
    names.into_iter().map(|name| Ok(RelativePath::new(name)?)).collect()
}

/// Checks a listing as [`examine_model`] checks a directory, and returns the wanted files with
/// their sizes. `staged` contains the small files.
fn examine_listing(
    staged: &Path,
    names: &BTreeMap<String, u64>,
    url: &str,
) -> Result<BTreeMap<String, u64>, BaseError> {
    let require = |name: &str| {
        let incomplete = || incomplete_error(url, name, "copy what is missing there");
        names.get(name).map(|bytes| (name.to_owned(), *bytes)).ok_or_else(incomplete)
    };
    let mut wanted = BTreeMap::from([require(CONFIG_FILE)?, require(TOKENIZER_FILE)?]);
    ModelOutline::from_dir(staged)?;
    for name in list_weight_names(staged)? {
        let (name, bytes) = require(&name)?;
        wanted.insert(name, bytes);
    }
    let side = SIDE_FILES.iter().chain([&INDEX_FILE]);
    wanted.extend(side.filter_map(|name| require(name).ok()));
    Ok(wanted)
}

/// Fails with advice how to get the file.
fn require_file(dir: &Path, name: &str) -> Result<(), BaseError> {
    if dir.join(name).is_file() {
        return Ok(());
    }
    let remedy = match ModelRevision::from_snapshot_path(dir) {
        Some(ModelRevision { repo, commit }) => format!("`hf download {repo} --revision {commit}`"),
        None => "copy or download what is missing".to_owned(),
    };
    Err(incomplete_error(&dir.display().to_string(), name, &remedy))
}

fn incomplete_error(path: &str, file: &str, remedy: &str) -> BaseError {
    BaseError::Incomplete { path: path.into(), file: file.into(), remedy: remedy.into() }
}

fn find_gguf(dir: &Path) -> Option<PathBuf> {
    std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).find(|path| is_gguf(path))
}

/// Runs a function on a blocking thread. A panic continues in the caller.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
