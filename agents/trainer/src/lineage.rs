//! The checkpoints of one training in the log: their ancestry, the checkpoint to resume from, and
//! whether a new checkpoint continues them.

use std::time::Duration;

use agent::{JobError, LeasedJob};
use anyhow::{Context, ensure};
use engine::{MergeRule, OuterOptimizer};
use serde_json::json;
use store::{CachedTree, TreeMetadata, TreePlace};
use wire::{FactBody, FactKey, Subject, v1};

/// Checkpoints that are tried for resuming. The store keeps only the state of the newest one, and
/// for a short time that of the one before.
const CANDIDATES_MAX: usize = 2;

/// Earlier checkpoints of a training have no state any more.
const FACTS_MAX: usize = 64;

/// The key in a state's metadata for the digest of its checkpoint.
const CHECKPOINT_KEY: &str = "checkpoint";

/// The longest time for which the removal of a state may delay a training.
const REMOVE_LIMIT: Duration = Duration::from_secs(30);

/// A checkpoint to resume from. Its files stay in the cache while this exists.
pub(crate) struct ResumePoint {
    pub fact: v1::Checkpoint,
    pub checkpoint: CachedTree,
    /// The optimizer's state.
    pub state: CachedTree,
}

/// The training of an order as the log has it.
///
/// A later step may only follow the weights that the log has for the step before. Two trainers may
/// run the same order; the first checkpoint fact of a step counts. After each publication
/// [`TrainingLineage::check_accepted`] decides whether this training may continue, or must resume
/// from the checkpoint of the other one.
#[derive(Clone, Copy)]
pub(crate) struct TrainingLineage<'a> {
    pub job: &'a LeasedJob,
    pub order: &'a v1::TrainOrder,
    /// From `TrainingEngine::lineage_name`.
    pub engine: &'a str,
}

impl TrainingLineage<'_> {
    /// Reads the newest [`FACTS_MAX`] checkpoints, by ascending step. Steps are also saved by time,
    /// so only the log knows which ones exist.
    async fn read_checkpoints(&self) -> Result<Vec<v1::Checkpoint>, JobError> {
        let subjects = format!("flotilla.{}.checkpoint.{}.*", self.job.run, self.order.cycle);
        let records = self.job.read_facts(&subjects, FACTS_MAX).await?;
        let checkpoints = records.into_iter().filter_map(|record| match record.fact.body {
            FactBody::Checkpoint(checkpoint) => Some(checkpoint),
            _ => None,
        });
        let mut checkpoints: Vec<_> = checkpoints.collect();
        checkpoints.sort_by_key(|checkpoint| checkpoint.step);
        Ok(checkpoints)
    }

    /// Returns the checkpoint with the highest step.
    pub(crate) async fn newest_checkpoint(&self) -> Result<Option<v1::Checkpoint>, JobError> {
        Ok(self.read_checkpoints().await?.pop())
    }

    /// Returns the newest checkpoint below a step.
    async fn checkpoint_before(&self, step: u32) -> Result<Option<v1::Checkpoint>, JobError> {
        let mut checkpoints = self.read_checkpoints().await?;
        checkpoints.retain(|checkpoint| checkpoint.step < step);
        Ok(checkpoints.pop())
    }

    pub(crate) async fn checkpoint_at(
        &self,
        step: u32,
    ) -> Result<Option<v1::Checkpoint>, JobError> {
        let place = FactKey::Checkpoint { cycle: self.order.cycle, step };
        let subject = Subject::new(&self.job.run, place).to_string();
        let record = self.job.bus.get_fact(&subject).await.map_err(JobError::retryable_failure)?;
        Ok(record.and_then(|record| match record.fact.body {
            FactBody::Checkpoint(checkpoint) => Some(checkpoint),
            _ => None,
        }))
    }

    /// Finds the newest checkpoint that training can resume from. A checkpoint that cannot be used
    /// is logged and skipped; this costs only time.
    pub(crate) async fn find_resume_point(&self) -> Result<Option<ResumePoint>, JobError> {
        for fact in self.read_checkpoints().await?.into_iter().rev().take(CANDIDATES_MAX) {
            let step = fact.step;
            match self.fetch_point(fact).await {
                Ok(point) => return Ok(Some(point)),
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(run = %self.job.run, step, error, "cannot resume from a \
                                                                      checkpoint");
                }
            }
        }
        Ok(None)
    }

    /// Checks that a checkpoint and its state belong to this training.
    async fn fetch_point(&self, fact: v1::Checkpoint) -> anyhow::Result<ResumePoint> {
        let LeasedJob { cache, store, .. } = self.job;
        let tree = fact.tree.as_ref().context("the fact names no checkpoint")?;
        let state = fact.resume.as_ref().context("the fact names no state to resume from")?;
        let state = cache.fetch_tree(store, state).await.context("fetch the optimizer state")?;
        let checkpoint = cache.fetch_tree(store, tree).await.context("fetch the checkpoint")?;
        let expected = checkpoint_metadata(self.order, self.engine, fact.step, fact.steps);
        ensure!(checkpoint.manifest().about == expected, "it belongs to another training (R116)");
        let named = state.manifest().about.get(CHECKPOINT_KEY);
        ensure!(
            named == Some(&json!(tree.manifest)),
            "the state belongs to another checkpoint \
                                                       (R116)"
        );
        Ok(ResumePoint { fact, checkpoint, state })
    }

    /// Removes the state of the newest checkpoint below a step, because no training resumes from it
    /// any more. A failure is only logged.
    pub(crate) async fn remove_state_before(&self, step: u32) {
        match self.checkpoint_before(step).await {
            Ok(Some(old)) => self.remove_state_of(&old).await,
            Ok(None) => {}
            Err(error) => {
                let (run, error) = (&self.job.run, format!("{error:?}"));
                tracing::warn!(%run, step, error, "could not look up a resume state to remove; it \
                                                   may stay in the store");
            }
        }
    }

    pub(crate) async fn remove_state_of(&self, old: &v1::Checkpoint) {
        if let Some(state) = &old.resume {
            self.remove_state(old.step, state).await;
        }
    }

    /// A failure is only logged.
    pub(crate) async fn remove_state(&self, step: u32, state: &v1::Tree) {
        let place = TreePlace::for_resume_state(&self.job.run, self.order.cycle, step);
        let removed = self.job.store.remove_tree(&place, state);
        let error = match tokio::time::timeout(REMOVE_LIMIT, removed).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => format!("{:#}", anyhow::Error::from(error)),
            Err(_) => format!("the store took longer than {REMOVE_LIMIT:?}"),
        };
        tracing::warn!(
            path = state.path,
            error,
            "could not remove a resume state; it stays in the \
                                                  store"
        );
    }

    /// Checks that a training may continue after its checkpoint `own`, now that the log has a
    /// checkpoint for the step. If the log has other weights but nothing to resume from, the
    /// training continues with its own; otherwise it fails, retryable, and must resume from the
    /// log.
    pub(crate) async fn check_accepted(&self, own: &v1::Checkpoint) -> Result<(), JobError> {
        let accepted = self.checkpoint_at(own.step).await?;
        if matches_accepted(own, accepted.as_ref()) {
            return Ok(());
        }
        if let Some(state) = &own.resume {
            self.remove_state(own.step, state).await;
        }
        let is_over = self.newest_checkpoint().await?.is_some_and(|newest| newest.r#final);
        if is_over || self.find_resume_point().await?.is_some() {
            let error = anyhow::anyhow!(
                "another trainer published different weights for step {} first; resuming from its \
                 checkpoint (E112)",
                own.step
            );
            return Err(JobError::retryable_failure(error));
        }
        tracing::warn!(
            run = %self.job.run, step = own.step,
            "the log has different weights for this step but no resume state; training continues"
        );
        Ok(())
    }
}

/// Returns true if the log has the same weights for the step: later steps may only follow them.
fn matches_accepted(own: &v1::Checkpoint, accepted: Option<&v1::Checkpoint>) -> bool {
    let manifest =
        |checkpoint: &v1::Checkpoint| checkpoint.tree.as_ref().map(|tree| tree.manifest.clone());
    accepted.is_some_and(|accepted| manifest(accepted) == manifest(own))
}

/// A state names the digest of its checkpoint.
pub(crate) fn state_metadata(checkpoint: &v1::Tree) -> TreeMetadata {
    let entries = [("content", json!("resume")), (CHECKPOINT_KEY, json!(checkpoint.manifest))];
    entries.map(|(key, value)| (key.to_owned(), value)).into()
}

/// The engine in the metadata of checkpoints that are merges.
pub(crate) const MERGED_ENGINE: &str = "merge";

/// Returns the rule by which a training on several boxes merges.
pub(crate) fn merge_rule(order: &v1::TrainOrder) -> MergeRule {
    let across = across_settings(order);
    let v1::Across { outer_rate, outer_momentum, .. } = across;
    match across.method() {
        v1::across::Method::Stack => MergeRule::Stack,
        v1::across::Method::Step | v1::across::Method::Soup => {
            MergeRule::Step(OuterOptimizer { rate: outer_rate, momentum: outer_momentum })
        }
    }
}

/// Returns true if boxes train apart, and those that improve the held-out likelihood are merged.
pub(crate) fn is_soup(order: &v1::TrainOrder) -> bool {
    across_settings(order).method() == v1::across::Method::Soup
}

/// Returns the share of the changed values that a box sends; `None` if it sends its weights.
pub(crate) fn send_share(order: &v1::TrainOrder) -> Option<f64> {
    Some(across_settings(order).send_share).filter(|share| *share > 0.0)
}

fn across_settings(order: &v1::TrainOrder) -> v1::Across {
    order.training.as_ref().and_then(|training| training.across).unwrap_or_default()
}

pub(crate) fn trains_adapter(order: &v1::TrainOrder) -> bool {
    order.training.as_ref().is_some_and(|training| training.lora.is_some())
}

/// The metadata is equal for equal trainings, on any host, at any time and after any interruptions.
pub(crate) fn checkpoint_metadata(
    order: &v1::TrainOrder,
    engine: &str,
    step: u32,
    steps: u32,
) -> TreeMetadata {
    let manifest = |tree: Option<&v1::Tree>| tree.map(|tree| tree.manifest.clone());
    let base = order.base.as_ref().and_then(|base| base.tree.as_ref());
    let dataset = order.dataset.as_ref().map(|blob| blob.digest.clone());
    let replayed: Vec<&String> = order.replay.iter().map(|blob| &blob.digest).collect();
    let replay = (!replayed.is_empty()).then(|| ("replay", json!([replayed, order.replay_share])));
    let entries = [
        ("content", json!(if trains_adapter(order) { "adapter" } else { "model" })),
        ("base", json!(manifest(base))),
        ("parent", json!(manifest(order.adapter.as_ref().or(base)))),
        ("dataset", json!(dataset)),
        ("cycle", json!(order.cycle)),
        ("step", json!(step)),
        ("steps", json!(steps)),
        ("engine", json!(engine)),
    ];
    entries.into_iter().chain(replay).map(|(key, value)| (key.to_owned(), value)).collect()
}

/// The metadata of the weights of one box after its slice, in a training on several boxes.
pub(crate) fn delta_metadata(
    order: &v1::TrainOrder,
    engine: &str,
    delta: &v1::Delta,
) -> TreeMetadata {
    let mut about =
        checkpoint_metadata(order, engine, delta.first + delta.steps, delta.total_steps);
    let slice = json!([delta.outer, delta.slice, delta.first, delta.steps]);
    about.extend([("slice".to_owned(), slice), ("start".to_owned(), json!(delta.start))]);
    if send_share(order).is_some() {
        about.insert("content".to_owned(), json!("change"));
    }
    about
}

/// The metadata of merged weights. It does not name the box that merged.
pub(crate) fn merge_metadata(
    order: &v1::TrainOrder,
    content: &str,
    merge: &v1::train_order::Merge,
) -> TreeMetadata {
    let manifest = |tree: Option<&v1::Tree>| tree.map(|tree| tree.manifest.clone());
    let base = order.base.as_ref().and_then(|base| base.tree.as_ref());
    let deltas: Vec<_> = merge.deltas.iter().map(|delta| manifest(delta.tree.as_ref())).collect();
    let entries = [
        ("content", json!(content)),
        ("base", json!(manifest(base))),
        ("cycle", json!(order.cycle)),
        ("outer", json!(merge.outer)),
        ("start", json!(manifest(merge.start.as_ref()))),
        ("merged", json!(deltas)),
    ];
    entries.map(|(key, value)| (key.to_owned(), value)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(manifest: &str, agent: &str) -> v1::Checkpoint {
        let tree = v1::Tree { path: "p".into(), manifest: manifest.into() };
        v1::Checkpoint { tree: Some(tree), agent: agent.into(), ..Default::default() }
    }

    #[test]
    fn a_training_continues_only_from_the_weights_in_the_log() {
        let own = checkpoint("b3:1", "me");
        assert!(matches_accepted(&own, Some(&own)));
        assert!(matches_accepted(&own, Some(&checkpoint("b3:1", "another agent"))));
        assert!(!matches_accepted(&own, Some(&checkpoint("b3:2", "another agent"))));
        assert!(!matches_accepted(&own, None), "a log without what was written is another log");
    }

    #[test]
    fn checkpoint_metadata_depends_on_the_whole_ancestry() {
        let tree =
            |manifest: &str| Some(v1::Tree { manifest: manifest.into(), ..Default::default() });
        let order = v1::TrainOrder {
            base: Some(v1::Base { tree: tree("b3:1"), random_init: false, adapter: None }),
            dataset: Some(v1::Blob { digest: "b3:2".into(), bytes: 3 }),
            ..Default::default()
        };
        let same = v1::TrainOrder { attempt: 7, round: 7, ..order.clone() };
        assert_eq!(
            checkpoint_metadata(&order, "candle-1", 5, 9),
            checkpoint_metadata(&same, "candle-1", 5, 9),
            "a second attempt is the same training"
        );
        let base = Some(v1::Base { tree: tree("b3:9"), random_init: false, adapter: None });
        let dataset = Some(v1::Blob { digest: "b3:9".into(), bytes: 3 });
        for other in [
            v1::TrainOrder { base, ..order.clone() },
            v1::TrainOrder { dataset, ..order.clone() },
            v1::TrainOrder { adapter: tree("b3:9"), ..order.clone() },
            v1::TrainOrder { cycle: 1, ..order.clone() },
            v1::TrainOrder { replay: vec![v1::Blob::default()], ..order.clone() },
        ] {
            assert_ne!(
                checkpoint_metadata(&order, "candle-1", 5, 9),
                checkpoint_metadata(&other, "candle-1", 5, 9)
            );
        }
        assert_ne!(
            checkpoint_metadata(&order, "candle-1", 5, 9),
            checkpoint_metadata(&order, "candle-1", 6, 9)
        );
        assert_ne!(
            checkpoint_metadata(&order, "candle-1", 5, 9),
            checkpoint_metadata(&order, "pytorch", 5, 9)
        );
    }
}
