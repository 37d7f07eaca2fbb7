//! The adapter that a run trains further: found on this machine or on the hub, checked, and stored
//! beside its base.

use std::path::{Path, PathBuf};

use formats::peft::{AdapterSettings, CONFIG_FILE, TENSOR_FILE};
use hub::ModelId;
use serde_json::Value;
use store::{TreeMetadata, TreePlace};
use wire::v1;

use crate::{
    FleetControl,
    base_model::{BaseError, TransferCallback, run_blocking},
    safetensors_check,
    spec_files::SpecFiles,
};

impl FleetControl {
    /// Resolves the name in `base.adapter` to a tree in the store: a local directory in PEFT's
    /// format, or `org/name[@revision]` on the hub. In its settings, the fleet's name of the base
    /// replaces any other, so that a pushed adapter has the same files again.
    pub(crate) async fn resolve_adapter(
        &self,
        name: &str,
        base: &v1::Tree,
        files: &SpecFiles,
        watch: &TransferCallback,
    ) -> Result<v1::Tree, BaseError> {
        let directory = self.find_adapter(name, &[CONFIG_FILE, TENSOR_FILE], files, watch).await?;
        let manifest = base.manifest.clone();
        let staged = run_blocking(move || stage_adapter(&directory, &manifest)).await?;
        let id = name.parse::<ModelId>().ok();
        let last = id.as_ref().map_or(name, |id| id.repo.as_str()).rsplit('/').next();
        let place = TreePlace::for_model(last.unwrap_or_default());
        let place = place.or_else(|_| TreePlace::for_model("adapter"))?;
        let store = self.open_store().await?;
        Ok(store.publish_tree(staged.path(), &place, TreeMetadata::default()).await?)
    }

    /// Fails as [`FleetControl::resolve_adapter`] does. Stores nothing and downloads no weights.
    pub(crate) async fn check_adapter(
        &self,
        name: &str,
        files: &SpecFiles,
        watch: &TransferCallback,
    ) -> Result<(), BaseError> {
        let directory = self.find_adapter(name, &[CONFIG_FILE], files, watch).await?;
        AdapterSettings::from_dir(&directory)?;
        Ok(())
    }

    /// Returns a directory with the adapter's files, downloaded if the name is no local directory.
    async fn find_adapter(
        &self,
        name: &str,
        wanted: &[&str],
        files: &SpecFiles,
        watch: &TransferCallback,
    ) -> Result<PathBuf, BaseError> {
        let path = files.resolve_directory(name)?;
        if path.is_dir() {
            return Ok(path);
        }
        let not_found = |reason| BaseError::NotFound { path: path.display().to_string(), reason };
        let id: ModelId = name.parse().map_err(not_found)?;
        let mut directory = PathBuf::new();
        for file in wanted {
            let fetched = self.fetch_hub_file(&id, file, watch).await;
            let fetched =
                fetched.map_err(|source| BaseError::Download { id: id.to_string(), source })?;
            directory = fetched.parent().unwrap_or(&fetched).to_owned();
        }
        Ok(directory)
    }
}

/// Copies an adapter to a temporary directory, and names its base in its settings.
fn stage_adapter(directory: &Path, base: &str) -> Result<tempfile::TempDir, BaseError> {
    AdapterSettings::from_dir(directory)?;
    safetensors_check::check_weights(&directory.join(TENSOR_FILE))?;
    let staged = tempfile::tempdir().map_err(BaseError::Stage)?;
    let copy = || {
        std::fs::copy(directory.join(TENSOR_FILE), staged.path().join(TENSOR_FILE))?;
        let settings = std::fs::read_to_string(directory.join(CONFIG_FILE))?;
        std::fs::write(staged.path().join(CONFIG_FILE), name_base(&settings, base))
    };
    copy().map_err(BaseError::Stage)?;
    Ok(staged)
}

/// Replaces the name of the base in an adapter's settings. All other bytes stay.
pub(crate) fn name_base(settings: &str, base: &str) -> String {
    let parsed: Value = serde_json::from_str(settings).unwrap_or_default();
    match parsed["base_model_name_or_path"].as_str() {
        Some(named) if !named.is_empty() => {
            settings.replacen(&Value::from(named).to_string(), &Value::from(base).to_string(), 1)
        }
        _ => settings.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pushed_adapter_gets_the_settings_back_that_it_had() {
        let stored = "{\n  \"base_model_name_or_path\": \"b3:12\",\n  \"r\": 8\n}\n";
        let pushed = name_base(stored, "org/base");
        assert!(pushed.contains("\"org/base\",\n"), "{pushed}");
        assert_eq!(name_base(&pushed, "b3:12"), stored);
        let unnamed = "{\"base_model_name_or_path\": null}";
        assert_eq!(name_base(unnamed, "b3:12"), unnamed);
    }
}
