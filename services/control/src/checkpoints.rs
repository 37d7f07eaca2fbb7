//! Checkpoints: listing, download and export.

use std::path::Path;

use bytes::Bytes;
use cycle::Run;
use futures::{Stream, StreamExt, TryStreamExt};
use store::GetError;
use tokio::io::AsyncWriteExt;
use wire::{FactBody, Record, RunId, v1};

use crate::{
    FleetControl, RunError, StoreAccessError, TaskProgress,
    runs::{fold_run, to_timestamp},
};

/// In a checkpoint reference, in place of a cycle.
const NEWEST: &str = "newest";

/// A failure to find, read or export a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error(
        "{0:?} is not a checkpoint; write RUN (its best), RUN/newest, RUN/CYCLE or RUN/CYCLE/STEP \
         (R106)"
    )]
    Reference(String),
    #[error("there is no checkpoint {0}; `flotilla checkpoint list RUN` lists all (R106)")]
    Unknown(String),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(transparent)]
    OpenStore(#[from] StoreAccessError),
    #[error(
        "{run} made an adapter; a run starts from a model: continue a RAFT run (`flotilla run fork \
         {run}@CYCLE --set cycles=N`), or export the adapter (`flotilla checkpoint export {run} \
         --out DIR`) and name DIR as base.adapter of a RAFT run, or merge it (`flotilla convert \
         merge`) and name the merged directory as base.model (R110)"
    )]
    Adapter { run: String },
    #[error("read the checkpoint's files")]
    Get(#[from] GetError),
    #[error("write {path}")]
    Write {
        path: String,
        #[source]
        source: std::io::Error,
    },
}

impl CheckpointError {
    /// Returns true if the named checkpoint cannot be used, rather than read.
    pub fn is_caller_fault(&self) -> bool {
        match self {
            Self::Reference(_) | Self::Unknown(_) | Self::Adapter { .. } => true,
            Self::Run(error) => matches!(error, RunError::Unknown(_)),
            Self::Get(GetError::Removed { .. }) => true,
            Self::OpenStore(_) | Self::Get(_) | Self::Write { .. } => false,
        }
    }

    /// Returns true if the same call may succeed later: the log or the store is the reason.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::OpenStore(_) => true,
            Self::Get(error) => error.is_transient(),
            Self::Run(error) => error.is_transient(),
            Self::Reference(_) | Self::Unknown(_) | Self::Adapter { .. } | Self::Write { .. } => {
                false
            }
        }
    }
}

/// Parses a checkpoint reference: `RUN` for the best of the run, `RUN/newest`, `RUN/CYCLE` for the
/// last of a cycle, or `RUN/CYCLE/STEP`.
pub fn parse_checkpoint_ref(text: &str) -> Result<v1::CheckpointRef, CheckpointError> {
    let wrong = || CheckpointError::Reference(text.to_owned());
    let mut parts = text.split('/');
    let run = parts.next().and_then(|run| RunId::new(run).ok()).ok_or_else(wrong)?;
    let rest: Vec<&str> = parts.collect();
    let number = |text: &str| text.parse::<u32>().map(Some).map_err(|_| wrong());
    let (cycle, step, newest) = match rest[..] {
        [] => (None, None, false),
        [NEWEST] => (None, None, true),
        [cycle] => (number(cycle)?, None, false),
        [cycle, step] => (number(cycle)?, number(step)?, false),
        _ => return Err(wrong()),
    };
    Ok(v1::CheckpointRef { run: run.to_string(), cycle, step, newest })
}

fn format_reference(reference: &v1::CheckpointRef) -> String {
    let parts = [reference.cycle, reference.step];
    let numbers = parts.iter().flatten().map(|number| format!("/{number}"));
    format!("{}{}", reference.run, numbers.collect::<String>())
}

/// Returns the checkpoints that count of a run, in the order of cycles and steps, with their figures
/// and without times and files.
pub(crate) fn checkpoint_infos(run: &Run) -> Vec<v1::CheckpointInfo> {
    let (best, newest) = (cycle::best_checkpoint(run), cycle::newest_checkpoint(run));
    let all = run
        .cycles
        .values()
        .flat_map(|cycle| cycle.checkpoints.values().map(move |checkpoint| (cycle, checkpoint)));
    all.map(|(cycle, checkpoint)| {
        let heldout = cycle.done.as_ref().and_then(|done| done.heldout.as_ref());
        let evals = cycle.evals.iter().filter(|((step, _), _)| *step == checkpoint.step);
        let perplexities = evals.map(|((_, suite), eval)| v1::checkpoint_info::SuitePerplexity {
            suite: suite.to_string(),
            perplexity: eval.perplexity,
        });
        v1::CheckpointInfo {
            checkpoint: Some(checkpoint.clone()),
            best: best == Some(checkpoint),
            newest: newest == Some(checkpoint),
            pass_rate: heldout.filter(|_| checkpoint.r#final).map(|rate| rate.mean),
            perplexities: perplexities.collect(),
            ..Default::default()
        }
    })
    .collect()
}

/// Returns the time of the fact about a checkpoint, in milliseconds since 1970.
pub(crate) fn publication_time_ms(records: &[Record], checkpoint: &v1::Checkpoint) -> Option<u64> {
    let is_it = |record: &&Record| matches!(&record.fact.body, FactBody::Checkpoint(found) if found == checkpoint);
    records.iter().find(is_it).map(|record| record.time_ms)
}

impl FleetControl {
    /// Returns a run's checkpoints in the order of cycles and steps, with their figures and without
    /// their files. Fails if the run does not exist.
    pub async fn list_checkpoints(&self, id: &RunId) -> Result<Vec<v1::CheckpointInfo>, RunError> {
        let records = self.records_without_samples(id).await?;
        let run = fold_run(&records).ok_or_else(|| RunError::Unknown(id.clone()))?;
        let mut infos = checkpoint_infos(&run);
        for info in &mut infos {
            let checkpoint = info.checkpoint.as_ref();
            let time_ms = checkpoint.and_then(|found| publication_time_ms(&records, found));
            info.at = time_ms.map(to_timestamp);
        }
        Ok(infos)
    }

    /// Returns a run's checkpoints as [`FleetControl::list_checkpoints`] does, and marks those whose
    /// files were removed. Without access to the store, none is marked.
    pub async fn list_stored_checkpoints(
        &self,
        id: &RunId,
    ) -> Result<Vec<v1::CheckpointInfo>, RunError> {
        let mut infos = self.list_checkpoints(id).await?;
        let Ok(store) = self.open_store().await else { return Ok(infos) };
        let directory = format!("runs/{id}/checkpoints");
        let removed = store.list_removed(&directory).await.unwrap_or_default();
        for info in &mut infos {
            let tree = checkpoint_tree(info);
            info.removed = tree.is_some_and(|tree| removed.contains(&tree.path));
        }
        Ok(infos)
    }

    /// Returns the checkpoint that the reference names, with its files.
    pub async fn get_checkpoint(
        &self,
        reference: &v1::CheckpointRef,
    ) -> Result<v1::CheckpointInfo, CheckpointError> {
        let unknown = || CheckpointError::Unknown(format_reference(reference));
        let run = RunId::new(reference.run.as_str()).map_err(|_| unknown())?;
        let fits = |info: &v1::CheckpointInfo| match (reference.cycle, &info.checkpoint) {
            (None, _) => {
                if reference.newest {
                    info.newest
                } else {
                    info.best
                }
            }
            (Some(cycle), Some(checkpoint)) => {
                cycle == checkpoint.cycle
                    && reference.step.is_none_or(|step| step == checkpoint.step)
            }
            (Some(_), None) => false,
        };
        let key = |info: &v1::CheckpointInfo| {
            info.checkpoint.as_ref().map(|checkpoint| (checkpoint.cycle, checkpoint.step))
        };
        let mut found = self
            .list_checkpoints(&run)
            .await?
            .into_iter()
            .filter(fits)
            .max_by_key(key)
            .ok_or_else(unknown)?;
        let tree = checkpoint_tree(&found).ok_or_else(unknown)?;
        found.files = self
            .open_store()
            .await?
            .read_manifest(&tree)
            .await?
            .files
            .into_iter()
            .map(|file| v1::checkpoint_info::File {
                path: file.path.to_string(),
                bytes: file.bytes,
                digest: file.digest.to_string(),
            })
            .collect();
        Ok(found)
    }

    /// Returns the bytes of one file of a checkpoint, verified as they are read: an error at the
    /// end of the stream means that the bytes before it are damaged.
    pub async fn read_checkpoint_file(
        &self,
        reference: &v1::CheckpointRef,
        path: &str,
    ) -> Result<impl Stream<Item = Result<Bytes, GetError>> + Send + use<>, CheckpointError> {
        let info = self.get_checkpoint(reference).await?;
        let tree = checkpoint_tree(&info)
            .ok_or_else(|| CheckpointError::Unknown(format_reference(reference)))?;
        Ok(self.open_store().await?.stream_tree_file(&tree, path).await?)
    }

    /// Copies a checkpoint's files into a directory. Each file is verified before it gets its final
    /// name.
    pub async fn export_checkpoint(
        &self,
        reference: &v1::CheckpointRef,
        directory: &Path,
        progress: &(dyn Fn(TaskProgress) + Sync),
    ) -> Result<v1::CheckpointInfo, CheckpointError> {
        let info = self.get_checkpoint(reference).await?;
        let tree = checkpoint_tree(&info)
            .ok_or_else(|| CheckpointError::Unknown(format_reference(reference)))?;
        self.export_tree(&tree, directory, progress).await?;
        Ok(info)
    }

    /// Copies the files of a tree into a directory, as [`FleetControl::export_checkpoint`] does.
    pub async fn export_tree(
        &self,
        tree: &v1::Tree,
        directory: &Path,
        progress: &(dyn Fn(TaskProgress) + Sync),
    ) -> Result<(), CheckpointError> {
        let store = self.open_store().await?;
        let files = store.read_manifest(tree).await?.files;
        let total = files.iter().map(|file| file.bytes).sum();
        let mut done = 0;
        for file in &files {
            let path = file.path.to_string();
            let bytes = store.stream_tree_file(tree, &path).await?;
            let bytes = bytes.err_into().inspect_ok(|bytes| {
                done += bytes.len() as u64;
                progress(TaskProgress { unit: "bytes", done, total });
            });
            write_verified(bytes.boxed(), &directory.join(&path)).await?;
        }
        Ok(())
    }
}

fn checkpoint_tree(info: &v1::CheckpointInfo) -> Option<v1::Tree> {
    info.checkpoint.as_ref()?.tree.clone()
}

/// Writes to a file with the suffix `partial`, syncs it, and renames it to `path`. Removes the
/// partial file on failure.
async fn write_verified(
    mut bytes: futures::stream::BoxStream<'_, Result<Bytes, CheckpointError>>,
    path: &Path,
) -> Result<(), CheckpointError> {
    let failed = |source| CheckpointError::Write { path: path.display().to_string(), source };
    if let Some(parent) = path.parent() {
        tokio::fs::create_dir_all(parent).await.map_err(failed)?;
    }
    let partial = path.with_extension("partial");
    let written = async {
        let mut file = tokio::fs::File::create(&partial).await.map_err(failed)?;
        while let Some(chunk) = bytes.try_next().await? {
            file.write_all(&chunk).await.map_err(failed)?;
        }
        file.sync_all().await.map_err(failed)?;
        tokio::fs::rename(&partial, path).await.map_err(failed)
    };
    let outcome = written.await;
    if outcome.is_err() {
        // A failure to remove the file adds nothing to the returned error.
        let _ = tokio::fs::remove_file(&partial).await;
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_named_by_run_cycle_and_step() {
        let parsed = |text| parse_checkpoint_ref(text).map(|r| (r.run, r.cycle, r.step, r.newest));
        let raft_1 = |cycle, step, newest| ("raft-1".to_owned(), cycle, step, newest);
        assert_eq!(parsed("raft-1").unwrap(), raft_1(None, None, false));
        assert_eq!(parsed("raft-1/newest").unwrap(), raft_1(None, None, true));
        assert_eq!(parsed("raft-1/2").unwrap(), raft_1(Some(2), None, false));
        assert_eq!(parsed("raft-1/2/48").unwrap(), raft_1(Some(2), Some(48), false));
        for wrong in ["", "raft-1/x", "raft-1/newest/3", "raft-1/1/2/3", "../x"] {
            assert!(parsed(wrong).is_err(), "{wrong:?} was accepted");
        }
    }
}
