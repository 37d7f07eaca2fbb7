//! Runs whose training is somebody else's: an agent watches where its checkpoints appear.

use std::sync::Arc;
use std::{path::Path, time::Duration};

use wire::{RunId, v1};

use crate::{
    Control, Files, SubmitError,
    base::Watch,
    check::check_watch,
    spec::{BaseSpec, WatchSpec},
};

/// What a watching agent found out before it could say what the run is.
#[derive(Debug, Clone, Copy)]
pub struct Found<'a> {
    /// The directory's name, and the box it is on.
    pub source: &'a str,
    pub host: &'a str,
    pub pool: &'a str,
    /// When the first checkpoint was found. Asking again with the same gives the same run.
    pub at: Duration,
    /// The model its adapters belong to, where the spec names none. `None` for whole models.
    pub base: Option<&'a Path>,
}

impl WatchSpec {
    /// Reads a watch spec and checks that it makes sense, as far as that shows without its files.
    ///
    /// # Errors
    /// When it is no YAML, has a key nobody knows, or a field cannot work.
    pub fn parse(yaml: &str) -> Result<Self, SubmitError> {
        let spec: Self = serde_saphyr::from_str(yaml).map_err(SubmitError::Yaml)?;
        spec.check()?;
        Ok(spec)
    }

    /// # Errors
    /// The first field that cannot work, and what it should be.
    pub fn check(&self) -> Result<(), SubmitError> {
        Ok(check_watch(self)?)
    }
}

impl Control {
    /// Whether the files a watch spec names can be used: later nobody is there to be told.
    ///
    /// # Errors
    /// The first thing wrong with them.
    pub async fn check_watch(&self, spec: &WatchSpec, files: &Files) -> Result<(), SubmitError> {
        self.suites(&spec.evals, files).await?;
        Ok(())
    }

    /// Starts the run of a watched directory, or finds the one that was started for it.
    ///
    /// # Errors
    /// The first thing wrong with the spec or its files, or with the fleet.
    pub async fn begin_watched(
        &self,
        name: &str,
        spec: &WatchSpec,
        found: Found<'_>,
        files: &Files,
    ) -> Result<RunId, SubmitError> {
        // An agent has no terminal to show a transfer on.
        let unheard: Watch = Arc::new(|_| {});
        let base = match (&spec.base, found.base) {
            (Some(base), _) => Some(self.base(base, files, &unheard).await?),
            (None, Some(directory)) => {
                let model = Some(directory.display().to_string());
                let base = BaseSpec { model, ..BaseSpec::default() };
                Some(self.base(&base, files, &unheard).await?)
            }
            (None, None) => None,
        };
        let watched =
            v1::spec::Watched { source: found.source.to_owned(), host: found.host.to_owned() };
        let resolved = v1::Spec {
            run: String::new(),
            name: name.to_owned(),
            submitted_at: Some(wire::timestamp(found.at)),
            seed: 0,
            base,
            pool: found.pool.to_owned(),
            suites: self.suites(&spec.evals, files).await?,
            kind: Some(v1::spec::Kind::Watched(watched)),
        };
        self.write_spec(name, resolved).await
    }
}
