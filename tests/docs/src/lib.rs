//! What users read, compared with what there is.

use std::path::{Path, PathBuf};

use syn::Attribute;

/// The repository's.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns true for a source of the program itself, by its path from the root: not for its tests.
pub fn is_program_source(name: &str) -> bool {
    let is_test = name.ends_with("/tests.rs") || name.contains("/tests/");
    name.contains("/src/") && name.ends_with(".rs") && !is_test
}

/// Returns true for the attributes of a test, or of a module of tests.
pub fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|it| {
        it.path().is_ident("test")
            || it.path().is_ident("cfg")
                && it.meta.require_list().is_ok_and(|it| it.tokens.to_string() == "test")
    })
}
