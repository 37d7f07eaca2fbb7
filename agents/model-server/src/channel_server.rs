//! The loop that keeps the models of channels loaded and hands requests to them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use agent::TaskContext;
use anyhow::Context;
use bus::{Bus, LogEvent, ServingMessage, ServingRequest};
use futures::StreamExt;
use generator::LlamaCppGenerator;
use store::{FileCache, Store};
use tokio::{sync::mpsc, task::AbortHandle, time::Instant};
use wire::{AgentId, FactBody, FactKey, Pool, Record, RunId, v1};

use crate::{
    forwarding,
    model_process::{ModelFiles, ModelProcess, ProcessSettings},
    placement::{ServedModels, assign_models},
};

/// An agent that announced nothing for this long is gone; agents announce each second.
const AGENT_SILENCE_MAX: Duration = Duration::from_secs(10);
/// Time to hear of the other agents before channels with few replicas are assigned.
const DISCOVERY_TIME: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_secs(1);
/// Requests that end after the agent was asked to stop.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);
const RETRY_MIN: Duration = Duration::from_secs(5);
const RETRY_MAX: Duration = Duration::from_secs(300);
/// For a process whose memory the next one needs.
const END_LIMIT: Duration = Duration::from_secs(30);

/// The settings of an agent that serves models.
#[derive(Debug, Clone)]
pub struct ModelServerConfig {
    pub agent: AgentId,
    pub pool: Pool,
    /// How this host runs llama.cpp.
    pub llama: LlamaCppGenerator,
    /// Requests that a process answers at a time.
    pub slots: u32,
    /// Most tokens of a conversation with its answer.
    pub context: u32,
}

/// Serves the channels that are assigned to this agent until it is stopped. Models that cannot be
/// loaded are tried again, with growing pauses; the agent's status has the reason.
///
/// # Errors
/// The bus connection is closed for good, or the log was replaced.
pub async fn serve_channels(
    config: ModelServerConfig,
    bus: Bus,
    (store, cache): (Store, FileCache),
    context: TaskContext,
) -> anyhow::Result<()> {
    let filters = vec!["flotilla.*.channel.*".to_owned()];
    let mut moves = std::pin::pin!(bus.follow_facts(filters, 0));
    let mut statuses = bus.watch_statuses().await?;
    let mut requests = bus.receive_serving_requests(&config.agent).await?;
    let (loaded, mut loads) = mpsc::channel(1);
    let mut tick = tokio::time::interval(TICK);
    let mut server = ChannelServer::new(config, bus.clone(), (store, cache), loaded);
    loop {
        tokio::select! {
            () = context.stop.cancelled() => break,
            event = moves.next() => match event.context("the log ended (B102)")?? {
                LogEvent::Record(record) => server.apply_move(&record),
                LogEvent::CaughtUp => server.has_read_log = true,
                LogEvent::Unreadable { .. } => {}
            },
            Some(status) = statuses.next() => server.note_agent(&status),
            Some(message) = requests.next() => {
                server.handle_message(message);
                continue;
            }
            Some(outcome) = loads.recv() => server.finish_load(outcome),
            _ = tick.tick() => {}
        }
        server.start_due_load();
        context.status.report_served(server.served_channels());
        context.status.report_trouble(server.trouble());
    }
    // Gateways send new requests elsewhere.
    context.status.report_served(Vec::new());
    server.drain().await;
    Ok(())
}

/// The base and the models of a load, and the process or the reason of its failure.
type LoadOutcome = (String, ServedModels, anyhow::Result<ModelProcess>);

struct ChannelServer {
    config: ModelServerConfig,
    bus: Bus,
    files: (Store, FileCache),
    started: Instant,
    has_read_log: bool,
    /// The newest move of each channel.
    moves: BTreeMap<RunId, (u64, v1::ChannelMove)>,
    /// When each agent of the pool that can serve was last heard of.
    agents: HashMap<String, Instant>,
    /// By the manifest digest of the base.
    processes: BTreeMap<String, Arc<ModelProcess>>,
    failures: BTreeMap<String, LoadFailure>,
    loading: Option<String>,
    loaded: mpsc::Sender<LoadOutcome>,
    /// The processes started so far.
    process_count: u64,
    /// Requests that are being answered, by id.
    active: HashMap<String, AbortHandle>,
}

/// The reason why the models of a base are not served, and the time of the next attempt.
struct LoadFailure {
    models: ServedModels,
    message: String,
    pause: Duration,
    retry_at: Instant,
}

impl ChannelServer {
    fn new(
        config: ModelServerConfig,
        bus: Bus,
        files: (Store, FileCache),
        loaded: mpsc::Sender<LoadOutcome>,
    ) -> Self {
        Self {
            config,
            bus,
            files,
            started: Instant::now(),
            has_read_log: false,
            moves: BTreeMap::new(),
            agents: HashMap::new(),
            processes: BTreeMap::new(),
            failures: BTreeMap::new(),
            loading: None,
            loaded,
            process_count: 0,
            active: HashMap::new(),
        }
    }

    fn apply_move(&mut self, record: &Record) {
        let (FactKey::Channel { number }, FactBody::Channel(found)) =
            (&record.fact.subject.key, &record.fact.body)
        else {
            return;
        };
        let channel = &record.fact.subject.run;
        if self.moves.get(channel).is_none_or(|(known, _)| known < number) {
            self.moves.insert(channel.clone(), (*number, found.clone()));
        }
    }

    fn note_agent(&mut self, status: &v1::AgentStatus) {
        use v1::agent_status::State;
        let serves = status.pool == self.config.pool.as_str()
            && status.roles.iter().any(|role| role == "server")
            && !matches!(status.state(), State::Stopped | State::Draining);
        if serves {
            self.agents.insert(status.agent.clone(), Instant::now());
        } else {
            self.agents.remove(&status.agent);
        }
    }

    /// Returns what this agent should serve now.
    fn wanted_models(&mut self) -> BTreeMap<String, ServedModels> {
        self.agents.retain(|_, seen| seen.elapsed() < AGENT_SILENCE_MAX);
        let mut agents: BTreeSet<String> = self.agents.keys().cloned().collect();
        agents.insert(self.config.agent.to_string());
        assign_models(&self.moves, (&self.config.agent, &self.config.pool), &agents)
    }

    /// Ends what is no longer wanted, and starts to load what is, one base at a time.
    fn start_due_load(&mut self) {
        if !self.has_read_log || self.started.elapsed() < DISCOVERY_TIME {
            return;
        }
        let wanted = self.wanted_models();
        self.processes
            .retain(|base, process| wanted.contains_key(base) && !process.ended().is_cancelled());
        self.failures.retain(|base, failure| wanted.get(base) == Some(&failure.models));
        if self.loading.is_some() {
            return;
        }
        let due = wanted.into_iter().find(|(base, models)| {
            let is_loaded = self.processes.get(base).is_some_and(|it| it.models == *models);
            let waits = self.failures.get(base).is_some_and(|it| Instant::now() < it.retry_at);
            !is_loaded && !waits
        });
        if let Some((base, models)) = due {
            self.start_load(base, models);
        }
    }

    fn start_load(&mut self, base: String, models: ServedModels) {
        self.process_count += 1;
        self.loading = Some(base.clone());
        let settings = ProcessSettings {
            llama: self.config.llama.clone(),
            slots: self.config.slots,
            context: self.config.context,
            directory: self.config.llama.directory.join((self.process_count % 16).to_string()),
        };
        // Without memory for both, the old process ends first.
        let in_the_way = self.processes.get(&base).filter(|old| !old.fits_twice());
        let gone = in_the_way.map(|old| old.ended().clone());
        if gone.is_some() {
            self.processes.remove(&base);
        }
        let (files, loaded) = (self.files.clone(), self.loaded.clone());
        tokio::spawn(async move {
            if let Some(gone) = gone {
                // If it does not end, the new one may fail, and is tried again.
                let _ = tokio::time::timeout(END_LIMIT, gone.cancelled()).await;
            }
            let wanted = models.clone();
            let load = tokio::spawn(async move {
                let files = fetch_files(&files, &wanted).await?;
                ModelProcess::start(settings, wanted, files).await
            });
            let outcome = load.await.unwrap_or_else(|panic| Err(panic.into()));
            // The receiver is gone if the agent stops.
            let _ = loaded.send((base, models, outcome)).await;
        });
    }

    fn finish_load(&mut self, (base, models, outcome): LoadOutcome) {
        self.loading = None;
        match outcome {
            Ok(process) => {
                let channels: Vec<&str> = models.keys().map(RunId::as_str).collect();
                tracing::info!(channels = channels.join(", "), "serving");
                self.failures.remove(&base);
                // The old process ends after the last of its answers.
                self.processes.insert(base, Arc::new(process));
            }
            Err(error) => {
                let message = format!("{error:#}");
                tracing::warn!(error = message, "a model cannot be served; trying again later");
                let last = self.failures.get(&base).map(|it| it.pause * 2);
                let pause = last.unwrap_or(RETRY_MIN).min(RETRY_MAX);
                let retry_at = Instant::now() + pause;
                self.failures.insert(base, LoadFailure { models, message, pause, retry_at });
            }
        }
    }

    fn handle_message(&mut self, message: ServingMessage) {
        self.active.retain(|_, task| !task.is_finished());
        match message {
            ServingMessage::Cancel { id } => {
                if let Some(task) = self.active.remove(&id) {
                    task.abort();
                }
            }
            ServingMessage::Request(request) => self.start_answer(request),
        }
    }

    fn start_answer(&mut self, request: ServingRequest) {
        let answer = self.bus.open_answer(&self.config.agent, &request.id);
        let process = RunId::new(request.channel.as_str()).ok().and_then(|channel| {
            let process = self.processes.values().find(|it| it.models.contains_key(&channel))?;
            Some((channel, process.clone()))
        });
        let id = request.id.clone();
        let task = tokio::spawn(async move {
            let sent = match process {
                Some((channel, process)) => {
                    forwarding::answer_request(&process, &channel, &request, &answer).await
                }
                None => {
                    let message = format!("{} is not loaded here", request.channel);
                    answer.send_part(bus::AnswerPart::Refused { message }).await
                }
            };
            if let Err(error) = sent {
                tracing::warn!(%error, "answering a request");
            }
        });
        self.active.insert(id, task.abort_handle());
    }

    fn served_channels(&self) -> Vec<v1::ServedChannel> {
        let loaded = self.processes.values().flat_map(|process| {
            let (slots, active) = (process.slots, process.active_requests());
            process.models.iter().map(move |(channel, model)| v1::ServedChannel {
                channel: channel.to_string(),
                number: model.number,
                slots,
                active,
                error: String::new(),
            })
        });
        let mut served: Vec<v1::ServedChannel> = loaded.collect();
        for failure in self.failures.values() {
            for channel in failure.models.keys() {
                let error = failure.message.clone();
                match served.iter_mut().find(|it| it.channel == channel.as_str()) {
                    Some(known) => known.error = error,
                    None => {
                        let channel = channel.to_string();
                        served.push(v1::ServedChannel { channel, error, ..Default::default() });
                    }
                }
            }
        }
        served
    }

    fn trouble(&self) -> Option<String> {
        let failure = self.failures.values().next()?;
        let channels: Vec<&str> = failure.models.keys().map(RunId::as_str).collect();
        Some(format!("cannot serve {}: {}", channels.join(", "), failure.message))
    }

    /// Waits for the answers that have begun, within a limit.
    async fn drain(&mut self) {
        let until = Instant::now() + DRAIN_LIMIT;
        while Instant::now() < until && self.active.values().any(|task| !task.is_finished()) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.active.values().for_each(AbortHandle::abort);
        let ended: Vec<_> = self.processes.values().map(|it| it.ended().clone()).collect();
        self.processes.clear();
        for ended in ended {
            // Its socket is removed when it ends; the kernel ends it in any case.
            let _ = tokio::time::timeout_at(until, ended.cancelled()).await;
        }
    }
}

/// Fetches the base and the adapters of models into the cache.
async fn fetch_files(
    (store, cache): &(Store, FileCache),
    models: &ServedModels,
) -> anyhow::Result<ModelFiles> {
    let base = models.values().next().map(|it| &it.base).context("no model to serve (X101)")?;
    let base = cache.fetch_tree(store, base).await?;
    let mut adapters = Vec::new();
    for (channel, model) in models {
        if let Some(adapter) = &model.adapter {
            adapters.push((channel.clone(), cache.fetch_tree(store, adapter).await?));
        }
    }
    Ok(ModelFiles { base, adapters })
}
