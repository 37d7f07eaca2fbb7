//! Runs of external trainings, whose checkpoints an agent adopts from a directory.

use std::{path::Path, time::Duration};

use spec::{BaseSpec, WatchSpec};
use wire::{RunId, v1};

use crate::{FleetControl, SpecFiles, SubmitError, base_model::unwatched};

/// The training that a watching agent detected in a directory.
#[derive(Debug, Clone, Copy)]
pub struct DetectedTraining<'a> {
    pub source: &'a str,
    pub host: &'a str,
    pub pool: &'a str,
    /// Time since 1970 at which the first checkpoint was found. The same time leads to the same
    /// run.
    pub found_at: Duration,
    /// Model of the adapters, if the spec names none; `None` for whole models.
    pub base: Option<&'a Path>,
}

impl FleetControl {
    /// Reads, checks and stores the files that a watch spec names. Later no user is present to read
    /// the problems.
    pub async fn check_watch_files(
        &self,
        spec: &WatchSpec,
        files: &SpecFiles,
    ) -> Result<(), SubmitError> {
        self.prepare_text_suites(&spec.evals, files).await?;
        Ok(())
    }

    /// Starts the run of a watched directory, or returns the run that was started for it before.
    pub async fn start_adopted_run(
        &self,
        name: &str,
        spec: &WatchSpec,
        found: DetectedTraining<'_>,
        files: &SpecFiles,
    ) -> Result<RunId, SubmitError> {
        // An agent has no terminal for the progress of a transfer.
        let unheard = unwatched();
        let found_base = found.base.map(|directory| {
            let model = Some(directory.display().to_string());
            BaseSpec { model, ..BaseSpec::default() }
        });
        let (base, other_model_type) = match spec.base.as_ref().or(found_base.as_ref()) {
            Some(base) => {
                let resolved = self.resolve_base(base, files, &unheard).await?;
                (Some(resolved), self.find_other_model_type(base, files).await)
            }
            None => (None, String::new()),
        };
        let watched =
            v1::spec::Watched { source: found.source.to_owned(), host: found.host.to_owned() };
        let resolved = v1::Spec {
            run: String::new(),
            name: name.to_owned(),
            submitted_at: Some(wire::to_timestamp(found.found_at)),
            seed: 0,
            base,
            pool: found.pool.to_owned(),
            suites: self.prepare_text_suites(&spec.evals, files).await?,
            kind: Some(v1::spec::Kind::Watched(watched)),
            other_model_type,
            ..v1::Spec::default()
        };
        self.write_spec_fact(name, resolved).await
    }
}
