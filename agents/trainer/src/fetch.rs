//! From an order to a worker's call: the files it names, on this machine.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use runtime::JobError;
use store::{Cache, CachedBlob, CachedTree, Store};
use wire::v1;

use crate::{
    calls::{Policy, Resume, Train},
    lineage::Point,
    replay,
};

/// What is replayed, beside what was selected; in a training's own directory, whose checkpoints are
/// called by their steps.
const DATASET: &str = "dataset.jsonl";

/// Where an order's files come from.
#[derive(Clone, Copy)]
pub(crate) struct Files<'a> {
    pub store: &'a Store,
    pub cache: &'a Cache,
}

/// A call, and the cached files it names, which must not be evicted meanwhile.
pub(crate) struct Fetched {
    pub value: Train,
    _held: (CachedTree, Option<CachedTree>, CachedBlob, Option<Point>),
}

impl Files<'_> {
    pub(crate) async fn fetch(
        &self,
        order: &v1::TrainOrder,
        policy: Policy,
        point: Option<Point>,
        out: PathBuf,
    ) -> Result<Fetched, JobError> {
        let Self { store, cache } = self;
        let missing = |what: &str| JobError::fatal(anyhow!("the order names no {what} (E111)"));
        let base = order.base.as_ref().ok_or_else(|| missing("base"))?;
        let tree = base.tree.as_ref().ok_or_else(|| missing("base"))?;
        let dataset = order.dataset.as_ref().ok_or_else(|| missing("dataset"))?;
        let model = cache.tree(store, tree).await?;
        let adapter = match &order.adapter {
            Some(adapter) => Some(cache.tree(store, adapter).await?),
            None => None,
        };
        let dataset = cache.blob(store, dataset).await?;
        let replayed = self.with_replay(order, &dataset, &out).await?;
        let value = Train {
            base: model.path().to_owned(),
            base_name: tree.manifest.clone(),
            random_init: base.random_init,
            adapter: adapter.as_ref().map(|adapter| adapter.path().to_owned()),
            dataset: replayed.unwrap_or_else(|| dataset.path().to_owned()),
            training: order.training.clone().unwrap_or_default(),
            seed: order.seed,
            canary: order.canary.clone(),
            out,
            policy,
            resume: point.as_ref().map(|point| Resume {
                checkpoint: point.checkpoint.path().to_owned(),
                state: point.state.path().to_owned(),
                step: point.fact.step,
                tokens: point.fact.tokens,
                trained_tokens: point.fact.trained_tokens,
                wall_s: point.fact.wall_s,
            }),
        };
        Ok(Fetched { value, _held: (model, adapter, dataset, point) })
    }

    /// The file of a dataset with what is replayed of earlier ones; `None` when nothing is.
    async fn with_replay(
        &self,
        order: &v1::TrainOrder,
        dataset: &CachedBlob,
        out: &Path,
    ) -> Result<Option<PathBuf>, JobError> {
        if order.replay.is_empty() {
            return Ok(None);
        }
        let read = |path: PathBuf| async move {
            let bytes = tokio::fs::read(&path).await;
            bytes.with_context(|| format!("read {}", path.display())).map_err(JobError::retry)
        };
        let new = read(dataset.path().to_owned()).await?;
        let mut older = Vec::new();
        for blob in &order.replay {
            let cached = self.cache.blob(self.store, blob).await?;
            older.push(read(cached.path().to_owned()).await?);
        }
        let lines = replay::beside(&new, &older, order.replay_share, order.seed);
        let path = out.join(DATASET);
        let written = tokio::fs::write(&path, lines.map_err(JobError::fatal)?).await;
        written.with_context(|| format!("write {}", path.display())).map_err(JobError::retry)?;
        Ok(Some(path))
    }
}
