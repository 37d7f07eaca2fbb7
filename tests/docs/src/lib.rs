//! What users read, compared with what there is.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use syn::Attribute;
use walkdir::WalkDir;

/// The repository's.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the sources of the program, without its tests, by their paths from the root.
pub fn program_sources() -> BTreeMap<String, String> {
    let mut sources = BTreeMap::new();
    for part in ["agents", "proto", "services"] {
        for entry in WalkDir::new(root().join(part)) {
            let path = entry.expect("an entry").into_path();
            let name = path.strip_prefix(root()).expect("below the root").display().to_string();
            if is_program_source(&name) {
                sources.insert(name, fs::read_to_string(&path).expect("a source"));
            }
        }
    }
    assert!(sources.len() > 300, "these are not all: {}", sources.len());
    sources
}

fn is_program_source(name: &str) -> bool {
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
