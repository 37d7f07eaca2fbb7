//! What users read, compared with what there is.

use std::path::{Path, PathBuf};

/// The repository's.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns true for a source of the program itself, by its path from the root: not for its tests.
pub fn is_program_source(name: &str) -> bool {
    let is_test = name.ends_with("/tests.rs") || name.contains("/tests/");
    name.contains("/src/") && name.ends_with(".rs") && !is_test
}
