//! Checkpoints: listing, download and export.

use std::path::Path;

use bus::ReadError;
use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt};
use store::GetError;
use tokio::io::AsyncWriteExt;
use wire::{FactBody, Record, RunId, v1};

use crate::{FleetControl, StoreAccessError, TaskProgress, runs::to_timestamp};

/// A failure to find, read or export a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{0:?} is not a checkpoint; write RUN, RUN/CYCLE or RUN/CYCLE/STEP (R106)")]
    Reference(String),
    #[error(
        "there is no checkpoint {0}; `flotilla checkpoint list RUN` shows which there are (R106)"
    )]
    Unknown(String),
    #[error("read the log")]
    Read(#[from] ReadError),
    #[error(transparent)]
    OpenStore(#[from] StoreAccessError),
    #[error("read the checkpoint's files")]
    Get(#[from] GetError),
    #[error("write {path}")]
    Write {
        path: String,
        #[source]
        source: std::io::Error,
    },
}

/// Parses a checkpoint reference: `RUN`, `RUN/CYCLE` or `RUN/CYCLE/STEP`.
pub fn parse_checkpoint_ref(text: &str) -> Result<v1::CheckpointRef, CheckpointError> {
    let wrong = || CheckpointError::Reference(text.to_owned());
    let mut parts = text.split('/');
    let run = parts.next().and_then(|run| RunId::new(run).ok()).ok_or_else(wrong)?;
    let mut number = || parts.next().map(str::parse).transpose().map_err(|_| wrong());
    let reference = v1::CheckpointRef { run: run.to_string(), cycle: number()?, step: number()? };
    if parts.next().is_some() { Err(wrong()) } else { Ok(reference) }
}

fn format_reference(reference: &v1::CheckpointRef) -> String {
    let parts = [reference.cycle, reference.step];
    let numbers = parts.iter().flatten().map(|number| format!("/{number}"));
    format!("{}{}", reference.run, numbers.collect::<String>())
}

/// Omits the files. Returns `None` for other facts.
fn checkpoint_info(record: Record) -> Option<v1::CheckpointInfo> {
    let FactBody::Checkpoint(checkpoint) = record.fact.body else { return None };
    let at = Some(to_timestamp(record.time_ms));
    Some(v1::CheckpointInfo { checkpoint: Some(checkpoint), files: Vec::new(), at })
}

impl FleetControl {
    /// Returns a run's checkpoints in the order of publication, without their files.
    pub async fn list_checkpoints(
        &self,
        run: &RunId,
    ) -> Result<Vec<v1::CheckpointInfo>, ReadError> {
        let records = self.read_records(vec![format!("flotilla.{run}.checkpoint.*.*")]).await?;
        Ok(records.into_iter().filter_map(checkpoint_info).collect())
    }

    /// Returns the latest checkpoint that the reference matches, with its files.
    pub async fn get_checkpoint(
        &self,
        reference: &v1::CheckpointRef,
    ) -> Result<v1::CheckpointInfo, CheckpointError> {
        let unknown = || CheckpointError::Unknown(format_reference(reference));
        let run = RunId::new(reference.run.as_str()).map_err(|_| unknown())?;
        let fits = |checkpoint: &v1::Checkpoint| {
            reference.cycle.is_none_or(|cycle| cycle == checkpoint.cycle)
                && reference.step.is_none_or(|step| step == checkpoint.step)
        };
        let key = |info: &v1::CheckpointInfo| {
            info.checkpoint.as_ref().map(|checkpoint| (checkpoint.cycle, checkpoint.step))
        };
        let mut found = self
            .list_checkpoints(&run)
            .await?
            .into_iter()
            .filter(|info| info.checkpoint.as_ref().is_some_and(fits))
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
        let total = info.files.iter().map(|file| file.bytes).sum();
        let mut done = 0;
        for file in &info.files {
            let bytes = self.open_store().await?.stream_tree_file(&tree, &file.path).await?;
            let bytes = bytes.err_into().inspect_ok(|bytes| {
                done += bytes.len() as u64;
                progress(TaskProgress { unit: "bytes", done, total });
            });
            write_verified(bytes.boxed(), &directory.join(&file.path)).await?;
        }
        Ok(info)
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
        let parsed = |text| parse_checkpoint_ref(text).map(|r| (r.run, r.cycle, r.step));
        assert_eq!(parsed("raft-1").unwrap(), ("raft-1".into(), None, None));
        assert_eq!(parsed("raft-1/2/48").unwrap(), ("raft-1".into(), Some(2), Some(48)));
        for wrong in ["", "raft-1/x", "raft-1/1/2/3", "../x"] {
            assert!(parsed(wrong).is_err(), "{wrong:?} was accepted");
        }
    }
}
