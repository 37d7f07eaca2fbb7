//! Models of this machine, and what is kept of them, for commands without a fleet.

use std::path::{Path, PathBuf};

use anyhow::Context;
use engine::Dtype;
use formats::{DirError, HubCache, find_model};
use hardware::Profile;
use hub::Hub;
use runtime::{Herd, Launch};
use store::Elsewhere;

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

/// Where base models are to be had besides the store.
pub(crate) fn elsewhere(models: &[PathBuf]) -> anyhow::Result<Elsewhere> {
    let hub = Hub::from_env();
    let mut directories = Vec::new();
    for directory in models {
        let found = directory.canonicalize();
        directories.push(found.with_context(|| format!("--models {}", directory.display()))?);
    }
    directories.push(hub.cache().to_owned());
    Ok(Elsewhere { models: directories, hub: Some(hub), peers: None })
}

/// How workers of a command are started that belong to no agent; their logs go below `directory`.
pub(crate) fn launch(
    directory: &Path,
    profile: Option<&str>,
    device: &str,
    threads: Option<u32>,
) -> anyhow::Result<Launch> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Ok(Launch {
        program: std::env::current_exe().context("find this program")?,
        wrapper: None,
        silence: None,
        threads: threads.map_or(cores, |threads| threads as usize),
        device: device.to_owned(),
        dtype: Dtype::F32.name().to_owned(),
        directory: directory.to_owned(),
        profile: Profile::choose(profile).context("choose the profile")?,
        root: "/".into(),
        herd: Herd::default(),
    })
}
