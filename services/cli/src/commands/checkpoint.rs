//! `flotilla checkpoint`: list, inspect, export, push and remove checkpoints.

mod export;
mod prune;
mod push;

use std::path::Path;

use anyhow::Context;
use control::{TaskProgress, parse_checkpoint_ref};
use run_view::weighting_text;
use store::TreePlace;
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
        CheckpointCommand::Prune(args) => prune::prune_checkpoints(flags, args).await?,
        CheckpointCommand::Push(args) => push::push_checkpoint(flags, &control, args).await?,
        CheckpointCommand::List { run } => {
            let run = RunId::new(run)?;
            let checkpoints = control.list_stored_checkpoints(&run).await?;
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
        CheckpointCommand::Export { checkpoint, out, cycle, newest, force, convert } => {
            let reference = exported_reference(&checkpoint, cycle, newest)?;
            anyhow::ensure!(
                force || is_empty_directory(&out)?,
                "{} is not empty; choose another directory, or write into it with --force (A104)",
                out.display()
            );
            if let Some(format) = export::model_format(convert.format) {
                let exported =
                    export::export_model(&control, &reference, &out, format, &convert).await?;
                return output::print_json_or(flags.json, &exported, || {
                    export::print_exported(&exported);
                });
            }
            export::require_no_options(&convert)?;
            let meter = ProgressMeter::new();
            let show = |TaskProgress { unit, done, total }| {
                meter.show_progress("export", unit, done, total);
            };
            let info = control.export_checkpoint(&reference, &out, &show).await?;
            meter.finish_bar();
            let others = control.list_checkpoints(&RunId::new(reference.run)?).await?;
            output::print_json_or(flags.json, &info, || print_export(&info, &others, &out))?;
        }
    }
    Ok(())
}

/// `--cycle` and `--newest` select a checkpoint of a run that is named alone.
fn exported_reference(
    checkpoint: &str,
    cycle: Option<u32>,
    newest: bool,
) -> anyhow::Result<v1::CheckpointRef> {
    let reference = parse_checkpoint_ref(checkpoint)?;
    let is_run = reference.cycle.is_none() && !reference.newest;
    anyhow::ensure!(
        is_run || (cycle.is_none() && !newest),
        "{checkpoint} names a checkpoint already; write only the run beside --cycle or --newest (R106)"
    );
    Ok(if is_run { v1::CheckpointRef { cycle, newest, ..reference } } else { reference })
}

/// Returns true if nothing would be overwritten or mixed with other files.
fn is_empty_directory(path: &Path) -> anyhow::Result<bool> {
    match path.read_dir() {
        Ok(mut entries) => Ok(entries.next().is_none()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
    }
}

fn print_checkpoints(checkpoints: &[v1::CheckpointInfo]) {
    let rows = checkpoints.iter().filter_map(|info| {
        let c = info.checkpoint.as_ref()?;
        let kind = c.content().as_str_name().to_lowercase();
        let loss = if c.step == 0 { "-".into() } else { format!("{:.4}", c.loss) };
        let rate = info.pass_rate.map_or("-".into(), percent_text);
        let perplexity = info.perplexities.first();
        let perplexity =
            perplexity.map_or("-".into(), |measured| format!("{:.4}", measured.perplexity));
        let mark = match (info.best, info.newest) {
            _ if info.removed => "removed",
            (true, true) if checkpoints.len() == 1 => "",
            (true, _) => "best",
            (false, true) => "newest",
            (false, false) => "",
        };
        let engine = short_engine(&c.engine);
        let (cycle, step) = (c.cycle.to_string(), c.step.to_string());
        Some([cycle, step, kind, mark.into(), rate, perplexity, loss, engine])
    });
    let headings = [">cycle", ">step", "what", "", ">pass rate", ">perplexity", ">loss", "~engine"];
    output::print_list(headings, rows, "no checkpoints yet; `flotilla run watch` follows the run");
}

fn percent_text(rate: f64) -> String {
    format!("{:.1} %", rate * 100.0)
}

/// The held-out pass rate and the perplexities.
fn figures_text(info: &v1::CheckpointInfo) -> String {
    let rate = info.pass_rate.map(|rate| format!("pass rate {}", percent_text(rate)));
    let perplexities = info.perplexities.iter();
    let perplexities = perplexities
        .map(|measured| format!("perplexity of {} {:.4}", measured.suite, measured.perplexity));
    let all: Vec<String> = rate.into_iter().chain(perplexities).collect();
    if all.is_empty() { "not measured".into() } else { all.join(", ") }
}

fn print_export(info: &v1::CheckpointInfo, others: &[v1::CheckpointInfo], out: &Path) {
    let checkpoint = info.checkpoint.clone().unwrap_or_default();
    let v1::Checkpoint { run, cycle, step, base, .. } = &checkpoint;
    let mark = match (info.best, info.newest) {
        (true, true) => ", the best and the newest",
        (true, false) => ", the best; --newest exports the newest",
        (false, true) => ", the newest",
        (false, false) => "",
    };
    let untrained = if *step == 0 { ", the base before any training" } else { "" };
    output::print_wrapped(&format!(
        "{run} cycle {cycle} step {step}{untrained}{mark}: {}",
        figures_text(info)
    ));
    output::print_line(&format!("{} files in {}", info.files.len(), out.display()));
    if let Some(base) = base {
        adapter_lines(base, others, out).iter().for_each(|line| output::print_line(line));
    }
}

/// Says how to get the base of an adapter, and how to use both.
fn adapter_lines(base: &v1::Tree, others: &[v1::CheckpointInfo], out: &Path) -> Vec<String> {
    let has_base = |info: &&v1::CheckpointInfo| {
        info.checkpoint.as_ref().is_some_and(|other| other.tree.as_ref() == Some(base))
    };
    let of_this_run = others.iter().find(has_base).and_then(|info| info.checkpoint.as_ref());
    let reference = match TreePlace::parse_checkpoint_path(&base.path) {
        Some((run, cycle, step)) => format!("{run}/{cycle}/{step}"),
        None => match of_this_run {
            Some(v1::Checkpoint { run, cycle, step, .. }) => format!("{run}/{cycle}/{step}"),
            None => return vec![format!("It is an adapter of {} in the store.", base.path)],
        },
    };
    let out = out.display();
    vec![
        format!("It is an adapter of {reference}. Get that base, and merge both:"),
        format!("  flotilla checkpoint export {reference} --out base"),
        format!("  flotilla convert merge --model base --adapter {out} --out merged"),
        "or load both in Python:".to_owned(),
        "  base = AutoModelForCausalLM.from_pretrained(\"base\")".to_owned(),
        format!("  model = PeftModel.from_pretrained(base, \"{out}\")"),
    ]
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
    // Four digits, without zeros at the end.
    let rate: f64 = format!("{learning_rate:.3e}").parse().unwrap_or(*learning_rate);
    format!("{weights}; gradient {grad_norm:.3} (at most {grad_norm_max:.3}), rate {rate:e}")
}

fn print_checkpoint(info: &v1::CheckpointInfo) {
    if let Some(c) = &info.checkpoint {
        let tree = c.tree.clone().unwrap_or_default();
        let parent = c.parent.clone().unwrap_or_default();
        output::print_line(&format!("{} cycle {} step {} of {}", c.run, c.cycle, c.step, c.steps));
        output::print_line(&format!("measured:     {}", figures_text(info)));
        output::print_line(&format!("in the store: {}", tree.path));
        output::print_line(&format!("manifest:     {}", tree.manifest));
        output::print_line(&format!("trained from: {}", parent.path));
        if !c.engine.is_empty() {
            output::print_line(&format!("trained by:   {}", c.engine));
        }
        if c.trained_tokens > 0 {
            output::print_line(&format!("trained on:   {}", training_tokens_text(c)));
            output::print_line(&format!("update:       {}", weight_change_text(c)));
            if let Some(found) = &c.weighting {
                output::print_line(&format!("objective:    {}", weighting_text(found)));
            }
        }
    }
    let rows = info
        .files
        .iter()
        .map(|file| [file.path.clone(), output::format_bytes(file.bytes), file.digest.clone()]);
    output::print_table(["file", ">size", "digest"], rows);
}
