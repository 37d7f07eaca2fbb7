//! The agent: one loop a role, which pulls jobs and sees them through.
//!
//! Order of work: result facts first, then the acknowledgement. A lease is an
//! unacknowledged delivery, so an agent that dies loses at most the jobs it held, and
//! somebody else gets them when the lease runs out.

use std::{convert::Infallible, future::pending, path::PathBuf, sync::Arc, time::Duration};

use bus::{Bus, Delivery, ReadError, WorkError, WorkQueue};
use futures::{
    StreamExt,
    future::BoxFuture,
    stream::{BoxStream, FuturesUnordered},
};
use store::{Cache, Peers, Store};
use tokio::{
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, MissedTickBehavior},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use wire::{AgentId, Pool, WorkKind, v1};

use crate::{
    Doctor, Exchange, Role, ahead, exchange, legacy,
    presence::{Presence, memory_bytes, timestamp_now},
    runs::Runs,
    side::{Account, Side},
    watch::{self, Watch},
    work::{Post, Shared, role_name},
};

/// One long poll for work.
const POLL: Duration = Duration::from_secs(20);

/// Between tries when the bus does not answer.
const PAUSE_ON_ERROR: Duration = Duration::from_millis(500);

/// What an agent must know of itself.
#[derive(Debug, Clone)]
pub struct Config {
    pub id: AgentId,
    /// Of the program, as people are told.
    pub version: String,
    pub pool: Pool,
    /// Logs of workers and other files of this agent.
    pub directory: PathBuf,
    pub lease: Duration,
    /// Name of its hardware's profile.
    pub profile: String,
    pub doctor: Doctor,
    /// Roles that were asked for and cannot be done before the agent is started anew.
    pub withheld: Vec<v1::Withheld>,
}

/// An agent and its roles.
pub struct Agent {
    config: Config,
    bus: Bus,
    store: Store,
    cache: Cache,
    roles: Vec<Arc<dyn Role>>,
    beside: Option<Beside>,
    watched: Option<watch::Options>,
    exchange: Option<Exchange>,
    reporting: Option<Reporting>,
    told: CancellationToken,
}

/// Whoever started the agent, and how often they hear of it.
struct Reporting {
    every: Duration,
    tell: Box<dyn FnMut(&v1::AgentStatus) + Send>,
}

/// Work that no fact of the log calls for.
struct Beside {
    name: &'static str,
    work: Box<dyn FnOnce(Side) -> BoxFuture<'static, anyhow::Result<()>> + Send>,
}

impl Agent {
    pub fn new(
        config: Config,
        bus: Bus,
        store: Store,
        cache: Cache,
        roles: Vec<Arc<dyn Role>>,
    ) -> Self {
        let told = CancellationToken::new();
        let (beside, watched, exchange, reporting) = (None, None, None, None);
        Self { config, bus, store, cache, roles, beside, watched, exchange, reporting, told }
    }

    /// Watches the box meanwhile.
    #[must_use]
    pub fn watched(mut self, options: watch::Options) -> Self {
        self.watched = Some(options);
        self
    }

    /// Exchanges files with other agents meanwhile; the cache was told of them, too.
    #[must_use]
    pub fn exchanging(mut self, exchange: Exchange) -> Self {
        self.exchange = Some(exchange);
        self
    }

    /// Is drained when this is cancelled, as by a command over the bus.
    #[must_use]
    pub fn leaving(mut self, told: CancellationToken) -> Self {
        self.told = told;
        self
    }

    /// Tells how it fares, first when it has its queues and hears commands, then again and again
    /// from the task that does its work: an agent that hangs is silent.
    #[must_use]
    pub fn reporting(
        mut self,
        every: Duration,
        tell: impl FnMut(&v1::AgentStatus) + Send + 'static,
    ) -> Self {
        self.reporting = Some(Reporting { every, tell: Box::new(tell) });
        self
    }

    /// Does this too, under that name among its roles. An agent without other roles leaves when
    /// it is done.
    #[must_use]
    pub fn beside(
        mut self,
        name: &'static str,
        work: impl FnOnce(Side) -> BoxFuture<'static, anyhow::Result<()>> + Send + 'static,
    ) -> Self {
        self.beside = Some(Beside { name, work: Box::new(work) });
        self
    }

    /// Works until `stop` is cancelled (held jobs then have their role's grace) or somebody
    /// drains the agent (held jobs are finished, or handed over where their role can).
    ///
    /// # Errors
    /// When the bus refuses the agent its work, or what it does beside its roles fails.
    pub async fn run(self, stop: CancellationToken) -> anyhow::Result<()> {
        let Self { config, bus, store, cache, roles, beside, watched, exchange, reporting, told } =
            self;
        let presence = Presence::new(first_status(&config, &roles, beside.as_ref()));
        presence.update(|status| status.exchange = exchange.as_ref().map(Exchange::said));
        for role in &roles {
            examine(&presence, &config.doctor, &**role).await;
        }
        let (runs, leave) = (Runs::new(&config.id), CancellationToken::new());
        let mut queues = Vec::new();
        for role in &roles {
            queues.push(bus.work(role.kind(), &config.pool, config.lease).await?);
        }
        legacy::hand_back(&bus, &config.directory, config.lease).await;
        let mut following = follow_runs(&runs, &bus, &stop).await;
        let background = TaskTracker::new();
        let over = CancellationToken::new();
        let watch = Watch::new(watched.as_ref().map(|options| &options.root));
        if let Some(options) = watched {
            let (watch, presence, aside) = (watch.clone(), presence.clone(), beside.is_some());
            background.spawn(watch::run(options, watch, presence, aside, over.clone()));
        }

        let look = look(roles.clone(), exchange.as_ref().map(Exchange::peers));
        lend(exchange, &cache, &background, &over);

        let drain = stop.child_token();
        let commands = bus.commands(&config.id).await?;
        background.spawn(obey(commands, told, drain.clone(), over.clone()));
        background.spawn(leave_with(drain.clone(), roles.clone(), over.clone()));
        let grace = roles.iter().map(|role| role.grace()).max().unwrap_or_default();
        let (speaker, speaks_on) = (presence.clone(), bus.clone());
        let silence = over.clone();
        background.spawn(async move { speaker.speak(&speaks_on, look, silence).await });

        let (failed, failure) = oneshot::channel();
        let side = Side { stop: drain.clone(), account: Account::new(presence.clone()) };
        let beside = async {
            if let Some(Beside { work, .. }) = beside
                && let Err(error) = work(side).await
            {
                // Whoever waits for it is this very function.
                let _ = failed.send(error);
                pending::<()>().await;
            }
        };
        let report = report(reporting, bus.clone(), presence.clone());
        let drained = drain.clone();
        let shared =
            Shared { config, bus, store, cache, presence, runs, watch, leave, drain: drained };
        attend(&shared, &roles, &background, &over);
        let loops = roles.into_iter().zip(queues).map(|(role, queue)| {
            let post = Post::new(shared.clone(), role);
            let drain = &drain;
            async move {
                if drain.run_until_cancelled(post.take_up()).await.is_some() {
                    work_through(post, queue, drain).await;
                }
            }
        });
        let work = futures::future::join(futures::future::join_all(loops), beside);
        let outcome = tokio::select! {
            () = finish(work, &stop, grace, &shared.leave) => Ok(()),
            Ok(error) = failure => Err(error),
            Ok(lost) = &mut following => Err(lost.into()),
            never = report => match never {},
        };
        following.abort();
        over.cancel();
        background.close();
        background.wait().await;
        outcome
    }
}

/// Measures and makes ready what jobs will need, until it is over.
fn attend(
    shared: &Shared,
    roles: &[Arc<dyn Role>],
    background: &TaskTracker,
    over: &CancellationToken,
) {
    background.spawn(shared.clone().measure(roles, over.clone()));
    background.spawn(ahead::look(shared.clone(), roles.to_vec(), over.clone()));
}

/// Gives other agents what they ask for, until it is over.
fn lend(
    exchange: Option<Exchange>,
    cache: &Cache,
    background: &TaskTracker,
    over: &CancellationToken,
) {
    let Some(exchange) = exchange else { return };
    let (serving, over) = (exchange.serve(cache.clone()), over.clone());
    background.spawn(async move { over.run_until_cancelled(serving).await.is_some() });
}

/// What changes by itself: how fast the roles are, and what was exchanged.
fn look(roles: Vec<Arc<dyn Role>>, peers: Option<Peers>) -> impl Fn(&mut v1::AgentStatus) {
    move |status| {
        let pace = roles.iter().find_map(|role| role.pace());
        status.tokens_per_s = pace.map_or(0.0, |pace| pace.tokens_per_s);
        status.sample_s = pace.map_or(0.0, |pace| pace.sample_s());
        exchange::count(peers.as_ref(), status);
    }
}

/// Tells for as long as it is polled. A connection that is lost is being made again; one that is
/// closed is not.
async fn report(reporting: Option<Reporting>, bus: Bus, presence: Presence) -> Infallible {
    let Some(Reporting { every, mut tell }) = reporting else { return pending().await };
    let mut tick = tokio::time::interval(every);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        if bus.is_open() {
            tell(&presence.now());
        }
    }
}

fn first_status(
    config: &Config,
    roles: &[Arc<dyn Role>],
    beside: Option<&Beside>,
) -> v1::AgentStatus {
    // Each role is named as it is taken up.
    let names = beside.map(|beside| beside.name.to_owned());
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    v1::AgentStatus {
        agent: config.id.to_string(),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        version: config.version.clone(),
        roles: names.into_iter().collect(),
        pool: config.pool.to_string(),
        state: v1::agent_status::State::Ready.into(),
        started_at: Some(timestamp_now()),
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory_bytes: memory_bytes(),
        profile: config.profile.clone(),
        withheld: config.withheld.clone(),
        engines: roles.iter().filter_map(|role| engine(&**role)).collect(),
        abilities: roles.iter().flat_map(|role| abilities(&**role)).collect(),
        ..Default::default()
    }
}

fn engine(role: &dyn Role) -> Option<String> {
    let engine = role.engine();
    (!engine.is_empty()).then(|| format!("{}: {engine}", role_name(role.kind())))
}

fn abilities(role: &dyn Role) -> impl Iterator<Item = String> {
    let name = role_name(role.kind());
    role.abilities().into_iter().map(move |ability| format!("{name}:{ability}"))
}

/// What is said of a role from the first word on.
async fn examine(presence: &Presence, doctor: &Doctor, role: &dyn Role) {
    let name = role_name(role.kind());
    let against = if role.uses_gpu() { doctor.against_role(name).await } else { None };
    match against {
        Some(finding) => presence.withhold(name, &finding),
        None => presence.take_up(name),
    }
    if role.kind() == WorkKind::Train {
        let bytes = doctor.training_bytes(role.uses_gpu()).await;
        presence.update(|status| status.training_bytes = bytes.unwrap_or(0));
    }
}

/// Starts to follow the runs' states, and waits until they are known. The task ends only
/// when the log is no longer the one it was.
async fn follow_runs(runs: &Runs, bus: &Bus, stop: &CancellationToken) -> JoinHandle<ReadError> {
    let ready = stop.child_token();
    let (runs, bus, caught_up) = (runs.clone(), bus.clone(), ready.clone());
    let following = tokio::spawn(async move { runs.follow(&bus, caught_up).await });
    ready.cancelled().await;
    following
}

/// Tells the roles when nothing new is taken, so that long work can be saved.
async fn leave_with(drain: CancellationToken, roles: Vec<Arc<dyn Role>>, over: CancellationToken) {
    if over.run_until_cancelled(drain.cancelled()).await.is_some() {
        tracing::info!("told to leave: takes nothing new, finishes what it holds");
        roles.iter().for_each(|role| role.leave());
    }
}

/// Drains the agent when it is told to, over the bus or by its box's owner.
async fn obey(
    mut commands: BoxStream<'static, v1::AgentCommand>,
    told: CancellationToken,
    drain: CancellationToken,
    over: CancellationToken,
) {
    loop {
        tokio::select! {
            () = over.cancelled() => return,
            () = told.cancelled(), if !drain.is_cancelled() => drain.cancel(),
            Some(command) = commands.next() => match command.action() {
                v1::agent_command::Action::Drain => drain.cancel(),
                v1::agent_command::Action::Unspecified => {}
            },
        }
    }
}

/// Waits for held jobs; once the process must stop, only for the grace.
async fn finish<T>(
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

/// Takes jobs while there is room for them; ends when it is drained and holds none.
///
/// Held jobs are polled here, and before more is asked for: a job takes its room at its
/// first poll.
async fn work_through(post: Post, mut queue: WorkQueue, drain: &CancellationToken) {
    let mut held = FuturesUnordered::new();
    let mut resting = Instant::now();
    while !drain.is_cancelled() {
        tokio::select! {
            biased;
            Some(rest) = held.next() => resting = resting.max(Instant::now() + rest),
            () = drain.cancelled() => {}
            delivery = next(&post, &mut queue, resting) => match delivery {
                Ok(None) => {}
                Ok(Some(delivery)) => held.push(post.handle(delivery)),
                Err(error) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::warn!(kind = %post.role.kind(), error, "pulling work");
                    resting = Instant::now() + PAUSE_ON_ERROR;
                }
            },
        }
    }
    post.shared.presence.update(|status| status.state = v1::agent_status::State::Draining.into());
    while held.next().await.is_some() {}
}

/// Cancel-safe, as its parts are.
async fn next(
    post: &Post,
    queue: &mut WorkQueue,
    resting: Instant,
) -> Result<Option<Delivery>, WorkError> {
    tokio::time::sleep_until(resting).await;
    post.room().await;
    let watch = &post.shared.watch;
    watch.allowed().await;
    tokio::select! {
        biased;
        () = watch.forbidden() => {
            queue.give_back();
            Ok(None)
        }
        () = post.convicted() => {
            queue.give_back();
            Ok(None)
        }
        next = queue.next(POLL) => next,
    }
}
