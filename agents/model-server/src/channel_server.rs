//! The loop that loads the models of channels and forwards requests to them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use agent::TaskContext;
use anyhow::Context;
use bus::{AnswerPart, AnswerSender, Bus, LogEvent, ServingMessage, ServingRequest};
use futures::{StreamExt, stream::BoxStream};
use store::{FileCache, Store};
use tokio::{
    sync::mpsc,
    task::AbortHandle,
    time::{Instant, sleep, timeout_at},
};
use tokio_util::sync::CancellationToken;
use wire::{AgentId, FactBody, FactKey, Pool, Record, RunId, v1};

use crate::{
    forwarding,
    model_process::{ModelFiles, ModelProcess, ProcessSettings, UnusableAdapter},
    placement::{
        ChannelModel, ServedModels, ServingAgent, ServingAgents, assign_models, has_weights_of_all,
        have_same_weights, is_awaited, is_for_others, is_replaced, keep_served_models,
    },
    serving_engine::ServingEngine,
};

/// An agent that announced nothing for this long is gone; agents announce each second.
const AGENT_SILENCE_MAX: Duration = Duration::from_secs(10);
/// Time to learn of the other agents before channels with few replicas are assigned.
const DISCOVERY_TIME: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_secs(1);
/// Time for the answers that have begun when the agent is drained.
const DRAIN_LIMIT: Duration = Duration::from_secs(600);
/// Time for them when the agent is stopped: a supervisor kills it after 8 seconds.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// Time for the ends of the processes after the last answer.
const PROCESS_END_LIMIT: Duration = Duration::from_secs(2);
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// A process that ran longer did not end because of its models.
const STABLE_TIME: Duration = Duration::from_secs(120);
/// The beginning of an error that the status of a channel has.
const SHOWN_ERROR_BYTES_MAX: usize = 256;
const RETRY_MIN: Duration = Duration::from_secs(5);
const RETRY_MAX: Duration = Duration::from_secs(300);
/// Time limit for the end of a process whose memory the next one needs.
const END_LIMIT: Duration = Duration::from_secs(30);

/// The settings of an agent that serves models.
#[derive(Debug, Clone)]
pub struct ModelServerConfig {
    pub agent: AgentId,
    pub pool: Pool,
    pub engine: ServingEngine,
    /// Directory for sockets, keys and converted adapters; emptied at the start.
    pub directory: PathBuf,
    /// Requests that a process answers at a time.
    pub slots: u32,
    /// Maximum number of tokens of a conversation with its answer.
    pub context: u32,
}

/// Serves the channels that are assigned to this agent until it is drained or stopped. Models that
/// cannot be loaded are tried again, with growing pauses; the agent's status has the reason.
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
    // Sockets and keys of processes that died with an earlier agent; a missing directory has none.
    let _ = std::fs::remove_dir_all(&config.directory);
    let (loaded, mut loads) = mpsc::channel(1);
    let mut tick = tokio::time::interval(TICK);
    let mut server = ChannelServer::new(config, bus.clone(), (store, cache), loaded);
    loop {
        tokio::select! {
            () = context.drain.cancelled() => break,
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
            Some(event) = loads.recv() => server.handle_load(event),
            _ = tick.tick() => {}
        }
        server.start_due_load();
        context.status.report_served(server.served_channels());
        context.status.report_trouble(server.trouble());
    }
    // Gateways send new requests elsewhere.
    context.status.report_served(Vec::new());
    // A process that becomes ready now ends.
    drop((loads, statuses));
    server.drain(&mut requests, &context.stop).await;
    Ok(())
}

/// A message from a task that loads the models of a base.
enum LoadEvent {
    /// The files are converted; the processes of these bases, which are in the way, may end now.
    Prepared(Vec<String>),
    /// The process, or the reason of its failure.
    Ended(String, ServedModels, Box<anyhow::Result<ModelProcess>>),
}

/// A request that is being answered.
struct ActiveAnswer {
    task: AbortHandle,
    answer: AnswerSender,
}

struct ChannelServer {
    config: ModelServerConfig,
    bus: Bus,
    files: (Store, FileCache),
    started: Instant,
    has_read_log: bool,
    /// The newest move of each channel.
    moves: BTreeMap<RunId, (u64, v1::ChannelMove)>,
    /// When each agent of the pool that can serve was last heard of, and what it announced.
    agents: HashMap<String, (Instant, ServingAgent)>,
    /// By the manifest digest of the base.
    processes: BTreeMap<String, RunningProcess>,
    /// By the manifest digest of the base, and the channel if its adapter alone is the reason.
    failures: BTreeMap<(String, Option<RunId>), LoadFailure>,
    loading: Option<String>,
    loaded: mpsc::Sender<LoadEvent>,
    /// The processes started so far.
    process_count: u64,
    /// Requests that are being answered, by id.
    active: HashMap<String, ActiveAnswer>,
}

/// A process, and when it became ready.
struct RunningProcess {
    process: Arc<ModelProcess>,
    since: Instant,
}

/// The reason why models of a base are not served, and the time of the next attempt.
struct LoadFailure {
    models: ServedModels,
    message: String,
    pause: Duration,
    retry_at: Instant,
    /// False once the models are loaded again.
    is_current: bool,
}

impl LoadFailure {
    fn is_waiting(&self) -> bool {
        self.is_current && Instant::now() < self.retry_at
    }
}

impl ChannelServer {
    fn new(
        config: ModelServerConfig,
        bus: Bus,
        files: (Store, FileCache),
        loaded: mpsc::Sender<LoadEvent>,
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
            let failed = status.served.iter().filter(|it| !it.error.is_empty());
            let loaded = status.served.iter().map(|it| (it.channel.clone(), it.number));
            let agent = ServingAgent {
                failed: failed.map(|it| it.channel.clone()).collect(),
                loaded: loaded.collect(),
            };
            self.agents.insert(status.agent.clone(), (Instant::now(), agent));
        } else {
            self.agents.remove(&status.agent);
        }
    }

    /// Returns the agents of the pool that serve channels now, this one included.
    fn serving_agents(&mut self) -> ServingAgents {
        self.agents.retain(|_, (seen, _)| seen.elapsed() < AGENT_SILENCE_MAX);
        let mut agents: ServingAgents =
            self.agents.iter().map(|(name, (_, agent))| (name.clone(), agent.clone())).collect();
        agents.entry(self.config.agent.to_string()).or_default();
        agents
    }

    /// Ends processes that are no longer wanted, and starts to load wanted models, one base at a
    /// time.
    fn start_due_load(&mut self) {
        if !self.has_read_log || self.started.elapsed() < DISCOVERY_TIME {
            return;
        }
        let agents = self.serving_agents();
        let wanted = assign_models(&self.moves, (&self.config.agent, &self.config.pool), &agents);
        self.note_ended_processes(&wanted);
        let awaited = self.find_awaited_channels(&wanted, &agents);
        self.processes.retain(|base, it| {
            let has_awaited = || it.process.models.keys().any(|it| awaited.contains(it));
            wanted.contains_key(base) || has_awaited()
        });
        // An agent that failed stays last in the choice until the channel moves.
        let (moves, pool) = (&self.moves, &self.config.pool);
        self.failures.retain(|(base, _), failure| {
            let mut models = failure.models.iter();
            // Without models, it only holds the next attempts back.
            let holds_back = failure.is_current && wanted.contains_key(base);
            let is_needed = !failure.models.is_empty() || holds_back;
            is_needed && models.all(|(channel, model)| model.is_served_by(moves.get(channel), pool))
        });
        if self.loading.is_some() {
            return;
        }
        let due = wanted.iter().find_map(|(base, models)| {
            Some((base.clone(), self.find_due_models(base, models, &awaited)?))
        });
        if let Some((base, models)) = due {
            self.start_load(base, models, &wanted);
        }
    }

    /// Returns the models of a base that are to be loaded now: first those whose adapters are not
    /// known to be unusable, then also those that may be tried again.
    fn find_due_models(
        &self,
        base: &str,
        wanted: &ServedModels,
        awaited: &BTreeSet<RunId>,
    ) -> Option<ServedModels> {
        let failure = |channel| self.failures.get(&(base.to_owned(), channel));
        if failure(None).is_some_and(LoadFailure::is_waiting) {
            return None;
        }
        let of_adapter = |channel: &RunId| failure(Some(channel.clone()));
        let loaded = self.processes.get(base).map(|it| &it.process.models);
        let choose = |is_left_out: &dyn Fn(&LoadFailure) -> bool| {
            let is_left_out = |channel: &RunId| of_adapter(channel).is_some_and(is_left_out);
            let mut models = keep_served_models(wanted, loaded, is_left_out);
            for (channel, model) in loaded.into_iter().flatten() {
                if awaited.contains(channel) {
                    models.entry(channel.clone()).or_insert_with(|| model.clone());
                }
            }
            models
        };
        let usable = choose(&|failure| failure.is_current);
        let tried = choose(&LoadFailure::is_waiting);
        let is_loaded = |models: &ServedModels| {
            models.is_empty() || loaded.is_some_and(|loaded| have_same_weights(loaded, models))
        };
        [usable, tried].into_iter().find(|models| !is_loaded(models))
    }

    /// Removes processes that ended by themselves. They are started again after a pause, which grows
    /// if they end soon after their start.
    fn note_ended_processes(&mut self, wanted: &BTreeMap<String, ServedModels>) {
        let ended = |it: &RunningProcess| it.process.ended().is_cancelled();
        let names: Vec<String> = self
            .processes
            .iter()
            .filter(|(_, it)| ended(it))
            .map(|(base, _)| base.clone())
            .collect();
        for base in names {
            let Some(gone) = self.processes.remove(&base) else { continue };
            if let Some(models) = wanted.get(&base) {
                let message =
                    "the model's process ended or hung; the agent's log has its last output (E104)";
                let all = (base, None);
                if gone.since.elapsed() > STABLE_TIME {
                    self.failures.remove(&all);
                }
                self.record_failure(all, models.clone(), message.to_owned());
            }
        }
    }

    /// Returns the channels whose loaded models stay, although their process is not to have them: the
    /// newest model has another base here, or is for other agents, which have not loaded it yet.
    fn find_awaited_channels(
        &self,
        wanted: &BTreeMap<String, ServedModels>,
        agents: &ServingAgents,
    ) -> BTreeSet<RunId> {
        let has = |base: &str, channel: &RunId| {
            self.processes.get(base).is_some_and(|it| it.process.models.contains_key(channel))
        };
        let stays = |channel: &RunId| {
            let own = wanted.iter().find(|(_, models)| models.contains_key(channel));
            match own {
                Some((base, _)) => !has(base, channel),
                None => is_awaited(channel, self.moves.get(channel), &self.config.pool, agents),
            }
        };
        let loaded = self.processes.values().flat_map(|it| it.process.models.keys());
        loaded.filter(|channel| stays(channel)).cloned().collect()
    }

    fn start_load(
        &mut self,
        base: String,
        models: ServedModels,
        wanted: &BTreeMap<String, ServedModels>,
    ) {
        self.process_count += 1;
        self.loading = Some(base.clone());
        let settings = ProcessSettings {
            engine: self.config.engine.clone(),
            slots: self.config.slots,
            context: self.config.context,
            directory: self.config.directory.join(self.process_count.to_string()),
        };
        // Without memory for both, an old process ends first, but not before the files are ready.
        let has_process = self.processes.contains_key(&base);
        let in_the_way = self.processes.iter().filter(|(name, old)| {
            let old_models = &old.process.models;
            let gives_way = is_replaced((name, old_models), (&base, &models), wanted)
                || (!has_process && is_for_others(old_models, wanted));
            gives_way && !old.process.has_room_for_second()
        });
        let (old, gone): (Vec<String>, Vec<CancellationToken>) =
            in_the_way.map(|(name, old)| (name.clone(), old.process.ended().clone())).unzip();
        let (files, loaded) = (self.files.clone(), self.loaded.clone());
        tokio::spawn(async move {
            let (wanted, events) = (models.clone(), loaded.clone());
            let load = tokio::spawn(async move {
                let files = fetch_files(&files, &wanted).await?;
                let room = async move {
                    if old.is_empty() {
                        return;
                    }
                    if events.send(LoadEvent::Prepared(old)).await.is_err() {
                        // The agent stops: nothing starts beside the processes that still answer.
                        std::future::pending::<()>().await;
                    }
                    let until = Instant::now() + END_LIMIT;
                    for gone in gone {
                        // If it does not end, the new one may fail, and is tried again.
                        let _ = timeout_at(until, gone.cancelled()).await;
                    }
                };
                ModelProcess::start(settings, wanted, files, room).await
            });
            let outcome = load.await.unwrap_or_else(|panic| Err(panic.into()));
            let _ = loaded.send(LoadEvent::Ended(base, models, Box::new(outcome))).await;
        });
    }

    fn handle_load(&mut self, event: LoadEvent) {
        let (base, models, outcome) = match event {
            LoadEvent::Prepared(old) => {
                self.processes.retain(|base, _| !old.contains(base));
                return;
            }
            LoadEvent::Ended(base, models, outcome) => (base, models, *outcome),
        };
        self.loading = None;
        match outcome {
            Ok(process) => {
                let channels: Vec<&str> = models.keys().map(RunId::as_str).collect();
                tracing::info!(channels = channels.join(", "), "serving");
                let failures = self.failures.iter_mut().filter(|((of, _), _)| *of == base);
                for ((_, channel), failure) in failures {
                    let is_loaded =
                        channel.is_none() || has_weights_of_all(&models, &failure.models);
                    failure.is_current &= !is_loaded;
                }
                // The old process ends after the last of its answers.
                let (process, since) = (Arc::new(process), Instant::now());
                self.processes.insert(base, RunningProcess { process, since });
            }
            Err(error) => {
                let mut models = models;
                // A model that stayed because its channel's new one failed is not announced as failed.
                models.retain(|channel, model| model.is_named_by(self.moves.get(channel)));
                // The other channels of the base are loaded without it.
                let channel = error.downcast_ref().map(|UnusableAdapter(channel)| channel.clone());
                let channel = channel.filter(|channel| models.contains_key(channel));
                models.retain(|it, _| channel.as_ref().is_none_or(|channel| channel == it));
                self.record_failure((base, channel), models, format!("{error:#}"));
            }
        }
    }

    fn record_failure(
        &mut self,
        of: (String, Option<RunId>),
        models: ServedModels,
        message: String,
    ) {
        tracing::warn!(error = message, "a model cannot be served; trying again later");
        let last = self.failures.get(&of);
        let pause = last.map_or(RETRY_MIN, |it| it.pause * 2).min(RETRY_MAX);
        let retry_at = Instant::now() + pause;
        // Without new models, the reason why some of them failed before is still the one to show.
        let (models, message) = match last.filter(|it| it.is_current && models.is_empty()) {
            Some(last) => (last.models.clone(), last.message.clone()),
            None => (models, message),
        };
        self.failures
            .insert(of, LoadFailure { models, message, pause, retry_at, is_current: true });
    }

    /// Returns the process with the newest model of a channel.
    fn find_process(&self, channel: &RunId) -> Option<Arc<ModelProcess>> {
        let serving = self
            .processes
            .values()
            .filter_map(|it| Some((it.process.models.get(channel)?.number, &it.process)));
        serving.max_by_key(|(number, _)| *number).map(|(_, process)| process.clone())
    }

    fn handle_message(&mut self, message: ServingMessage) {
        self.active.retain(|_, answer| !answer.task.is_finished());
        match message {
            ServingMessage::Cancel { id } => {
                if let Some(answer) = self.active.remove(&id) {
                    answer.task.abort();
                }
            }
            ServingMessage::Request(request) => self.start_answer(request),
        }
    }

    fn start_answer(&mut self, request: ServingRequest) {
        let answer = self.bus.open_answer(&self.config.agent, &request.id);
        let channel = RunId::new(request.channel.as_str()).ok();
        let process = channel.and_then(|channel| Some((self.find_process(&channel)?, channel)));
        let (id, sender) = (request.id.clone(), answer.clone());
        let task = tokio::spawn(async move {
            let sent = match process {
                Some((process, channel)) => tokio::select! {
                    sent = forwarding::answer_request(&process, &channel, &request, &answer) => {
                        sent
                    }
                    () = process.hung().cancelled() => {
                        let message = "the model's process hangs".to_owned();
                        answer.send_part(AnswerPart::Refused { message }).await
                    }
                },
                None => {
                    let message = format!("{} is not loaded here", request.channel);
                    answer.send_part(AnswerPart::Refused { message }).await
                }
            };
            if let Err(error) = sent {
                tracing::warn!(%error, "answering a request");
            }
        });
        let task = task.abort_handle();
        self.active.insert(id, ActiveAnswer { task, answer: sender });
    }

    fn served_channels(&self) -> Vec<v1::ServedChannel> {
        let mut served: BTreeMap<&RunId, v1::ServedChannel> = BTreeMap::new();
        for RunningProcess { process, .. } in self.processes.values() {
            for (channel, model) in &process.models {
                let found = v1::ServedChannel {
                    channel: channel.to_string(),
                    number: self.served_number(channel, model),
                    slots: process.slots,
                    active: process.active_requests(),
                    error: String::new(),
                };
                let known = served.entry(channel).or_default();
                if known.number <= found.number {
                    *known = found;
                }
            }
        }
        for failure in self.failures.values().filter(|it| it.is_current) {
            for channel in failure.models.keys() {
                let known = served.entry(channel).or_default();
                known.channel = channel.to_string();
                // All channels of a base may have it, and a status has a limit.
                let end = failure.message.floor_char_boundary(SHOWN_ERROR_BYTES_MAX);
                known.error = failure.message[..end].to_owned();
            }
        }
        served.into_values().collect()
    }

    /// Returns the newest move that names the loaded model: a later one may change only who serves
    /// it.
    fn served_number(&self, channel: &RunId, model: &ChannelModel) -> u64 {
        let newest = self.moves.get(channel).filter(|it| model.is_named_by(Some(it)));
        newest.map_or(model.number, |(number, _)| *number)
    }

    fn trouble(&self) -> Option<String> {
        let is_shown = |it: &&LoadFailure| it.is_current && !it.models.is_empty();
        let failure = self.failures.values().find(is_shown)?;
        let channels: Vec<&str> = failure.models.keys().map(RunId::as_str).collect();
        Some(format!("cannot serve {}: {}", channels.join(", "), failure.message))
    }

    /// Finishes the answers that have begun, within a limit, and refuses new requests.
    async fn drain(
        &mut self,
        requests: &mut BoxStream<'static, ServingMessage>,
        stop: &CancellationToken,
    ) {
        let mut limit = std::pin::pin!(wait_drain_limit(stop));
        let is_open = |it: &ActiveAnswer| !it.task.is_finished();
        while self.active.values().any(is_open) {
            let message = tokio::select! {
                () = &mut limit => break,
                () = sleep(DRAIN_POLL_INTERVAL) => continue,
                message = requests.next() => message,
            };
            match message {
                Some(ServingMessage::Request(request)) => {
                    let answer = self.bus.open_answer(&self.config.agent, &request.id);
                    refuse(&answer).await;
                }
                Some(cancel) => self.handle_message(cancel),
                // The connection is closed, so no part of an answer can be sent.
                None => break,
            }
        }
        for open in self.active.values().filter(|it| is_open(it)) {
            open.task.abort();
            refuse(&open.answer).await;
        }
        let ended: Vec<_> = self.processes.values().map(|it| it.process.ended().clone()).collect();
        self.processes.clear();
        let until = Instant::now() + PROCESS_END_LIMIT;
        for ended in ended {
            // Its socket is removed when it ends; the kernel ends it in any case.
            let _ = timeout_at(until, ended.cancelled()).await;
        }
    }
}

/// Waits until the time is over for the answers that have begun: since now, or since `stop`.
async fn wait_drain_limit(stop: &CancellationToken) {
    let stopped = async {
        stop.cancelled().await;
        sleep(STOP_LIMIT).await;
    };
    tokio::select! {
        () = stopped => {}
        () = sleep(DRAIN_LIMIT) => {}
    }
}

/// Sends a request to another agent. A failure shows there as silence.
async fn refuse(answer: &AnswerSender) {
    let message = "this agent is stopping".to_owned();
    let _ = answer.send_part(AnswerPart::Refused { message }).await;
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
            let fetched = cache.fetch_tree(store, adapter).await;
            adapters.push((
                channel.clone(),
                fetched.with_context(|| UnusableAdapter(channel.clone()))?,
            ));
        }
    }
    Ok(ModelFiles { base, adapters })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_drain_leaves_answers_their_time_and_a_stop_cuts_them_soon() {
        let stop = CancellationToken::new();
        let began = Instant::now();
        wait_drain_limit(&stop).await;
        assert_eq!(began.elapsed().as_secs(), DRAIN_LIMIT.as_secs());

        // A stop in the middle of a drain.
        let began = Instant::now();
        let stopping = async {
            sleep(Duration::from_secs(60)).await;
            stop.cancel();
        };
        tokio::join!(wait_drain_limit(&stop), stopping);
        assert_eq!(began.elapsed().as_secs(), 60 + STOP_LIMIT.as_secs());
    }
}
