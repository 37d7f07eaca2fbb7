//! What users read, compared with what there is.

use std::path::{Path, PathBuf};

/// The repository's.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
