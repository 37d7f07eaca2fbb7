//! The prompt files of runs, parsed once for many jobs.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use anyhow::Context;
use wire::{PromptEntry, v1};

use crate::{JobError, LeasedJob};

const FILES_MAX: usize = 4;

/// The prompts of a file by id.
pub type PromptIndex = Arc<BTreeMap<String, PromptEntry>>;

/// The prompt files that were used last, by digest.
#[derive(Debug, Default)]
pub struct PromptFiles(Mutex<Vec<(String, PromptIndex)>>);

impl PromptFiles {
    /// Returns the prompts of a file, which is fetched and parsed unless it was used lately.
    ///
    /// # Errors
    /// When the file cannot be fetched, read or parsed.
    pub async fn load_prompts(
        &self,
        job: &LeasedJob,
        file: &v1::Blob,
    ) -> Result<PromptIndex, JobError> {
        let known = |files: &Vec<(String, PromptIndex)>| {
            let found = files.iter().find(|(digest, _)| *digest == file.digest);
            found.map(|(_, prompts)| prompts.clone())
        };
        if let Some(prompts) = self.0.lock().ok().and_then(|files| known(&files)) {
            return Ok(prompts);
        }
        let cached = job.cache.fetch_blob(&job.store, file).await?;
        let text = tokio::fs::read(cached.path())
            .await
            .with_context(|| format!("read {}", cached.path().display()))
            .map_err(JobError::retryable_failure)?;
        // Parsing a large file takes seconds, and this thread renews leases.
        let parsed = tokio::task::spawn_blocking(move || PromptEntry::parse_all(&text)).await;
        let prompts =
            parsed.map_err(JobError::retryable_failure)?.map_err(JobError::fatal_failure)?;
        let prompts: PromptIndex =
            Arc::new(prompts.into_iter().map(|prompt| (prompt.id.clone(), prompt)).collect());
        if let Ok(mut files) = self.0.lock() {
            files.truncate(FILES_MAX - 1);
            files.insert(0, (file.digest.clone(), prompts.clone()));
        }
        Ok(prompts)
    }
}
