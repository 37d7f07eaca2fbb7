//! The prompts of a run, fetched from the store once.

use std::collections::BTreeMap;

use store::{GetError, Store};
use wire::{PromptEntry, PromptsError, v1};

const PROMPT_FILE_BYTES_MAX: u64 = 1 << 30;

/// Empty for runs other than RAFT.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunPrompts {
    pub train: Vec<PromptEntry>,
    pub heldout: Vec<PromptEntry>,
    /// Prompts of the prompt suites, by suite name.
    pub suites: BTreeMap<String, Vec<PromptEntry>>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadPromptsError {
    #[error("fetch the prompts")]
    Get(#[from] GetError),
    #[error("read the prompts")]
    Parse(#[from] PromptsError),
    #[error("reading the prompts was interrupted (X101)")]
    Interrupted(#[from] tokio::task::JoinError),
}

impl LoadPromptsError {
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Get(error) => error.is_transient(),
            Self::Parse(_) => false,
            Self::Interrupted(error) => error.is_cancelled(),
        }
    }
}

impl RunPrompts {
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

async fn fetch_prompts(
    store: &Store,
    blob: Option<&v1::Blob>,
) -> Result<Vec<PromptEntry>, LoadPromptsError> {
    let Some(blob) = blob else { return Ok(Vec::new()) };
    let bytes = store.get_blob(blob, PROMPT_FILE_BYTES_MAX).await?;
    // Parsing a large file takes seconds.
    Ok(tokio::task::spawn_blocking(move || PromptEntry::parse_all(&bytes)).await??)
}
