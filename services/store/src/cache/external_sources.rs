//! Base models from sources other than the store: this machine, or the hub that published them.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use futures::TryStreamExt;
use hub::{HubClient, HubError, ModelRevision};

use super::{CacheInner, CachedBlob, FileCache};
use crate::{
    blocking::run_blocking,
    error::{CacheError, GetError},
    manifest::{TreeFile, TreeManifest},
    peers::PeerNode,
    store::Store,
};

/// Tries without progress before a download fails; each continues at the last received byte.
const HUB_TRIES: u32 = 5;

/// The sources of a cache beside the store.
#[derive(Clone, Default)]
pub struct ExternalSources {
    /// Directories of this machine, searched before the store.
    pub models: Vec<PathBuf>,
    /// The hub, used after the store.
    pub hub: Option<HubClient>,
    /// Agents that may have or fetch the same files, used together with the store.
    pub peers: Option<PeerNode>,
}

enum HubOutcome {
    Fetched(CachedBlob),
    /// The reason, and whether a later try may succeed.
    Failed(String, bool),
}

impl CacheInner {
    /// Returns `None` if the file is not a link to one of the user's files, and else whether the
    /// target still has the right bytes. Blocking.
    pub(super) fn check_user_link(&self, path: &Path, wanted: &TreeFile) -> Option<bool> {
        if !fs::symlink_metadata(path).is_ok_and(|meta| meta.is_symlink()) {
            return None;
        }
        let intact = self.local_models.matches_file(path, wanted);
        if !intact {
            let target = fs::read_link(path).unwrap_or_default();
            tracing::warn!(file = %target.display(), "a base's file changed or is gone");
        }
        Some(intact)
    }

    pub(super) fn link_user_file(&self, from: &Path, to: PathBuf) -> Result<(), CacheError> {
        let failed = |source| CacheError::from_io("link", &to, source);
        fs::create_dir_all(to.parent().unwrap_or(&to)).map_err(failed)?;
        let temp = self.quota.new_temp_path();
        let target = from.canonicalize().map_err(failed)?;
        symlink(target, temp.path()).map_err(failed)?;
        temp.rename_to(&to).map_err(failed)
    }
}

impl FileCache {
    pub(super) async fn find_local_files(
        &self,
        manifest: &TreeManifest,
        absent: Vec<TreeFile>,
    ) -> BTreeMap<String, PathBuf> {
        if absent.is_empty()
            || !manifest.is_model()
            || self.inner.local_models.root_directories().is_empty()
        {
            return BTreeMap::new();
        }
        let inner = self.inner.clone();
        run_blocking(move || inner.local_models.find_files(&absent)).await
    }

    pub(super) async fn fetch_tree_file(
        &self,
        store: &Store,
        wanted: crate::store::WantedObject,
        (manifest, file): (&TreeManifest, &TreeFile),
    ) -> Result<CachedBlob, GetError> {
        let stored = if manifest.is_external() {
            self.find_cached(&wanted).await?.ok_or_else(|| "not in the store, by choice".to_owned())
        } else {
            match self.fetch_object(store, wanted).await {
                Err(GetError::Storage(fault)) if fault.is_missing() && manifest.is_model() => {
                    Err(fault.to_string())
                }
                done => return done,
            }
        };
        let stored = match stored {
            Ok(held) => return Ok(held),
            Err(why) => why,
        };
        match self.fetch_from_hub(manifest, file).await? {
            HubOutcome::Fetched(held) => Ok(held),
            HubOutcome::Failed(why, hub_may_pass) => {
                let roots: Vec<String> = self
                    .inner
                    .local_models
                    .root_directories()
                    .iter()
                    .map(|root| root.display().to_string())
                    .collect();
                let looked = match roots.as_slice() {
                    [] => "no --models to look in".to_owned(),
                    roots => format!("not in {}", roots.join(", ")),
                };
                let mut error = GetError::unavailable_file(
                    manifest,
                    file,
                    format!("{looked}; {stored}; {why}"),
                );
                if let GetError::Unavailable { may_pass, .. } = &mut error {
                    *may_pass = hub_may_pass;
                }
                Err(error)
            }
        }
    }

    /// Fetches a file under its fetch lock, if the manifest names a revision and a hub is
    /// configured.
    async fn fetch_from_hub(
        &self,
        manifest: &TreeManifest,
        file: &TreeFile,
    ) -> Result<HubOutcome, GetError> {
        let Some(revision) = manifest.hub_revision() else {
            return Ok(HubOutcome::Failed("no hub is known to have it".into(), false));
        };
        let Some(hub) = &self.inner.hub else {
            return Ok(HubOutcome::Failed("the hub is not asked".into(), false));
        };
        let _flight = self.lock_fetch(&format!("b-{}", file.digest.to_hex())).await?;
        let (inner, wanted, path) = (self.inner.clone(), file.clone(), self.blob_path(file.digest));
        let held =
            run_blocking(move || inner.hold_blob(&path, wanted.digest, wanted.bytes)).await?;
        if let Some(held) = held {
            return Ok(HubOutcome::Fetched(held));
        }
        tracing::info!(file = %file.path, repo = revision.repo, "downloading from the hub");
        self.download_from_hub(hub, &revision, file).await
    }

    async fn download_from_hub(
        &self,
        hub: &HubClient,
        revision: &ModelRevision,
        file: &TreeFile,
    ) -> Result<HubOutcome, GetError> {
        let ask =
            async |from| hub.stream_file(revision, file.path.as_str(), (from, file.bytes)).await;
        // Room is reserved only after the hub has answered.
        let mut asked = ask(0).await;
        if let Err(error) = &asked {
            return Ok(HubOutcome::Failed(wire::format_error_chain(error), error.is_transient()));
        }
        let (sink, temp) = self.reserve_space(file.bytes).await?;
        let mut sink = (sink, blake3::Hasher::new());
        let mut tries = 0;
        loop {
            let at = sink.1.count();
            let ended;
            (sink, ended) = match asked {
                Ok(chunks) => receive_chunks(chunks, file.bytes, sink, temp.path()).await?,
                Err(error) => (sink, Err(error)),
            };
            let Err(error) = ended else { break };
            if sink.1.count() >= file.bytes {
                break;
            }
            tries = if sink.1.count() > at { 0 } else { tries + 1 };
            if !error.is_transient() || tries >= HUB_TRIES {
                return Ok(HubOutcome::Failed(
                    wire::format_error_chain(&error),
                    error.is_transient(),
                ));
            }
            asked = ask(sink.1.count()).await;
        }
        let (sink, hasher) = sink;
        if hasher.count() != file.bytes || wire::Digest::from(hasher.finalize()) != file.digest {
            let why = format!("the hub's {} of {} has another digest", file.path, revision.repo);
            return Ok(HubOutcome::Failed(why, false));
        }
        self.commit_file(sink, temp, file.digest).await.map(HubOutcome::Fetched)
    }
}

type HashedFile = (fs::File, blake3::Hasher);

async fn receive_chunks(
    mut chunks: hub::HubByteStream,
    bytes: u64,
    mut sink: HashedFile,
    at: &Path,
) -> Result<(HashedFile, Result<(), HubError>), GetError> {
    loop {
        let chunk = match chunks.try_next().await {
            Ok(Some(chunk)) => chunk,
            Ok(None) => return Ok((sink, Ok(()))),
            Err(error) => return Ok((sink, Err(error))),
        };
        if sink.1.count() + chunk.len() as u64 > bytes {
            // The hub sends more than was reserved, so it is not the file.
            return Ok((sink, Ok(())));
        }
        let written: std::io::Result<HashedFile> = run_blocking(move || {
            sink.0.write_all(&chunk)?;
            sink.1.update(&chunk);
            Ok(sink)
        })
        .await;
        sink = written.map_err(|source| CacheError::from_io("write", at, source))?;
    }
}
