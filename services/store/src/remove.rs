//! Removal of trees: of temporary ones without a trace, and of those that a fact names with a record
//! of who removed them.

use std::{fs, io, path::Path as FsPath};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::{ObjectStoreExt, path::Path};
use wire::v1;

use crate::{
    blocking::run_blocking,
    error::{GetError, RemoveError, StorageError},
    manifest::{MANIFEST, MAX_FILES},
    path::{RelativePath, TreePlace},
    removal::{REMOVAL_FILE, TreeRemoval, TreeUsage},
    store::Store,
    tree::object_key,
};

/// A tree's files, manifest, sums, part hashes and removal record.
const OBJECTS_MAX: usize = MAX_FILES + 4;

const REMOVAL_BYTES_MAX: u64 = 64 << 10;

impl Store {
    /// Removes the tree of a place, its manifest first: without the manifest the tree does not
    /// exist. Touches no other place, independent of the path in `tree`. Spares a removal record. A
    /// tree that is missing or incomplete is not an error.
    pub async fn remove_tree(&self, place: &TreePlace, tree: &v1::Tree) -> Result<(), RemoveError> {
        let root = check_place(place, tree)?;
        self.remove_object(&object_key(&root, MANIFEST)).await?;
        let prefix = Path::parse(root.as_str()).expect("stricter than object_store's");
        match self.local_path(&prefix) {
            Some(path) => {
                let path = path?;
                let removed = run_blocking(move || remove_directory(&path)).await;
                removed.map_err(|source| {
                    StorageError::from_io(self.backend.object_url(&prefix), source).into()
                })
            }
            None => Ok(self.remove_objects_below(&prefix).await?),
        }
    }

    /// Records that the tree of a place is being removed. A record that exists already stays as it
    /// is.
    pub async fn mark_removed(
        &self,
        place: &TreePlace,
        tree: &v1::Tree,
        removal: &TreeRemoval,
    ) -> Result<(), RemoveError> {
        let key = object_key(&check_place(place, tree)?, REMOVAL_FILE);
        match self.backend.objects.head(&key).await {
            Ok(_) => return Ok(()),
            Err(object_store::Error::NotFound { .. }) => {}
            Err(source) => return Err(self.backend.storage_error(&key, source).into()),
        }
        let json = serde_json::to_vec_pretty(removal).expect("three texts are JSON");
        Ok(self.put_bytes(&key, Bytes::from(json)).await?)
    }

    /// Takes back [`Store::mark_removed`].
    pub async fn unmark_removed(
        &self,
        place: &TreePlace,
        tree: &v1::Tree,
    ) -> Result<(), RemoveError> {
        let key = object_key(&check_place(place, tree)?, REMOVAL_FILE);
        Ok(self.remove_object(&key).await?)
    }

    /// Returns the removal record of a tree, also if its removal has not begun.
    pub async fn find_removal(&self, tree: &v1::Tree) -> Result<Option<TreeRemoval>, GetError> {
        self.read_removal(&RelativePath::new(&*tree.path)?).await
    }

    /// Fails if a removal of the tree is recorded.
    pub async fn require_kept(&self, tree: &v1::Tree) -> Result<(), GetError> {
        let root = RelativePath::new(&*tree.path)?;
        match self.read_removal(&root).await? {
            Some(removal) => Err(self.removed_error(&root, removal)),
            None => Ok(()),
        }
    }

    /// Replaces the error about a missing manifest of a tree whose removal is recorded.
    pub(crate) async fn explain_missing(&self, root: &RelativePath, error: GetError) -> GetError {
        if !matches!(&error, GetError::Storage(fault) if fault.is_missing()) {
            return error;
        }
        match self.read_removal(root).await {
            Ok(Some(removal)) => self.removed_error(root, removal),
            _ => error,
        }
    }

    /// An unreadable record is one without words, because its author removed the tree.
    async fn read_removal(&self, root: &RelativePath) -> Result<Option<TreeRemoval>, GetError> {
        let json = self.read_small_file(root, REMOVAL_FILE, REMOVAL_BYTES_MAX).await?;
        let unknown = || TreeRemoval { at: "?".into(), by: "?".into(), rules: "?".into() };
        Ok(json.map(|json| serde_json::from_slice(&json).unwrap_or_else(|_| unknown())))
    }

    fn removed_error(&self, root: &RelativePath, removal: TreeRemoval) -> GetError {
        GetError::Removed { url: format!("{}/{root}", self.backend.url), removal }
    }

    /// Returns the paths of the trees directly below a directory whose removal is recorded.
    pub async fn list_removed(&self, below: &str) -> Result<Vec<String>, GetError> {
        let root = RelativePath::new(below)?;
        let found = self.list_directory(&root).await?;
        let tree =
            |name: &String| name.strip_suffix(REMOVAL_FILE)?.strip_suffix('/').map(str::to_owned);
        let is_readable = |tree: &String| found.contains_key(&format!("{tree}/{MANIFEST}"));
        let trees = found.keys().filter_map(tree).filter(|tree| !is_readable(tree));
        Ok(trees.map(|tree| format!("{root}/{tree}")).collect())
    }

    /// Counts the objects in a tree's directory.
    pub async fn measure_tree(&self, tree: &v1::Tree) -> Result<TreeUsage, GetError> {
        let mut found = self.list_directory(&RelativePath::new(&*tree.path)?).await?;
        let is_marked = found.remove(REMOVAL_FILE).is_some();
        Ok(TreeUsage {
            objects: found.len() as u64,
            bytes: found.values().sum(),
            is_readable: found.contains_key(MANIFEST),
            is_marked,
        })
    }

    async fn remove_objects_below(&self, prefix: &Path) -> Result<(), StorageError> {
        let fault = |source| self.backend.storage_error(prefix, source);
        let found = self.backend.objects.list(Some(prefix)).take(OBJECTS_MAX);
        let found: Vec<_> = found.try_collect().await.map_err(fault)?;
        let record = prefix.clone().join(REMOVAL_FILE);
        for object in found.iter().filter(|object| object.location != record) {
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

/// Returns the path of the tree, which the place alone decides.
fn check_place(place: &TreePlace, tree: &v1::Tree) -> Result<RelativePath, RemoveError> {
    let root = place.tree_path(tree.manifest.parse()?);
    if root.as_str() == tree.path {
        return Ok(root);
    }
    let (path, expected) = (tree.path.clone(), root.to_string());
    Err(RemoveError::WrongPlace { path, expected })
}

/// Removes a directory with all files but a removal record. Blocking.
fn remove_directory(path: &FsPath) -> io::Result<()> {
    let unless_missing = |removed: io::Result<()>| match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    if !path.join(REMOVAL_FILE).exists() {
        return unless_missing(fs::remove_dir_all(path));
    }
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            unless_missing(fs::remove_dir_all(entry.path()))?;
        } else if entry.file_name() != REMOVAL_FILE {
            unless_missing(fs::remove_file(entry.path()))?;
        }
    }
    Ok(())
}
