//! `flotilla checkpoint`: list, inspect and export checkpoints.

use control::{TaskProgress, parse_checkpoint_ref};
use wire::{RunId, v1};

use super::explain;
use crate::{
    args::{CheckpointCommand, GlobalArgs},
    output,
    progress_meter::ProgressMeter,
};

pub(crate) async fn handle_checkpoints(
    flags: &GlobalArgs,
    command: CheckpointCommand,
) -> anyhow::Result<()> {
    let control = flags.fleet.connect_control().await?;
    match command {
        CheckpointCommand::List { run } => {
            let run = RunId::new(run)?;
            control.read_run_records(&run).await?;
            let checkpoints = control.list_checkpoints(&run).await?;
            output::print_json_or(flags.json, &checkpoints, || print_checkpoints(&checkpoints))?;
        }
        CheckpointCommand::Get { checkpoint } => {
            let info = control.get_checkpoint(&parse_checkpoint_ref(&checkpoint)?).await?;
            output::print_json_or(flags.json, &info, || print_checkpoint(&info))?;
        }
        CheckpointCommand::Explain { checkpoint, samples } => {
            let info = control.get_checkpoint(&parse_checkpoint_ref(&checkpoint)?).await?;
            let checkpoint = info.checkpoint.unwrap_or_default();
            let lineage = control.explain_checkpoint(&checkpoint).await?;
            output::print_json_or(flags.json, &lineage, || {
                explain::print_lineage(&lineage, samples);
            })?;
        }
        CheckpointCommand::Export { checkpoint, out } => {
            let meter = ProgressMeter::new();
            let show = |TaskProgress { unit, done, total }| {
                meter.show_progress("export", unit, done, total);
            };
            let info =
                control.export_checkpoint(&parse_checkpoint_ref(&checkpoint)?, &out, &show).await?;
            meter.finish_bar();
            output::print_json_or(flags.json, &info, || {
                output::print_line(&format!("{} files in {}", info.files.len(), out.display()));
            })?;
        }
    }
    Ok(())
}

fn print_checkpoints(checkpoints: &[v1::CheckpointInfo]) {
    let rows = checkpoints.iter().filter_map(|info| {
        let c = info.checkpoint.as_ref()?;
        let kind = c.content().as_str_name().to_lowercase();
        let path = c.tree.as_ref().map_or(String::new(), |tree| tree.path.clone());
        let loss = if c.step == 0 { "-".into() } else { format!("{:.4}", c.loss) };
        let last = if c.r#final { "yes" } else { "" };
        let engine = short_engine(&c.engine);
        Some([c.cycle.to_string(), c.step.to_string(), kind, last.into(), loss, engine, path])
    });
    output::print_table(
        [">cycle", ">step", "what", "final", ">loss", "engine", "in the store"],
        rows,
    );
}

fn short_engine(engine: &str) -> String {
    if engine.starts_with("pytorch-") { "pytorch".into() } else { engine.to_owned() }
}

fn training_tokens_text(c: &v1::Checkpoint) -> String {
    let v1::Checkpoint { trained_tokens, tokens, packing, skipped, .. } = c;
    let filled = packing * 100.0;
    let skipped = match skipped {
        0 => String::new(),
        some => format!("; {some} examples skipped: too long"),
    };
    format!("{trained_tokens} completion tokens of {tokens}, batches {filled:.0} % full{skipped}")
}

fn weight_change_text(c: &v1::Checkpoint) -> String {
    let v1::Checkpoint { grad_norm, grad_norm_max, learning_rate, .. } = c;
    let weights = match c.weight_change {
        Some(change) => format!("weights changed by {:.3} %", change * 100.0),
        None => "weights initialized at random".to_owned(),
    };
    format!(
        "{weights}; gradient {grad_norm:.3} (at most {grad_norm_max:.3}), rate {learning_rate:e}"
    )
}

fn print_checkpoint(info: &v1::CheckpointInfo) {
    if let Some(c) = &info.checkpoint {
        let tree = c.tree.clone().unwrap_or_default();
        let parent = c.parent.clone().unwrap_or_default();
        output::print_line(&format!("{} cycle {} step {} of {}", c.run, c.cycle, c.step, c.steps));
        output::print_line(&format!("in the store: {}", tree.path));
        output::print_line(&format!("manifest:     {}", tree.manifest));
        output::print_line(&format!("trained from: {}", parent.path));
        if !c.engine.is_empty() {
            output::print_line(&format!("trained by:   {}", c.engine));
        }
        if c.trained_tokens > 0 {
            output::print_line(&format!("trained on:   {}", training_tokens_text(c)));
            output::print_line(&format!("update:       {}", weight_change_text(c)));
        }
    }
    let rows = info
        .files
        .iter()
        .map(|file| [file.path.clone(), output::format_bytes(file.bytes), file.digest.clone()]);
    output::print_table(["file", ">size", "digest"], rows);
}
