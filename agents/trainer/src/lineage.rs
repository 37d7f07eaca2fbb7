//! The checkpoints of one training in the log: what they descend from, which of them to go on
//! from, and whether one's own belongs among them.

use std::time::Duration;

use anyhow::{Context, ensure};
use runtime::{Job, JobError};
use serde_json::json;
use store::{About, CachedTree, TreePlace};
use wire::{Body, Place, Subject, v1};

/// Checkpoints looked at for one to go on from. Only the newest's state is kept, and for a
/// moment the one before.
const CANDIDATES: usize = 2;

/// Facts looked at of a training; those before have no state any more.
const LOOKED_AT: usize = 64;

/// In what is told about a state: the digest of its checkpoint.
const CHECKPOINT_KEY: &str = "checkpoint";

/// What removing a state may hold up a training.
const REMOVE_LIMIT: Duration = Duration::from_secs(30);

/// A checkpoint to go on from; its files are here and stay while this is held.
pub(crate) struct Point {
    pub fact: v1::Checkpoint,
    pub checkpoint: CachedTree,
    pub state: CachedTree,
}

/// The training of an order, as the log knows it.
#[derive(Clone, Copy)]
pub(crate) struct Lineage<'a> {
    pub job: &'a Job,
    pub order: &'a v1::TrainOrder,
    /// Without versions where trainings go on across them.
    pub engine: &'a str,
}

impl Lineage<'_> {
    /// The checkpoints so far, by step; of many the last ones. Steps are saved by time as well:
    /// only the log knows which.
    async fn checkpoints(&self) -> Result<Vec<v1::Checkpoint>, JobError> {
        let subjects = format!("flotilla.{}.checkpoint.{}.*", self.job.run, self.order.cycle);
        let records = self.job.facts(&subjects, LOOKED_AT).await?;
        let checkpoints = records.into_iter().filter_map(|record| match record.fact.body {
            Body::Checkpoint(checkpoint) => Some(checkpoint),
            _ => None,
        });
        let mut checkpoints: Vec<_> = checkpoints.collect();
        checkpoints.sort_by_key(|checkpoint| checkpoint.step);
        Ok(checkpoints)
    }

    /// The furthest checkpoint.
    pub(crate) async fn newest(&self) -> Result<Option<v1::Checkpoint>, JobError> {
        Ok(self.checkpoints().await?.pop())
    }

    async fn before(&self, step: u32) -> Result<Option<v1::Checkpoint>, JobError> {
        let mut checkpoints = self.checkpoints().await?;
        checkpoints.retain(|checkpoint| checkpoint.step < step);
        Ok(checkpoints.pop())
    }

    pub(crate) async fn at(&self, step: u32) -> Result<Option<v1::Checkpoint>, JobError> {
        let place = Place::Checkpoint { cycle: self.order.cycle, step };
        let subject = Subject::new(&self.job.run, place).to_string();
        let record = self.job.bus.get(&subject).await.map_err(JobError::retry)?;
        Ok(record.and_then(|record| match record.fact.body {
            Body::Checkpoint(checkpoint) => Some(checkpoint),
            _ => None,
        }))
    }

    /// The newest checkpoint that training can go on from. One that cannot be used, whatever
    /// the reason, costs time and no more.
    pub(crate) async fn resume_point(&self) -> Result<Option<Point>, JobError> {
        for fact in self.checkpoints().await?.into_iter().rev().take(CANDIDATES) {
            let step = fact.step;
            match self.fetch(fact).await {
                Ok(point) => return Ok(Some(point)),
                Err(error) => {
                    let error = format!("{error:#}");
                    tracing::warn!(run = %self.job.run, step, error, "cannot go on from a checkpoint");
                }
            }
        }
        Ok(None)
    }

    async fn fetch(&self, fact: v1::Checkpoint) -> anyhow::Result<Point> {
        let Job { cache, store, .. } = self.job;
        let tree = fact.tree.as_ref().context("the fact names no checkpoint")?;
        let state = fact.resume.as_ref().context("the fact names no state to resume from")?;
        let state = cache.tree(store, state).await.context("fetch what the optimizer remembers")?;
        let checkpoint = cache.tree(store, tree).await.context("fetch the checkpoint")?;
        let expected = about(self.order, self.engine, fact.step, fact.steps);
        ensure!(checkpoint.manifest().about == expected, "it belongs to another training (R116)");
        let named = state.manifest().about.get(CHECKPOINT_KEY);
        ensure!(named == Some(&json!(tree.manifest)), "the state is another checkpoint's (R116)");
        Ok(Point { fact, checkpoint, state })
    }

    /// Removes the state of the checkpoint before a step: it is of no use any more. Whatever
    /// hinders that hinders nothing else.
    pub(crate) async fn forget_before(&self, step: u32) {
        match self.before(step).await {
            Ok(Some(old)) => self.forget(&old).await,
            Ok(None) => {}
            Err(error) => {
                let (run, error) = (&self.job.run, format!("{error:?}"));
                tracing::warn!(%run, step, error, "a resume state may stay in the store");
            }
        }
    }

    pub(crate) async fn forget(&self, old: &v1::Checkpoint) {
        if let Some(state) = &old.resume {
            self.remove_state(old.step, state).await;
        }
    }

    pub(crate) async fn remove_state(&self, step: u32, state: &v1::Tree) {
        let place = TreePlace::resume(&self.job.run, self.order.cycle, step);
        let removed = self.job.store.remove_tree(&place, state);
        let error = match tokio::time::timeout(REMOVE_LIMIT, removed).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => format!("{:#}", anyhow::Error::from(error)),
            Err(_) => format!("the store took longer than {REMOVE_LIMIT:?}"),
        };
        tracing::warn!(path = state.path, error, "a resume state stays in the store");
    }

    /// Whether a training may go on after its checkpoint, now that the log has one for its step.
    ///
    /// # Errors
    /// When it must start again, from what the log has.
    pub(crate) async fn check(&self, own: &v1::Checkpoint) -> Result<(), JobError> {
        let accepted = self.at(own.step).await?;
        if stands(own, accepted.as_ref()) {
            return Ok(());
        }
        if let Some(state) = &own.resume {
            self.remove_state(own.step, state).await;
        }
        let is_over = self.newest().await?.is_some_and(|newest| newest.r#final);
        if is_over || self.resume_point().await?.is_some() {
            let error = anyhow::anyhow!(
                "another trainer came to other weights at step {} and was first; going on from its (E112)",
                own.step
            );
            return Err(JobError::retry(error));
        }
        tracing::warn!(
            run = %self.job.run, step = own.step,
            "the log has other weights for this step and nothing to go on from; training on"
        );
        Ok(())
    }
}

/// The rule of lineage: later steps may follow only on the weights the log has for this one.
fn stands(own: &v1::Checkpoint, accepted: Option<&v1::Checkpoint>) -> bool {
    let manifest =
        |checkpoint: &v1::Checkpoint| checkpoint.tree.as_ref().map(|tree| tree.manifest.clone());
    accepted.is_some_and(|accepted| manifest(accepted) == manifest(own))
}

/// What a state is: what the optimizer remembers at that checkpoint.
pub(crate) fn about_state(checkpoint: &v1::Tree) -> About {
    let entries = [("content", json!("resume")), (CHECKPOINT_KEY, json!(checkpoint.manifest))];
    entries.map(|(key, value)| (key.to_owned(), value)).into()
}

pub(crate) fn is_adapter(order: &v1::TrainOrder) -> bool {
    order.training.as_ref().is_some_and(|training| training.lora.is_some())
}

/// What a checkpoint is: equal for equal training, wherever, whenever and in however many
/// pieces it ran.
pub(crate) fn about(order: &v1::TrainOrder, engine: &str, step: u32, steps: u32) -> About {
    let manifest = |tree: Option<&v1::Tree>| tree.map(|tree| tree.manifest.clone());
    let base = order.base.as_ref().and_then(|base| base.tree.as_ref());
    let dataset = order.dataset.as_ref().map(|blob| blob.digest.clone());
    let replayed: Vec<&String> = order.replay.iter().map(|blob| &blob.digest).collect();
    let replay = (!replayed.is_empty()).then(|| ("replay", json!([replayed, order.replay_share])));
    let entries = [
        ("content", json!(if is_adapter(order) { "adapter" } else { "model" })),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(manifest: &str, agent: &str) -> v1::Checkpoint {
        let tree = v1::Tree { path: "p".into(), manifest: manifest.into() };
        v1::Checkpoint { tree: Some(tree), agent: agent.into(), ..Default::default() }
    }

    #[test]
    fn a_training_goes_on_only_from_the_weights_the_log_has() {
        let own = checkpoint("b3:1", "me");
        assert!(stands(&own, Some(&own)));
        assert!(stands(&own, Some(&checkpoint("b3:1", "somebody else"))));
        assert!(!stands(&own, Some(&checkpoint("b3:2", "somebody else"))));
        assert!(!stands(&own, None), "a log without what was written is another log");
    }

    #[test]
    fn what_a_checkpoint_is_differs_with_all_it_descends_from() {
        let tree =
            |manifest: &str| Some(v1::Tree { manifest: manifest.into(), ..Default::default() });
        let order = v1::TrainOrder {
            base: Some(v1::Base { tree: tree("b3:1"), random_init: false }),
            dataset: Some(v1::Blob { digest: "b3:2".into(), bytes: 3 }),
            ..Default::default()
        };
        let same = v1::TrainOrder { attempt: 7, round: 7, ..order.clone() };
        assert_eq!(
            about(&order, "candle-1", 5, 9),
            about(&same, "candle-1", 5, 9),
            "a second attempt is the same training"
        );
        let base = Some(v1::Base { tree: tree("b3:9"), random_init: false });
        let dataset = Some(v1::Blob { digest: "b3:9".into(), bytes: 3 });
        for other in [
            v1::TrainOrder { base, ..order.clone() },
            v1::TrainOrder { dataset, ..order.clone() },
            v1::TrainOrder { adapter: tree("b3:9"), ..order.clone() },
            v1::TrainOrder { cycle: 1, ..order.clone() },
            v1::TrainOrder { replay: vec![v1::Blob::default()], ..order.clone() },
        ] {
            assert_ne!(about(&order, "candle-1", 5, 9), about(&other, "candle-1", 5, 9));
        }
        assert_ne!(about(&order, "candle-1", 5, 9), about(&order, "candle-1", 6, 9));
        assert_ne!(about(&order, "candle-1", 5, 9), about(&order, "pytorch", 5, 9));
    }
}
