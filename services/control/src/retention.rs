//! Retention: removes the checkpoints and archived samples of ended runs that no rule keeps and that
//! nothing needs. The facts about them stay in the log; the store records who removed the files.
//!
//! A removal is recorded in the store first. Then the log is read again, and what a new run or
//! channel needs by then is spared. Submissions and moves of channels do the opposite: they write
//! their fact, then look for such a record ([`FleetControl::require_trees`]). So at least one of the
//! two notices the other.
//! After a crash, the next call completes what is left.

mod keep_rules;

use std::collections::BTreeMap;

use bus::ReadError;
use cycle::Run;
use futures::{StreamExt, TryStreamExt, stream};
use serde::Serialize;
use serde_json::Value;
use store::{GetError, RemoveError, Store, TreePlace, TreeRemoval, TreeUsage};
use wire::{FactBody, RunId, v1};

use crate::{
    FleetControl, RunError, StoreAccessError, TaskProgress,
    channels::roll_back_target,
    checkpoints::{checkpoint_infos, publication_time_ms},
    runs::fold_run,
};
use keep_rules::{
    AdoptedCheckpoint, ChannelTrees, CheckpointTree, KeepPolicy, RunTrees, TreeContent,
    TreeDecision, decide_trees,
};

pub use keep_rules::KeepRules;

const CONCURRENT_LOOKUPS: usize = 8;

/// A request to remove what no rule keeps.
#[derive(Debug, Clone)]
pub struct PruneRequest {
    /// The runs to look at; empty for all.
    pub runs: Vec<RunId>,
    pub rules: KeepRules,
    /// Keeps the newest checkpoint of each run, whatever the rules are.
    pub keep_newest: bool,
    /// The user, for the record in the store.
    pub by: String,
}

/// A plan to remove trees from the store, or its result.
#[derive(Debug, Clone, Serialize)]
pub struct PrunePlan {
    pub rules: String,
    /// False for a plan.
    pub is_done: bool,
    /// The total size of the trees that no rule keeps.
    pub bytes: u64,
    pub trees: Vec<PruneItem>,
}

/// One tree in the store.
#[derive(Debug, Clone, Serialize)]
pub struct PruneItem {
    pub run: RunId,
    pub cycle: u32,
    /// Absent for samples, which belong to the whole cycle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u32>,
    /// `checkpoint`, with its resume state, or `samples`.
    pub what: &'static str,
    pub bytes: u64,
    pub is_kept: bool,
    /// The reason to keep it; empty for a tree that is removed.
    pub reason: String,
    #[serde(skip)]
    decision: TreeDecision,
    #[serde(skip)]
    is_marked: bool,
}

/// A failure to plan or to remove.
#[derive(Debug, thiserror::Error)]
pub enum PruneError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    OpenStore(#[from] StoreAccessError),
    #[error("read the log")]
    Read(#[from] ReadError),
    #[error("look at the store")]
    Get(#[from] GetError),
    #[error("remove a tree")]
    Remove(#[from] RemoveError),
}

impl FleetControl {
    /// Returns the trees of the requested runs, with those that would be removed.
    pub async fn plan_prune(&self, request: &PruneRequest) -> Result<PrunePlan, PruneError> {
        let decisions = self.decide_trees(request).await?;
        let store = self.open_store().await?;
        let items: Vec<_> = decisions.into_iter().map(|it| measure_item(store, it)).collect();
        let items = stream::iter(items).buffered(CONCURRENT_LOOKUPS);
        let trees: Vec<PruneItem> = items.try_filter_map(async |it| Ok(it)).try_collect().await?;
        let removed = trees.iter().filter(|item| !item.is_kept);
        let bytes = removed.map(|item| item.bytes).sum();
        Ok(PrunePlan { rules: request.rules.to_string(), is_done: false, bytes, trees })
    }

    /// Removes the trees that a plan does not keep, except those that are needed meanwhile. Returns
    /// what was done. If it fails midway, the next plan has the rest.
    pub async fn prune_trees(
        &self,
        request: &PruneRequest,
        plan: PrunePlan,
        watch: &(dyn Fn(TaskProgress) + Sync),
    ) -> Result<PrunePlan, PruneError> {
        let store = self.open_store().await?;
        let at = format_time(wire::clock::unix_seconds());
        let removal = TreeRemoval { at, by: request.by.clone(), rules: request.rules.to_string() };
        let mut trees = plan.trees;
        for item in trees.iter().filter(|item| !item.is_kept) {
            let TreeDecision { tree, .. } = &item.decision;
            store.mark_removed(&item.decision.place(), tree, &removal).await?;
        }
        let now: BTreeMap<String, TreeDecision> = self
            .decide_trees(request)
            .await?
            .into_iter()
            .map(|decision| (decision.tree.path.clone(), decision))
            .collect();
        let (total, mut bytes) = (plan.bytes, 0);
        for item in &mut trees {
            let (place, tree) = (item.decision.place(), &item.decision.tree);
            let kept = now.get(&tree.path).and_then(|decision| decision.kept.clone());
            if !item.is_kept && kept.is_none() {
                remove_item(store, &item.decision).await?;
                bytes += item.bytes;
                watch(TaskProgress { unit: "bytes", done: bytes, total });
                continue;
            }
            if item.is_marked || !item.is_kept {
                store.unmark_removed(&place, tree).await?;
            }
            item.is_kept = true;
            item.reason = kept.map_or(std::mem::take(&mut item.reason), |kept| kept.to_string());
        }
        Ok(PrunePlan { is_done: true, bytes, trees, ..plan })
    }

    /// Fails if a tree of a run that the value names is removed, or about to be. To be called after
    /// the fact with this value is written. An unreachable store is no failure: those who read from
    /// it report that.
    pub(crate) async fn require_trees(&self, named: &impl Serialize) -> Result<(), GetError> {
        for tree in find_trees(named).iter().filter(|tree| tree.path.starts_with("runs/")) {
            let Ok(store) = self.open_store().await else { continue };
            match store.require_kept(tree).await {
                Err(error) if error.is_transient() => {}
                kept => kept?,
            }
        }
        Ok(())
    }

    async fn decide_trees(&self, request: &PruneRequest) -> Result<Vec<TreeDecision>, PruneError> {
        let policy = KeepPolicy {
            rules: request.rules.clone(),
            keep_newest: request.keep_newest,
            now_ms: wire::clock::unix_millis(),
        };
        let runs = self.list_runs().await?;
        if let Some(unknown) = request.runs.iter().find(|id| !runs.iter().any(|it| it.id == **id)) {
            return Err(RunError::Unknown(unknown.clone()).into());
        }
        let mut found = Vec::new();
        for run in &runs {
            let is_selected = request.runs.is_empty() || request.runs.contains(&run.id);
            found.push(self.read_run_trees(run, is_selected).await?);
        }
        Ok(decide_trees(&found, &self.read_channel_trees().await?, &policy))
    }

    async fn read_run_trees(&self, listed: &Run, is_selected: bool) -> Result<RunTrees, ReadError> {
        let records = self.records_without_samples(&listed.id).await?;
        let run = fold_run(&records).unwrap_or_else(|| listed.clone());
        let (mut checkpoints, mut adopted) = (Vec::new(), Vec::new());
        for info in checkpoint_infos(&run) {
            let Some(checkpoint) = info.checkpoint else { continue };
            let published_ms = publication_time_ms(&records, &checkpoint).unwrap_or(u64::MAX);
            let v1::Checkpoint { cycle, step, tree: Some(tree), resume, base, .. } = checkpoint
            else {
                continue;
            };
            let is_best = info.best;
            if !TreePlace::for_checkpoint(&run.id, cycle, step).contains_tree(&tree) {
                adopted.push(AdoptedCheckpoint { path: tree.path, is_best });
                continue;
            }
            let resume = resume.filter(|tree| {
                TreePlace::for_resume_state(&run.id, cycle, step).contains_tree(tree)
            });
            let base = base.map(|base| base.path);
            checkpoints.push(CheckpointTree {
                cycle,
                step,
                tree,
                resume,
                base,
                is_best,
                published_ms,
            });
        }
        let archives = records.iter().filter_map(|record| match &record.fact.body {
            FactBody::Archived(v1::Archived { cycle, tree: Some(tree), .. }) => {
                let place = TreePlace::for_archive(&run.id, *cycle);
                place.contains_tree(tree).then(|| (*cycle, tree.clone()))
            }
            _ => None,
        });
        let forked =
            run.cycles.range(..run.first_cycle).flat_map(|(_, it)| it.checkpoints.values());
        Ok(RunTrees {
            run: run.id.clone(),
            has_ended: run.done.is_some(),
            is_selected,
            spec_trees: forked.flat_map(tree_paths).chain(tree_paths(&run.spec)).collect(),
            adopted,
            checkpoints,
            archives: archives.collect(),
        })
    }

    async fn read_channel_trees(&self) -> Result<Vec<ChannelTrees>, ReadError> {
        let channels = self.read_all_moves().await?;
        let trees = channels.into_iter().map(|(name, moves)| {
            let paths = |found: Option<&v1::Channel>| {
                found.map(|it| tree_paths(&it.r#move)).unwrap_or_default()
            };
            ChannelTrees {
                name: name.to_string(),
                present: paths(moves.last()),
                before: paths(roll_back_target(&moves)),
                ever: moves.iter().flat_map(|it| paths(Some(it))).collect(),
            }
        });
        Ok(trees.collect())
    }
}

impl TreeDecision {
    /// Returns the only place where the tree may be removed.
    fn place(&self) -> TreePlace {
        match self.content {
            TreeContent::Checkpoint(step) => TreePlace::for_checkpoint(&self.run, self.cycle, step),
            TreeContent::Samples => TreePlace::for_archive(&self.run, self.cycle),
        }
    }
}

/// Returns `None` for a tree of which nothing is left.
async fn measure_item(
    store: &Store,
    decision: TreeDecision,
) -> Result<Option<PruneItem>, GetError> {
    let usage = store.measure_tree(&decision.tree).await?;
    let resume = match &decision.resume {
        Some(resume) => store.measure_tree(resume).await?,
        None => TreeUsage::default(),
    };
    let is_kept = decision.kept.is_some();
    if usage.objects + resume.objects == 0 || (is_kept && !usage.is_readable) {
        return Ok(None);
    }
    let (step, what) = match decision.content {
        TreeContent::Checkpoint(step) => (Some(step), "checkpoint"),
        TreeContent::Samples => (None, "samples"),
    };
    Ok(Some(PruneItem {
        run: decision.run.clone(),
        cycle: decision.cycle,
        step,
        what,
        bytes: usage.bytes + resume.bytes,
        is_kept,
        reason: decision.kept.as_ref().map(ToString::to_string).unwrap_or_default(),
        decision,
        is_marked: usage.is_marked,
    }))
}

async fn remove_item(store: &Store, decision: &TreeDecision) -> Result<(), RemoveError> {
    store.remove_tree(&decision.place(), &decision.tree).await?;
    if let (Some(resume), TreeContent::Checkpoint(step)) = (&decision.resume, decision.content) {
        let place = TreePlace::for_resume_state(&decision.run, decision.cycle, step);
        store.remove_tree(&place, resume).await?;
    }
    Ok(())
}

/// Returns the time in the format of RFC 3339.
fn format_time(unix_seconds: u64) -> String {
    let seconds = i64::try_from(unix_seconds).unwrap_or_default();
    jiff::Timestamp::from_second(seconds).unwrap_or_default().to_string()
}

fn tree_paths(named: &impl Serialize) -> Vec<String> {
    find_trees(named).into_iter().map(|tree| tree.path).collect()
}

/// Returns all trees in a fact. It searches the JSON, so that it also finds those in fields that
/// later versions add.
fn find_trees(named: &impl Serialize) -> Vec<v1::Tree> {
    fn search(value: &Value, found: &mut Vec<v1::Tree>) {
        if let (Some(path), Some(manifest)) = (value["path"].as_str(), value["manifest"].as_str()) {
            found.push(v1::Tree { path: path.to_owned(), manifest: manifest.to_owned() });
        }
        match value {
            Value::Object(fields) => fields.values().for_each(|it| search(it, found)),
            Value::Array(items) => items.iter().for_each(|it| search(it, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    search(&serde_json::to_value(named).unwrap_or_default(), &mut found);
    found
}
