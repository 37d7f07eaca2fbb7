//! The agent: one loop a role, which pulls jobs and sees them through.
//!
//! Order of work: result facts first, then the acknowledgement. A lease is an
//! unacknowledged delivery, so an agent that dies loses at most the jobs it held, and
//! somebody else gets them when the lease runs out.

use std::{path::PathBuf, sync::Arc, time::Duration};

use bus::{Bus, Delivery, ReadError, WorkError, WorkQueue};
use futures::{
    StreamExt,
    stream::{BoxStream, FuturesUnordered},
};
use store::{Cache, Store};
use tokio::{task::JoinHandle, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use wire::{AgentId, Pool, v1};

use crate::{
    Role, legacy,
    presence::{Presence, memory_bytes, timestamp_now},
    runs::Runs,
    work::{Post, Shared, role_name},
};

/// One long poll for work.
const POLL: Duration = Duration::from_secs(20);

/// Between tries when the bus does not answer.
const PAUSE_ON_ERROR: Duration = Duration::from_millis(500);

/// What held jobs may still take when the process is asked to stop.
const GRACE: Duration = Duration::from_secs(2);

/// What an agent must know of itself.
#[derive(Debug, Clone)]
pub struct Config {
    pub id: AgentId,
    pub pool: Pool,
    /// Logs of workers and other files of this agent.
    pub directory: PathBuf,
    pub lease: Duration,
}

/// An agent and its roles.
pub struct Agent {
    config: Config,
    bus: Bus,
    store: Store,
    cache: Cache,
    roles: Vec<Arc<dyn Role>>,
}

impl Agent {
    pub fn new(
        config: Config,
        bus: Bus,
        store: Store,
        cache: Cache,
        roles: Vec<Arc<dyn Role>>,
    ) -> Self {
        Self { config, bus, store, cache, roles }
    }

    /// Works until `stop` is cancelled (held jobs then have two seconds) or somebody
    /// drains the agent (held jobs are finished).
    ///
    /// # Errors
    /// When the bus refuses the agent its work.
    pub async fn run(self, stop: CancellationToken) -> anyhow::Result<()> {
        let Self { config, bus, store, cache, roles } = self;
        let presence = Presence::new(first_status(&config, &roles));
        let (runs, leave) = (Runs::default(), CancellationToken::new());
        let mut queues = Vec::new();
        for role in &roles {
            queues.push(bus.work(role.kind(), &config.pool, config.lease).await?);
        }
        legacy::hand_back(&bus, &config.directory, config.lease).await;
        let mut following = follow_runs(&runs, &bus, &stop).await;
        let background = TaskTracker::new();
        let over = CancellationToken::new();

        let drain = stop.child_token();
        let commands = bus.commands(&config.id).await?;
        background.spawn(obey(commands, drain.clone(), over.clone()));
        let rates = roles.clone();
        let rate = move || rates.iter().map(|role| role.tokens_per_s()).sum();
        let (speaker, speaks_on) = (presence.clone(), bus.clone());
        let silence = over.clone();
        background.spawn(async move { speaker.speak(&speaks_on, rate, silence).await });

        let shared = Shared { config, bus, store, cache, presence, runs, leave };
        let loops = roles
            .into_iter()
            .zip(queues)
            .map(|(role, queue)| work_through(Post::new(shared.clone(), role), queue, &drain));
        let outcome = tokio::select! {
            () = finish(futures::future::join_all(loops), &stop, &shared.leave) => Ok(()),
            Ok(lost) = &mut following => Err(lost.into()),
        };
        following.abort();
        over.cancel();
        background.close();
        background.wait().await;
        outcome
    }
}

fn first_status(config: &Config, roles: &[Arc<dyn Role>]) -> v1::AgentStatus {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    v1::AgentStatus {
        agent: config.id.to_string(),
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        version: env!("CARGO_PKG_VERSION").into(),
        roles: roles.iter().map(|role| role_name(role.kind()).to_owned()).collect(),
        pool: config.pool.to_string(),
        state: v1::agent_status::State::Ready.into(),
        started_at: Some(timestamp_now()),
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory_bytes: memory_bytes(),
        ..Default::default()
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

/// Drains the agent when it is told to.
async fn obey(
    mut commands: BoxStream<'static, v1::AgentCommand>,
    drain: CancellationToken,
    over: CancellationToken,
) {
    while let Some(Some(command)) = over.run_until_cancelled(commands.next()).await {
        match command.action() {
            v1::agent_command::Action::Drain => drain.cancel(),
            v1::agent_command::Action::Unspecified => {}
        }
    }
}

/// Waits for held jobs; once the process must stop, only for the grace.
async fn finish(
    work: impl Future<Output = Vec<()>>,
    stop: &CancellationToken,
    leave: &CancellationToken,
) {
    let grace = async {
        stop.cancelled().await;
        tokio::time::sleep(GRACE).await;
        leave.cancel();
        std::future::pending::<()>().await;
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
    queue.next(POLL).await
}
