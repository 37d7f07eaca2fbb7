//! A running server of one base with the adapters of its channels: `llama-server`, or the embedded
//! engine in a process of its own. Both have the same HTTP API.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use anyhow::Context;
use completion_server::CompletionServerConfig;
use engine::LoraAdapter;
use formats::{FloatDtype, GgufModel, ModelConfig, ModelOutline, is_gguf};
use generator::{ConvertedBase, LlamaCppGenerator};
use llama::{LlamaServer, ServedModel, ServerAddress, ServerProgram};
use serde_json::value::{RawValue, to_raw_value};
use store::CachedTree;
use tokio::sync::oneshot;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use wire::RunId;

use crate::{
    hang_watch::{ActiveRequest, ProcessActivity, await_hang},
    placement::ServedModels,
    serving_engine::{EmbeddedServer, ServingEngine},
};

/// The name of its model that a process writes into answers, in place of the channel's.
pub(crate) const MODEL_ALIAS: &str = "flotilla-channel";

/// Interval at which the process is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The files of the models that a process loads.
pub(crate) struct ModelFiles {
    pub base: CachedTree,
    /// By channel, in the order in which the process numbers them.
    pub adapters: Vec<(RunId, CachedTree)>,
}

/// The channel whose adapter is the reason why models cannot be loaded, as the context of an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnusableAdapter(pub RunId);

impl std::fmt::Display for UnusableAdapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("its adapter cannot be loaded")
    }
}

/// The settings of a process.
#[derive(Debug, Clone)]
pub(crate) struct ProcessSettings {
    pub engine: ServingEngine,
    pub slots: u32,
    /// Maximum number of tokens of a conversation with its answer.
    pub context: u32,
    /// Directory for the socket and the converted adapters of this process alone.
    pub directory: PathBuf,
}

/// A process that answers requests. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct ModelProcess {
    pub models: ServedModels,
    pub slots: u32,
    /// True if it can answer with the log-probabilities of a prompt.
    pub echoes_prompts: bool,
    /// True if its completions have log-probabilities in OpenAI's form.
    pub writes_token_lists: bool,
    http: reqwest::Client,
    root: String,
    key: String,
    /// The channels with an adapter, in the order of the process's numbers.
    adapters: Vec<RunId>,
    activity: Arc<ProcessActivity>,
    has_room_for_second: Arc<AtomicBool>,
    hung: CancellationToken,
    ended: CancellationToken,
    _hang_watch: AbortOnDropHandle<()>,
    /// Closed when this is dropped, which ends the thread.
    _stop: mpsc::Sender<()>,
}

/// The address of a process that is ready.
struct ReadyServer {
    address: ServerAddress,
    key: String,
}

impl ModelProcess {
    /// Prepares the models, waits for `room`, and starts a process; returns once it is ready.
    ///
    /// # Errors
    /// The engine cannot use a model, or the process does not become ready.
    pub(crate) async fn start(
        settings: ProcessSettings,
        models: ServedModels,
        files: ModelFiles,
        room: impl Future<Output = ()>,
    ) -> anyhow::Result<Self> {
        let adapters: Vec<RunId> =
            files.adapters.iter().map(|(channel, _)| channel.clone()).collect();
        let serves_base = models.keys().any(|channel| !adapters.contains(channel));
        let base_key = models.values().next().map(|it| it.base.manifest.clone());
        let base_key = base_key.context("no model to serve (X101)")?;
        let (prepared, settings) = {
            let settings = settings.clone();
            let convert = move || {
                let prepared = match &settings.engine {
                    ServingEngine::LlamaCpp(llama) => PreparedModels::Converted(convert_models(
                        &settings, llama, &base_key, files,
                    )?),
                    ServingEngine::Embedded(_) => {
                        PreparedModels::Original(check_embedded(files, serves_base)?)
                    }
                };
                anyhow::Ok((prepared, settings))
            };
            tokio::task::spawn_blocking(convert).await.context("prepare the models")??
        };
        room.await;
        let (ready, is_ready) = oneshot::channel();
        let (stop, stopped) = mpsc::channel();
        let (has_room_for_second, ended) =
            (Arc::new(AtomicBool::new(false)), CancellationToken::new());
        let (slots, echoes_prompts) = (settings.slots, settings.engine.echoes_prompts());
        let writes_token_lists = settings.engine.writes_token_lists();
        let hang_limit = settings.engine.hang_limit();
        let (fits, over) = (has_room_for_second.clone(), ended.clone());
        // The process dies with the thread that started it.
        std::thread::Builder::new()
            .name("model-server".into())
            .spawn(move || {
                let _over = over.drop_guard();
                run_process(&settings, &prepared, ready, &stopped, &fits);
                // Its socket, key and converted adapters; what remains is removed at the next start.
                let _ = std::fs::remove_dir_all(&settings.directory);
            })
            .context("start a thread")?;
        let ready = is_ready.await.context("the thread of the model's process ended (X101)")??;
        let (http, root) = build_client(&ready.address)?;
        let (key, activity) = (ready.key, Arc::<ProcessActivity>::default());
        let hung = CancellationToken::new();
        let check = (http.clone(), format!("{root}/slots"), key.clone());
        let tokens = [hung.clone(), ended.clone()];
        let watch = end_hung_process(check, activity.clone(), hang_limit, tokens, stop.clone());
        let _hang_watch = AbortOnDropHandle::new(tokio::spawn(watch));
        Ok(Self {
            models,
            slots,
            echoes_prompts,
            writes_token_lists,
            http,
            root,
            key,
            adapters,
            activity,
            has_room_for_second,
            hung,
            ended,
            _hang_watch,
            _stop: stop,
        })
    }

    pub(crate) fn count_request(&self) -> ActiveRequest<'_> {
        self.activity.count_request()
    }

    pub(crate) fn active_requests(&self) -> u32 {
        self.activity.active_requests()
    }

    /// Returns true if the machine has memory for a second process like this one.
    pub(crate) fn has_room_for_second(&self) -> bool {
        self.has_room_for_second.load(Ordering::Relaxed)
    }

    /// Cancelled when the process hangs, so that no request to it is answered.
    pub(crate) fn hung(&self) -> &CancellationToken {
        &self.hung
    }

    /// Cancelled when the process has ended, or hangs.
    pub(crate) fn ended(&self) -> &CancellationToken {
        &self.ended
    }

    /// Sends a request for the model of a channel.
    pub(crate) async fn post(
        &self,
        channel: &RunId,
        path: &str,
        mut body: BTreeMap<String, Box<RawValue>>,
    ) -> reqwest::Result<reqwest::Response> {
        if !self.adapters.is_empty() {
            let scales = self.adapters.iter().enumerate().map(|(id, name)| {
                serde_json::json!({ "id": id, "scale": f64::from(u8::from(name == channel)) })
            });
            let scales = to_raw_value(&scales.collect::<Vec<_>>());
            body.insert("lora".into(), scales.expect("only numbers"));
        }
        let request = self.http.post(format!("{}{path}", self.root)).bearer_auth(&self.key);
        let body = serde_json::to_string(&body).expect("it was read from JSON");
        request.header("content-type", "application/json").body(body).send().await
    }
}

/// Returns a client of the process at an address, and the beginning of its URLs.
fn build_client(address: &ServerAddress) -> anyhow::Result<(reqwest::Client, String)> {
    // llama-server closes a connection after some requests, perhaps while the next one is sent.
    let client = bounded_http::client_builder().no_proxy().pool_max_idle_per_host(0);
    let (client, root) = match address {
        ServerAddress::Socket(path) => {
            (client.unix_socket(path.as_path()), "http://localhost".to_owned())
        }
        ServerAddress::Port(port) => (client, format!("http://127.0.0.1:{port}")),
    };
    Ok((client.build().context("set up the client of the model's process")?, root))
}

/// Waits until a process hangs, cancels the tokens, and asks the thread that started it to end it.
async fn end_hung_process(
    (http, url, key): (reqwest::Client, String, String),
    activity: Arc<ProcessActivity>,
    limit: Duration,
    tokens: [CancellationToken; 2],
    stop: mpsc::Sender<()>,
) {
    await_hang(&activity, || http.get(&url).bearer_auth(&key), limit).await;
    tracing::error!(?limit, "the model's process hangs and is ended");
    // At once: the kernel may be unable to end it.
    tokens.iter().for_each(CancellationToken::cancel);
    // The thread may have ended.
    let _ = stop.send(());
}

/// The models of a process in the form that its engine reads.
enum PreparedModels {
    Converted(ConvertedModels),
    Original(OriginalModels),
}

/// The models of a process as they are in the store.
struct OriginalModels {
    base: PathBuf,
    adapters: Vec<PathBuf>,
    /// True if a channel has the base without an adapter.
    serves_base: bool,
    /// Not evicted from the cache while they are in use.
    _files: ModelFiles,
}

/// The models of a process as GGUF files.
struct ConvertedModels {
    base: ConvertedBase,
    adapters: Vec<PathBuf>,
    /// Maximum number of tokens of a sequence that the base supports.
    positions: usize,
    /// Not evicted from the cache while they are in use.
    _files: ModelFiles,
}

/// Runs a process until it ends, or the other side of `stopped` is gone.
fn run_process(
    settings: &ProcessSettings,
    models: &PreparedModels,
    ready: oneshot::Sender<anyhow::Result<ReadyServer>>,
    stopped: &mpsc::Receiver<()>,
    has_room_for_second: &AtomicBool,
) {
    let mut server = match start_server(settings, models) {
        Ok(server) => server,
        Err(error) => {
            // The caller may have given up.
            let _ = ready.send(Err(error));
            return;
        }
    };
    has_room_for_second.store(server.has_room_for_second(), Ordering::Relaxed);
    let (address, key) = (server.listen_address().clone(), server.api_key().to_owned());
    if ready.send(Ok(ReadyServer { address, key })).is_err() {
        return;
    }
    while let Err(mpsc::RecvTimeoutError::Timeout) = stopped.recv_timeout(POLL_INTERVAL) {
        if let Some((ending, last_output)) = server.poll_exit() {
            tracing::error!(ending, last_output, "{} ended", server.program_name());
            return;
        }
        has_room_for_second.store(server.has_room_for_second(), Ordering::Relaxed);
    }
}

/// Fails if the embedded engine does not compute the base, or an adapter is not one of it.
fn check_embedded(files: ModelFiles, serves_base: bool) -> anyhow::Result<OriginalModels> {
    let base = files.base.path().to_owned();
    let config = if is_gguf(&base) {
        GgufModel::open(&base)?.model_config().clone()
    } else {
        let config = ModelConfig::from_dir(&base)?;
        config.require_embedded(&base).context(
            "this agent serves models with the embedded engine; install llama.cpp, or \
                         pass --llama-cpp DIR",
        )?;
        config
    };
    // Two channels may have the same adapter.
    let mut checked = BTreeSet::new();
    let distinct = files.adapters.iter().filter(|(_, adapter)| checked.insert(adapter.path()));
    for (channel, adapter) in distinct {
        // The process loads them as well, but would not say which of them it cannot use.
        LoraAdapter::load_peft(adapter.path(), &config)
            .with_context(|| UnusableAdapter(channel.clone()))?;
    }
    let adapters = files.adapters.iter().map(|(_, adapter)| adapter.path().to_owned()).collect();
    Ok(OriginalModels { base, adapters, serves_base, _files: files })
}

fn convert_models(
    settings: &ProcessSettings,
    llama: &LlamaCppGenerator,
    base_key: &str,
    files: ModelFiles,
) -> anyhow::Result<ConvertedModels> {
    let directory = &settings.directory;
    std::fs::create_dir_all(directory)
        .with_context(|| format!("create {}", directory.display()))?;
    let model = files.base.path();
    let positions = match is_gguf(model) {
        true => GgufModel::open(model)?.model_config().max_positions,
        false => ModelOutline::from_dir(model)?.max_positions,
    };
    let base = llama.convert_base(base_key, model, &mut || ())?;
    // Two channels may have the same adapter: it is converted once.
    let mut converted: BTreeMap<PathBuf, PathBuf> = BTreeMap::new();
    let mut adapters = Vec::new();
    for (channel, adapter) in &files.adapters {
        let path = adapter.path().to_owned();
        let gguf = match converted.get(&path) {
            Some(known) => known.clone(),
            None => {
                let file = directory.join(format!("adapter-{}.gguf", converted.len()));
                llama
                    .convert_adapter(model, &path, file, &mut || ())
                    .with_context(|| UnusableAdapter(channel.clone()))?
            }
        };
        converted.insert(path, gguf.clone());
        adapters.push(gguf);
    }
    Ok(ConvertedModels { base, adapters, positions, _files: files })
}

fn start_server(
    settings: &ProcessSettings,
    models: &PreparedModels,
) -> anyhow::Result<LlamaServer> {
    let (mut server, limit) = match (&settings.engine, models) {
        (ServingEngine::LlamaCpp(llama), PreparedModels::Converted(models)) => {
            (start_llama_server(settings, llama, models)?, llama.ready_limit)
        }
        (ServingEngine::Embedded(embedded), PreparedModels::Original(models)) => {
            (start_embedded_server(settings, embedded, models)?, embedded.ready_limit())
        }
        _ => anyhow::bail!("the models were prepared for another engine (X101)"),
    };
    server.wait_ready(limit, || ())?;
    Ok(server)
}

fn start_embedded_server(
    settings: &ProcessSettings,
    embedded: &EmbeddedServer,
    models: &OriginalModels,
) -> anyhow::Result<LlamaServer> {
    let size = |number| usize::try_from(number).unwrap_or(usize::MAX);
    let config = CompletionServerConfig {
        base: models.base.clone(),
        adapters: models.adapters.clone(),
        serves_base: models.serves_base,
        alias: MODEL_ALIAS.to_owned(),
        slots: size(settings.slots),
        context: size(settings.context),
    };
    let program: ServerProgram = embedded.server_program(&config)?;
    Ok(LlamaServer::start_program(&program, &settings.directory)?)
}

fn start_llama_server(
    settings: &ProcessSettings,
    llama: &LlamaCppGenerator,
    models: &ConvertedModels,
) -> anyhow::Result<LlamaServer> {
    let ProcessSettings { slots, context, directory, .. } = settings;
    let serve = ServedModel {
        base: &models.base.path,
        adapters: &models.adapters,
        adapter_by_request: true,
        alias: Some(MODEL_ALIAS),
        slots: *slots,
        context: u32::try_from(models.positions).unwrap_or(u32::MAX).min(*context),
        exact: llama.dtype == FloatDtype::F32,
        directory,
        states: directory,
    };
    Ok(LlamaServer::start(&llama.server, &serve)?)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_process_that_hangs_is_ended() {
        // It accepts requests, and answers none.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (http, root) = build_client(&ServerAddress::Port(port)).unwrap();
        let activity = Arc::<ProcessActivity>::default();
        let _request = activity.count_request();
        let tokens = [CancellationToken::new(), CancellationToken::new()];
        let (stop, stopped) = mpsc::channel();
        let check = (http, format!("{root}/slots"), "key".to_owned());
        let limit = Duration::from_millis(300);
        end_hung_process(check, activity.clone(), limit, tokens.clone(), stop).await;
        assert!(tokens.iter().all(CancellationToken::is_cancelled));
        assert_eq!(stopped.try_recv(), Ok(()), "its thread ends it");
    }
}
