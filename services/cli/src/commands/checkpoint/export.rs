//! `flotilla checkpoint export --format`: a model as another program loads it.

use std::{
    panic::resume_unwind,
    path::{Path, PathBuf},
};

use anyhow::Context;
use control::{FleetControl, TaskProgress};
use model_export::{ExportFormat, ExportRequest, WeightType};
use serde::Serialize;
use wire::v1;

use crate::{
    args::{ExportFormatArg, ExportFormatArgs},
    output,
    progress_meter::ProgressMeter,
    signals,
};

/// A model that was exported, for `--json`.
#[derive(Debug, Serialize)]
pub(super) struct ExportSummary {
    run: String,
    cycle: u32,
    step: u32,
    pub(super) path: PathBuf,
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

pub(super) const DEFAULT_TYPE: &str = "q8_0";
const INTERRUPTED: &str = "export: interrupted; partial output removed (A108)";

/// The panic payload that unwinds an export after a stop signal.
struct ExportStopped;

/// Checks what needs no model, before one is fetched.
fn check_options(out: &Path, format: ExportFormat, args: &ExportFormatArgs) -> anyhow::Result<()> {
    if let Some(name) = &args.name {
        anyhow::ensure!(
            !name.is_empty() && !name.starts_with('.') && !name.contains(['/', ':', ',']),
            "--name {name}: must be a file name without a dot at its start (A101)"
        );
    }
    anyhow::ensure!(
        format != ExportFormat::Merged || args.weight_type.is_none(),
        "--type: a merged model has the type of its base; omit it (A102)"
    );
    anyhow::ensure!(
        !out.to_string_lossy().contains([':', ',']),
        "--out {}: llama.cpp cannot use a path with `:` or `,` (E103)",
        out.display()
    );
    Ok(())
}

/// Refuses options that only apply to models for other programs.
pub(super) fn require_no_options(args: &ExportFormatArgs) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.weight_type.is_none() && args.name.is_none(),
        "--type and --name need --format gguf, ollama, lemonade or merged (A102)"
    );
    Ok(())
}

/// Fetches a checkpoint and its base, and exports them.
pub(super) async fn export_model(
    control: &FleetControl,
    reference: &v1::CheckpointRef,
    out: &Path,
    format: ExportFormat,
    args: &ExportFormatArgs,
) -> anyhow::Result<ExportSummary> {
    check_options(out, format, args)?;
    let weight_type = args.weight_type.as_deref().unwrap_or(DEFAULT_TYPE);
    let weight_type = WeightType::from_name(weight_type)
        .with_context(|| format!("--type {weight_type}: no such type (A101)"))?;
    let stop = signals::stop_token()?;
    let meter = ProgressMeter::new();
    let show = |TaskProgress { unit, done, total }| meter.show_progress("fetch", unit, done, total);
    std::fs::create_dir_all(out).with_context(|| format!("create {}", out.display()))?;
    let parts = tempfile::Builder::new().prefix(".fetch-").tempdir_in(out);
    let parts = parts.with_context(|| format!("write into {}", out.display()))?;
    let fetch = async {
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
        anyhow::Ok((checkpoint, base, adapter))
    };
    let (checkpoint, base, adapter) =
        stop.run_until_cancelled(fetch).await.context(INTERRUPTED)??;
    meter.finish_bar();
    let name = args.name.clone().unwrap_or_else(|| checkpoint.run.clone());
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
            if stop.is_cancelled() {
                // Unwinds, so that the parts are removed.
                resume_unwind(Box::new(ExportStopped));
            }
            meter.show_progress(activity, "bytes", done, total);
        });
        meter.finish_bar();
        exported
    });
    let exported = match exported.await {
        Ok(exported) => exported?,
        Err(error) => match error.try_into_panic() {
            Ok(panic) if panic.is::<ExportStopped>() => anyhow::bail!(INTERRUPTED),
            Ok(panic) => resume_unwind(panic),
            Err(error) => return Err(error.into()),
        },
    };
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
