//! `flotilla compare`: which of two models scores higher, tested pair by pair.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

use anyhow::Context;
use comparison::{Comparison, PairedTest, compare_pair_lines};
use control::{FleetControl, MeasuredModel, ModelComparison, SpecFiles, parse_checkpoint_ref};
use pair_judge::PairJudge;
use spec::{JudgeSpec, MeasureDraft};
use wire::v1::CheckpointRef;

use super::run::report_missing_roles;
use crate::{
    args::{CompareArgs, GlobalArgs},
    output,
    progress_meter::ProgressMeter,
    run_submission::await_success,
};

pub(crate) async fn compare_models(flags: &GlobalArgs, args: &CompareArgs) -> anyhow::Result<()> {
    let Some(a) = &args.a else {
        let path = args.pairs.as_deref().context("name two checkpoints, or --pairs (A102)")?;
        let (comparison, pairs) = compare_pairs(path, args.alpha)?;
        return output::print_json_or(flags.json, &comparison, || {
            output::print_wrapped(&comparison.describe(pairs, args.alpha, ["a", "b"]));
        });
    };
    let judge = args.judge.as_deref().map(open_judge).transpose()?;
    let a = parse_checkpoint_ref(a)?;
    let b = args.b.as_deref().map(parse_checkpoint_ref).transpose()?;
    let control = flags.fleet.connect_control().await?;
    let (named, models) = match (&args.prompts, b) {
        (Some(prompts), b) => {
            let (verifier, settings) = (args.verifier.clone(), args.settings.clone());
            let draft = MeasureDraft { prompts: prompts.clone(), verifier, settings };
            let files = SpecFiles::Local(".".into());
            let measured = control.measure_models(&a, b.as_ref(), &draft, &files).await?;
            for MeasuredModel { name, run } in &measured {
                output::print_message(&format!("{run} draws samples with {name}"));
                report_missing_roles(&control, run).await?;
                await_success(&control, run).await?;
            }
            let cycles = measured.each_ref().map(MeasuredModel::sampled_cycle);
            (cycles, measured.map(|it| Some(it.name)))
        }
        (None, b) => ([a, b.context("name two checkpoints, or --prompts (A102)")?], [None, None]),
    };
    let suite = args.suite.as_deref().unwrap_or_default();
    let mut found = match judge {
        Some(judge) => judge_checkpoints(&control, &judge, &named, suite, args.alpha).await?,
        None => control.compare_checkpoints(&named[0], &named[1], suite, args.alpha).await?,
    };
    [found.a.model, found.b.model] = models;
    output::print_json_or(flags.json, &found, || print_comparison(&found))
}

fn compare_pairs(path: &Path, alpha: f64) -> anyhow::Result<(Comparison, usize)> {
    let name = path.display().to_string();
    let lines: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(std::io::stdin().lock())
    } else {
        Box::new(BufReader::new(File::open(path).with_context(|| format!("read {name}"))?))
    };
    compare_pair_lines(PairedTest::new(alpha)?, lines).context(name)
}

fn open_judge(path: &Path) -> anyhow::Result<PairJudge> {
    let what = || path.display().to_string();
    let bytes = control::read_named_file(path)?;
    let spec = JudgeSpec::parse(wire::decode_text(&bytes).with_context(what)?);
    Ok(PairJudge::new(&spec.with_context(what)?)?)
}

async fn judge_checkpoints(
    control: &FleetControl,
    judge: &PairJudge,
    [a, b]: &[CheckpointRef; 2],
    suite: &str,
    alpha: f64,
) -> anyhow::Result<ModelComparison> {
    let paired = control.pair_checkpoints(a, b, suite, alpha).await?;
    let meter = ProgressMeter::new();
    let show = |pairs| meter.show_progress("judging", "pairs", pairs, 0);
    let judged = judge.judge_prompts(paired.prompt_answers(), paired.start_test(), &show).await;
    meter.finish_bar();
    let judged = judged?;
    Ok(paired.compare_scores(&judged.scores, Some(judged.report)))
}

fn print_comparison(found: &ModelComparison) {
    let names = found.names();
    let [a, b] = names.each_ref().map(String::as_str);
    output::print_table(["", &format!(">{a}"), &format!(">{b}")], found.table_rows());
    let pairs = usize::try_from(found.pairs).unwrap_or(usize::MAX);
    output::print_wrapped(&found.test.describe(pairs, found.alpha, [a, b]));
    if let Some(judge) = &found.judge {
        output::print_wrapped(&judge.describe());
    }
    if let unpaired @ 1.. = found.unpaired {
        output::print_message(&format!("{unpaired} samples have no partner and do not count"));
    }
}
