//! `flotilla checkpoint push`: uploads a checkpoint and its model card to the hub.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::Context;
use control::{
    CardRequest, FleetControl, ModelForm, ModelPush, TaskProgress, parse_checkpoint_ref,
};
use hub::{ModelId, PushOutcome};
use serde_json::json;
use wire::v1;

use super::export;
use crate::{
    args::{ExportFormatArgs, GlobalArgs, PushArgs},
    output,
    progress_meter::ProgressMeter,
    signals,
};

const INTERRUPTED: &str = "push: interrupted; the branch is as it was (A108)";

pub(super) async fn push_checkpoint(
    flags: &GlobalArgs,
    control: &FleetControl,
    args: PushArgs,
) -> anyhow::Result<()> {
    let PushArgs { checkpoint, model, branch, private, message, dry_run, mut convert } = args;
    let target = name_branch(model, branch)?;
    let info = control.get_checkpoint(&parse_checkpoint_ref(&checkpoint)?).await?;
    let v1::Checkpoint { run, cycle, step, .. } = info.checkpoint.clone().unwrap_or_default();
    let form = model_form(&convert)?;
    if let ModelForm::Gguf { weight_type } = &form {
        // llama.cpp finds the type in the name of the file.
        convert.name.get_or_insert(format!("{run}-{}", weight_type.to_uppercase()));
    }
    let request = CardRequest { info: &info, target: &target, form: &form };
    if dry_run {
        let card = control.write_model_card(request).await?.text;
        return output::print_json_or(flags.json, &json!({ "card": card }), || {
            output::print_text(&card);
        });
    }
    // Before hours of work.
    let opened = control.open_push(&target, private).await?;
    let card = control.write_model_card(request).await?;
    let message = message.unwrap_or_else(|| format!("Push {run}/{cycle}/{step} of Flotilla"));
    let reference = v1::CheckpointRef { run, cycle: Some(cycle), step: Some(step), newest: false };
    let parts = tempfile::tempdir().context("create a directory for the files to push")?;
    let directory = write_files(control, &reference, parts.path(), &convert).await?;
    let (meter, bytes) = (Arc::new(ProgressMeter::new()), AtomicU64::new(0));
    let shown = meter.clone();
    let sent = Arc::new(move |more| {
        let done = bytes.fetch_add(more, Ordering::Relaxed) + more;
        shown.show_progress("push", "bytes", done, 0);
    });
    let (target, directory) = (&opened, directory.as_path());
    let push = ModelPush { target, directory, card: &card, message: &message, sent };
    let stop = signals::stop_token()?;
    let pushed =
        stop.run_until_cancelled(control.push_model(&push)).await.context(INTERRUPTED)??;
    meter.finish_bar();
    output::print_json_or(flags.json, &pushed, || print_outcome(&pushed))
}

fn name_branch(model: ModelId, branch: Option<String>) -> anyhow::Result<ModelId> {
    let Some(branch) = branch else { return Ok(model) };
    anyhow::ensure!(
        model.revision.is_none(),
        "{model} names a branch already; omit --branch {branch} (A102)"
    );
    Ok(format!("{model}@{branch}").parse()?)
}

fn model_form(convert: &ExportFormatArgs) -> anyhow::Result<ModelForm> {
    use model_export::ExportFormat::{Gguf, Lemonade, Merged, Ollama};
    let weight_type = convert.weight_type.as_deref().unwrap_or(export::DEFAULT_TYPE).to_owned();
    match export::model_format(convert.format) {
        None => export::require_no_options(convert).map(|()| ModelForm::Stored),
        Some(Merged) => Ok(ModelForm::Merged),
        Some(Gguf | Ollama | Lemonade) => Ok(ModelForm::Gguf { weight_type }),
    }
}

/// Exports the checkpoint, and returns the directory with its files.
async fn write_files(
    control: &FleetControl,
    reference: &v1::CheckpointRef,
    parts: &Path,
    convert: &ExportFormatArgs,
) -> anyhow::Result<PathBuf> {
    let Some(format) = export::model_format(convert.format) else {
        let meter = ProgressMeter::new();
        let show = |TaskProgress { unit, done, total }| {
            meter.show_progress("export", unit, done, total);
        };
        control.export_checkpoint(reference, parts, &show).await?;
        meter.finish_bar();
        return Ok(parts.to_owned());
    };
    let path = export::export_model(control, reference, parts, format, convert).await?.path;
    Ok(if path.is_dir() { path } else { parts.to_owned() })
}

fn print_outcome(PushOutcome { url, commit, is_new, changed, removed }: &PushOutcome) {
    if !is_new {
        output::print_line(&format!("{url} is unchanged at {commit}"));
        return;
    }
    let removed = match removed.len() {
        0 => String::new(),
        _ => format!(", {} removed", removed.join(", ")),
    };
    output::print_line(&format!("{url} is at {commit}: {} files changed{removed}", changed.len()));
}
