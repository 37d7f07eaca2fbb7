//! The coordinator's loop: facts in, decisions out.
//!
//! What it knows and decides is the desk's; here are the clock, the bus and the store.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::Context;
use bus::{Bus, Followed, PublishError, ReadError};
use cycle::{Command, Desk, Inputs, Sizing, Waiting, give_up};
use futures::StreamExt;
use store::Store;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use wire::{Record, RunId};

use crate::{
    archive::{self, Keep},
    figures::Figures,
    fleet::Present,
    prompts::Prompts,
};

/// Facts folded before the next decision, when many are waiting.
const FACTS_AT_ONCE: usize = 4096;

/// Between tries of what the store or the bus refused.
const RETRY_EVERY: Duration = Duration::from_secs(2);

/// Between two looks for what a box that stands idle could do again.
const IDLE_EVERY: Duration = Duration::from_millis(300);

/// How a coordinator works.
#[derive(Debug, Clone)]
pub struct Config {
    /// Its name in the leader election.
    pub holder: String,
    /// How long a leader that fell silent is waited for.
    pub lease: Duration,
    pub sizing: Sizing,
    pub waiting: Waiting,
    /// What the log keeps of cycles that are done.
    pub keep: Keep,
    /// Sent at every turn of the loop: one that hangs is silent.
    pub turns: watch::Sender<Turn>,
    /// Sent every few seconds, where somebody collects them.
    pub figures: watch::Sender<Figures>,
}

/// Where the loop is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Turn {
    /// The log was replayed.
    pub caught_up: bool,
    pub leads: bool,
    pub open_runs: usize,
    pub facts: u64,
}

struct Shell {
    bus: Bus,
    store: Store,
    sizing: Sizing,
    waiting: Waiting,
    present: Present,
    desk: Desk,
    caught_up: bool,
    /// What open runs sample from, once fetched.
    prompts: BTreeMap<RunId, Prompts>,
    clock: LogClock,
    /// When a box that has nothing to do was last a reason to decide anew.
    idled: Instant,
}

/// The log's time: that of its last entry, and what has passed here since. Nobody's clock is
/// compared with another's.
struct LogClock {
    last_ms: u64,
    heard: Instant,
}

impl LogClock {
    fn note(&mut self, record: &Record) {
        *self = Self { last_ms: record.time_ms.max(self.last_ms), heard: Instant::now() };
    }

    fn now_ms(&self) -> u64 {
        let since = u64::try_from(self.heard.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.saturating_add(since)
    }
}

/// Coordinates until stopped. Several may run at once.
///
/// # Errors
/// When the log cannot be followed.
pub async fn run(
    bus: Bus,
    store: Store,
    config: Config,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut leadership = bus.leadership(&config.holder, config.lease);
    let mut statuses = bus.watch_statuses().await.context("watch the agents")?;
    let mut facts = bus.follow(Vec::new(), 0).ready_chunks(FACTS_AT_ONCE).boxed();
    let (lead, leads) = watch::channel(false);
    let archiving = archive::run(bus.clone(), store.clone(), config.keep, leads);
    let archivist = tokio::spawn(stop.clone().run_until_cancelled_owned(archiving));
    let mut retry = tokio::time::interval(RETRY_EVERY);
    let mut shell = Shell {
        bus: bus.clone(),
        store,
        sizing: config.sizing,
        waiting: config.waiting,
        present: Present::default(),
        desk: Desk::default(),
        caught_up: false,
        prompts: BTreeMap::new(),
        clock: LogClock { last_ms: 0, heard: Instant::now() },
        idled: Instant::now(),
    };
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(chunk) = facts.next() => {
                for fact in chunk {
                    shell.take(fact)?;
                }
            }
            Some(status) = statuses.next() => {
                // What others still hold may be done sooner by this one.
                if shell.present.note(status) && shell.idled.elapsed() > IDLE_EVERY {
                    shell.idled = Instant::now();
                    shell.desk.stir();
                }
            }
            won = leadership.changed() => {
                tracing::info!(leads = won, "leadership");
                lead.send_replace(won);
                shell.desk.stir();
            }
            _ = retry.tick() => {
                let desk = &shell.desk;
                shell.present.tidy(|id| desk.run(id).is_some());
                shell.desk.stir();
                if shell.caught_up && config.figures.receiver_count() > 0 {
                    config.figures.send_replace(shell.figures());
                }
            }
        }
        config.turns.send_replace(shell.turn(leadership.is_leader()));
        if leadership.is_leader() {
            // Whatever was being written is decided anew by the next coordinator.
            stop.run_until_cancelled(shell.decide()).await;
        }
    }
    archivist.abort();
    leadership.release().await;
    Ok(())
}

impl Shell {
    fn turn(&self, leads: bool) -> Turn {
        let facts = self.desk.folded();
        Turn { caught_up: self.caught_up, leads, open_runs: self.desk.open().count(), facts }
    }

    fn figures(&self) -> Figures {
        Figures::of(self.desk.open(), self.present.states())
    }

    /// Fails only when the log is no longer the one that was followed.
    fn take(&mut self, followed: Result<Followed, ReadError>) -> Result<(), ReadError> {
        match followed {
            Ok(Followed::Record(record)) => {
                self.clock.note(&record);
                self.present.settle(&record);
                self.desk.fold(&record);
            }
            Ok(Followed::CaughtUp) => {
                self.desk.caught_up();
                self.caught_up = true;
                let runs = self.desk.open().count();
                tracing::info!(facts = self.desk.folded(), runs, "replayed the log");
            }
            Ok(Followed::Unreadable { sequence, subject, error }) => {
                let error = format!("{:#}", anyhow::Error::from(error));
                tracing::error!(subject, error, "an entry that is no fact");
                self.desk.unreadable(sequence, &subject, &error);
            }
            Err(error @ ReadError::WentBack { .. }) => return Err(error),
            Err(error) => {
                let error = anyhow::Error::from(error);
                tracing::warn!(error = format!("{error:#}"), "following the log");
            }
        }
        Ok(())
    }

    async fn decide(&mut self) {
        for id in self.desk.due() {
            if let Err(error) = self.advance(&id).await {
                // Stirred again by the retry tick.
                tracing::warn!(run = %id, error = format!("{error:#}"), "advancing a run");
            }
        }
        let desk = &self.desk;
        self.prompts.retain(|id, _| desk.run(id).is_some());
    }

    /// Decides for one run and writes what was decided.
    async fn advance(&mut self, id: &RunId) -> anyhow::Result<()> {
        let Some(run) = self.desk.run(id) else { return Ok(()) };
        if !self.prompts.contains_key(id) {
            match Prompts::load(&self.store, &run.spec).await {
                Ok(prompts) => drop(self.prompts.insert(id.clone(), prompts)),
                Err(error) if error.may_pass() => return Err(error.into()),
                Err(error) => {
                    let message = format!("{:#}", anyhow::Error::from(error));
                    return self.carry_out(vec![give_up(id, message)]).await;
                }
            }
        }
        let prompts = &self.prompts[id];
        let inputs = Inputs {
            prompts: &prompts.train,
            heldout: &prompts.heldout,
            suites: &prompts.suites,
            fleet: self.present.fleet(&run.spec.pool),
            sizing: &self.sizing,
            waiting: &self.waiting,
            again: true,
            now_ms: self.clock.now_ms(),
        };
        let commands = self.desk.decide(id, inputs);
        let Err(error) = self.carry_out(commands).await else { return Ok(()) };
        if matches!(error.downcast_ref(), Some(PublishError::TooLarge { .. })) {
            return self.carry_out(vec![give_up(id, format!("{error:#}"))]).await;
        }
        Err(error)
    }

    /// The blobs first: a fact never speaks of what is not there. What was decided at once
    /// follows from what was there before, and goes out together.
    async fn carry_out(&mut self, commands: Vec<Command>) -> anyhow::Result<()> {
        let mut facts = Vec::with_capacity(commands.len());
        for Command { fact, blob } in commands {
            if let Some(bytes) = blob {
                self.store.put_blob(bytes.into()).await.context("store a dataset")?;
            }
            facts.push(fact);
        }
        let published = self.bus.publish_all(&facts).await?;
        for (fact, published) in facts.iter().zip(published) {
            self.desk.wrote(published.sequence());
            let sequence = published.sequence();
            tracing::info!(subject = %fact.subject, sequence, "wrote");
        }
        Ok(())
    }
}
