//! The agent process: one loop for each role, which pulls jobs and runs them to completion.
//!
//! Results are written before the delivery is acknowledged. An agent that dies therefore loses only
//! the jobs it held, and another agent receives them when their leases expire.

use std::{convert::Infallible, future::pending, sync::Arc, time::Duration};

use bus::{Bus, Delivery, ReadError, WorkError, WorkQueue};
use futures::{
    StreamExt,
    future::BoxFuture,
    stream::{BoxStream, FuturesUnordered},
};
use store::{FileCache, PeerNode, Store};
use tokio::{
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, MissedTickBehavior},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use wire::{WorkKind, v1};

use crate::{
    AgentConfig, AgentRole, HostDoctor, PeerExchange,
    agent_context::AgentContext,
    lease_journal,
    live_status::{LiveStatus, memory_bytes},
    peer_exchange, prefetch,
    role_name::role_name,
    role_runner::RoleRunner,
    run_tracker::RunTracker,
    task_context::{TaskContext, TaskStatus, WATCHER_TASK},
    telemetry::{self, TelemetryHandle},
};

const POLL_TIMEOUT: Duration = Duration::from_secs(20);

const PULL_ERROR_PAUSE: Duration = Duration::from_millis(500);

/// An agent and its roles.
///
/// Build it with `new`, add options with the `with_…` methods, then call `run`. Its states, as
/// announced to the fleet:
///
/// - ready: each role pulls jobs while it has room;
/// - draining: no new job is taken, held jobs are finished or handed over;
/// - quarantined: a role takes no job (too many failures, or wrong weights);
/// - stopped: the last status that the agent announces.
///
/// The process ends when the stop token is cancelled (held jobs then have their role's grace
/// period), when the agent has drained, when its background task fails, or when the log it follows
/// is replaced.
pub struct Agent {
    config: AgentConfig,
    bus: Bus,
    store: Store,
    cache: FileCache,
    roles: Vec<Arc<dyn AgentRole>>,
    background_tasks: Vec<BackgroundTask>,
    telemetry_options: Option<telemetry::TelemetryOptions>,
    exchange: Option<PeerExchange>,
    status_reporter: Option<StatusReporter>,
    drain_request: CancellationToken,
}

/// A callback that receives the agent's status at a fixed interval, for the parent process.
struct StatusReporter {
    interval: Duration,
    on_status: Box<dyn FnMut(&v1::AgentStatus) + Send>,
}

/// Work of the agent that no fact of the log orders, such as watching an external training.
struct BackgroundTask {
    name: &'static str,
    start: Box<dyn FnOnce(TaskContext) -> BoxFuture<'static, anyhow::Result<()>> + Send>,
}

impl Agent {
    /// Creates an agent with these roles and no options.
    pub fn new(
        config: AgentConfig,
        bus: Bus,
        store: Store,
        cache: FileCache,
        roles: Vec<Arc<dyn AgentRole>>,
    ) -> Self {
        let drain_request = CancellationToken::new();
        let (telemetry_options, exchange, status_reporter) = (None, None, None);
        Self {
            config,
            bus,
            store,
            cache,
            roles,
            background_tasks: Vec::new(),
            telemetry_options,
            exchange,
            status_reporter,
            drain_request,
        }
    }

    /// Adds the measurement of the host, and its protection: at the limits in `options`, workers
    /// are paused or killed and no new work is taken.
    #[must_use]
    pub fn with_telemetry(mut self, options: telemetry::TelemetryOptions) -> Self {
        self.telemetry_options = Some(options);
        self
    }

    /// Adds the exchange of files with other agents. The cache passed to `Agent::new` must already
    /// use the same peers ([`PeerExchange::peer_handle`]).
    #[must_use]
    pub fn with_exchange(mut self, exchange: PeerExchange) -> Self {
        self.exchange = Some(exchange);
        self
    }

    /// Sets the token that drains the agent when cancelled, as a drain command over the bus does.
    #[must_use]
    pub fn with_drain_request(mut self, request: CancellationToken) -> Self {
        self.drain_request = request;
        self
    }

    /// Adds a callback for the agent's status: called when the agent is ready for commands and then
    /// at each interval, until the bus connection is closed for good. It is called from the task
    /// that does the agent's work, so that an agent that hangs is silent.
    #[must_use]
    pub fn with_status_reports(
        mut self,
        every: Duration,
        on_status: impl FnMut(&v1::AgentStatus) + Send + 'static,
    ) -> Self {
        self.status_reporter =
            Some(StatusReporter { interval: every, on_status: Box::new(on_status) });
        self
    }

    /// Adds a background task, listed by this name among the agent's roles. If the task returns an
    /// error, [`Agent::run`] ends with that error. After success the other roles continue, and an
    /// agent without any ends. When the agent stops, it waits for the task.
    #[must_use]
    pub fn with_background_task(
        mut self,
        name: &'static str,
        work: impl FnOnce(TaskContext) -> BoxFuture<'static, anyhow::Result<()>> + Send + 'static,
    ) -> Self {
        self.background_tasks.push(BackgroundTask { name, start: Box::new(work) });
        self
    }

    /// Runs the agent until `stop` is cancelled (held jobs then have their role's grace period) or
    /// the agent is drained (held jobs are finished, or handed over where their role can).
    ///
    /// # Errors
    /// When the bus refuses to serve the agent's work or commands, when the background task fails,
    /// or when the log that the agent follows has been replaced.
    pub async fn run(self, stop: CancellationToken) -> anyhow::Result<()> {
        let Self { config, bus, store, cache, roles, exchange, .. } = self;
        let live_status = LiveStatus::new(initial_status(&config, &roles, &self.background_tasks));
        live_status.update_status(|status| {
            status.exchange = exchange.as_ref().map(PeerExchange::build_announcement);
        });
        for role in &roles {
            check_role(&live_status, &config.doctor, &**role).await;
        }
        let runs = RunTracker::new(&config.id);
        let queues = join_work_queues(&bus, &config, &roles).await?;
        lease_journal::release_leftover_leases(&bus, &config.directory, config.lease).await;
        let mut following = follow_runs(&runs, &bus, &stop).await;
        let background = TaskTracker::new();
        // Ends the background tasks; `stop` and the drain end the roles first.
        let ended = CancellationToken::new();
        let root = self.telemetry_options.as_ref().map(|options| &options.root);
        let telemetry = TelemetryHandle::new(root);
        if let Some(options) = self.telemetry_options {
            let (handle, status) = (telemetry.clone(), live_status.clone());
            let trains_aside = self.background_tasks.iter().any(|task| task.name == WATCHER_TASK);
            let run =
                telemetry::run_telemetry(options, handle, status, trains_aside, ended.clone());
            background.spawn(run);
        }
        let refresh =
            status_updater(roles.clone(), exchange.as_ref().map(PeerExchange::peer_handle));
        serve_peers(exchange, &cache, &background, &ended);

        let drain = stop.child_token();
        let commands = bus.receive_commands(&config.id).await?;
        let handle = handle_commands(commands, self.drain_request, drain.clone(), ended.clone());
        background.spawn(handle);
        let task = announce_drain(drain.clone(), roles.clone(), live_status.clone(), ended.clone());
        background.spawn(task);
        let grace = roles.iter().map(|role| role.grace()).max().unwrap_or_default();
        let (status, record_interval) = (live_status.clone(), config.intervals.status_record);
        let announcing =
            status.announce_until_stopped(bus.clone(), record_interval, refresh, ended.clone());
        background.spawn(announcing);

        let (failed, failure) = oneshot::channel();
        let tasks = self.background_tasks;
        let task = run_background_tasks(tasks, (&drain, &stop), live_status.clone(), failed);
        let report = report_status(self.status_reporter, bus.clone(), live_status.clone());
        let stop_jobs = CancellationToken::new();
        #[rustfmt::skip]
        let shared = AgentContext {
            config, bus, store, cache, live_status, runs, telemetry, stop_jobs, drain: drain.clone(),
        };
        spawn_background(&shared, &roles, &background, &ended);
        let loops = roles.into_iter().zip(queues).map(|(role, queue)| {
            let runner = RoleRunner::new(shared.clone(), role);
            let drain = &drain;
            async move {
                if drain.run_until_cancelled(runner.wait_until_fit()).await.is_some() {
                    run_role_loop(runner, queue, drain).await;
                }
            }
        });
        let work = futures::future::join(futures::future::join_all(loops), task);
        let outcome = tokio::select! {
            () = wait_for_held_jobs(work, &stop, grace, &shared.stop_jobs) => Ok(()),
            Ok(error) = failure => Err(error),
            Ok(lost) = &mut following => Err(lost.into()),
            never = report => match never {},
        };
        following.abort();
        ended.cancel();
        background.close();
        background.wait().await;
        outcome
    }
}

async fn join_work_queues(
    bus: &Bus,
    config: &AgentConfig,
    roles: &[Arc<dyn AgentRole>],
) -> Result<Vec<WorkQueue>, WorkError> {
    let mut queues = Vec::new();
    for role in roles {
        queues.push(bus.join_work_queue(role.work_kind(), &config.pool, config.lease).await?);
    }
    Ok(queues)
}

/// A failure is sent to `failed`; this future then never ends.
async fn run_background_tasks(
    tasks: Vec<BackgroundTask>,
    (drain, stop): (&CancellationToken, &CancellationToken),
    live_status: LiveStatus,
    failed: oneshot::Sender<anyhow::Error>,
) {
    let runs = tasks.into_iter().map(|BackgroundTask { name, start }| {
        let status = TaskStatus::new(name, live_status.clone());
        start(TaskContext { drain: drain.clone(), stop: stop.clone(), status })
    });
    if let Err(error) = futures::future::try_join_all(runs).await {
        // The receiver lives as long as this future, so the send cannot be lost.
        let _ = failed.send(error);
        pending::<()>().await;
    }
}

fn spawn_background(
    shared: &AgentContext,
    roles: &[Arc<dyn AgentRole>],
    background: &TaskTracker,
    over: &CancellationToken,
) {
    background.spawn(shared.clone().watch_training_memory(roles, over.clone()));
    background.spawn(prefetch::run_prefetch(shared.clone(), roles.to_vec(), over.clone()));
}

fn serve_peers(
    exchange: Option<PeerExchange>,
    cache: &FileCache,
    background: &TaskTracker,
    over: &CancellationToken,
) {
    let Some(exchange) = exchange else { return };
    let (serving, over) = (exchange.serve_files(cache.clone()), over.clone());
    background.spawn(async move { over.run_until_cancelled(serving).await.is_some() });
}

/// Returns a function that refreshes the parts of the status that change without an event.
fn status_updater(
    roles: Vec<Arc<dyn AgentRole>>,
    peers: Option<PeerNode>,
) -> impl Fn(&mut v1::AgentStatus) {
    move |status| {
        let throughput = roles.iter().find_map(|role| role.current_throughput());
        status.engines = roles.iter().filter_map(|role| describe_engine(&**role)).collect();
        status.tokens_per_s = throughput.map_or(0.0, |own| own.tokens_per_s);
        status.sample_s = throughput.map_or(0.0, |own| own.seconds_per_sample());
        status.training_speed = roles.iter().find_map(|role| role.training_speed());
        peer_exchange::update_byte_counts(peers.as_ref(), status);
    }
}

/// Never returns. Reports only while the bus connection is open or being restored.
async fn report_status(
    reporting: Option<StatusReporter>,
    bus: Bus,
    live_status: LiveStatus,
) -> Infallible {
    let Some(StatusReporter { interval: every, mut on_status }) = reporting else {
        return pending().await;
    };
    let mut tick = tokio::time::interval(every);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        if bus.is_open() {
            on_status(&live_status.current_status());
        }
    }
}

fn initial_status(
    config: &AgentConfig,
    roles: &[Arc<dyn AgentRole>],
    background_tasks: &[BackgroundTask],
) -> v1::AgentStatus {
    // Roles of jobs are added when they are enabled.
    let names = background_tasks.iter().map(|task| task.name.to_owned());
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let engines: Vec<String> = roles.iter().filter_map(|role| describe_engine(&**role)).collect();
    v1::AgentStatus {
        agent: config.id.to_string(),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        version: config.version.clone(),
        roles: names.collect(),
        pool: config.pool.to_string(),
        state: v1::agent_status::State::Ready.into(),
        started_at: Some(wire::clock::now()),
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory_bytes: memory_bytes(),
        profile: config.profile.clone(),
        withheld: config.withheld.clone(),
        stack: Some(config.stack.to_proto(&engines)),
        engines,
        abilities: roles.iter().flat_map(|role| list_abilities(&**role)).collect(),
        ..Default::default()
    }
}

/// Formats `ROLE: ENGINE`; `None` if the role runs no model.
fn describe_engine(role: &dyn AgentRole) -> Option<String> {
    let engine = role.describe_engine();
    (!engine.is_empty()).then(|| format!("{}: {engine}", role_name(role.work_kind())))
}

/// Lists the abilities as `ROLE:ABILITY`.
fn list_abilities(role: &dyn AgentRole) -> impl Iterator<Item = String> {
    let name = role_name(role.work_kind());
    role.list_abilities().into_iter().map(move |ability| format!("{name}:{ability}"))
}

/// Enables or withholds one role before the first status is announced.
async fn check_role(live_status: &LiveStatus, doctor: &HostDoctor, role: &dyn AgentRole) {
    let name = role_name(role.work_kind());
    let against = if role.uses_gpu() { doctor.check_role(name).await } else { None };
    match against {
        Some(finding) => live_status.withhold_role(name, &finding),
        None => live_status.enable_role(name),
    }
    if role.work_kind() == WorkKind::Train {
        let bytes = doctor.training_budget_bytes(role.uses_gpu()).await;
        live_status.update_status(|status| status.training_bytes = bytes.unwrap_or(0));
    }
}

/// Waits until the states of all runs are known or `stop` is cancelled. The returned task ends only
/// when the log has been replaced.
async fn follow_runs(
    runs: &RunTracker,
    bus: &Bus,
    stop: &CancellationToken,
) -> JoinHandle<ReadError> {
    let ready = stop.child_token();
    let (runs, bus, caught_up) = (runs.clone(), bus.clone(), ready.clone());
    let following = tokio::spawn(async move { runs.follow_log(&bus, caught_up).await });
    ready.cancelled().await;
    following
}

async fn announce_drain(
    drain: CancellationToken,
    roles: Vec<Arc<dyn AgentRole>>,
    live_status: LiveStatus,
    over: CancellationToken,
) {
    use v1::agent_status::State;
    if over.run_until_cancelled(drain.cancelled()).await.is_some() {
        tracing::info!("draining: takes no new work, finishes current jobs");
        live_status.update_status(|status| {
            // An agent without jobs may have stopped meanwhile.
            if status.state() == State::Ready {
                status.state = State::Draining.into();
            }
        });
        roles.iter().for_each(|role| role.begin_drain());
    }
}

async fn handle_commands(
    mut commands: BoxStream<'static, v1::AgentCommand>,
    request: CancellationToken,
    drain: CancellationToken,
    over: CancellationToken,
) {
    loop {
        tokio::select! {
            () = over.cancelled() => return,
            () = request.cancelled(), if !drain.is_cancelled() => drain.cancel(),
            Some(command) = commands.next() => match command.action() {
                v1::agent_command::Action::Drain => drain.cancel(),
                v1::agent_command::Action::Unspecified => {}
            },
        }
    }
}

/// Waits at most `grace` after `stop` is cancelled, then cancels `leave`, which ends the jobs.
async fn wait_for_held_jobs<T>(
    work: impl Future<Output = T>,
    stop: &CancellationToken,
    grace: Duration,
    leave: &CancellationToken,
) {
    let grace = async {
        stop.cancelled().await;
        tokio::time::sleep(grace).await;
        leave.cancel();
        pending::<()>().await;
    };
    tokio::select! {
        _ = work => {}
        () = grace => {}
    }
}

/// Takes jobs while the role has room. Returns when the agent is drained and holds no job of the
/// role.
///
/// Held jobs are polled before the next delivery is requested, because a job takes its room at its
/// first poll.
async fn run_role_loop(runner: RoleRunner, mut queue: WorkQueue, drain: &CancellationToken) {
    let mut held = FuturesUnordered::new();
    let mut paused_until = Instant::now();
    while !drain.is_cancelled() {
        tokio::select! {
            biased;
            Some(pause) = held.next() => paused_until = paused_until.max(Instant::now() + pause),
            () = drain.cancelled() => {}
            delivery = next_delivery(&runner, &mut queue, paused_until) => match delivery {
                Ok(None) => {}
                Ok(Some(delivery)) => held.push(runner.handle_delivery(delivery)),
                Err(error) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::warn!(kind = %runner.role.work_kind(), error, "pulling work");
                    paused_until = Instant::now() + PULL_ERROR_PAUSE;
                }
            },
        }
    }
    while held.next().await.is_some() {}
}

/// Returns `None` if the poll ended without a delivery, or if the host's limits or a quarantine
/// forbid new work. Cancel-safe.
async fn next_delivery(
    runner: &RoleRunner,
    queue: &mut WorkQueue,
    paused_until: Instant,
) -> Result<Option<Delivery>, WorkError> {
    tokio::time::sleep_until(paused_until).await;
    runner.wait_for_room().await;
    let watch = &runner.shared.telemetry;
    watch.wait_until_allowed().await;
    tokio::select! {
        biased;
        () = watch.wait_until_forbidden() => {
            queue.release_pull();
            Ok(None)
        }
        () = runner.wait_for_quarantine() => {
            queue.release_pull();
            Ok(None)
        }
        next = queue.next(POLL_TIMEOUT) => next,
    }
}

#[cfg(test)]
mod tests {
    use wire::v1::agent_status::State;

    use super::*;

    #[tokio::test]
    async fn a_drained_agent_announces_it_unless_it_has_stopped() {
        for (before, expected) in
            [(State::Ready, State::Draining), (State::Stopped, State::Stopped)]
        {
            let status = v1::AgentStatus { state: before.into(), ..Default::default() };
            let live_status = LiveStatus::new(status);
            let (drain, over) = (CancellationToken::new(), CancellationToken::new());
            drain.cancel();
            announce_drain(drain, Vec::new(), live_status.clone(), over).await;
            assert_eq!(live_status.current_status().state(), expected);
        }
    }

    #[tokio::test]
    async fn a_background_task_is_drained_before_it_is_stopped() {
        let stop = CancellationToken::new();
        let drain = stop.child_token();
        let (failed, _failure) = oneshot::channel();
        let (seen, mut states) = tokio::sync::mpsc::unbounded_channel();
        let start = move |context: TaskContext| -> BoxFuture<'static, anyhow::Result<()>> {
            Box::pin(async move {
                context.drain.cancelled().await;
                seen.send(context.stop.is_cancelled())?;
                context.stop.cancelled().await;
                Ok(())
            })
        };
        let tasks = vec![BackgroundTask { name: "server", start: Box::new(start) }];
        let live_status = LiveStatus::new(v1::AgentStatus::default());
        let running = run_background_tasks(tasks, (&drain, &stop), live_status, failed);
        let signals = async {
            drain.cancel();
            assert_eq!(states.recv().await, Some(false));
            stop.cancel();
        };
        futures::future::join(running, signals).await;
    }
}
