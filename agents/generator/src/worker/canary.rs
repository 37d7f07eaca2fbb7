//! What shows which policy a worker has loaded: its tokenizer, and what it thinks of a text. These
//! are of one policy, so each text is scored once.

use std::{collections::BTreeMap, path::Path};

use anyhow::Context;
use formats::is_gguf;
use wire::Digest;

/// Texts remembered; a run has one for each policy. Beyond, all are forgotten.
const KNOWN_MAX: usize = 64;

/// Texts that were scored.
#[derive(Debug, Default)]
pub(super) struct Canaries(BTreeMap<String, Vec<f32>>);

impl Canaries {
    pub(super) fn get(&self, text: &str) -> Option<Vec<f32>> {
        self.0.get(text).cloned()
    }

    pub(super) fn learn(&mut self, text: &str, canary: &[f32]) {
        if self.0.len() >= KNOWN_MAX {
            self.0.clear();
        }
        self.0.insert(text.to_owned(), canary.to_owned());
    }
}

/// Of a model directory's tokenizer; empty for a GGUF file, which has it in its own words, and for
/// no model.
///
/// # Errors
/// When it cannot be read.
pub(super) fn tokenizer(base: &Path) -> anyhow::Result<String> {
    if base.as_os_str().is_empty() || is_gguf(base) {
        return Ok(String::new());
    }
    let path = base.join("tokenizer.json");
    let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    Ok(Digest::of(&bytes).to_string())
}
