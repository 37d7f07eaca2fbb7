//! The prompts of a run, fetched from the store once.

use std::collections::BTreeMap;

use store::{GetError, Store};
use wire::{Prompt, PromptsError, v1};

/// Largest prompts file.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// What a RAFT run samples from. Empty for other kinds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Prompts {
    pub train: Vec<Prompt>,
    pub heldout: Vec<Prompt>,
    /// By the suite's name.
    pub suites: BTreeMap<String, Vec<Prompt>>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    #[error("fetch the prompts")]
    Get(#[from] GetError),
    #[error("read the prompts")]
    Parse(#[from] PromptsError),
}

impl LoadError {
    /// Whether trying again later may help.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Get(error) => error.may_pass(),
            Self::Parse(_) => false,
        }
    }
}

impl Prompts {
    pub(crate) async fn load(store: &Store, spec: &v1::Spec) -> Result<Self, LoadError> {
        let Some(v1::spec::Kind::Raft(raft)) = &spec.kind else { return Ok(Self::default()) };
        let mut suites = BTreeMap::new();
        for suite in &raft.prompt_suites {
            suites.insert(suite.name.clone(), fetch(store, suite.prompts.as_ref()).await?);
        }
        Ok(Self {
            train: fetch(store, raft.prompts.as_ref()).await?,
            heldout: fetch(store, raft.heldout.as_ref()).await?,
            suites,
        })
    }
}

async fn fetch(store: &Store, blob: Option<&v1::Blob>) -> Result<Vec<Prompt>, LoadError> {
    match blob {
        Some(blob) => Ok(Prompt::parse_all(&store.get_blob(blob, FILE_BYTES_MAX).await?)?),
        None => Ok(Vec::new()),
    }
}
