//! Publishing through the cache: a publisher keeps its files, so that peers fetch them from it and
//! the store sends less.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use wire::{Digest, v1};

use super::FileCache;
use crate::{
    blocking::run_blocking,
    error::{CacheError, GetError, PutError},
    file_hashing,
    manifest::{TreeFile, TreeMetadata},
    parts::PartHashes,
    path::TreePlace,
    store::Store,
    tree::build_manifest,
};

impl FileCache {
    /// Publishes a directory as [`Store::publish_tree`] does, and keeps the files in the cache that
    /// peers may request. A file that cannot be kept is only logged; peers fetch it from the store.
    pub async fn publish_tree(
        &self,
        store: &Store,
        dir: &Path,
        place: &TreePlace,
        about: TreeMetadata,
    ) -> Result<v1::Tree, PutError> {
        let (tree, manifest) = store.publish_with_manifest(dir, place, about).await?;
        if self.inner.peers.is_none() || store.is_local() {
            return Ok(tree);
        }
        for file in manifest.files.iter().filter(|file| PartHashes::part_size(file.bytes).is_some())
        {
            let from = dir.join(file.path.as_str());
            if let Err(error) = self.keep_published(from, file).await {
                let error = wire::format_error_chain(&error);
                tracing::warn!(file = %file.path, error, "could not keep a published file for \
                                                          peers");
            }
        }
        Ok(tree)
    }

    /// Copies a directory into the cache, as the tree that publishing it would give. Nothing is
    /// written to the store.
    pub async fn keep_tree(
        &self,
        dir: &Path,
        place: &TreePlace,
        about: TreeMetadata,
    ) -> Result<v1::Tree, PutError> {
        let (manifest, json) = build_manifest(dir, about).await?;
        let digest = Digest::hash_bytes(&json);
        let kept =
            v1::Tree { path: place.tree_path(digest).to_string(), manifest: digest.to_string() };
        let _flight = self.lock_fetch(&format!("t-{}", digest.to_hex())).await?;
        let (inner, from, path) = (self.inner.clone(), dir.to_owned(), self.tree_path(digest));
        run_blocking(move || {
            if inner.hold_complete_tree(&path, digest)?.is_some() {
                return Ok(());
            }
            inner.remove_incomplete_tree(&path)?;
            let (_in_use, staged) = inner.quota.create_staging_dir()?;
            for file in &manifest.files {
                let (from, to) =
                    (from.join(file.path.as_str()), staged.path().join(file.path.as_str()));
                inner.copy_file(&from, &to, file.bytes)?;
            }
            inner.complete_tree(staged, &path, &json, &manifest.to_sums())
        })
        .await?;
        Ok(kept)
    }

    /// Copies a file that was just published into the cache, unless it has changed.
    async fn keep_published(&self, from: PathBuf, file: &TreeFile) -> Result<(), GetError> {
        let _flight = self.lock_fetch(&format!("b-{}", file.digest.to_hex())).await?;
        let (inner, path, wanted) = (self.inner.clone(), self.blob_path(file.digest), file.clone());
        if run_blocking(move || inner.hold_blob(&path, wanted.digest, wanted.bytes))
            .await?
            .is_some()
        {
            return Ok(());
        }
        let (to, temp) = self.reserve_space(file.bytes).await?;
        let at = temp.path().to_owned();
        let copied = run_blocking(move || {
            let (digest, bytes, _) = file_hashing::copy_and_hash(&File::open(from)?, &to)?;
            Ok::<_, std::io::Error>((to, digest, bytes))
        });
        let copied = copied.await.map_err(|source| CacheError::from_io("write", at, source))?;
        let (to, digest, bytes) = copied;
        if (digest, bytes) == (file.digest, file.bytes) {
            self.commit_file(to, temp, digest).await?;
        }
        Ok(())
    }
}
