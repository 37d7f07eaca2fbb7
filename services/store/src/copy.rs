//! Copies within a store, which replace uploads of files that it already contains.

use std::{fs::File, path::PathBuf};

use object_store::path::Path;

use crate::{blocking::run_blocking, file_hashing, parts::PartHashes, store::Store};

/// Smallest file in bytes that is copied within the store instead of uploaded.
pub(crate) const COPY_BYTES_MIN: u64 = 1 << 20;

impl Store {
    /// Copies an object within the store and reports whether the copy is complete.
    pub(crate) async fn copy_within_store(&self, from: &Path, to: &Path, bytes: u64) -> bool {
        let whole = self.has_object(from, bytes).await.unwrap_or(false);
        whole
            && self.backend.copy(from, to).await.is_ok()
            && self.has_object(to, bytes).await.unwrap_or(false)
    }
}

/// Computes the part hashes of a file that need not be sent. A file without part hashes is fetched
/// without peers.
pub(crate) async fn compute_parts(file: PathBuf) -> Option<PartHashes> {
    run_blocking(move || file_hashing::hash_open_file(&File::open(file)?, &|_| ())).await.ok()?.2
}
