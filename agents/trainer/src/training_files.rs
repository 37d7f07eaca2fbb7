//! Turns a train order into a request to the worker, with its files on this host.

use std::path::{Path, PathBuf};

use agent::JobError;
use anyhow::{Context, anyhow};
use store::{CachedBlob, CachedTree, FileCache, Store};
use wire::v1;

use crate::{
    lineage::ResumePoint,
    messages::{ResumeCheckpoint, TrainHostSettings, TrainRequest},
    replay,
};

/// In the training's own directory, beside the saved steps, which are named by their numbers.
const DATASET_FILE: &str = "dataset.jsonl";

#[derive(Clone, Copy)]
pub(crate) struct TrainingFiles<'a> {
    pub store: &'a Store,
    pub cache: &'a FileCache,
}

/// A request, with locks on its cached files that prevent their eviction.
pub(crate) struct FetchedRequest {
    pub request: TrainRequest,
    _held: (CachedTree, Option<CachedTree>, CachedBlob, Option<ResumePoint>),
}

impl TrainingFiles<'_> {
    /// Fetches the files of an order and builds the request. `point` is the checkpoint to resume
    /// from, `out` the directory of the training. An incomplete order or an invalid dataset is a
    /// fatal failure.
    pub(crate) async fn fetch_request(
        &self,
        order: &v1::TrainOrder,
        policy: TrainHostSettings,
        point: Option<ResumePoint>,
        out: PathBuf,
    ) -> Result<FetchedRequest, JobError> {
        let Self { store, cache } = self;
        let missing =
            |what: &str| JobError::fatal_failure(anyhow!("the order names no {what} (E111)"));
        let base = order.base.as_ref().ok_or_else(|| missing("base"))?;
        let tree = base.tree.as_ref().ok_or_else(|| missing("base"))?;
        let dataset = order.dataset.as_ref().ok_or_else(|| missing("dataset"))?;
        let model = cache.fetch_tree(store, tree).await?;
        let adapter = match &order.adapter {
            Some(adapter) => Some(cache.fetch_tree(store, adapter).await?),
            None => None,
        };
        let dataset = cache.fetch_blob(store, dataset).await?;
        let replayed = self.write_replay_dataset(order, &dataset, &out).await?;
        let value = TrainRequest {
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
            slice: None,
            resume: point.as_ref().map(|point| ResumeCheckpoint {
                checkpoint: point.checkpoint.path().to_owned(),
                state: point.state.path().to_owned(),
                step: point.fact.step,
                tokens: point.fact.tokens,
                trained_tokens: point.fact.trained_tokens,
                wall_s: point.fact.wall_s,
            }),
        };
        Ok(FetchedRequest { request: value, _held: (model, adapter, dataset, point) })
    }

    /// Writes the dataset together with replayed examples of earlier cycles. Returns `None` if the
    /// order replays nothing.
    async fn write_replay_dataset(
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
            bytes
                .with_context(|| format!("read {}", path.display()))
                .map_err(JobError::retryable_failure)
        };
        let new = read(dataset.path().to_owned()).await?;
        let mut older = Vec::new();
        for blob in &order.replay {
            let cached = self.cache.fetch_blob(self.store, blob).await?;
            older.push(read(cached.path().to_owned()).await?);
        }
        let lines = replay::append_replay(&new, &older, order.replay_share, order.seed);
        let path = out.join(DATASET_FILE);
        let written = tokio::fs::write(&path, lines.map_err(JobError::fatal_failure)?).await;
        written
            .with_context(|| format!("write {}", path.display()))
            .map_err(JobError::retryable_failure)?;
        Ok(Some(path))
    }
}
