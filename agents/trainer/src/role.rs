//! The agent's side: fetch, start the worker, publish each checkpoint as it is saved.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, anyhow};
use futures::future::{BoxFuture, FutureExt};
use runtime::{Job, JobError, Launch, Role, Worker};
use tokio::sync::{Semaphore, mpsc};
use wire::{Body, WorkKind, v1};

use crate::{
    calls::{Begun, Progress, Resume, Step, Train, Trained, UNPUBLISHED_MAX},
    lineage::{Lineage, Point},
    publish,
};

/// A worker that says nothing for so long is hung, whatever it is at.
const SILENCE: Duration = Duration::from_secs(1800);

/// One whose steps take less is given at least this much.
const SILENCE_MIN: Duration = Duration::from_secs(60);

/// The trainer role of an agent.
pub struct TrainerRole {
    launch: Launch,
    /// One training at a time.
    busy: Semaphore,
}

impl TrainerRole {
    pub fn new(launch: Launch) -> Self {
        Self { launch, busy: Semaphore::new(1) }
    }

    async fn train(&self, job: &Job) -> Result<(), JobError> {
        let _busy = self.busy.acquire().await.map_err(JobError::retry)?;
        let Body::TrainOrder(order) = &job.record.fact.body else {
            return Err(JobError::fatal(anyhow!("not a train order")));
        };
        let lineage = Lineage { job, order };
        if let Some(last) = lineage.newest().await?.filter(|newest| newest.r#final) {
            // Whoever wrote it may have died before this.
            lineage.forget_before(last.step).await;
            return Ok(());
        }
        let scratch = Scratch::create(job, order.cycle)?;
        let point = lineage.resume_point().await?;
        if let Some(point) = &point {
            lineage.forget_before(point.fact.step).await;
        }
        let call = self.fetch(job, order, point, scratch.0.clone()).await?;
        let worker = Worker::start(&self.launch.worker("train", "train", []))?;
        let (saved, to_publish) = mpsc::channel(UNPUBLISHED_MAX);
        let mut patience = self.launch.patience(SILENCE, SILENCE_MIN);
        let training = worker.call::<Trained, _>(&call.value, &mut patience, move |progress| {
            let step = heard(job, progress);
            let saved = saved.clone();
            async move {
                if let Some(step) = step.filter(|step| step.saved.is_some()) {
                    // The receiver is gone only when publishing failed, which is reported.
                    let _ = saved.send(step).await;
                }
            }
        });
        // Training goes on while a checkpoint is on its way into the store. When one cannot be
        // published, what follows is in vain; when training fails, what it saved still counts.
        let publishing = publish::publish_all(lineage, to_publish);
        let (trained, ()) = tokio::try_join!(training.map(Ok), publishing)?;
        match trained {
            Ok(Trained {}) => Ok(()),
            Err(error) => Err(JobError::of_worker(error, &worker).await),
        }
    }

    async fn fetch(
        &self,
        job: &Job,
        order: &v1::TrainOrder,
        point: Option<Point>,
        out: PathBuf,
    ) -> Result<Fetched, JobError> {
        let missing = |what: &str| JobError::fatal(anyhow!("the order names no {what}"));
        let base = order.base.as_ref().ok_or_else(|| missing("base"))?;
        let tree = base.tree.as_ref().ok_or_else(|| missing("base"))?;
        let dataset = order.dataset.as_ref().ok_or_else(|| missing("dataset"))?;
        let model = job.cache.tree(&job.store, tree).await?;
        let adapter = job.tree_if(order.adapter.as_ref()).await?;
        let dataset = job.cache.blob(&job.store, dataset).await?;
        let value = Train {
            base: model.path().to_owned(),
            base_name: tree.manifest.clone(),
            random_init: base.random_init,
            adapter: adapter.as_ref().map(|adapter| adapter.path().to_owned()),
            dataset: dataset.path().to_owned(),
            training: order.training.clone().unwrap_or_default(),
            seed: order.seed,
            out,
            resume: point.as_ref().map(|point| Resume {
                checkpoint: point.checkpoint.path().to_owned(),
                state: point.state.path().to_owned(),
                step: point.fact.step,
                tokens: point.fact.tokens,
                wall_s: point.fact.wall_s,
            }),
        };
        Ok(Fetched { value, _held: (model, adapter, dataset, point) })
    }
}

/// A call, and the cached files it names, which must not be evicted meanwhile.
struct Fetched {
    value: Train,
    _held: (store::CachedTree, Option<store::CachedTree>, store::CachedBlob, Option<Point>),
}

/// Passes on what the worker says; a step is the answer.
fn heard(job: &Job, progress: serde_json::Value) -> Option<Step> {
    match serde_json::from_value(progress).ok()? {
        Progress::Begun(Begun { step, refused: None }) => {
            tracing::info!(run = %job.run, step, "training begins behind a step");
            None
        }
        Progress::Begun(Begun { step, refused: Some(error) }) => {
            tracing::warn!(run = %job.run, step, error, "a checkpoint was refused; starting over");
            None
        }
        Progress::Step(step) => {
            job.progress.set(step.step, step.steps, format!("loss {:.4}", step.loss));
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

    fn run<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<(), JobError>> {
        self.train(job).boxed()
    }
}
