//! The agent's side: fetch, start the worker, publish each checkpoint as it is saved.

use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use anyhow::{Context, anyhow};
use futures::future::{BoxFuture, FutureExt};
use hardware::doctor::Finding;
use runtime::{Fault, Job, JobError, Needs, Role, Worker, halved};
use tokio::sync::{Semaphore, mpsc, watch};
use wire::{Body, WorkKind, v1};

use crate::{
    calls::{Begun, Progress, Step, Trained, UNPUBLISHED_MAX},
    change::Start,
    config::{Config, Engine},
    examine::Heard,
    fetch::Files,
    lineage::Lineage,
    probe::Probe,
    publish::{self, Saved},
    room,
};

/// A worker that says nothing for so long is hung, whatever it is at.
pub(crate) const SILENCE: Duration = Duration::from_secs(1800);

/// One whose steps take less is given at least this much.
pub(crate) const SILENCE_MIN: Duration = Duration::from_secs(60);

/// The trainer role of an agent.
pub struct TrainerRole {
    config: Config,
    probe: Probe,
    /// One training at a time.
    busy: Semaphore,
    /// The agent takes nothing new: what trains should save and end.
    leaving: watch::Sender<bool>,
    /// The training that last ran out of memory, and how often its passes were halved since.
    halved: Mutex<(String, u32)>,
}

impl TrainerRole {
    pub fn new(config: Config) -> Self {
        let leaving = watch::Sender::new(false);
        let busy = Semaphore::new(1);
        Self { config, probe: Probe::default(), busy, leaving, halved: Mutex::default() }
    }

    /// Trains, with smaller passes when the box runs out of memory.
    async fn train(&self, job: &Job) -> Result<(), JobError> {
        let _busy = self.busy.acquire().await.map_err(JobError::retry)?;
        let order = order(job)?;
        let name = format!("{} c{}", job.run, order.cycle);
        loop {
            let halvings = self.halvings(&name);
            let outcome = self.attempt(job, order, halvings).await;
            let failed = match outcome.map_err(|error| job.blame(error)) {
                Err(failed @ JobError::Failed { .. }) => failed,
                other => return other,
            };
            let JobError::Failed { fault, message, .. } = &failed else { return Err(failed) };
            if matches!(fault, Fault::Passing(_) | Fault::Broken) {
                self.probe.forget(&self.config.launch).await;
            }
            let less = halved(self.pass_tokens(order), halvings + 1);
            let Some(less) =
                less.filter(|_| *fault == Fault::TooLarge && self.config.engine.halves())
            else {
                return Err(failed);
            };
            tracing::warn!(run = %job.run, message, pass_tokens = less, "on with smaller passes");
            job.progress.note(format!("passes of {less} tokens, for {message}"));
            self.set_halvings(name.clone(), halvings + 1);
        }
    }

    fn halvings(&self, name: &str) -> u32 {
        let halved = self.halved.lock();
        halved.ok().filter(|last| last.0 == name).map_or(0, |last| last.1)
    }

    fn set_halvings(&self, name: String, halvings: u32) {
        if let Ok(mut halved) = self.halved.lock() {
            *halved = (name, halvings);
        }
    }

    /// Of one forward and backward pass, as ordered or else by the box's profile.
    fn pass_tokens(&self, order: &v1::TrainOrder) -> u32 {
        match order.training.as_ref().map_or(0, |training| training.micro_batch_tokens) {
            0 => self.config.launch.profile.training.micro_batch_tokens,
            tokens => tokens,
        }
    }

    /// Trains once, from the newest checkpoint.
    async fn attempt(
        &self,
        job: &Job,
        order: &v1::TrainOrder,
        halvings: u32,
    ) -> Result<(), JobError> {
        let Config { launch, engine, .. } = &self.config;
        let lineage = Lineage { job, order, engine: engine.family() };
        if let Some(last) = lineage.newest().await?.filter(|newest| newest.r#final) {
            // Whoever wrote it may have died before this.
            lineage.forget_before(last.step).await;
            return Ok(());
        }
        self.consult(order).await?;
        if let Engine::PyTorch(pytorch) = engine {
            self.probe.pass(pytorch, launch).await?;
        }
        let scratch = Scratch::create(job, order.cycle)?;
        let point = lineage.resume_point().await?;
        if let Some(point) = &point {
            lineage.forget_before(point.fact.step).await;
        }
        let previous = point.as_ref().map(|point| point.fact.clone());
        let files = Files { store: &job.store, cache: &job.cache };
        let mut call = files.fetch(order, self.config.policy(), point, scratch.0.clone()).await?;
        call.value.policy.halvings = halvings;
        let worker = Worker::start(&engine.command(launch))?;
        let (saved, to_publish) = mpsc::channel(UNPUBLISHED_MAX);
        let mut patience = launch.patience(SILENCE, SILENCE_MIN);
        let mut heard = Heard::new(engine.describe(), 0);
        let training = worker.call::<Trained, _>(&call.value, &mut patience, move |progress| {
            let step = hear(job, progress, &mut heard);
            let saved = saved.clone();
            let heard = heard.clone();
            async move {
                let Some(step) = step else { return };
                if let Some(directory) = step.saved.clone() {
                    // The receiver is gone only when publishing failed, which is reported.
                    let _ = saved.send(Saved { step, directory, heard }).await;
                }
            }
        });
        // Training goes on while a checkpoint is on its way into the store. When one cannot be
        // published, what follows is in vain; when training fails, what it saved still counts.
        let start = Start::of(&call.value);
        let publishing = publish::publish_all(lineage, start, previous, to_publish);
        let both = async { tokio::try_join!(training.map(Ok), publishing) };
        let (trained, ()) = tokio::select! {
            both = both => both?,
            never = self.hand_over(&worker) => match never {},
        };
        match trained {
            Ok(Trained { stopped_at: None }) => Ok(()),
            Ok(Trained { stopped_at: Some(step) }) => {
                tracing::info!(run = %job.run, step, "a training was saved to be gone on with");
                Err(self.interrupted())
            }
            Err(_) if self.hands_over() => Err(JobError::Stopped),
            Err(error) => Err(JobError::of_model_worker(error, &worker).await),
        }
    }

    /// # Errors
    /// When the doctor finds something against the training: another box may do it.
    async fn consult(&self, order: &v1::TrainOrder) -> Result<(), JobError> {
        let Config { launch, doctor, .. } = &self.config;
        if !self.config.uses_gpu() {
            return Ok(());
        }
        let plan = room::plan(order, &launch.profile);
        match doctor.against_plan(&launch.profile, &plan).await {
            Some(Finding { id, seen, remedy, .. }) => {
                Err(JobError::not_here(anyhow!("{id}: {seen}; {remedy} (E115)")))
            }
            None => Ok(()),
        }
    }

    /// Tells the training to save and end once the agent leaves. What it says of that is heard
    /// where all else is.
    async fn hand_over(&self, worker: &Worker) -> Infallible {
        let mut leaving = self.leaving.subscribe();
        // The sender lives as long as the role.
        let _ = leaving.wait_for(|leaving| *leaving).await;
        if self.config.engine.hands_over() {
            worker.terminate();
        }
        std::future::pending().await
    }

    fn hands_over(&self) -> bool {
        *self.leaving.borrow() && self.config.engine.hands_over()
    }

    /// Somebody else may have told it to end: then it is only tried again.
    fn interrupted(&self) -> JobError {
        if self.hands_over() {
            return JobError::Stopped;
        }
        JobError::retry(anyhow!("the training was told to end (SIGTERM), and saved before (E112)"))
    }
}

fn order(job: &Job) -> Result<&v1::TrainOrder, JobError> {
    match &job.record.fact.body {
        Body::TrainOrder(order) => Ok(order),
        _ => Err(JobError::fatal(anyhow!("not a train order (E111)"))),
    }
}

/// Passes on what the worker says; a step is the answer.
fn hear(job: &Job, progress: serde_json::Value, heard: &mut Heard) -> Option<Step> {
    match serde_json::from_value(progress).ok()? {
        Progress::Begun(Begun { step, refused, engine, skipped }) => {
            *heard = Heard::new(engine, skipped);
            if skipped > 0 {
                tracing::warn!(run = %job.run, skipped, "examples longer than training.max_tokens are left out");
            }
            match refused {
                None => tracing::info!(run = %job.run, step, "training begins behind a step"),
                Some(error) => {
                    tracing::warn!(run = %job.run, step, error, "a checkpoint was refused; starting over");
                }
            }
            None
        }
        Progress::Step(step) => {
            job.progress.set(step.step, step.steps, format!("loss {:.4}", step.loss));
            heard.count(&step);
            Some(step)
        }
        Progress::Busy => None,
    }
}

/// A directory for one training, removed when it ends.
struct Scratch(PathBuf);

impl Scratch {
    fn create(job: &Job, cycle: u32) -> Result<Self, JobError> {
        let path = job.directory.join("work").join(format!("{}-c{cycle}", job.run));
        let create = |path: &Path| -> std::io::Result<()> {
            // What an agent that died left here is of no use.
            let _ = std::fs::remove_dir_all(path);
            std::fs::create_dir_all(path)
        };
        create(&path)
            .with_context(|| format!("create {}", path.display()))
            .map_err(JobError::retry)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Role for TrainerRole {
    fn kind(&self) -> WorkKind {
        WorkKind::Train
    }

    fn room(&self) -> BoxFuture<'_, ()> {
        // The permit is taken again by the job itself.
        async { drop(self.busy.acquire().await) }.boxed()
    }

    fn uses_gpu(&self) -> bool {
        self.config.uses_gpu()
    }

    fn needs<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<Option<Needs>, JobError>> {
        async {
            let order = order(job)?;
            let lineage = Lineage { job, order, engine: self.config.engine.family() };
            if lineage.newest().await?.is_some_and(|newest| newest.r#final) {
                return Ok(None);
            }
            room::needs(job, order, &self.config).await
        }
        .boxed()
    }

    fn engine(&self) -> String {
        self.config.engine.describe()
    }

    fn leave(&self) {
        self.leaving.send_replace(true);
    }

    fn grace(&self) -> Duration {
        self.config.grace
    }

    fn run<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<(), JobError>> {
        self.train(job).boxed()
    }
}
