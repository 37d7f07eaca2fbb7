//! `flotilla checkpoint export --format`: a model as another program loads it.

use std::path::{Path, PathBuf};

use anyhow::Context;
use control::{FleetControl, TaskProgress};
use model_export::{ExportFormat, ExportRequest, WeightType};
use serde::Serialize;
use wire::v1;

use crate::{
    args::{ExportFormatArg, ExportFormatArgs},
    output,
    progress_meter::ProgressMeter,
};

/// A model that was exported, for `--json`.
#[derive(Debug, Serialize)]
pub(super) struct ExportSummary {
    run: String,
    cycle: u32,
    step: u32,
    path: PathBuf,
    bytes: u64,
    /// Mean distance from the trained model, and the largest accepted, in nats per token.
    distance: f64,
    tolerance: f64,
    commands: Vec<String>,
}

/// Returns `None` for the files as they are stored.
pub(super) fn model_format(format: ExportFormatArg) -> Option<ExportFormat> {
    match format {
        ExportFormatArg::Files => None,
        ExportFormatArg::Merged => Some(ExportFormat::Merged),
        ExportFormatArg::Gguf => Some(ExportFormat::Gguf),
        ExportFormatArg::Ollama => Some(ExportFormat::Ollama),
        ExportFormatArg::Lemonade => Some(ExportFormat::Lemonade),
    }
}

/// Fetches a checkpoint and its base, and exports them.
pub(super) async fn export_model(
    control: &FleetControl,
    reference: &v1::CheckpointRef,
    out: &Path,
    format: ExportFormat,
    args: &ExportFormatArgs,
) -> anyhow::Result<ExportSummary> {
    let meter = ProgressMeter::new();
    let show = |TaskProgress { unit, done, total }| meter.show_progress("fetch", unit, done, total);
    std::fs::create_dir_all(out).with_context(|| format!("create {}", out.display()))?;
    let parts = tempfile::Builder::new().prefix(".fetch-").tempdir_in(out);
    let parts = parts.with_context(|| format!("write into {}", out.display()))?;
    let fetched = parts.path().join("checkpoint");
    let info = control.export_checkpoint(reference, &fetched, &show).await?;
    let checkpoint = info.checkpoint.unwrap_or_default();
    let (base, adapter) = match (checkpoint.content(), &checkpoint.base) {
        (v1::checkpoint::Content::Adapter, Some(base)) => {
            let directory = parts.path().join("base");
            control.export_tree(base, &directory, &show).await.context("fetch the base")?;
            (directory, Some(fetched))
        }
        _ => (fetched, None),
    };
    meter.finish_bar();
    let name = args.name.clone().unwrap_or_else(|| checkpoint.run.clone());
    anyhow::ensure!(
        !name.is_empty() && !name.starts_with('.') && !name.contains(['/', ':', ',']),
        "--name {name}: must be a file name without a dot at its start (A101)"
    );
    let weight_type = WeightType::from_name(&args.weight_type)
        .with_context(|| format!("--type {}: no such type (A101)", args.weight_type))?;
    let (out, llama_cpp) = (out.to_owned(), args.llama_cpp.clone());
    let exported = tokio::task::spawn_blocking(move || {
        let meter = ProgressMeter::new();
        let request = ExportRequest {
            base: &base,
            adapter: adapter.as_deref(),
            out: &out,
            name: &name,
            format,
            weight_type,
            llama_cpp: llama_cpp.as_deref(),
        };
        let exported = model_export::export_model(&request, &mut |activity, done, total| {
            meter.show_progress(activity, "bytes", done, total);
        });
        meter.finish_bar();
        exported
    });
    let exported = exported.await??;
    Ok(ExportSummary {
        run: checkpoint.run,
        cycle: checkpoint.cycle,
        step: checkpoint.step,
        bytes: path_size(&exported.path)?,
        path: exported.path,
        distance: exported.distance,
        tolerance: exported.tolerance,
        commands: exported.commands,
    })
}

fn path_size(path: &Path) -> anyhow::Result<u64> {
    let measured = || -> std::io::Result<u64> {
        if !path.is_dir() {
            return Ok(path.metadata()?.len());
        }
        path.read_dir()?.map(|entry| Ok(entry?.metadata()?.len())).sum()
    };
    measured().with_context(|| format!("look at {}", path.display()))
}

pub(super) fn print_exported(exported: &ExportSummary) {
    let ExportSummary { run, cycle, step, path, bytes, distance, tolerance, .. } = exported;
    let size = output::format_bytes(*bytes);
    output::print_wrapped(&format!(
        "{}: {run} cycle {cycle} step {step}, {size}; its log-probabilities are {distance:.4} nats \
         per token from the trained model's ({tolerance} are accepted). To load it:",
        path.display()
    ));
    exported.commands.iter().for_each(|command| output::print_line(&format!("  {command}")));
}
