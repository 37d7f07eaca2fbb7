//! Models on this machine and caches of them, for commands without a fleet.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use agent::WorkerLauncher;
use anyhow::Context;
use engine::MatrixDtype;
use formats::{ConversionDtype, HubCache, ModelDirError, find_model};
use hardware::HardwareProfile;
use hub::{BytesCallback, HubClient, ModelId};
use store::ExternalSources;

use crate::this_machine::{cpu_cores, this_program};

/// Maximum size of the cache of converted models.
pub const GGUF_CACHE_BYTES: u64 = 50 << 30;

pub(crate) fn find_local_model(named: &Path) -> Result<PathBuf, ModelDirError> {
    if named.is_file() {
        return Ok(named.to_owned());
    }
    find_model(&named.to_string_lossy(), &HubCache::from_environment(|name| std::env::var_os(name)))
}

/// Returns the path of a model's directory or of its `config.json`. That of a hub model is
/// downloaded if the hub's cache lacks it.
pub(crate) async fn find_model_config(named: &Path) -> anyhow::Result<PathBuf> {
    if named.exists() {
        return Ok(named.to_owned());
    }
    let id: ModelId = named.to_string_lossy().parse().map_err(|_| {
        anyhow::anyhow!(
            "there is no file or directory {}; name a model's directory, its config.json, or a \
             hub model as org/name (F101)",
            named.display()
        )
    })?;
    let ignore_progress: BytesCallback = Arc::new(|_| ());
    Ok(HubClient::from_env().download_file(&id, "config.json", ignore_progress).await?)
}

pub(crate) fn gguf_cache_directory() -> anyhow::Result<PathBuf> {
    Ok(cache_directory()?.join("gguf"))
}

pub(crate) fn cache_directory() -> anyhow::Result<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("XDG_CACHE_HOME")
        .filter(|path| path.is_absolute())
        .or_else(|| Some(set("HOME")?.join(".cache")));
    Ok(cache.context("neither HOME nor XDG_CACHE_HOME is set; set one")?.join("flotilla"))
}

pub(crate) fn find_external_sources(models: &[PathBuf]) -> anyhow::Result<ExternalSources> {
    let hub = HubClient::from_env();
    let mut directories = Vec::new();
    for directory in models {
        let found = directory.canonicalize();
        directories.push(found.with_context(|| format!("--models {}", directory.display()))?);
    }
    directories.push(hub.cache_path().to_owned());
    Ok(ExternalSources { models: directories, hub: Some(hub), peers: None })
}

/// Returns a launcher for workers of a command without an agent; their logs go below `directory`.
pub fn worker_launcher(
    directory: &Path,
    profile: Option<&str>,
    device: &str,
    threads: Option<u32>,
) -> anyhow::Result<WorkerLauncher> {
    let profile = HardwareProfile::choose_profile(profile).context("choose the profile")?;
    Ok(WorkerLauncher {
        threads: threads.map_or_else(cpu_cores, |threads| threads as usize),
        device: device.to_owned(),
        ..WorkerLauncher::new(this_program()?, directory, profile)
    })
}

pub(crate) fn candle_dtype(dtype: ConversionDtype) -> anyhow::Result<MatrixDtype> {
    MatrixDtype::from_name(dtype.name()).with_context(|| {
        format!(
            "--dtype {}: candle supports {} only; pass one of these, or --engine llama.cpp (A101)",
            dtype.name(),
            MatrixDtype::NAMES.join(", ")
        )
    })
}
