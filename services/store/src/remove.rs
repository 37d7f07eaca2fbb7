//! Removal of the few trees that are temporary.

use std::{fs, io};

use futures::{StreamExt, TryStreamExt};
use object_store::{ObjectStoreExt, path::Path};
use wire::v1;

use crate::{
    blocking::run_blocking,
    error::{RemoveError, StorageError},
    manifest::{MANIFEST, MAX_FILES},
    path::TreePlace,
    store::Store,
    tree::object_key,
};

/// A tree's files, manifest, sums and part hashes.
const OBJECTS_MAX: usize = MAX_FILES + 3;

impl Store {
    /// Removes the tree of a place, its manifest first: without the manifest the tree does not
    /// exist. Touches no other place, independent of the path in `tree`. A tree that is missing or
    /// incomplete is not an error.
    pub async fn remove_tree(&self, place: &TreePlace, tree: &v1::Tree) -> Result<(), RemoveError> {
        let root = place.tree_path(tree.manifest.parse()?);
        if root.as_str() != tree.path {
            let (path, expected) = (tree.path.clone(), root.to_string());
            return Err(RemoveError::WrongPlace { path, expected });
        }
        self.remove_object(&object_key(&root, MANIFEST)).await?;
        let prefix = Path::parse(root.as_str()).expect("stricter than object_store's");
        match self.local_path(&prefix) {
            Some(path) => {
                let path = path?;
                match run_blocking(move || fs::remove_dir_all(path)).await {
                    Err(source) if source.kind() != io::ErrorKind::NotFound => {
                        Err(StorageError::from_io(self.backend.object_url(&prefix), source).into())
                    }
                    _ => Ok(()),
                }
            }
            None => Ok(self.remove_objects_below(&prefix).await?),
        }
    }

    async fn remove_objects_below(&self, prefix: &Path) -> Result<(), StorageError> {
        let fault = |source| self.backend.storage_error(prefix, source);
        let found = self.backend.objects.list(Some(prefix)).take(OBJECTS_MAX);
        let found: Vec<_> = found.try_collect().await.map_err(fault)?;
        for object in found {
            self.remove_object(&object.location).await?;
        }
        Ok(())
    }

    /// Removes an object; a missing object is not an error.
    async fn remove_object(&self, key: &Path) -> Result<(), StorageError> {
        match self.backend.objects.delete(key).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(source) => Err(self.backend.storage_error(key, source)),
        }
    }
}
