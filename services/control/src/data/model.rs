//! Where the chat template of a run's base is read: from the model's directory, or from what of
//! it is small, fetched here.

use std::path::{Path, PathBuf};

use hub::{HubError, ModelId};
use store::RelativePath;
use tempfile::TempDir;

use super::error::ModelError;
use crate::{
    Control, Files, SubmitError,
    base::{BaseError, SMALL_BYTES_MAX},
    checkpoints,
    spec::{BaseSpec, InitSpec},
};

/// What of a model a chat depends on.
const FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

/// A model's directory, which may hold nothing but its small files.
pub(super) enum ModelDir {
    Here(PathBuf),
    Staged(TempDir),
}

impl ModelDir {
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Here(path) => path,
            Self::Staged(dir) => dir.path(),
        }
    }
}

impl Control {
    /// The small files of the base.
    pub(super) async fn model_dir(
        &self,
        base: &BaseSpec,
        files: &Files,
    ) -> Result<ModelDir, SubmitError> {
        if let Some(name) = &base.checkpoint {
            let reference = checkpoints::parse_checkpoint_ref(name)?;
            let checkpoint = self.checkpoint(&reference).await?.checkpoint.unwrap_or_default();
            let path = checkpoint.tree.unwrap_or_default().path;
            return self.staged(&path).await;
        }
        if let Some(init) = &base.init {
            return stage_init(init, files).await;
        }
        let name = base.model.as_deref().unwrap_or_default();
        if let Some(path) = name.strip_prefix("store:") {
            return self.staged(path.trim_end_matches('/')).await;
        }
        let path = files.directory(name).map_err(|source| SubmitError::of_base(source.into()))?;
        match name.parse::<ModelId>() {
            Ok(id) if !path.is_dir() => self.of_hub_small(&id).await,
            _ => {
                let found = self.snapshot_of(&path).map_err(SubmitError::of_base)?;
                Ok(ModelDir::Here(found))
            }
        }
    }

    async fn staged(&self, path: &str) -> Result<ModelDir, SubmitError> {
        let root = RelativePath::new(path).map_err(|source| SubmitError::of_base(source.into()))?;
        let staged = tempfile::tempdir().map_err(ModelError::Stage)?;
        for name in FILES {
            let file = self.store().await?.small_file(&root, name, SMALL_BYTES_MAX).await;
            let Some(bytes) = file.map_err(ModelError::Get)? else { continue };
            let written = tokio::fs::write(staged.path().join(name), bytes).await;
            written.map_err(ModelError::Stage)?;
        }
        if !staged.path().join(FILES[0]).exists() {
            return Err(ModelError::Elsewhere.into());
        }
        Ok(ModelDir::Staged(staged))
    }

    /// Of the hub, but for what is large.
    async fn of_hub_small(&self, id: &ModelId) -> Result<ModelDir, SubmitError> {
        let failed =
            |source| SubmitError::of_base(BaseError::Download { id: id.to_string(), source });
        if let Some(dir) = self.hub.cached(id).await.map_err(failed)? {
            return Ok(ModelDir::Here(dir));
        }
        let mut dir = None;
        for name in FILES {
            let unheard = std::sync::Arc::new(|_| {});
            match self.hub.file(id, name, unheard).await {
                Ok(path) => dir = dir.or_else(|| path.parent().map(Path::to_owned)),
                Err(HubError::Missing { .. }) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        dir.map(ModelDir::Here).ok_or_else(|| ModelError::Elsewhere.into())
    }
}

async fn stage_init(init: &InitSpec, files: &Files) -> Result<ModelDir, SubmitError> {
    let staged = tempfile::tempdir().map_err(ModelError::Stage)?;
    for (field, file, name) in init.parts() {
        let bytes = crate::submit::read(field, file, files).await?;
        tokio::fs::write(staged.path().join(name), &bytes).await.map_err(ModelError::Stage)?;
    }
    Ok(ModelDir::Staged(staged))
}
