//! The agent's side: fetch, start the worker, publish each checkpoint as it is saved.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow};
use futures::future::{BoxFuture, FutureExt};
use runtime::{Job, JobError, Launch, Role, Worker};
use serde_json::json;
use store::{About, TreePlace};
use tokio::sync::{Semaphore, mpsc};
use wire::{Body, Place, WorkKind, v1};

use crate::calls::{Step, Train, Trained, UNPUBLISHED_MAX};

/// A worker that finishes no step for so long is hung.
const SILENCE: Duration = Duration::from_secs(1800);

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
        if has_final_checkpoint(job, order.cycle).await? {
            return Ok(());
        }
        let scratch = Scratch::create(job, order.cycle)?;
        let call = self.fetch(job, order, scratch.0.clone()).await?;
        let worker = Worker::start(&self.launch.worker("train", "train", []))?;
        let publisher = Publisher { job, order, began: Instant::now() };
        let (saved, to_publish) = mpsc::channel(UNPUBLISHED_MAX);
        let training = worker.call::<Trained, _>(&call.value, SILENCE, move |progress| {
            let step = serde_json::from_value::<Step>(progress).ok();
            if let Some(step) = &step {
                job.progress.set(step.step, step.steps, format!("loss {:.4}", step.loss));
            }
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
        let (trained, ()) = tokio::try_join!(training.map(Ok), publisher.publish_all(to_publish))?;
        match trained {
            Ok(Trained {}) => Ok(()),
            Err(error) => Err(JobError::of_worker(error, &worker).await),
        }
    }

    async fn fetch(
        &self,
        job: &Job,
        order: &v1::TrainOrder,
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
        };
        Ok(Fetched { value, _held: (model, adapter, dataset) })
    }
}

/// A call, and the cached files it names, which must not be evicted meanwhile.
struct Fetched {
    value: Train,
    _held: (store::CachedTree, Option<store::CachedTree>, store::CachedBlob),
}

async fn has_final_checkpoint(job: &Job, cycle: u32) -> Result<bool, JobError> {
    let subjects = format!("flotilla.{}.checkpoint.{cycle}.*", job.run);
    let last = job.bus.get(&subjects).await.map_err(JobError::retry)?;
    Ok(last.is_some_and(|record| match record.fact.body {
        Body::Checkpoint(checkpoint) => checkpoint.r#final,
        _ => false,
    }))
}

/// Publishes what the worker saves, in order.
struct Publisher<'a> {
    job: &'a Job,
    order: &'a v1::TrainOrder,
    began: Instant,
}

impl Publisher<'_> {
    async fn publish_all(&self, mut saved: mpsc::Receiver<Step>) -> Result<(), JobError> {
        while let Some(step) = saved.recv().await {
            self.publish(step).await?;
        }
        Ok(())
    }

    /// Files first, then the fact: a checkpoint that was announced is there.
    async fn publish(&self, step: Step) -> Result<(), JobError> {
        let Some(directory) = &step.saved else { return Ok(()) };
        let Self { job, order, began } = self;
        let place = TreePlace::checkpoint(&job.run, order.cycle, step.step);
        let tree = job.store.publish_tree(directory, &place, self.about(&step)).await?;
        let base = order.base.as_ref().and_then(|base| base.tree.clone());
        let content = if self.is_adapter() {
            v1::checkpoint::Content::Adapter
        } else {
            v1::checkpoint::Content::Model
        };
        let checkpoint = v1::Checkpoint {
            run: job.run.to_string(),
            cycle: order.cycle,
            step: step.step,
            steps: step.steps,
            r#final: step.step == step.steps,
            content: content.into(),
            tree: Some(tree),
            parent: order.adapter.clone().or_else(|| base.clone()),
            base: base.filter(|_| self.is_adapter()),
            loss: step.loss,
            learning_rate: step.learning_rate,
            tokens: step.tokens,
            wall_s: began.elapsed().as_secs_f64(),
            agent: job.agent.clone(),
            resume: None,
        };
        let place = Place::Checkpoint { cycle: order.cycle, step: step.step };
        job.write(place, Body::Checkpoint(checkpoint)).await?;
        // It is in the store now; what remains here is only in the way.
        let _ = tokio::fs::remove_dir_all(directory).await;
        Ok(())
    }

    fn is_adapter(&self) -> bool {
        self.order.training.as_ref().is_some_and(|training| training.lora.is_some())
    }

    /// Lineage: equal for equal training, wherever and whenever it ran.
    fn about(&self, step: &Step) -> About {
        let manifest = |tree: Option<&v1::Tree>| tree.map(|tree| tree.manifest.clone());
        let base = self.order.base.as_ref().and_then(|base| base.tree.as_ref());
        let dataset = self.order.dataset.as_ref().map(|blob| blob.digest.clone());
        let entries = [
            ("content", json!(if self.is_adapter() { "adapter" } else { "model" })),
            ("base", json!(manifest(base))),
            ("parent", json!(manifest(self.order.adapter.as_ref().or(base)))),
            ("dataset", json!(dataset)),
            ("cycle", json!(self.order.cycle)),
            ("step", json!(step.step)),
            ("steps", json!(step.steps)),
            ("engine", json!(engine::ENGINE)),
        ];
        entries.map(|(key, value)| (key.to_owned(), value)).into()
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
