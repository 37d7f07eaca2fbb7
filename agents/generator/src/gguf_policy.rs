//! A policy in the form that llama.cpp reads: base and adapter as GGUF files.

use std::path::{Path, PathBuf};

use anyhow::bail;
use formats::is_gguf;
use llama::{CachedGguf, GgufCache};

use crate::LlamaCppGenerator;

/// A base as a GGUF file, which is not evicted from the cache while this is held.
#[derive(Debug)]
pub struct ConvertedBase {
    /// The file.
    pub path: PathBuf,
    _in_use: Option<CachedGguf>,
}

impl LlamaCppGenerator {
    /// Returns a base as a GGUF file: itself, or the one in the cache, which it is converted into
    /// if needed. `key` is a digest of its content; `on_heartbeat` is called while this works.
    ///
    /// # Errors
    /// When the model cannot be converted, or the cache cannot be written.
    pub fn convert_base(
        &self,
        key: &str,
        model: &Path,
        on_heartbeat: &mut dyn FnMut(),
    ) -> anyhow::Result<ConvertedBase> {
        if is_gguf(model) {
            return Ok(ConvertedBase { path: model.to_owned(), _in_use: None });
        }
        let cache = GgufCache::open(&self.gguf_cache, self.gguf_cache_bytes)?;
        let (dtype, converters) = (self.dtype.into(), self.converters.as_ref());
        let cached =
            cache.get_or_convert(key, model, dtype, converters, &mut |_, _| on_heartbeat())?;
        Ok(ConvertedBase { path: cached.file_path().to_owned(), _in_use: Some(cached) })
    }

    /// Returns an adapter as a GGUF file: itself, or `converted`, which is written. `on_heartbeat`
    /// is called while this works.
    ///
    /// # Errors
    /// When the base is a GGUF file and the adapter is not, or it cannot be converted.
    pub fn convert_adapter(
        &self,
        base: &Path,
        adapter: &Path,
        converted: PathBuf,
        on_heartbeat: &mut dyn FnMut(),
    ) -> anyhow::Result<PathBuf> {
        if is_gguf(adapter) {
            return Ok(adapter.to_owned());
        }
        if is_gguf(base) {
            bail!(
                "{} is a GGUF file, so the adapter must be one too: convert {} with `flotilla \
                 convert lora` (M111)",
                base.display(),
                adapter.display()
            );
        }
        let cache = GgufCache::open(&self.gguf_cache, self.gguf_cache_bytes)?;
        cache.convert_adapter(base, adapter, &converted, self.converters.as_ref(), on_heartbeat)?;
        Ok(converted)
    }
}
