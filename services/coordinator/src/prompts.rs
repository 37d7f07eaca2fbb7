//! The prompts of a run, fetched from the store once.

use std::collections::BTreeMap;

use store::{GetError, Store};
use wire::{PromptEntry, PromptsError, v1};

/// Maximum size of a prompts file in bytes.
const PROMPT_FILE_BYTES_MAX: u64 = 1 << 30;

/// The prompts of a RAFT run; empty for other kinds.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunPrompts {
    /// Training prompts.
    pub train: Vec<PromptEntry>,
    /// Held-out prompts.
    pub heldout: Vec<PromptEntry>,
    /// Prompts of the prompt suites, by suite name.
    pub suites: BTreeMap<String, Vec<PromptEntry>>,
}

/// An error while loading prompts.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadPromptsError {
    #[error("fetch the prompts")]
    Get(#[from] GetError),
    #[error("read the prompts")]
    Parse(#[from] PromptsError),
}

impl LoadPromptsError {
    /// Returns true if a later retry may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Get(error) => error.is_transient(),
            Self::Parse(_) => false,
        }
    }
}

impl RunPrompts {
    /// Fetches and parses the prompts that a spec names.
    pub(crate) async fn load_prompts(
        store: &Store,
        spec: &v1::Spec,
    ) -> Result<Self, LoadPromptsError> {
        let Some(v1::spec::Kind::Raft(raft)) = &spec.kind else { return Ok(Self::default()) };
        let mut suites = BTreeMap::new();
        for suite in &raft.prompt_suites {
            suites.insert(suite.name.clone(), fetch_prompts(store, suite.prompts.as_ref()).await?);
        }
        Ok(Self {
            train: fetch_prompts(store, raft.prompts.as_ref()).await?,
            heldout: fetch_prompts(store, raft.heldout.as_ref()).await?,
            suites,
        })
    }
}

/// Fetches and parses one prompts file; empty without a file.
async fn fetch_prompts(
    store: &Store,
    blob: Option<&v1::Blob>,
) -> Result<Vec<PromptEntry>, LoadPromptsError> {
    match blob {
        Some(blob) => {
            Ok(PromptEntry::parse_all(&store.get_blob(blob, PROMPT_FILE_BYTES_MAX).await?)?)
        }
        None => Ok(Vec::new()),
    }
}
