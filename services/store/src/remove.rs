//! Removing the few trees that are not for ever.

use std::{fs, io};

use futures::{StreamExt, TryStreamExt};
use object_store::{ObjectStoreExt, path::Path};
use wire::v1;

use crate::{
    error::{Fault, RemoveError},
    manifest::{MANIFEST, MAX_FILES},
    path::TreePlace,
    store::{Store, blocking},
    tree::key_of,
};

/// The files of a tree, its manifest, its sums and its parts.
const OBJECTS_MAX: usize = MAX_FILES + 3;

impl Store {
    /// Removes the tree of a place, its manifest first: without it the tree does not exist.
    /// Nothing elsewhere is touched, whatever path the tree claims. What is gone already, or
    /// was never wholly there, is fine.
    ///
    /// # Errors
    /// When the tree is not of that place, or the store refuses or fails.
    pub async fn remove_tree(&self, place: &TreePlace, tree: &v1::Tree) -> Result<(), RemoveError> {
        let root = place.path(tree.manifest.parse()?);
        if root.as_str() != tree.path {
            let (path, expected) = (tree.path.clone(), root.to_string());
            return Err(RemoveError::Elsewhere { path, expected });
        }
        self.remove(&key_of(&root, MANIFEST)).await?;
        let prefix = Path::parse(root.as_str()).expect("stricter than object_store's");
        match self.local_path(&prefix) {
            Some(path) => {
                let path = path?;
                match blocking(move || fs::remove_dir_all(path)).await {
                    Err(source) if source.kind() != io::ErrorKind::NotFound => {
                        Err(Fault::from_io(self.at.url_of(&prefix), source).into())
                    }
                    _ => Ok(()),
                }
            }
            None => Ok(self.remove_below(&prefix).await?),
        }
    }

    async fn remove_below(&self, prefix: &Path) -> Result<(), Fault> {
        let fault = |source| self.at.fault(prefix, source);
        let found = self.at.objects.list(Some(prefix)).take(OBJECTS_MAX);
        let found: Vec<_> = found.try_collect().await.map_err(fault)?;
        for object in found {
            self.remove(&object.location).await?;
        }
        Ok(())
    }

    async fn remove(&self, key: &Path) -> Result<(), Fault> {
        match self.at.objects.delete(key).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(self.at.fault(key, source)),
        }
    }
}
