//! Models of this machine, and what is kept of them, for commands without a fleet.

use std::path::{Path, PathBuf};

use anyhow::Context;
use formats::{DirError, HubCache, find_model};

/// What converted models may take of the user's disk.
pub(crate) const SHELF_BYTES: u64 = 50 << 30;

/// A file as it is (GGUF); otherwise a model's directory, also of Hugging Face's cache, where it
/// goes by `org/name[@revision]`.
pub(crate) fn model(named: &Path) -> Result<PathBuf, DirError> {
    if named.is_file() {
        return Ok(named.to_owned());
    }
    find_model(&named.to_string_lossy(), &HubCache::from_environment(|name| std::env::var_os(name)))
}

/// Where converted models are kept.
pub(crate) fn shelf() -> anyhow::Result<PathBuf> {
    Ok(cache_directory()?.join("gguf"))
}

/// As the XDG base directories have it.
pub(crate) fn cache_directory() -> anyhow::Result<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME")
        .filter(|path| path.is_absolute())
        .or_else(|| Some(set("HOME")?.join(".cache")));
    Ok(cache.context("neither HOME nor XDG_CACHE_HOME is set; set one")?.join("flotilla"))
}
