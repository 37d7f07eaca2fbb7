//! The agent: one loop a role, which pulls jobs and sees them through.
//!
//! Order of work: result facts first, then the acknowledgement. A lease is an
//! unacknowledged delivery, so an agent that dies loses at most the jobs it held, and
//! somebody else gets them when the lease runs out.

use std::{path::PathBuf, sync::Arc, time::Duration};

use bus::{Bus, Delivery, WorkError, WorkQueue};
use futures::{
    StreamExt,
    stream::{BoxStream, FuturesUnordered},
};
use store::{Cache, Store};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use wire::{AgentId, Body, Fact, Place, Pool, Record, Subject, WorkKind, v1};

use crate::{
    Job, JobError, Role, RunState, Runs, lease,
    presence::{Presence, memory_bytes, timestamp_now},
};

/// How often a job may be handed out before it counts as poison.
const DELIVERIES_MAX: u64 = 5;

/// One long poll for work.
const POLL: Duration = Duration::from_secs(20);

/// Between tries when the bus does not answer.
const PAUSE_ON_ERROR: Duration = Duration::from_millis(500);

/// What held jobs may still take when the process is asked to stop.
const GRACE: Duration = Duration::from_secs(2);

/// Before a failed job is tried again, times the tries so far.
const RETRY_DELAY: Duration = Duration::from_secs(1);

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

/// What the tasks of an agent share.
struct Shared {
    config: Config,
    bus: Bus,
    store: Store,
    cache: Cache,
    presence: Presence,
    runs: Runs,
    /// Set when held jobs must end now.
    leave: CancellationToken,
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
        let background = TaskTracker::new();
        let over = CancellationToken::new();
        follow_runs(&background, &runs, &bus, &over).await;

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
            .map(|(role, queue)| work_through(&shared, role, queue, &drain));
        finish(futures::future::join_all(loops), &stop, &shared.leave).await;
        over.cancel();
        background.close();
        background.wait().await;
        Ok(())
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

/// What users call the role that does a kind of work.
fn role_name(kind: WorkKind) -> &'static str {
    match kind {
        WorkKind::Generate => "generator",
        WorkKind::Verify => "verifier",
        WorkKind::Train => "trainer",
        WorkKind::Eval => "evaluator",
    }
}

/// Starts to follow the runs' states, and waits until they are known.
async fn follow_runs(tasks: &TaskTracker, runs: &Runs, bus: &Bus, over: &CancellationToken) {
    let ready = CancellationToken::new();
    let (runs, bus, over) = (runs.clone(), bus.clone(), over.clone());
    let caught_up = ready.clone();
    tasks.spawn(async move {
        over.run_until_cancelled(runs.follow(&bus, caught_up)).await;
    });
    ready.cancelled().await;
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
async fn work_through(
    shared: &Shared,
    role: Arc<dyn Role>,
    mut queue: WorkQueue,
    drain: &CancellationToken,
) {
    let role = role.as_ref();
    let mut held = FuturesUnordered::new();
    while !drain.is_cancelled() {
        tokio::select! {
            biased;
            Some(()) = held.next() => {}
            () = drain.cancelled() => {}
            delivery = next(role, &mut queue) => match delivery {
                Ok(None) => {}
                Ok(Some(delivery)) => held.push(shared.handle(role, delivery)),
                Err(error) => {
                    let error = format!("{:#}", anyhow::Error::from(error));
                    tracing::warn!(kind = %role.kind(), error, "pulling work");
                    tokio::time::sleep(PAUSE_ON_ERROR).await;
                }
            },
        }
    }
    shared.presence.update(|status| status.state = v1::agent_status::State::Draining.into());
    while held.next().await.is_some() {}
}

/// Cancel-safe, as both parts are.
async fn next(role: &dyn Role, queue: &mut WorkQueue) -> Result<Option<Delivery>, WorkError> {
    role.room().await;
    queue.next(POLL).await
}

impl Shared {
    async fn handle(&self, role: &dyn Role, delivery: Delivery) {
        let settled = match &delivery.record {
            Ok(record) => self.work(role, record, &delivery).await,
            Err(error) => {
                tracing::error!(%error, "an entry of the log that calls for work cannot be read");
                delivery.ack().await
            }
        };
        if let Err(error) = settled {
            // The lease runs out and somebody, perhaps we, finds the result written.
            tracing::warn!(%error, "settling a job");
        }
    }

    async fn work(
        &self,
        role: &dyn Role,
        record: &Record,
        delivery: &Delivery,
    ) -> Result<(), bus::AckError> {
        let run = record.fact.subject.run.clone();
        let ordered = matches!(role.kind(), WorkKind::Generate | WorkKind::Train);
        match self.runs.state(&run) {
            RunState::Over => return delivery.ack().await,
            // The coordinator orders again when the run goes on.
            RunState::Paused if ordered => return delivery.ack().await,
            RunState::Paused | RunState::Open => {}
        }
        let job = self.job(role, record, delivery);
        tracing::info!(subject = %record.fact.subject, delivered = job.delivered, "job begins");
        let outcome = tokio::select! {
            biased;
            outcome = role.run(&job) => outcome,
            () = self.runs.over(&run) => Err(JobError::Stopped),
            () = self.leave.cancelled() => Err(JobError::Stopped),
            never = lease::keep(delivery) => match never {},
        };
        job.stop.cancel();
        self.presence.update(|status| status.jobs_done += u64::from(outcome.is_ok()));
        match outcome {
            Ok(()) => delivery.ack().await,
            Err(JobError::Stopped) if self.runs.state(&run) == RunState::Over => {
                delivery.ack().await
            }
            Err(JobError::Stopped) => delivery.nak(Duration::ZERO).await,
            Err(error) => self.fail(role, &job, delivery, &error).await,
        }
    }

    fn job(&self, role: &dyn Role, record: &Record, delivery: &Delivery) -> Job {
        let (cycle, name) = describe(&record.fact);
        let active = v1::ActiveJob {
            role: role_name(role.kind()).into(),
            run: record.fact.subject.run.to_string(),
            cycle,
            job: name,
            ..Default::default()
        };
        Job {
            run: record.fact.subject.run.clone(),
            record: record.clone(),
            delivered: delivery.delivered,
            agent: self.config.id.to_string(),
            bus: self.bus.clone(),
            store: self.store.clone(),
            cache: self.cache.clone(),
            directory: self.config.directory.clone(),
            progress: self.presence.begin(record.sequence, active),
            stop: CancellationToken::new(),
        }
    }

    /// Writes what went wrong, then hands the job back, or gives it up.
    async fn fail(
        &self,
        role: &dyn Role,
        job: &Job,
        delivery: &Delivery,
        error: &JobError,
    ) -> Result<(), bus::AckError> {
        let last = matches!(error, JobError::Final { .. }) || job.delivered >= DELIVERIES_MAX;
        tracing::warn!(subject = %job.record.fact.subject, %error, last, "job failed");
        if let Err(error) = self.write_failures(role, job, error, last).await {
            tracing::warn!(%error, "writing a failure");
            return Ok(());
        }
        if last {
            return delivery.ack().await;
        }
        let tries = u32::try_from(job.delivered).unwrap_or(u32::MAX);
        delivery.nak(RETRY_DELAY * tries).await
    }

    async fn write_failures(
        &self,
        role: &dyn Role,
        job: &Job,
        error: &JobError,
        last: bool,
    ) -> Result<(), JobError> {
        let spec = job.spec().await?;
        let attempt = u32::try_from(job.delivered).unwrap_or(u32::MAX);
        for id in role.failure_ids(&job.record, &spec) {
            let failure = v1::Failure {
                run: job.run.to_string(),
                kind: role.kind().to_string(),
                id: id.clone(),
                attempt,
                agent: job.agent.clone(),
                message: error.to_string(),
                log_tail: error.log_tail().to_owned(),
                r#final: last,
            };
            let place = Place::Failure { kind: role.kind(), id, attempt };
            job.write(place, Body::Failure(failure)).await?;
        }
        Ok(())
    }
}

/// A job's cycle and name, for people.
fn describe(fact: &Fact) -> (u32, String) {
    match &fact.subject.place {
        Place::GenerateOrder { cycle, job, .. } | Place::Samples { cycle, job } => {
            (*cycle, job.to_string())
        }
        Place::TrainOrder { cycle, .. } => (*cycle, "train".into()),
        Place::Checkpoint { cycle, step } => (*cycle, format!("step {step}")),
        _ => (0, Subject::to_string(&fact.subject)),
    }
}
