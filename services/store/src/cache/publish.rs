//! Keeping what is published, so that peers have it from its publisher and the store sends less.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use wire::v1;

use super::Cache;
use crate::{
    error::{CacheError, GetError, PutError},
    files,
    manifest::{About, TreeFile},
    parts::Parts,
    path::TreePlace,
    store::{Store, blocking},
};

impl Cache {
    /// As [`Store::publish_tree`]. Where files are exchanged with peers, those are kept that they
    /// may ask for.
    ///
    /// # Errors
    /// As [`Store::publish_tree`]: what cannot be kept is had from the store.
    pub async fn publish_tree(
        &self,
        store: &Store,
        dir: &Path,
        place: &TreePlace,
        about: About,
    ) -> Result<v1::Tree, PutError> {
        let (tree, manifest) = store.publish(dir, place, about).await?;
        if self.inner.peers.is_none() || store.is_local() {
            return Ok(tree);
        }
        for file in manifest.files.iter().filter(|file| Parts::part_bytes(file.bytes).is_some()) {
            let from = dir.join(file.path.as_str());
            if let Err(error) = self.keep(from, file).await {
                let error = wire::chain(&error);
                tracing::warn!(file = %file.path, error, "peers get what was published elsewhere");
            }
        }
        Ok(tree)
    }

    /// A copy of a file that was published just now, if it is that still.
    async fn keep(&self, from: PathBuf, file: &TreeFile) -> Result<(), GetError> {
        let _flight = self.fly(&format!("b-{}", file.digest.to_hex())).await?;
        let (inner, path, wanted) = (self.inner.clone(), self.path_of(file.digest), file.clone());
        if blocking(move || inner.hold(&path, wanted.digest, wanted.bytes)).await?.is_some() {
            return Ok(());
        }
        let (to, temp) = self.reserve(file.bytes).await?;
        let at = temp.path().to_owned();
        let copied = blocking(move || {
            let (digest, bytes, _) = files::copy(&File::open(from)?, &to)?;
            Ok::<_, std::io::Error>((to, digest, bytes))
        });
        let copied = copied.await.map_err(|source| CacheError::io("write", at, source))?;
        let (to, digest, bytes) = copied;
        if (digest, bytes) == (file.digest, file.bytes) {
            self.commit(to, temp, digest).await?;
        }
        Ok(())
    }
}
