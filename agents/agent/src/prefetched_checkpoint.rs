//! A checkpoint that is fetched before a job needs it.

use store::{CachedTree, FileCache, GetError, Store};
use wire::v1;

/// A checkpoint that the next jobs may need, and the source of its files.
pub struct PrefetchedCheckpoint {
    /// The checkpoint fact, with the trees of its base and its weights.
    pub checkpoint: v1::Checkpoint,
    pub(crate) store: Store,
    pub(crate) cache: FileCache,
}

impl PrefetchedCheckpoint {
    /// Returns the local copy of one of the checkpoint's trees in the cache, after fetching files
    /// that are missing or damaged.
    pub async fn fetch_tree(&self, tree: &v1::Tree) -> Result<CachedTree, GetError> {
        self.cache.fetch_tree(&self.store, tree).await
    }
}
