//! The weights from which a part starts: fetched, or derived from the changes of all boxes.

use std::path::Path;

use agent::JobError;
use anyhow::{Context, anyhow};
use engine::{AdapterMerge, MergeErrors};
use futures::future::try_join_all;
use store::CachedTree;
use wire::v1;

use super::{
    TrainingPart,
    merge::{MergedFiles, merge_mismatch_error},
};
use crate::{lineage, training_process::TrainingDir};

/// The adapter from which a merge starts, and the outer optimizer's velocity.
pub(super) struct MergeStart {
    adapter: CachedTree,
    velocity: Option<CachedTree>,
}

/// The files that a merge gives, as the log names them.
#[derive(Clone, Copy)]
struct MergeResult<'a> {
    adapter: &'a v1::Tree,
    /// `None` if it is not needed.
    velocity: Option<&'a v1::Tree>,
}

impl<'a> MergeResult<'a> {
    /// Returns the result from which a merge starts.
    fn before_merge(merge: &'a v1::train_order::Merge) -> Result<Self, JobError> {
        let adapter = merge.start.as_ref().ok_or_else(|| missing("start"))?;
        Ok(Self { adapter, velocity: merge.momentum.as_ref() })
    }
}

impl TrainingPart<'_> {
    /// Fetches the adapter from which a slice starts.
    pub(super) async fn fetch_start(
        self,
        start: &v1::Tree,
        derivation: &[v1::train_order::Merge],
    ) -> Result<CachedTree, JobError> {
        let wanted = MergeResult { adapter: start, velocity: None };
        Ok(self.fetch_or_derive(wanted, derivation).await?.adapter)
    }

    /// Fetches what a merge starts from.
    pub(super) async fn fetch_merge_inputs(
        self,
        merge: &v1::train_order::Merge,
    ) -> Result<MergeStart, JobError> {
        self.fetch_or_derive(MergeResult::before_merge(merge)?, &merge.derivation).await
    }

    /// Fetches the result of the last merge of a derivation. If it is not in the store, repeats the
    /// merges since the newest result that this host has, or else all of them.
    async fn fetch_or_derive(
        self,
        wanted: MergeResult<'_>,
        derivation: &[v1::train_order::Merge],
    ) -> Result<MergeStart, JobError> {
        let Some(first) = derivation.first() else { return self.fetch_result(wanted).await };
        // Each merge with its result, which the next one starts from.
        let mut results = Vec::new();
        for (index, merge) in derivation.iter().enumerate() {
            let next = derivation.get(index + 1);
            results.push((merge, next.map_or(Ok(wanted), MergeResult::before_merge)?));
        }
        let mut start = None;
        let mut rest = Vec::new();
        while start.is_none()
            && let Some((merge, result)) = results.pop()
        {
            start = self.find_result(result).await?;
            if start.is_none() {
                rest.push((merge, result));
            }
        }
        let mut start = match start {
            Some(start) => start,
            None => self.fetch_result(MergeResult::before_merge(first)?).await?,
        };
        for (merge, result) in rest.into_iter().rev() {
            start = self.derive_result(merge, &start, result).await?;
        }
        Ok(start)
    }

    async fn fetch_result(self, wanted: MergeResult<'_>) -> Result<MergeStart, JobError> {
        let Self { job, .. } = self;
        let adapter = job.cache.fetch_tree(&job.store, wanted.adapter).await?;
        let velocity = job.fetch_optional_tree(wanted.velocity).await?;
        Ok(MergeStart { adapter, velocity })
    }

    /// Returns a result that this host has; `None` if a part of it is missing.
    async fn find_result(self, wanted: MergeResult<'_>) -> Result<Option<MergeStart>, JobError> {
        let cache = &self.job.cache;
        let Some(adapter) = cache.find_tree(wanted.adapter).await? else { return Ok(None) };
        let Some(velocity) = wanted.velocity else {
            return Ok(Some(MergeStart { adapter, velocity: None }));
        };
        let velocity = cache.find_tree(velocity).await?;
        Ok(velocity.map(|velocity| MergeStart { adapter, velocity: Some(velocity) }))
    }

    /// Repeats a merge, and keeps its result in the cache.
    async fn derive_result(
        self,
        merge: &v1::train_order::Merge,
        start: &MergeStart,
        wanted: MergeResult<'_>,
    ) -> Result<MergeStart, JobError> {
        let Self { job, order, .. } = self;
        let name = format!("{}-{}-derived", order.cycle, merge.outer);
        let scratch = TrainingDir::create_for(job, &name)?;
        let (adapter, velocity) = (scratch.0.join("adapter"), scratch.0.join("velocity"));
        self.write_merged(merge, start, (&adapter, &velocity)).await?;
        let (place, about) = self.describe_merged(merge, MergedFiles::Adapter);
        let kept = job.cache.keep_tree(&adapter, &place, about).await?;
        if kept.manifest != wanted.adapter.manifest {
            let (ours, theirs) = (&kept.manifest, &wanted.adapter.manifest);
            let weights = format!("merge {} of cycle {}", merge.outer, order.cycle);
            return Err(merge_mismatch_error(&weights, ours, theirs, "in the log"));
        }
        if velocity.exists() {
            let (place, about) = self.describe_merged(merge, MergedFiles::Velocity);
            job.cache.keep_tree(&velocity, &place, about).await?;
        }
        self.fetch_result(wanted).await
    }

    /// Writes the merged adapter and the new velocity into two directories.
    pub(super) async fn write_merged(
        self,
        merge: &v1::train_order::Merge,
        start: &MergeStart,
        (adapter, velocity): (&Path, &Path),
    ) -> Result<MergeErrors, JobError> {
        let Self { job, order, .. } = self;
        let fetch = async |delta: &v1::Delta| {
            let tree = delta.tree.as_ref().ok_or_else(|| missing("weights"))?;
            let fetched = job.cache.fetch_tree(&job.store, tree).await?;
            Ok::<_, JobError>((fetched, delta.trained_tokens))
        };
        let trained = try_join_all(merge.deltas.iter().map(fetch)).await?;
        let files = AdapterMerge {
            start: start.adapter.path().to_owned(),
            velocity: start.velocity.as_ref().map(|tree| tree.path().to_owned()),
            trained: trained
                .iter()
                .map(|(tree, tokens)| (tree.path().to_owned(), *tokens))
                .collect(),
            rule: lineage::merge_rule(order),
        };
        let (adapter, velocity) = (adapter.to_owned(), velocity.to_owned());
        let merging = move || files.write_merged(&adapter, &velocity);
        let merged =
            tokio::task::spawn_blocking(merging).await.map_err(JobError::retryable_failure)?;
        merged.context("merge the weights of the slices").map_err(|error| {
            // Another box may have room on its disk.
            match error.chain().any(|cause| cause.is::<std::io::Error>()) {
                true => JobError::retryable_failure(error),
                false => JobError::fatal_failure(error),
            }
        })
    }
}

fn missing(what: &str) -> JobError {
    JobError::fatal_failure(anyhow!("the merge names no {what} (E111)"))
}
