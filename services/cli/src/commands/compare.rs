//! `flotilla compare`: which of two models scores higher, tested pair by pair.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

use anyhow::Context;
use comparison::{Comparison, PairedTest, compare_pair_lines};
use control::{FleetControl, ModelComparison, parse_checkpoint_ref};
use pair_judge::PairJudge;
use spec::JudgeSpec;
use wire::v1::CheckpointRef;

use crate::{
    args::{CompareArgs, GlobalArgs},
    output,
    progress_meter::ProgressMeter,
};

pub(crate) async fn compare_models(flags: &GlobalArgs, args: &CompareArgs) -> anyhow::Result<()> {
    let Some((a, b)) = args.a.as_ref().zip(args.b.as_ref()) else {
        let path = args.pairs.as_deref().context("name two checkpoints, or --pairs (A102)")?;
        let (comparison, pairs) = compare_pairs(path, args.alpha)?;
        return output::print_json_or(flags.json, &comparison, || {
            output::print_wrapped(&comparison.describe(pairs, args.alpha, ["a", "b"]));
        });
    };
    let judge = args.judge.as_deref().map(open_judge).transpose()?;
    let control = flags.fleet.connect_control().await?;
    let named = [parse_checkpoint_ref(a)?, parse_checkpoint_ref(b)?];
    let suite = args.suite.as_deref().unwrap_or_default();
    let found = match judge {
        Some(judge) => judge_checkpoints(&control, &judge, &named, suite, args.alpha).await?,
        None => control.compare_checkpoints(&named[0], &named[1], suite, args.alpha).await?,
    };
    output::print_json_or(flags.json, &found, || print_comparison(&found))
}

fn compare_pairs(path: &Path, alpha: f64) -> anyhow::Result<(Comparison, usize)> {
    let test = PairedTest::new(alpha)?;
    let name = path.display().to_string();
    let lines: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(std::io::stdin().lock())
    } else {
        Box::new(BufReader::new(File::open(path).with_context(|| format!("read {name}"))?))
    };
    compare_pair_lines(test, lines).context(name)
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
    if found.unpaired > 0 {
        let unpaired = found.unpaired;
        output::print_message(&format!("{unpaired} samples have no partner and do not count"));
    }
}
