//! `flotilla compare`: which of two models scores higher, tested pair by pair.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

use anyhow::Context;
use comparison::{Comparison, Decision, PairedTest, read_pair_line};
use control::{ComparedCheckpoint, ModelComparison, parse_checkpoint_ref};

use crate::{
    args::{CompareArgs, GlobalArgs},
    output,
};

/// Lines of a file of pairs.
const PAIRS_MAX: usize = 10_000_000;

pub(crate) async fn compare_models(flags: &GlobalArgs, args: &CompareArgs) -> anyhow::Result<()> {
    let Some((a, b)) = args.a.as_ref().zip(args.b.as_ref()) else {
        let path = args.pairs.as_deref().context("name two checkpoints, or --pairs (A102)")?;
        let (comparison, pairs) = compare_pairs(path, args.alpha)?;
        return output::print_json_or(flags.json, &comparison, || {
            output::print_wrapped(&decision_text(&comparison, pairs, args.alpha, ["a", "b"]));
        });
    };
    let control = flags.fleet.connect_control().await?;
    let (reference_a, reference_b) = (parse_checkpoint_ref(a)?, parse_checkpoint_ref(b)?);
    let suite = args.suite.as_deref().unwrap_or_default();
    let found = control.compare_checkpoints(&reference_a, &reference_b, suite, args.alpha).await?;
    output::print_json_or(flags.json, &found, || print_comparison(&found))
}

/// Returns the comparison, and the number of pairs in the file.
fn compare_pairs(path: &Path, alpha: f64) -> anyhow::Result<(Comparison, usize)> {
    let mut test = PairedTest::new(alpha)?;
    let name = path.display().to_string();
    let reader: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(std::io::stdin().lock())
    } else {
        Box::new(BufReader::new(File::open(path).with_context(|| format!("read {name}"))?))
    };
    let mut pairs = 0;
    for (index, line) in reader.lines().enumerate() {
        let place = || format!("{name}, line {}", index + 1);
        let line = line.with_context(place)?;
        if line.trim().is_empty() {
            continue;
        }
        test.add_pair(read_pair_line(&line).with_context(place)?);
        pairs += 1;
        anyhow::ensure!(pairs <= PAIRS_MAX, "{name} has more than {PAIRS_MAX} pairs (D105)");
    }
    anyhow::ensure!(pairs > 0, "{name} has no pairs (D102)");
    Ok((test.comparison(), pairs))
}

fn print_comparison(found: &ModelComparison) {
    let name = |side: &ComparedCheckpoint| format!("{}/{}", side.run, side.cycle);
    let names = [name(&found.a), name(&found.b)];
    let suites = found.a.perplexities.keys().filter(|it| found.b.perplexities.contains_key(*it));
    let tokens = [found.a.mean_tokens, found.b.mean_tokens].map(|it| format!("{it:.1}"));
    let mut rows = vec![
        ["pass rate".into(), percent(found.a.pass_rate), percent(found.b.pass_rate)],
        ["tokens per sample".into(), tokens[0].clone(), tokens[1].clone()],
    ];
    for suite in suites {
        let of = |side: &ComparedCheckpoint| format!("{:.4}", side.perplexities[suite]);
        rows.push([format!("perplexity of {suite}"), of(&found.a), of(&found.b)]);
    }
    for it in &found.categories {
        let heading = format!("{} ({} pairs)", it.category, it.pairs);
        rows.push([heading, percent(it.mean_a), percent(it.mean_b)]);
    }
    output::print_table(["", &format!(">{}", names[0]), &format!(">{}", names[1])], rows);
    let pairs = usize::try_from(found.pairs).unwrap_or(usize::MAX);
    let names = names.each_ref().map(String::as_str);
    output::print_wrapped(&decision_text(&found.test, pairs, found.alpha, names));
    if found.unpaired > 0 {
        output::print_message(&format!(
            "{} samples have no judged partner and do not count",
            found.unpaired
        ));
    }
}

/// Returns `b is better: b scores +5.0 points (95 % interval +0.8 to +9.1), p = 0.012; decided after
/// 812 of 1500 pairs`.
fn decision_text(found: &Comparison, pairs: usize, alpha: f64, names: [&str; 2]) -> String {
    let [a, b] = names;
    let (decision, how) = match found.decision {
        Decision::A => (format!("{a} is better"), "decided after"),
        Decision::B => (format!("{b} is better"), "decided after"),
        Decision::Undecided => ("undecided".to_owned(), "with"),
    };
    let Comparison { at, p, difference, interval: [low, high], .. } = found;
    // Without the errors of binary fractions.
    let level = ((1.0 - alpha) * 1e6).round() / 1e4;
    let p = if *p < 0.001 { "p < 0.001".to_owned() } else { format!("p = {p:.3}") };
    format!(
        "{decision}: {b} scores {} points ({level} % interval {} to {}), {p}; {how} {at} \
         of {pairs} pairs",
        points(*difference),
        points(*low),
        points(*high),
    )
}

fn points(difference: f64) -> String {
    format!("{:+.1}", difference * 100.0)
}

fn percent(rate: f64) -> String {
    format!("{:.1} %", rate * 100.0)
}
