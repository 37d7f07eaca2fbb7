//! Submission of runs, with progress.

use std::{path::Path, sync::Arc};

use anyhow::{Context, bail};
use control::{FleetControl, SpecFiles, SubmittedRun, TransferCallback, TransferProgress};
use cycle::Run;
use wire::{RunId, v1};

use crate::{progress_meter::ProgressMeter, run_progress};

/// Reads a spec; the files it names are searched beside it.
pub(crate) async fn read_spec(spec: &Path) -> anyhow::Result<(String, SpecFiles)> {
    let read = || format!("read {}", spec.display());
    anyhow::ensure!(
        tokio::fs::try_exists(spec).await.with_context(read)?,
        "there is no spec {}; `flotilla run new` writes one (F101)",
        spec.display()
    );
    control::require_named_file(spec)?;
    let bytes = tokio::fs::read(spec).await.with_context(read)?;
    let yaml = wire::decode_text(&bytes).with_context(read)?.to_owned();
    Ok((yaml, SpecFiles::Local(spec.parent().unwrap_or(Path::new("")).to_owned())))
}

/// Writes a spec, and beside it the schema that its first line names to editors.
pub(crate) fn write_spec(file: &Path, yaml: &str) -> anyhow::Result<()> {
    write_schema(&file.with_file_name(spec::SCHEMA_FILE), &spec::run_spec_schema_text())?;
    std::fs::write(file, yaml).with_context(|| format!("write {} (A104)", file.display()))
}

/// Writes a JSON Schema.
pub(crate) fn write_schema(file: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(file, text).with_context(|| format!("write {} (A104)", file.display()))
}

/// Returns a meter, and a callback that shows transfers on it.
pub(crate) fn meter_transfers() -> (Arc<ProgressMeter>, TransferCallback) {
    let meter = Arc::new(ProgressMeter::new());
    let shown = meter.clone();
    let watch = Arc::new(move |transfer: TransferProgress| {
        shown.show_progress(transfer.activity, "bytes", transfer.bytes, transfer.total);
    });
    (meter, watch)
}

/// Submits the run of a spec file.
pub async fn submit_run(control: &FleetControl, spec: &Path) -> anyhow::Result<SubmittedRun> {
    let (yaml, files) = read_spec(spec).await?;
    let (meter, watch) = meter_transfers();
    let submitted = control.submit_with_progress(&yaml, &files, &watch).await;
    meter.finish_bar();
    submitted.with_context(|| format!("submit {}", spec.display()))
}

/// Submits a run, follows it to its end and returns it; fails if the run does not succeed.
pub async fn run_to_success(control: &FleetControl, spec: &Path) -> anyhow::Result<Run> {
    let id = submit_run(control, spec).await?.run;
    await_success(control, &id).await
}

/// Follows a run to its end and returns it; fails if the run does not succeed.
pub async fn await_success(control: &FleetControl, id: &RunId) -> anyhow::Result<Run> {
    let ended = run_progress::follow_run(control, id, 0).await?;
    match &ended.done {
        Some(done) if done.status() == v1::done::Status::Succeeded => Ok(ended),
        Some(done) => bail!("run {id} ended unexpectedly: {} (A113)", done.message),
        None => bail!("run {id} has not ended (A113)"),
    }
}
