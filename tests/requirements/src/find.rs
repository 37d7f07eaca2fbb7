//! Programs and rights.

use std::path::{Path, PathBuf};

use crate::skip_test;

/// Returns the path of a program: what the environment variable names, or the first of the names
/// on PATH, in `.tools/bin` or in `.tools` of this repository.
pub fn find_program(variable: &str, names: &[&str]) -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        return Some(path.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools");
    let directories = std::env::split_paths(&path).chain([tools.join("bin"), tools]);
    let directories: Vec<PathBuf> = directories.collect();
    let candidates = names.iter().flat_map(|name| directories.iter().map(|dir| dir.join(name)));
    candidates.into_iter().find(|candidate| candidate.is_file())
}

/// Finds a program on PATH or in `.tools`. Records this test as skipped and returns `None` without
/// it.
pub fn require_program(name: &str, remedy: &str) -> Option<PathBuf> {
    let variable = name.to_uppercase().replace('-', "_");
    let found = find_program(&variable, &[name]);
    if found.is_none() {
        skip_test(name, remedy);
    }
    found
}

/// Returns true for root. Records this test as skipped otherwise.
pub fn require_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip_test("root", "run the tests as root");
    }
    root
}
