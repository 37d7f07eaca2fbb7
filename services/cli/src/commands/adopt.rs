//! `flotilla agent --watch DIR`: adoption of a training outside the fleet. Connects the checkpoint
//! watcher to the control API, which the watcher does not know.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, OnceLock},
};

use agent::TaskContext;
use anyhow::{Context, bail};
use bus::Bus;
use checkpoint_watcher::{BeginRun, NewRunInfo};
use control::{DetectedTraining, FleetControl, SpecFiles};
use futures::future::{BoxFuture, FutureExt};
use spec::{BaseSpec, SuiteSpec, WatchSpec};
use store::{FileCache, Store};
use wire::{AgentId, v1};

use crate::{args::TrainingWatchArgs, exit_codes, this_machine};

use super::run;

pub(crate) struct TrainingAdoption {
    directory: PathBuf,
    pub(crate) name: String,
    spec: WatchSpec,
    files: SpecFiles,
    pool: String,
    pub(crate) final_status: Arc<OnceLock<v1::Done>>,
}

impl TrainingAdoption {
    pub(crate) fn from_args(args: &TrainingWatchArgs, pool: &str) -> anyhow::Result<Option<Self>> {
        let Some(directory) = &args.watch else { return Ok(None) };
        let directory = std::path::absolute(directory)
            .with_context(|| format!("use {}", directory.display()))?;
        if directory.exists() && !directory.is_dir() {
            bail!("--watch {}: not a directory (A104)", directory.display());
        }
        let (spec, beside) = build_spec(args)?;
        let name = match &spec.name {
            Some(name) => name.clone(),
            None => name_from_directory(&directory)?,
        };
        Ok(Some(Self {
            directory,
            name,
            spec,
            files: SpecFiles::Local(beside),
            pool: pool.to_owned(),
            final_status: Arc::default(),
        }))
    }

    /// Checks the spec and its files now, instead of with the first checkpoint.
    pub(crate) async fn check_spec(&self, bus: &Bus, store: &Store) -> anyhow::Result<()> {
        let control = FleetControl::with_store(bus.clone(), store.clone());
        control.check_watch_files(&self.spec, &self.files).await.context("--eval, --watch-spec")?;
        if self.spec.evals.is_empty() {
            tracing::warn!("no --eval: checkpoints are published but not evaluated");
        }
        Ok(())
    }

    pub(crate) fn into_task(
        self,
        id: AgentId,
        home: &Path,
        bus: Bus,
        (store, cache): (Store, FileCache),
    ) -> impl FnOnce(TaskContext) -> BoxFuture<'static, anyhow::Result<()>> + Send + 'static {
        let config = checkpoint_watcher::Config {
            directory: self.directory.clone(),
            fallback: home.join("watch").join(&self.name),
            agent: id,
            name: self.name.clone(),
            base_given: self.spec.base.is_some(),
            until: self.spec.until,
        };
        let over = self.final_status.clone();
        let (adoption, control) =
            (Arc::new(self), FleetControl::with_store(bus.clone(), store.clone()));
        let begin: BeginRun = Arc::new(move |finding| {
            let (adoption, control) = (adoption.clone(), control.clone());
            async move { adoption.begin_run(&control, finding).await }.boxed()
        });
        let files = (store, cache);
        move |side| {
            async move {
                if let Some(done) =
                    checkpoint_watcher::watch_checkpoints(config, bus, files, begin, side).await?
                {
                    let status = done.status().as_str_name().to_lowercase();
                    tracing::info!(status, why = done.message, "the watched run ended");
                    let _ = over.set(done);
                }
                Ok(())
            }
            .boxed()
        }
    }

    async fn begin_run(
        &self,
        control: &FleetControl,
        finding: NewRunInfo,
    ) -> anyhow::Result<wire::RunId> {
        let host = this_machine::host_name();
        let source = self.directory.file_name().map_or("/".into(), |name| name.to_string_lossy());
        let found = DetectedTraining {
            source: &source,
            host: &host,
            pool: &self.pool,
            found_at: finding.begun_at,
            base: finding.base.as_deref(),
        };
        let run = control.start_adopted_run(&self.name, &self.spec, found, &self.files).await?;
        if let Err(error) = run::report_missing_roles(control, &run).await {
            tracing::debug!(error = format!("{error:#}"), "list the fleet's agents");
        }
        Ok(run)
    }
}

pub(crate) fn watched_exit_code(over: Option<&v1::Done>) -> ExitCode {
    let failed = over.is_some_and(|done| done.status() != v1::done::Status::Succeeded);
    exit_codes::findings_code(failed)
}

/// Returns the spec, and the directory that its file names are relative to.
fn build_spec(args: &TrainingWatchArgs) -> anyhow::Result<(WatchSpec, PathBuf)> {
    if let Some(path) = &args.watch_spec {
        let yaml = std::fs::read_to_string(path);
        let yaml = yaml.with_context(|| format!("read {}", path.display()))?;
        let spec = WatchSpec::parse(&yaml).with_context(|| format!("{}", path.display()))?;
        let beside = path.parent().map(Path::to_owned).unwrap_or_default();
        return Ok((spec, beside));
    }
    let base = args
        .watch_base
        .as_ref()
        .map(|model| BaseSpec { model: Some(model.display().to_string()), ..BaseSpec::default() });
    let suite = |file: &PathBuf| {
        // The checks of the spec report a file that cannot be read.
        let bytes = std::fs::metadata(file).map_or(0, |found| found.len());
        SuiteSpec::for_file(&file.display().to_string(), bytes)
    };
    let evals: Vec<SuiteSpec> = args.eval.iter().map(suite).collect();
    for SuiteSpec { name, n_ctx, .. } in &evals {
        tracing::info!(
            suite = name,
            n_ctx = n_ctx.unwrap_or_default(),
            "checkpoints will be evaluated"
        );
    }
    let spec = WatchSpec { name: args.watch_name.clone(), base, evals, until: args.watch_until };
    spec.check_fields().context("--watch")?;
    Ok((spec, PathBuf::new()))
}

fn name_from_directory(directory: &Path) -> anyhow::Result<String> {
    let name = directory.file_name().and_then(|name| wire::make_slug(&name.to_string_lossy()));
    name.with_context(|| {
        format!("cannot derive a run name from {}; pass --watch-name", directory.display())
    })
}

/// The host and the run, so that several watchers can share a box.
pub(crate) fn watcher_agent_name(host: &str, name: &str) -> String {
    const HOST_BYTES_MAX: usize = 20;
    let host = wire::make_slug(host).unwrap_or_else(|| "agent".into());
    let host: String = host.chars().take(HOST_BYTES_MAX).collect();
    let name: String = name.chars().take(wire::NAME_BYTES_MAX - HOST_BYTES_MAX - 1).collect();
    format!("{host}-{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_only_watches_has_a_legal_name_of_its_own() {
        assert_eq!(watcher_agent_name("My.Box", "out"), "my-box-out");
        let long = watcher_agent_name(&"h".repeat(90), &"n".repeat(48));
        assert!(AgentId::new(long.as_str()).is_ok(), "{long}");
    }
}
