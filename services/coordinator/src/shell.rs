//! The coordinator's loop: facts in, decisions out.
//!
//! It decides only on a state that holds all it wrote itself; until its own facts have
//! come back through the log it waits. A write that fails is forgotten and decided anew.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::Context;
use bus::{Bus, Followed, PublishError, ReadError};
use cycle::{Command, Inputs, Run, Sizing, decide};
use futures::StreamExt;
use store::Store;
use tokio_util::sync::CancellationToken;
use wire::{Body, Fact, Place, Record, RunId, Subject, v1};

use crate::{fleet::Present, prompts::Prompts};

/// Facts folded before the next decision, when many are waiting.
const FACTS_AT_ONCE: usize = 4096;

/// Between tries of what the store or the bus refused.
const RETRY_EVERY: Duration = Duration::from_secs(2);

/// How a coordinator works.
#[derive(Debug, Clone)]
pub struct Config {
    /// Its name in the leader election.
    pub holder: String,
    /// How long a leader that fell silent is waited for.
    pub lease: Duration,
    pub sizing: Sizing,
}

struct Shell {
    bus: Bus,
    store: Store,
    sizing: Sizing,
    present: Present,
    open: BTreeMap<RunId, Open>,
    ended: BTreeSet<RunId>,
    /// Sequence of the last fact folded, and of the last one written here.
    folded: u64,
    written: u64,
    caught_up: bool,
}

/// A run that has not ended.
struct Open {
    run: Run,
    prompts: Option<Prompts>,
    /// Something happened since the last decision.
    stirred: bool,
    /// Why it cannot go on: what others would react to is not there.
    broken: Option<String>,
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
    let mut retry = tokio::time::interval(RETRY_EVERY);
    let mut shell = Shell {
        bus: bus.clone(),
        store,
        sizing: config.sizing,
        present: Present::default(),
        open: BTreeMap::new(),
        ended: BTreeSet::new(),
        folded: 0,
        written: 0,
        caught_up: false,
    };
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(chunk) = facts.next() => {
                for fact in chunk {
                    shell.take(fact)?;
                }
            }
            Some(status) = statuses.next() => shell.present.note(status),
            won = leadership.changed() => {
                tracing::info!(leads = won, "leadership");
                shell.stir();
            }
            _ = retry.tick() => shell.stir(),
        }
        if leadership.is_leader() && shell.caught_up && shell.folded >= shell.written {
            // Whatever was being written is decided anew by the next coordinator.
            stop.run_until_cancelled(shell.decide()).await;
        }
    }
    leadership.release().await;
    Ok(())
}

impl Shell {
    fn stir(&mut self) {
        self.open.values_mut().for_each(|open| open.stirred = true);
    }

    /// Fails only when the log is no longer the one that was followed.
    fn take(&mut self, followed: Result<Followed, ReadError>) -> Result<(), ReadError> {
        match followed {
            Ok(Followed::Record(record)) => self.fold(&record),
            Ok(Followed::CaughtUp) => {
                self.caught_up = true;
                tracing::info!(facts = self.folded, runs = self.open.len(), "replayed the log");
            }
            Ok(Followed::Unreadable { sequence, subject, error }) => {
                self.folded = sequence;
                let error = format!("{:#}", anyhow::Error::from(error));
                tracing::error!(subject, error, "an entry that is no fact");
                let run = subject.parse().ok().map(|subject: Subject| subject.run);
                if let Some(open) = run.and_then(|run| self.open.get_mut(&run)) {
                    let message = format!("entry {sequence} of the log cannot be read: {error}");
                    open.broken.get_or_insert(message);
                    open.stirred = true;
                }
            }
            Err(error @ ReadError::WentBack { .. }) => return Err(error),
            Err(error) => {
                let error = anyhow::Error::from(error);
                tracing::warn!(error = format!("{error:#}"), "following the log");
            }
        }
        Ok(())
    }

    fn fold(&mut self, record: &Record) {
        self.folded = record.sequence;
        let id = &record.fact.subject.run;
        if self.ended.contains(id) {
            return;
        }
        match self.open.get_mut(id) {
            Some(open) => {
                open.run.fold(record);
                open.stirred = true;
            }
            None => {
                let open = |run| Open { run, prompts: None, stirred: true, broken: None };
                self.open.extend(Run::start(record).map(|run| (id.clone(), open(run))));
            }
        }
        if matches!(record.fact.body, Body::Done(_)) {
            self.open.remove(id);
            self.ended.insert(id.clone());
        }
    }

    async fn decide(&mut self) {
        let stirred: Vec<RunId> =
            self.open.iter().filter(|(_, open)| open.stirred).map(|(id, _)| id.clone()).collect();
        for id in stirred {
            if let Err(error) = self.advance(&id).await {
                // Stirred again by the retry tick.
                tracing::warn!(run = %id, error = format!("{error:#}"), "advancing a run");
            }
        }
    }

    /// Decides for one run and writes what was decided.
    async fn advance(&mut self, id: &RunId) -> anyhow::Result<()> {
        let Some(open) = self.open.get_mut(id) else { return Ok(()) };
        open.stirred = false;
        if let Some(message) = open.broken.clone() {
            return self.end_failed(id, message).await;
        }
        if open.prompts.is_none() {
            match Prompts::load(&self.store, &open.run.spec).await {
                Ok(prompts) => open.prompts = Some(prompts),
                Err(error) if error.may_pass() => return Err(error.into()),
                Err(error) => {
                    let message = format!("{:#}", anyhow::Error::from(error));
                    return self.end_failed(id, message).await;
                }
            }
        }
        let prompts = open.prompts.as_ref().expect("loaded just above");
        let inputs = Inputs {
            prompts: &prompts.train,
            heldout: &prompts.heldout,
            fleet: &self.present.fleet(&open.run.spec.pool),
            sizing: &self.sizing,
        };
        for command in decide(&open.run, inputs) {
            let Err(error) = self.carry_out(command).await else { continue };
            let hopeless = matches!(error.downcast_ref(), Some(PublishError::TooLarge { .. }));
            return if hopeless {
                self.end_failed(id, format!("{error:#}")).await
            } else {
                Err(error)
            };
        }
        Ok(())
    }

    /// The blob first: a fact never speaks of what is not there.
    async fn carry_out(&mut self, Command { fact, blob }: Command) -> anyhow::Result<()> {
        if let Some(bytes) = blob {
            self.store.put_blob(bytes.into()).await.context("store a dataset")?;
        }
        let published = self.bus.publish(&fact).await?;
        self.written = self.written.max(published.sequence());
        tracing::info!(subject = %fact.subject, sequence = published.sequence(), "wrote");
        Ok(())
    }

    async fn end_failed(&mut self, id: &RunId, message: String) -> anyhow::Result<()> {
        let done = v1::Done { status: v1::done::Status::Failed.into(), message };
        let fact = Fact { subject: Subject::new(id, Place::Done), body: Body::Done(done) };
        self.carry_out(Command { fact, blob: None }).await
    }
}
