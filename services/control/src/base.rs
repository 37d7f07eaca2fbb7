//! The model a run starts from: found, examined, and named by digest, before anything of it is
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
    Config, ConfigError, DirError, HubCache, SIDE_FILES, find_model, is_gguf, weight_files,
    weight_names,
};
use hub::{HubError, ModelId, Revision};
use store::{AdoptError, Digests, GetError, PutError, RelativePath, TreePlace, Upload};
use wire::v1;

use crate::{
    Control, StoreError,
    files::{FileError, Files},
    spec::UploadSpec,
    weights::{self, WeightsError},
};

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const INDEX: &str = "model.safetensors.index.json";

/// Largest configuration, tokenizer or index that is read from a store to be examined.
pub(crate) const SMALL_BYTES_MAX: u64 = 64 << 20;

/// What of a base is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// `downloading` or `hashing`.
    pub doing: &'static str,
    pub bytes: u64,
    /// 0 when that is not known.
    pub total: u64,
}

/// Told of transfers.
pub type Watch = Arc<dyn Fn(Transfer) + Send + Sync>;

/// Why a model cannot be the base of a run.
#[derive(Debug, thiserror::Error)]
pub enum BaseError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "{path} is a GGUF file, and a run trains, which needs the model as Hugging Face has it: \
         name that directory or org/name. A GGUF file can be measured with `flotilla eval local` \
         and sampled with `flotilla generate` (M102)"
    )]
    Gguf { path: String },
    #[error("{path} is not a directory (M101), and {reason}")]
    Nowhere { path: String, reason: hub::IdError },
    #[error("{path} has no {file}: it is not a complete model; {remedy} (M101)")]
    Incomplete { path: String, file: String, remedy: String },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Directory(#[from] DirError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(
        "{id} is no directory here, is not whole in this machine's Hugging Face cache, and could \
         not be downloaded; where the network allows, `hf download {id}`, or copy the model here and name its directory"
    )]
    Download {
        id: String,
        #[source]
        source: HubError,
    },
    #[error(
        "{0:?} lies where flotilla writes; name a directory of your own, or a base's tree (R110)"
    )]
    Ours(String),
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
    OpenStore(#[from] StoreError),
}

impl From<AdoptError> for BaseError {
    fn from(error: AdoptError) -> Self {
        match error {
            AdoptError::Get(error) => Self::Get(error),
            AdoptError::Put(error) => Self::Put(error),
        }
    }
}

impl BaseError {
    /// Whether the caller's spec or files are at fault, rather than the fleet.
    pub(crate) fn is_callers(&self) -> bool {
        match self {
            Self::Put(error) => !matches!(error, PutError::Fault(_)),
            Self::Get(error) => !error.may_pass(),
            Self::Stage(_) => false,
            _ => true,
        }
    }
}

/// A model on this machine.
struct Local {
    dir: PathBuf,
    /// What the store calls it.
    name: String,
    revision: Option<Revision>,
}

impl Control {
    /// The base that `model` names.
    pub(crate) async fn model(
        &self,
        name: &str,
        upload: UploadSpec,
        files: &Files,
        watch: &Watch,
    ) -> Result<v1::Base, BaseError> {
        let tree = match name.strip_prefix("store:") {
            Some(path) => self.stored(path, watch).await?,
            None => {
                let found = self.local(files.directory(name)?, name, watch).await?;
                let dir = found.dir.clone();
                let names = blocking(move || examine(&dir)).await?;
                self.publish(&found, &names, upload, watch).await?
            }
        };
        Ok(v1::Base { tree: Some(tree), random_init: false })
    }

    /// The directory of a model on this machine.
    pub(crate) fn snapshot_of(&self, path: &Path) -> Result<PathBuf, BaseError> {
        Ok(snapshot(path, self.hub.cache())?.dir)
    }

    async fn publish(
        &self,
        found: &Local,
        names: &[RelativePath],
        upload: UploadSpec,
        watch: &Watch,
    ) -> Result<v1::Tree, BaseError> {
        let place = TreePlace::model(&found.name).or_else(|_| TreePlace::model("model"));
        let place = place.expect("\"model\" is a legal name");
        let upload = match upload {
            UploadSpec::Auto => Upload::Missing,
            UploadSpec::Always => Upload::All,
            UploadSpec::Never => Upload::Nothing,
        };
        let sizes = names.iter().filter_map(|name| found.dir.join(name.as_str()).metadata().ok());
        let total = sizes.map(|meta| meta.len()).sum();
        let seen = meter("hashing", total, watch.clone());
        let digests = Arc::new(Digests::of_user());
        let revision = found.revision.clone();
        let store = self.store().await?;
        let files = (found.dir.as_path(), names);
        Ok(store.publish_base(files, &place, revision, upload, (digests, Arc::new(seen))).await?)
    }

    /// A directory, the hub's cache of a model, or a model of the hub.
    async fn local(&self, path: PathBuf, name: &str, watch: &Watch) -> Result<Local, BaseError> {
        if path.is_dir() {
            return snapshot(&path, self.hub.cache());
        }
        if is_gguf(&path) {
            return Err(BaseError::Gguf { path: path.display().to_string() });
        }
        match name.parse::<ModelId>() {
            Ok(id) => self.of_hub(&id, watch).await,
            Err(reason) => Err(BaseError::Nowhere { path: path.display().to_string(), reason }),
        }
    }

    async fn of_hub(&self, id: &ModelId, watch: &Watch) -> Result<Local, BaseError> {
        let failed = |source| BaseError::Download { id: id.to_string(), source };
        let of = |dir: PathBuf| {
            let name = id.repo.rsplit('/').next().unwrap_or("model").to_owned();
            Local { name, revision: Revision::of_snapshot(&dir), dir }
        };
        if let Some(dir) = self.hub.cached(id).await.map_err(failed)? {
            let examined = dir.clone();
            match blocking(move || examine(&examined)).await {
                // What is missing may yet come.
                Err(
                    BaseError::Incomplete { .. } | BaseError::Directory(_) | BaseError::Weights(_),
                ) => {}
                examined => return examined.map(|_| of(dir)),
            }
        }
        let fetch = async |name: &str| {
            let seen = watch.clone();
            let doing = "downloading";
            let seen = Arc::new(move |bytes| seen(Transfer { doing, bytes, total: 0 }));
            self.hub.file(id, name, seen).await
        };
        // What refuses the model comes before what is large.
        let config = match fetch(CONFIG).await {
            Err(HubError::Missing { .. }) if id.repo.to_lowercase().ends_with("gguf") => {
                return Err(BaseError::Gguf { path: id.to_string() });
            }
            config => config.map_err(failed)?,
        };
        let dir = config.parent().unwrap_or(&config).to_owned();
        Config::load(&dir)?;
        for name in SIDE_FILES.iter().chain([&INDEX]) {
            match fetch(name).await {
                Err(HubError::Missing { .. }) => {}
                fetched => fetched.map(drop).map_err(failed)?,
            }
        }
        require(&dir, TOKENIZER)?;
        for name in weight_names(&dir)? {
            fetch(&name).await.map_err(failed)?;
        }
        Ok(of(dir))
    }

    /// A directory of the store: a tree, or files that somebody copied there.
    async fn stored(&self, path: &str, watch: &Watch) -> Result<v1::Tree, BaseError> {
        let root = RelativePath::new(path.trim_end_matches('/'))?;
        let store = self.store().await?;
        let found = store.directory(&root).await?;
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
            && !names.contains_key(CONFIG)
        {
            return Err(BaseError::Gguf { path: format!("{}/{root}/{name}", store.url()) });
        }
        let ours = ["runs", "blobs"].contains(&root.as_str().split('/').next().unwrap_or(""));
        match &found.published {
            // It was examined when it was published, by whoever had the files.
            Some((tree, manifest)) if manifest.is_elsewhere() => return Ok(tree.clone()),
            None if ours => return Err(BaseError::Ours(path.to_owned())),
            _ => {}
        }
        let staged = tempfile::tempdir().map_err(BaseError::Stage)?;
        for name in [CONFIG, "generation_config.json", INDEX] {
            if !names.contains_key(name) {
                continue;
            }
            let bytes = store.small_file(&root, name, SMALL_BYTES_MAX).await?.unwrap_or_default();
            tokio::fs::write(staged.path().join(name), bytes).await.map_err(BaseError::Stage)?;
        }
        let url = format!("{}/{root}", store.url());
        let wanted = examine_listing(staged.path(), &names, &url)?;
        if let Some((tree, _)) = found.published {
            return Ok(tree);
        }
        let total = wanted.values().sum();
        let seen = meter("hashing", total, watch.clone());
        Ok(store.adopt(&root, &wanted, &seen).await?)
    }
}

/// Counts bytes up.
fn meter(doing: &'static str, total: u64, watch: Watch) -> impl Fn(u64) + Send + Sync + 'static {
    let done = AtomicU64::new(0);
    move |more| {
        let bytes = done.fetch_add(more, Ordering::Relaxed) + more;
        watch(Transfer { doing, bytes, total });
    }
}

/// A directory as it is, or the snapshot that the hub's cache of a model leads to.
fn snapshot(path: &Path, hub_cache: &Path) -> Result<Local, BaseError> {
    let name_of = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    if let (Some(gguf), false) =
        (gguf_in(path), path.join("snapshots").is_dir() || path.join(CONFIG).exists())
    {
        return Err(BaseError::Gguf { path: gguf.display().to_string() });
    }
    let dir = find_model(&path.to_string_lossy(), &HubCache::at(hub_cache))?;
    let revision = Revision::of_snapshot(&dir);
    let hub_name = revision.as_ref().and_then(|revision| revision.repo.rsplit('/').next());
    let name = hub_name.map(str::to_owned).or_else(|| name_of(&dir));
    Ok(Local { name: name.unwrap_or_else(|| "model".into()), revision, dir })
}

/// Whether the model can be trained here, and the names of its files.
fn examine(dir: &Path) -> Result<Vec<RelativePath>, BaseError> {
    Config::load(dir)?;
    require(dir, TOKENIZER)?;
    let mut names = BTreeSet::from([CONFIG.to_owned()]);
    let side = SIDE_FILES.iter().chain([&INDEX]).filter(|name| dir.join(name).exists());
    names.extend(side.map(|name| (*name).to_owned()));
    for file in weight_files(dir)? {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        weights::check(&file)?;
        names.insert(name);
    }
    names.into_iter().map(|name| Ok(RelativePath::new(name)?)).collect()
}

/// As [`examine`], of a listing; `staged` holds its small files.
fn examine_listing(
    staged: &Path,
    names: &BTreeMap<String, u64>,
    url: &str,
) -> Result<BTreeMap<String, u64>, BaseError> {
    let require = |name: &str| {
        let incomplete = || incomplete(url, name, "copy what is missing there");
        names.get(name).map(|bytes| (name.to_owned(), *bytes)).ok_or_else(incomplete)
    };
    let mut wanted = BTreeMap::from([require(CONFIG)?, require(TOKENIZER)?]);
    Config::load(staged)?;
    for name in weight_names(staged)? {
        let (name, bytes) = require(&name)?;
        wanted.insert(name, bytes);
    }
    let side = SIDE_FILES.iter().chain([&INDEX]);
    wanted.extend(side.filter_map(|name| require(name).ok()));
    Ok(wanted)
}

fn require(dir: &Path, name: &str) -> Result<(), BaseError> {
    if dir.join(name).is_file() {
        return Ok(());
    }
    let remedy = match Revision::of_snapshot(dir) {
        Some(Revision { repo, commit }) => format!("`hf download {repo} --revision {commit}`"),
        None => "copy or download what is missing".to_owned(),
    };
    Err(incomplete(&dir.display().to_string(), name, &remedy))
}

fn incomplete(path: &str, file: &str, remedy: &str) -> BaseError {
    BaseError::Incomplete { path: path.into(), file: file.into(), remedy: remedy.into() }
}

fn gguf_in(dir: &Path) -> Option<PathBuf> {
    std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).find(|path| is_gguf(path))
}

/// Off the runtime's own threads.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
