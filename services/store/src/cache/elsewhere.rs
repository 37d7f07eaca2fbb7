//! Base models from other places than the store: this machine, or the hub they came from.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use futures::TryStreamExt;
use hub::{Hub, HubError, Revision};

use super::{Cache, CachedBlob, Inner};
use crate::{
    error::{CacheError, GetError},
    manifest::{Manifest, TreeFile},
    peers::Peers,
    store::{Store, blocking},
};

/// A download that breaks off goes on where it was so often.
const HUB_TRIES: u32 = 5;

/// Where a cache looks beside the store.
#[derive(Clone, Default)]
pub struct Elsewhere {
    /// Directories of this machine, for files of base models, before the store.
    pub models: Vec<PathBuf>,
    /// For the same, after the store.
    pub hub: Option<Hub>,
    /// Agents that may be fetching the same, together with the store.
    pub peers: Option<Peers>,
}

/// What a hub's file was fetched for, or why not.
enum FromHub {
    Held(CachedBlob),
    Not(String, bool),
}

impl Inner {
    /// Whether a tree's file is a link to one of the user's that has the right bytes still.
    pub(super) fn is_linked(&self, path: &Path, wanted: &TreeFile) -> Option<bool> {
        if !fs::symlink_metadata(path).is_ok_and(|meta| meta.is_symlink()) {
            return None;
        }
        let intact = self.local.is(path, wanted);
        if !intact {
            let target = fs::read_link(path).unwrap_or_default();
            tracing::warn!(file = %target.display(), "a base's file changed or is gone");
        }
        Some(intact)
    }

    pub(super) fn link_local(&self, from: &Path, to: PathBuf) -> Result<(), CacheError> {
        let failed = |source| CacheError::io("link", &to, source);
        fs::create_dir_all(to.parent().unwrap_or(&to)).map_err(failed)?;
        let temp = self.space.temp();
        let target = from.canonicalize().map_err(failed)?;
        symlink(target, temp.path()).map_err(failed)?;
        temp.rename(&to).map_err(failed)
    }
}

impl Cache {
    /// Files of a base that this machine has, by their names in the tree.
    pub(super) async fn locate(
        &self,
        manifest: &Manifest,
        absent: Vec<TreeFile>,
    ) -> BTreeMap<String, PathBuf> {
        if absent.is_empty() || !manifest.is_model() || self.inner.local.roots().is_empty() {
            return BTreeMap::new();
        }
        let inner = self.inner.clone();
        blocking(move || inner.local.find(&absent)).await
    }

    /// A file of a tree that is not on this machine.
    pub(super) async fn fetch_file(
        &self,
        store: &Store,
        wanted: crate::store::Wanted,
        (manifest, file): (&Manifest, &TreeFile),
    ) -> Result<CachedBlob, GetError> {
        let stored = if manifest.is_elsewhere() {
            self.held(&wanted).await?.ok_or_else(|| "not in the store, by choice".to_owned())
        } else {
            match self.file(store, wanted).await {
                Err(GetError::Fault(fault)) if fault.is_missing() && manifest.is_model() => {
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
            FromHub::Held(held) => Ok(held),
            FromHub::Not(why, hub_may_pass) => {
                let roots: Vec<String> = self
                    .inner
                    .local
                    .roots()
                    .iter()
                    .map(|root| root.display().to_string())
                    .collect();
                let looked = match roots.as_slice() {
                    [] => "no --models to look in".to_owned(),
                    roots => format!("not in {}", roots.join(", ")),
                };
                let mut error =
                    GetError::nowhere(manifest, file, format!("{looked}; {stored}; {why}"));
                if let GetError::Nowhere { may_pass, .. } = &mut error {
                    *may_pass = hub_may_pass;
                }
                Err(error)
            }
        }
    }

    async fn fetch_from_hub(
        &self,
        manifest: &Manifest,
        file: &TreeFile,
    ) -> Result<FromHub, GetError> {
        let Some(revision) = manifest.revision() else {
            return Ok(FromHub::Not("nobody knows of a hub that has it".into(), false));
        };
        let Some(hub) = &self.inner.hub else {
            return Ok(FromHub::Not("the hub is not asked".into(), false));
        };
        let _flight = self.fly(&format!("b-{}", file.digest.to_hex())).await?;
        let (inner, wanted, path) = (self.inner.clone(), file.clone(), self.path_of(file.digest));
        let held = blocking(move || inner.hold(&path, wanted.digest, wanted.bytes)).await?;
        if let Some(held) = held {
            return Ok(FromHub::Held(held));
        }
        tracing::info!(file = %file.path, repo = revision.repo, "downloading from the hub");
        self.download(hub, &revision, file).await
    }

    async fn download(
        &self,
        hub: &Hub,
        revision: &Revision,
        file: &TreeFile,
    ) -> Result<FromHub, GetError> {
        let ask = async |from| hub.stream(revision, file.path.as_str(), (from, file.bytes)).await;
        // Nothing makes room for what nobody sends.
        let mut asked = ask(0).await;
        if let Err(error) = &asked {
            return Ok(FromHub::Not(wire::chain(error), error.may_pass()));
        }
        let (sink, temp) = self.reserve(file.bytes).await?;
        let mut sink = (sink, blake3::Hasher::new());
        let mut tries = 0;
        loop {
            let at = sink.1.count();
            let ended;
            (sink, ended) = match asked {
                Ok(chunks) => receive(chunks, file.bytes, sink, temp.path()).await?,
                Err(error) => (sink, Err(error)),
            };
            let Err(error) = ended else { break };
            if sink.1.count() >= file.bytes {
                break;
            }
            tries = if sink.1.count() > at { 0 } else { tries + 1 };
            if !error.may_pass() || tries >= HUB_TRIES {
                return Ok(FromHub::Not(wire::chain(&error), error.may_pass()));
            }
            asked = ask(sink.1.count()).await;
        }
        let (sink, hasher) = sink;
        if hasher.count() != file.bytes || wire::Digest::from(hasher.finalize()) != file.digest {
            let why = format!("the hub's {} of {} is another", file.path, revision.repo);
            return Ok(FromHub::Not(why, false));
        }
        self.commit(sink, temp, file.digest).await.map(FromHub::Held)
    }
}

type Sink = (fs::File, blake3::Hasher);

/// Takes what the hub sends until it ends or breaks off.
async fn receive(
    mut chunks: hub::Bytes,
    bytes: u64,
    mut sink: Sink,
    at: &Path,
) -> Result<(Sink, Result<(), HubError>), GetError> {
    loop {
        let chunk = match chunks.try_next().await {
            Ok(Some(chunk)) => chunk,
            Ok(None) => return Ok((sink, Ok(()))),
            Err(error) => return Ok((sink, Err(error))),
        };
        if sink.1.count() + chunk.len() as u64 > bytes {
            // More than was reserved: not the file.
            return Ok((sink, Ok(())));
        }
        let written: std::io::Result<Sink> = blocking(move || {
            sink.0.write_all(&chunk)?;
            sink.1.update(&chunk);
            Ok(sink)
        })
        .await;
        sink = written.map_err(|source| CacheError::io("write", at, source))?;
    }
}
