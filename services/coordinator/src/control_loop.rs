//! The control loop of the coordinator: facts in, commands out. `cycle::RunSet` holds the state and
//! makes the decisions; this module contributes the clock, the bus and the store.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::Context;
use bus::{Bus, LogEvent, PublishError, PublishOutcome, ReadError};
use cycle::{JobSizing, PlannerInputs, ReissueTimeouts, RunSet, WriteCommand, fail_run};
use futures::StreamExt;
use store::{PutError, Store};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use wire::{Fact, Record, RunId};

use crate::{
    agent_registry::AgentRegistry,
    archive::{self, CycleRetention},
    metrics::FleetMetrics,
    prompts::{LoadPromptsError, RunPrompts},
    store_tasks::StoreTasks,
};

/// Facts folded before the next decision, when many are waiting.
const FACTS_PER_BATCH: usize = 4096;

const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// The time in which an iteration waits for the store; then it continues without the runs that need
/// it.
const STORE_WAIT: Duration = Duration::from_secs(2);

/// Minimum time between two straggler checks caused by agents that became idle.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_millis(300);

/// The configuration of a coordinator.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name of this coordinator in the leader election.
    pub candidate: String,
    /// Time without a sign of life after which a leader is replaced.
    pub lease: Duration,
    pub sizing: JobSizing,
    pub timeouts: ReissueTimeouts,
    /// Finished cycles whose bulky facts stay in the log.
    pub retention: CycleRetention,
    /// Receives the status after each iteration of the loop; a loop that hangs sends nothing.
    pub status_tx: watch::Sender<LoopStatus>,
    /// Receives the metrics every 2 seconds, if there are receivers.
    pub metrics_tx: watch::Sender<FleetMetrics>,
}

/// The status of the control loop.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoopStatus {
    /// The log has been replayed.
    pub caught_up: bool,
    /// This coordinator is the leader.
    pub leads: bool,
    /// Runs that have not ended.
    pub open_runs: usize,
    /// Sequence of the last log entry seen.
    pub last_sequence: u64,
}

/// The state of the control loop. Each iteration waits for one event and then, on the leader,
/// writes what the dirty runs need:
///
/// - facts of the log: folded into the runs, which become dirty;
/// - a status report of an agent: updates the registry; an agent that became idle triggers a
///   straggler check;
/// - a change of the leadership: all runs become dirty;
/// - every 2 seconds: removes stale agents, marks all runs as dirty, sends metrics.
///
/// For example, a samples fact makes its run dirty; the planner returns the next generate orders,
/// which are published in one batch and come back through the log. The blob of a command is stored
/// before its fact is published; if that takes longer than [`STORE_WAIT`], the other runs continue. A
/// failed or slow write is not retried by itself: the next tick marks the run as dirty, and the
/// planner decides again.
struct CoordinatorLoop {
    bus: Bus,
    store: Store,
    sizing: JobSizing,
    timeouts: ReissueTimeouts,
    registry: AgentRegistry,
    runs: RunSet,
    /// The log has been replayed.
    caught_up: bool,
    /// Prompts of open runs, once fetched.
    prompts: BTreeMap<RunId, RunPrompts>,
    prompt_loads: StoreTasks<(), Result<RunPrompts, LoadPromptsError>>,
    /// Store the blobs of facts.
    blob_writes: StoreTasks<Vec<Fact>, Result<(), PutError>>,
    clock: LogClock,
    /// Caused by an agent that became idle.
    last_idle_check: Instant,
}

/// The time of the log's last entry plus the local time since. Clocks of different hosts are never
/// compared.
struct LogClock {
    /// Milliseconds since 1970.
    last_ms: u64,
    received_at: Instant,
}

impl LogClock {
    /// Never goes back.
    fn record_entry(&mut self, record: &Record) {
        *self = Self { last_ms: record.time_ms.max(self.last_ms), received_at: Instant::now() };
    }

    fn now_ms(&self) -> u64 {
        let since = u64::try_from(self.received_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.saturating_add(since)
    }
}

/// Runs a coordinator until stopped. Several may run at the same time. Fails if the agents cannot
/// be watched, or the log was replaced.
pub async fn run(
    bus: Bus,
    store: Store,
    config: Config,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut leadership = bus.campaign_for_leadership(&config.candidate, config.lease);
    let mut statuses = bus.watch_statuses().await.context("watch the agents")?;
    let mut facts = bus.follow_facts(Vec::new(), 0).ready_chunks(FACTS_PER_BATCH).boxed();
    let (lead, leads) = watch::channel(false);
    let archiving = archive::run(bus.clone(), store.clone(), config.retention, leads);
    let archivist = tokio::spawn(stop.clone().run_until_cancelled_owned(archiving));
    let mut retry = tokio::time::interval(RETRY_INTERVAL);
    let mut coordinator = CoordinatorLoop {
        bus: bus.clone(),
        store,
        sizing: config.sizing,
        timeouts: config.timeouts,
        registry: AgentRegistry::default(),
        runs: RunSet::default(),
        caught_up: false,
        prompts: BTreeMap::new(),
        prompt_loads: StoreTasks::default(),
        blob_writes: StoreTasks::default(),
        clock: LogClock { last_ms: 0, received_at: Instant::now() },
        last_idle_check: Instant::now(),
    };
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(chunk) = facts.next() => {
                for fact in chunk {
                    coordinator.handle_event(fact)?;
                }
            }
            Some(status) = statuses.next() => {
                // The agent that became idle may finish a straggling job sooner.
                if coordinator.registry.record_status(status) && coordinator.last_idle_check.elapsed() > IDLE_CHECK_INTERVAL {
                    coordinator.last_idle_check = Instant::now();
                    coordinator.runs.mark_dirty();
                }
            }
            won = leadership.wait_changed() => {
                tracing::info!(leads = won, "leadership");
                lead.send_replace(won);
                if !won {
                    coordinator.drop_fetched();
                }
                coordinator.runs.mark_dirty();
            }
            _ = retry.tick() => {
                let runs = &coordinator.runs;
                coordinator.registry.evict_stale(|id| runs.find_run(id).is_some());
                coordinator.runs.mark_dirty();
                if coordinator.caught_up && config.metrics_tx.receiver_count() > 0 {
                    config.metrics_tx.send_replace(coordinator.collect_metrics());
                }
            }
        }
        config.status_tx.send_replace(coordinator.loop_status(leadership.is_leader()));
        if leadership.is_leader() {
            // If stopped here, the next leader plans the unwritten facts again.
            stop.run_until_cancelled(coordinator.advance_dirty_runs()).await;
        }
    }
    archivist.abort();
    leadership.release_leadership().await;
    Ok(())
}

impl CoordinatorLoop {
    fn loop_status(&self, leads: bool) -> LoopStatus {
        let facts = self.runs.last_sequence();
        LoopStatus {
            caught_up: self.caught_up,
            leads,
            open_runs: self.runs.iter_open().count(),
            last_sequence: facts,
        }
    }

    fn collect_metrics(&self) -> FleetMetrics {
        FleetMetrics::from_runs(self.runs.iter_open(), self.registry.count_states())
    }

    /// Fails only if the log was replaced.
    fn handle_event(&mut self, followed: Result<LogEvent, ReadError>) -> Result<(), ReadError> {
        match followed {
            Ok(LogEvent::Record(record)) => {
                self.clock.record_entry(&record);
                self.registry.apply_fact(&record);
                self.runs.fold_record(&record);
            }
            Ok(LogEvent::CaughtUp) => {
                self.runs.mark_caught_up();
                self.caught_up = true;
                let runs = self.runs.iter_open().count();
                tracing::info!(facts = self.runs.last_sequence(), runs, "replayed the log");
            }
            Ok(LogEvent::Unreadable { sequence, subject, error }) => {
                let error = format!("{:#}", anyhow::Error::from(error));
                tracing::error!(subject, error, "a log entry is not a fact");
                self.runs.record_unreadable(sequence, &subject, &error);
            }
            Err(error @ ReadError::Truncated { .. }) => return Err(error),
            Err(error) => {
                let error = anyhow::Error::from(error);
                tracing::warn!(error = format!("{error:#}"), "following the log");
            }
        }
        Ok(())
    }

    /// Drops what only a leader needs. Runs may end before this coordinator leads again.
    fn drop_fetched(&mut self) {
        self.prompts.clear();
        self.prompt_loads.retain_runs(|_| false);
        self.blob_writes.retain_runs(|_| false);
    }

    async fn advance_dirty_runs(&mut self) {
        // Other decisions wait until these have come back through the log.
        let queue = self.runs.queue_commands(wire::clock::minute_of_day().into());
        if let Err(error) = self.execute_commands(queue).await {
            // The retry tick asks the queue again.
            tracing::warn!(error = format!("{error:#}"), "advancing the queue");
        }
        let store_deadline = tokio::time::Instant::now() + STORE_WAIT;
        for id in self.runs.take_dirty() {
            if let Err(error) = self.advance_run(&id, store_deadline).await {
                // The retry tick marks the run as dirty again.
                tracing::warn!(run = %id, error = format!("{error:#}"), "advancing a run");
            }
        }
        let runs = &self.runs;
        self.prompts.retain(|id, _| runs.find_run(id).is_some());
        self.prompt_loads.retain_runs(|id| runs.find_run(id).is_some());
        self.blob_writes.retain_runs(|id| runs.find_run(id).is_some());
    }

    /// Fails the run if its prompts are invalid or a fact is too large for the bus. Waits for the
    /// store until the deadline; a later tick continues.
    async fn advance_run(
        &mut self,
        id: &RunId,
        store_deadline: tokio::time::Instant,
    ) -> anyhow::Result<()> {
        let Some(run) = self.runs.find_run(id) else { return Ok(()) };
        if self.blob_writes.is_running(id) {
            return Ok(());
        }
        if !self.prompts.contains_key(id) {
            let load = || {
                let (store, spec) = (self.store.clone(), run.spec.clone());
                async move { RunPrompts::load_prompts(&store, &spec).await }
            };
            match self.prompt_loads.poll_task(id, (), store_deadline, load).await {
                None => return Ok(()),
                Some(Ok(prompts)) => drop(self.prompts.insert(id.clone(), prompts)),
                Some(Err(error)) if error.is_transient() => return Err(error.into()),
                Some(Err(error)) => {
                    let message = format!("{:#}", anyhow::Error::from(error));
                    return self.execute_commands(vec![fail_run(id, message)]).await;
                }
            }
        }
        let prompts = &self.prompts[id];
        let inputs = PlannerInputs {
            prompts: &prompts.train,
            heldout: &prompts.heldout,
            suites: &prompts.suites,
            fleet: self.registry.fleet_snapshot(&run.spec.pool),
            sizing: &self.sizing,
            timeouts: &self.timeouts,
            check_stragglers: true,
            now_ms: self.clock.now_ms(),
        };
        let mut commands = self.runs.next_commands(id, inputs);
        if !self.store_blobs(id, &mut commands, store_deadline).await? {
            return Ok(());
        }
        let Err(error) = self.execute_commands(commands).await else { return Ok(()) };
        let is_final = |error: &PublishError| {
            matches!(error, PublishError::TooLarge { .. }) || error.is_occupied()
        };
        if error.downcast_ref().is_some_and(is_final) {
            return self.execute_commands(vec![fail_run(id, format!("{error:#}"))]).await;
        }
        Err(error)
    }

    /// Stores the blobs of a run's commands, because a fact must never refer to a missing blob.
    /// Returns false while they are being stored: the planner then decides again.
    async fn store_blobs(
        &mut self,
        id: &RunId,
        commands: &mut [WriteCommand],
        deadline: tokio::time::Instant,
    ) -> anyhow::Result<bool> {
        let (mut facts, mut blobs) = (Vec::new(), Vec::new());
        for command in commands {
            if let Some(blob) = command.blob.take() {
                facts.push(command.fact.clone());
                blobs.push(blob);
            }
        }
        if blobs.is_empty() {
            // What was stored is for an earlier plan.
            self.blob_writes.end_task(id);
            return Ok(true);
        }
        let write = || {
            let store = self.store.clone();
            async move {
                for blob in blobs {
                    store.put_blob(blob.into()).await?;
                }
                Ok::<_, PutError>(())
            }
        };
        // A later fact may change the plan while they are stored: the result is used for these only.
        let Some(stored) = self.blob_writes.poll_task(id, facts, deadline, write).await else {
            return Ok(false);
        };
        stored.context("store a dataset")?;
        Ok(true)
    }

    /// Publishes the facts of commands in one batch. Their blobs are stored.
    async fn execute_commands(&mut self, commands: Vec<WriteCommand>) -> anyhow::Result<()> {
        let facts: Vec<Fact> = commands.into_iter().map(|command| command.fact).collect();
        let published = self.bus.publish_all(&facts).await?;
        for (fact, published) in facts.iter().zip(published) {
            let sequence = published.log_sequence();
            self.runs.record_write(sequence);
            if let PublishOutcome::AlreadyWritten { same: false, .. } = published {
                self.runs.record_conflict(&fact.subject, sequence);
                continue;
            }
            tracing::info!(subject = %fact.subject, sequence, "wrote");
        }
        Ok(())
    }
}
