//! Loads the models and serves them until the process is ended.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context;
use chat_template::ChatTemplate;
use engine::{BatchGenerator, LoraAdapter, MatrixDtype, ModelTokenizer};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};

use crate::{
    api::{CompletionApi, ModelIndices, ModelLimits},
    batch::{BatchRequest, CompletionBatch, PromptTag},
    http::{ListenAddress, serve_requests},
};

/// Requests that may wait for a slot, as many as a gateway opens. Further ones are refused, and may
/// be sent to another agent.
const WAITING_MAX: usize = 1024;
/// Threads that read requests and write answers; the engine has its own.
const HTTP_THREADS: usize = 2;

/// A base, its adapters, among which requests choose, and the limits of a server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CompletionServerConfig {
    /// A model directory or a GGUF file.
    pub base: PathBuf,
    /// PEFT directories. Requests select an adapter by its index.
    pub adapters: Vec<PathBuf>,
    /// True if requests may use the base without an adapter.
    pub serves_base: bool,
    /// The name of the model in answers.
    pub alias: String,
    /// Number of samples that are drawn at once.
    pub slots: usize,
    /// Maximum number of tokens of a prompt with its answer; the model's own limit applies, too.
    pub context: usize,
}

/// Serves a base and its adapters with the embedded engine. It is ready when it listens.
///
/// # Errors
/// A model cannot be loaded, the address cannot be used, or the engine fails.
pub fn run_completion_server(
    config: &CompletionServerConfig,
    (device, dtype): (&str, MatrixDtype),
    address: &ListenAddress,
    key_file: &Path,
) -> anyhow::Result<()> {
    let key = std::fs::read_to_string(key_file);
    let key = key.with_context(|| format!("read {}", key_file.display()))?;
    let models = LoadedModels::load(config, device, dtype)?;
    let (requests, inbox) = mpsc::channel(WAITING_MAX);
    let (is_idle, batch_idle) = watch::channel(true);
    let api = models.open_api(config, requests, batch_idle)?;
    let batch = CompletionBatch::new(models.generators, api.tokenizer(), config.slots);
    let (ended, batch_end) = oneshot::channel();
    let draw = move || {
        // The receiver lives as long as the process.
        let _ = ended.send(batch.run(inbox, &is_idle));
    };
    std::thread::Builder::new().name("batch".into()).spawn(draw).context("start a thread")?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(HTTP_THREADS).enable_all().build();
    runtime.context("start the threads of the server")?.block_on(async {
        tokio::select! {
            served = serve_requests(Arc::new(api), address, key.trim()) => served,
            end = batch_end => end.context("the thread of the engine ended (X101)")?,
        }
    })
}

/// A loaded base with its adapters.
pub(crate) struct LoadedModels {
    pub generators: Vec<BatchGenerator<PromptTag>>,
    tokenizer: ModelTokenizer,
    indices: ModelIndices,
}

impl LoadedModels {
    /// Loads a base and its adapters. Models in f32 merge adapters: each needs memory for the matrices
    /// that its adapter changes.
    pub(crate) fn load(
        config: &CompletionServerConfig,
        device: &str,
        dtype: MatrixDtype,
    ) -> anyhow::Result<Self> {
        let (base, tokenizer) = engine::load_model(&config.base, None, device, dtype)?;
        let mut base = Some(base.into_packed()?);
        let mut generators = Vec::new();
        let mut add_model = |model| {
            generators.push(BatchGenerator::new(model, tokenizer.clone(), config.slots));
            generators.len() - 1
        };
        let distinct: BTreeSet<&PathBuf> = config.adapters.iter().collect();
        let mut known = BTreeMap::new();
        for (number, path) in distinct.iter().copied().enumerate() {
            let is_last = number + 1 == distinct.len() && !config.serves_base;
            let model = if is_last { base.take() } else { base.clone() };
            let model = model.context("the base is gone (X101)")?;
            let load = || {
                let adapter = LoraAdapter::load_peft(path, model.model_config())?;
                if dtype.merges_adapters() && !is_last {
                    model.check_room_for_copy()?;
                }
                anyhow::Ok(model.into_adapted(&adapter)?)
            };
            let adapted = load().with_context(|| format!("load {}", path.display()))?;
            known.insert(path, add_model(adapted));
        }
        let adapters = config.adapters.iter().map(|path| known[path]).collect();
        let base = base.filter(|_| config.serves_base).map(add_model);
        Ok(Self { generators, tokenizer, indices: ModelIndices { base, adapters } })
    }

    /// Creates the API of the models, which sends requests to their batch. `batch_idle` changes with
    /// each step of the batch.
    pub(crate) fn open_api(
        &self,
        config: &CompletionServerConfig,
        requests: mpsc::Sender<BatchRequest>,
        batch_idle: watch::Receiver<bool>,
    ) -> anyhow::Result<CompletionApi> {
        let model = self.generators.first();
        let model = model.context("neither the base nor an adapter is served (A102)")?;
        let limits = ModelLimits {
            context: config.context.min(model.max_positions()),
            vocab_size: model.vocab_size(),
        };
        let template = ChatTemplate::load(&config.base, jiff::Zoned::now);
        let api = CompletionApi::open(
            (config.alias.clone(), self.indices.clone()),
            self.tokenizer.clone(),
            template,
            limits,
            (requests, batch_idle),
        );
        api.context("read random bytes")
    }
}
