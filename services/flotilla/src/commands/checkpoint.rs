//! `flotilla checkpoint …`.

use std::process::ExitCode;

use control::{Progress, parse_checkpoint_ref};
use wire::{RunId, v1};

use super::explain;
use crate::{cli::CheckpointCommand, fleet::FleetArgs, meter::Meter, output};

pub(crate) async fn checkpoint(
    fleet: &FleetArgs,
    command: CheckpointCommand,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let control = fleet.control().await?;
    match command {
        CheckpointCommand::List { run } => {
            let run = RunId::new(run)?;
            control.records(&run).await?;
            let checkpoints = control.checkpoints(&run).await?;
            if json {
                output::print_json(&checkpoints)?;
            } else {
                list(&checkpoints);
            }
        }
        CheckpointCommand::Get { checkpoint } => {
            let info = control.checkpoint(&parse_checkpoint_ref(&checkpoint)?).await?;
            if json {
                output::print_json(&info)?;
            } else {
                show(&info);
            }
        }
        CheckpointCommand::Explain { checkpoint, samples } => {
            let info = control.checkpoint(&parse_checkpoint_ref(&checkpoint)?).await?;
            let checkpoint = info.checkpoint.unwrap_or_default();
            let lineage = control.explain_checkpoint(&checkpoint).await?;
            if json {
                output::print_json(&lineage)?;
            } else {
                explain::lineage(&lineage, samples);
            }
        }
        CheckpointCommand::Export { checkpoint, out } => {
            let meter = Meter::new();
            let show = |Progress { unit, done, total }| meter.show("export", unit, done, total);
            let info = control.export(&parse_checkpoint_ref(&checkpoint)?, &out, &show).await?;
            meter.end();
            if json {
                output::print_json(&info)?;
            } else {
                output::print(&format!("{} files in {}", info.files.len(), out.display()));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn list(checkpoints: &[v1::CheckpointInfo]) {
    let rows = checkpoints.iter().filter_map(|info| {
        let c = info.checkpoint.as_ref()?;
        let kind = c.content().as_str_name().to_lowercase();
        let path = c.tree.as_ref().map_or(String::new(), |tree| tree.path.clone());
        let loss = if c.step == 0 { "-".into() } else { format!("{:.4}", c.loss) };
        let last = if c.r#final { "yes" } else { "" };
        let engine = short_engine(&c.engine);
        Some([c.cycle.to_string(), c.step.to_string(), kind, last.into(), loss, engine, path])
    });
    output::print(&output::table(
        [">cycle", ">step", "what", "final", ">loss", "engine", "in the store"],
        rows,
    ));
}

/// The first of what trained it: the rest is for `checkpoint get`.
fn short_engine(engine: &str) -> String {
    if engine.starts_with("pytorch-") { "pytorch".into() } else { engine.to_owned() }
}

fn trained_on(c: &v1::Checkpoint) -> String {
    let v1::Checkpoint { trained_tokens, tokens, packing, skipped, .. } = c;
    let filled = packing * 100.0;
    let skipped = match skipped {
        0 => String::new(),
        some => format!("; {some} examples were too long and left out"),
    };
    format!("{trained_tokens} tokens of answers among {tokens}, passes {filled:.0} % full{skipped}")
}

fn changed(c: &v1::Checkpoint) -> String {
    let v1::Checkpoint { grad_norm, grad_norm_max, learning_rate, .. } = c;
    let weights = match c.weight_change {
        Some(change) => format!("the weights by {:.3} %", change * 100.0),
        None => "weights that began at random".to_owned(),
    };
    format!(
        "{weights}; gradient {grad_norm:.3} (at most {grad_norm_max:.3}), rate {learning_rate:e}"
    )
}

fn show(info: &v1::CheckpointInfo) {
    if let Some(c) = &info.checkpoint {
        let tree = c.tree.clone().unwrap_or_default();
        let parent = c.parent.clone().unwrap_or_default();
        output::print(&format!("{} cycle {} step {} of {}", c.run, c.cycle, c.step, c.steps));
        output::print(&format!("in the store: {}", tree.path));
        output::print(&format!("manifest:     {}", tree.manifest));
        output::print(&format!("trained from: {}", parent.path));
        if !c.engine.is_empty() {
            output::print(&format!("trained by:   {}", c.engine));
        }
        if c.trained_tokens > 0 {
            output::print(&format!("trained on:   {}", trained_on(c)));
            output::print(&format!("it changed:   {}", changed(c)));
        }
    }
    let rows = info
        .files
        .iter()
        .map(|file| [file.path.clone(), output::bytes(file.bytes), file.digest.clone()]);
    output::print(&output::table(["file", ">size", "digest"], rows));
}
