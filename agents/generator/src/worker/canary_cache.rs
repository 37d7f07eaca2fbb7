//! Evidence of the policy that a worker has loaded: its tokenizer, and its log-probabilities of
//! canary texts. A worker has one policy, so each text is scored once.

use std::{collections::BTreeMap, path::Path};

use anyhow::Context;
use formats::is_gguf;
use wire::Digest;

/// A run has one text for each policy. Beyond this number, all are forgotten.
const CANARIES_MAX: usize = 64;

/// The log-probabilities of the texts that were scored.
#[derive(Debug, Default)]
pub(super) struct CanaryCache(BTreeMap<String, Vec<f32>>);

impl CanaryCache {
    pub(super) fn get(&self, text: &str) -> Option<Vec<f32>> {
        self.0.get(text).cloned()
    }

    pub(super) fn remember_canary(&mut self, text: &str, canary: &[f32]) {
        if self.0.len() >= CANARIES_MAX {
            self.0.clear();
        }
        self.0.insert(text.to_owned(), canary.to_owned());
    }
}

/// Returns the digest of a model directory's `tokenizer.json`; empty for a GGUF file, which has its
/// own form of tokenizer, and for an empty path.
pub(super) fn digest_tokenizer(base: &Path) -> anyhow::Result<String> {
    if base.as_os_str().is_empty() || is_gguf(base) {
        return Ok(String::new());
    }
    let path = base.join("tokenizer.json");
    let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    Ok(Digest::hash_bytes(&bytes).to_string())
}
