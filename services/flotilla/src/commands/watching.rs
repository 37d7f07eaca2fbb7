//! `flotilla agent --watch DIR`: what the watcher may not know, the control API among it.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, OnceLock},
};

use anyhow::{Context, bail};
use bus::Bus;
use control::{BaseSpec, Control, Files, Found, SuiteSpec, WatchSpec};
use futures::future::{BoxFuture, FutureExt};
use runtime::Side;
use store::{Cache, Store};
use watcher::{Begin, Finding};
use wire::{AgentId, v1};

use crate::cli::WatchArgs;

use super::{FINDINGS, run};

/// A directory to watch, and what is to be made of it.
pub(crate) struct Watching {
    directory: PathBuf,
    name: String,
    spec: WatchSpec,
    /// Where the names in the spec lead.
    files: Files,
    pool: String,
    over: Arc<OnceLock<v1::Done>>,
}

impl Watching {
    /// `None` when nothing is to be watched.
    pub(crate) fn of(args: &WatchArgs, pool: &str) -> anyhow::Result<Option<Self>> {
        let Some(directory) = &args.watch else { return Ok(None) };
        let directory = std::path::absolute(directory)
            .with_context(|| format!("use {}", directory.display()))?;
        if directory.exists() && !directory.is_dir() {
            bail!("--watch {}: is no directory (A104)", directory.display());
        }
        let (spec, beside) = spec(args)?;
        let name = match &spec.name {
            Some(name) => name.clone(),
            None => name_of(&directory)?,
        };
        Ok(Some(Self {
            directory,
            name,
            spec,
            files: Files::Local(beside),
            pool: pool.to_owned(),
            over: Arc::default(),
        }))
    }

    /// What its runs are called.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Finds now what would otherwise be found with the first checkpoint.
    pub(crate) async fn check(&self, bus: &Bus, store: &Store) -> anyhow::Result<()> {
        let control = Control::with_store(bus.clone(), store.clone());
        control.check_watch(&self.spec, &self.files).await.context("--eval, --watch-spec")?;
        if self.spec.evals.is_empty() {
            tracing::warn!("no --eval: checkpoints are published and not measured");
        }
        Ok(())
    }

    /// How it ended, if its run is over.
    pub(crate) fn outcome(&self) -> Arc<OnceLock<v1::Done>> {
        self.over.clone()
    }

    /// The work, for the agent to do beside its roles.
    pub(crate) fn work(
        self,
        id: AgentId,
        home: &Path,
        bus: Bus,
        (store, cache): (Store, Cache),
    ) -> impl FnOnce(Side) -> BoxFuture<'static, anyhow::Result<()>> + Send + 'static {
        let config = watcher::Config {
            directory: self.directory.clone(),
            fallback: home.join("watch").join(&self.name),
            agent: id,
            name: self.name.clone(),
            base_given: self.spec.base.is_some(),
            until: self.spec.until,
        };
        let over = self.over.clone();
        let begin = self.begin(Control::with_store(bus.clone(), store.clone()));
        let files = (store, cache);
        move |side| {
            async move {
                if let Some(done) = watcher::watch(config, bus, files, begin, side).await? {
                    let status = done.status().as_str_name().to_lowercase();
                    tracing::info!(status, why = done.message, "the watched run is over");
                    let _ = over.set(done);
                }
                Ok(())
            }
            .boxed()
        }
    }

    fn begin(self, control: Control) -> Begin {
        let watching = Arc::new(self);
        Arc::new(move |finding| {
            let (watching, control) = (watching.clone(), control.clone());
            async move { watching.begin_run(&control, finding).await }.boxed()
        })
    }

    async fn begin_run(&self, control: &Control, finding: Finding) -> anyhow::Result<wire::RunId> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let source = self.directory.file_name().map_or("/".into(), |name| name.to_string_lossy());
        let found = Found {
            source: &source,
            host: &host,
            pool: &self.pool,
            at: finding.at,
            base: finding.base.as_deref(),
        };
        let run = control.begin_watched(&self.name, &self.spec, found, &self.files).await?;
        if let Err(error) = run::name_absent(control, &run).await {
            tracing::debug!(error = format!("{error:#}"), "asking who is there");
        }
        Ok(run)
    }
}

/// The exit code of an agent that only watched.
pub(crate) fn code(over: Option<&v1::Done>) -> ExitCode {
    match over.map(v1::Done::status) {
        None | Some(v1::done::Status::Succeeded) => ExitCode::SUCCESS,
        Some(_) => ExitCode::from(FINDINGS),
    }
}

/// The spec, and the directory its names are relative to.
fn spec(args: &WatchArgs) -> anyhow::Result<(WatchSpec, PathBuf)> {
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
        // Whether it can be read is checked with the rest of the spec.
        let bytes = std::fs::metadata(file).map_or(0, |found| found.len());
        SuiteSpec::of_file(&file.display().to_string(), bytes)
    };
    let evals: Vec<SuiteSpec> = args.eval.iter().map(suite).collect();
    for SuiteSpec { name, n_ctx, .. } in &evals {
        tracing::info!(
            suite = name,
            n_ctx = n_ctx.unwrap_or_default(),
            "checkpoints will be measured"
        );
    }
    let spec = WatchSpec { name: args.watch_name.clone(), base, evals, until: args.watch_until };
    spec.check().context("--watch")?;
    Ok((spec, PathBuf::new()))
}

fn name_of(directory: &Path) -> anyhow::Result<String> {
    let name = directory.file_name().and_then(|name| wire::slug(&name.to_string_lossy()));
    name.with_context(|| {
        format!("no run can be called after {}; pass --watch-name", directory.display())
    })
}

/// What an agent that only watches is called, so that it may share the box with others.
pub(crate) fn agent_name(host: &str, name: &str) -> String {
    const HOST_BYTES_MAX: usize = 20;
    let host = wire::slug(host).unwrap_or_else(|| "agent".into());
    let host: String = host.chars().take(HOST_BYTES_MAX).collect();
    let name: String = name.chars().take(wire::NAME_BYTES_MAX - HOST_BYTES_MAX - 1).collect();
    format!("{host}-{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_only_watches_has_a_legal_name_of_its_own() {
        assert_eq!(agent_name("My.Box", "out"), "my-box-out");
        let long = agent_name(&"h".repeat(90), &"n".repeat(48));
        assert!(AgentId::new(long.as_str()).is_ok(), "{long}");
    }
}
