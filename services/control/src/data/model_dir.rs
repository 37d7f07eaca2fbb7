//! The directory with the chat template and the tokenizer of a run's base: the model's own
//! directory, or a temporary one with its small files.

use formats::ModelOutline;
use spec::{BaseSpec, FieldError, InitSpec};
use std::path::{Path, PathBuf};

use hub::{HubClient, HubError, ModelId};
use store::RelativePath;
use tempfile::TempDir;

use super::{
    error::BaseFilesError,
    file_content::{check_text, read_spec_file},
};
use crate::{
    FleetControl, SpecFiles, SubmitError,
    base_model::{BaseError, SMALL_BYTES_MAX, local_model_dir},
    checkpoints,
};

const TEACHER_FIELD: &str = "raft.teacher";

/// Small files that a conversation depends on.
const SMALL_FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer_config.json",
    LAST_FILE,
];

/// The last that is downloaded: a directory in the hub's cache without it was not downloaded whole.
const LAST_FILE: &str = "tokenizer.json";

/// The settings of a tokenizer without any: `tokenizer.json` says all. Without this file
/// transformers would choose the tokenizer class of the model's type, which may add tokens.
const DEFAULT_TOKENIZER_CONFIG: &[u8] =
    b"{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\"\n}\n";

/// May contain only the small files.
pub(crate) enum ModelDir {
    Existing(PathBuf),
    Staged(TempDir),
}

impl ModelDir {
    pub(crate) fn dir_path(&self) -> &Path {
        match self {
            Self::Existing(path) => path,
            Self::Staged(dir) => dir.path(),
        }
    }
}

impl FleetControl {
    /// Fetches small files from the store or the hub if needed. Fails if the base's name leads to
    /// no model, or its files cannot be read.
    pub(crate) async fn prepare_model_dir(
        &self,
        base: &BaseSpec,
        files: &SpecFiles,
    ) -> Result<ModelDir, SubmitError> {
        if let Some(name) = &base.checkpoint {
            let reference = checkpoints::parse_checkpoint_ref(name)?;
            let checkpoint = self.get_checkpoint(&reference).await?.checkpoint.unwrap_or_default();
            let path = checkpoint.tree.unwrap_or_default().path;
            return self.stage_from_store(&path).await;
        }
        if let Some(name) = &base.channel {
            let base = self.find_channel_model(name).await?.base.unwrap_or_default();
            return self.stage_from_store(&base.path).await;
        }
        if let Some(init) = &base.init {
            return Ok(ModelDir::Staged(stage_init_files(init, files).await?));
        }
        let name = base.model.as_deref().unwrap_or_default();
        if let Some(path) = name.strip_prefix("store:") {
            return self.stage_from_store(path.trim_end_matches('/')).await;
        }
        find_model_dir(&self.hub, name, files).await
    }

    /// Returns the `model_type` of a base outside of the table of architectures; empty for others,
    /// and for one whose files cannot be read.
    pub(crate) async fn find_other_model_type(&self, base: &BaseSpec, files: &SpecFiles) -> String {
        let dir = self.prepare_model_dir(base, files).await;
        match dir.map(|dir| ModelOutline::from_dir(dir.dir_path())) {
            Ok(Ok(ModelOutline { config: None, model_type, .. })) => model_type,
            _ => String::new(),
        }
    }

    /// Compares a teacher with the base whose tokens it scores, by their small files. Returns the
    /// token with which the base ends a sample. Fails if the teacher has another tokenizer, or
    /// the base has no end token.
    pub(crate) async fn check_teacher(
        &self,
        base: &BaseSpec,
        teacher: &BaseSpec,
        files: &SpecFiles,
    ) -> Result<u32, SubmitError> {
        let base = self.prepare_model_dir(base, files).await?;
        let teacher = self.prepare_model_dir(teacher, files).await;
        let teacher = teacher.map_err(|error| error.in_section(TEACHER_FIELD))?;
        let refuse = |remedy: &str| -> SubmitError {
            let field = TEACHER_FIELD.to_owned();
            FieldError { field, remedy: remedy.to_owned() }.into()
        };
        let read = |dir: &ModelDir| std::fs::read(dir.dir_path().join("tokenizer.json")).ok();
        if read(&base).is_none_or(|base| read(&teacher) != Some(base)) {
            return Err(refuse(
                "must have the same tokenizer.json as the base: it scores the base's tokens; use a \
                 model of the same family",
            ));
        }
        let config = |dir: &ModelDir| {
            ModelOutline::from_dir(dir.dir_path())
                .map_err(|source| SubmitError::base_error(BaseError::from(source)))
        };
        let learner = config(&base)?;
        config(&teacher).map_err(|error| error.in_section(TEACHER_FIELD))?;
        let end = learner.eos_tokens.first().copied();
        end.ok_or_else(|| refuse("needs a base whose config.json names an eos_token_id"))
    }

    /// Fails with [`BaseFilesError::Elsewhere`] if the store does not contain the base's files.
    async fn stage_from_store(&self, path: &str) -> Result<ModelDir, SubmitError> {
        let root =
            RelativePath::new(path).map_err(|source| SubmitError::base_error(source.into()))?;
        let staged = tempfile::tempdir().map_err(BaseFilesError::Stage)?;
        for name in SMALL_FILES {
            let file = self.open_store().await?.read_small_file(&root, name, SMALL_BYTES_MAX).await;
            let Some(bytes) = file.map_err(BaseFilesError::Get)? else { continue };
            let written = tokio::fs::write(staged.path().join(name), bytes).await;
            written.map_err(BaseFilesError::Stage)?;
        }
        if !staged.path().join(SMALL_FILES[0]).exists() {
            return Err(BaseFilesError::Elsewhere.into());
        }
        Ok(ModelDir::Staged(staged))
    }
}

/// Returns the directory of a model on this machine. Downloads the small files of a model that is
/// only on the hub.
pub(super) async fn find_model_dir(
    hub: &HubClient,
    name: &str,
    files: &SpecFiles,
) -> Result<ModelDir, SubmitError> {
    let path =
        files.resolve_directory(name).map_err(|source| SubmitError::base_error(source.into()))?;
    match name.parse::<ModelId>() {
        Ok(id) if !path.is_dir() => fetch_small_files(hub, &id).await,
        _ => {
            let found =
                local_model_dir(&path, hub.cache_path()).map_err(SubmitError::base_error)?;
            Ok(ModelDir::Existing(found))
        }
    }
}

/// Returns a directory in the hub's cache. Downloads only the small files of a model that is not
/// cached, or not whole.
async fn fetch_small_files(hub: &HubClient, id: &ModelId) -> Result<ModelDir, SubmitError> {
    let failed =
        |source| SubmitError::base_error(BaseError::Download { id: id.to_string(), source });
    let mut dir = hub.find_snapshot(id).await;
    if let Some(dir) = dir.clone().filter(|dir| dir.join(LAST_FILE).exists()) {
        return Ok(ModelDir::Existing(dir));
    }
    for name in SMALL_FILES {
        let ignore_progress = std::sync::Arc::new(|_| {});
        match hub.download_file(id, name, ignore_progress).await {
            Ok(path) => dir = path.parent().map(Path::to_owned),
            Err(HubError::Missing { .. }) => {}
            Err(HubError::Offline) if dir.is_some() => break,
            Err(error) => return Err(failed(error)),
        }
    }
    dir.map(ModelDir::Existing).ok_or_else(|| BaseFilesError::Elsewhere.into())
}

/// Writes the files that the section names to a temporary directory.
pub(crate) async fn stage_init_files(
    init: &InitSpec,
    files: &SpecFiles,
) -> Result<TempDir, SubmitError> {
    let staged = tempfile::tempdir().map_err(BaseFilesError::Stage)?;
    let write = async |name: &str, bytes: &[u8]| {
        let written = tokio::fs::write(staged.path().join(name), bytes).await;
        written.map_err(BaseFilesError::Stage)
    };
    for (field, file, name) in init.file_fields() {
        let bytes = read_spec_file(field, file, files).await?;
        check_text(field, file, &bytes)?;
        write(name, &bytes).await?;
    }
    if init.tokenizer_config.is_none() {
        write("tokenizer_config.json", DEFAULT_TOKENIZER_CONFIG).await?;
    }
    Ok(staged)
}
