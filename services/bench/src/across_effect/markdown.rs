//! The report of `flotilla-bench across` as Markdown.

use std::fmt::Write;

use super::{AcrossReport, SeedResult, SharedResult, SlowReport};

/// Writes the tables of docs/RAFT-FIGURES.md.
pub(super) fn write_markdown(report: &AcrossReport) -> String {
    let mut page = format!(
        "{}\n\n{} seeds; mean change of the held-out negative log-likelihood against one box, ± \
         standard error. {}\n\n| boxes | `every` | `merge` | change | worst seed | drift | sent a \
         slice |\n|---|---|---|---|---|---|---|\n",
        report.conditions.to_markdown(),
        report.seeds.len(),
        describe_single(&report.seeds),
    );
    let kinds = report.seeds.first().map_or(0, |seed| seed.shared.len());
    for kind in 0..kinds {
        write_row(&mut page, report, |seed| &seed.shared[kind]);
    }
    page.push_str("\nWith a quarter more tokens:\n\n| boxes | `every` | `merge` | change | worst seed | drift | sent a slice |\n|---|---|---|---|---|---|---|\n");
    write_row(&mut page, report, |seed| &seed.longer);
    page.push_str("\n| speeds of the boxes | share of their sum that is used |\n|---|---|\n");
    for (speeds, share) in &report.efficiency {
        let speeds: Vec<String> = speeds.iter().map(ToString::to_string).collect();
        let _ = writeln!(page, "| {} | {:.0} % |", speeds.join(" : "), share * 100.0);
    }
    write_slow(&mut page, &report.slow);
    page
}

fn write_slow(page: &mut String, slow: &SlowReport) {
    #[expect(clippy::cast_precision_loss, reason = "megabytes")]
    let [weights, change] = [slow.weight_bytes, slow.change_bytes].map(|bytes| bytes as f64 / 1e6);
    // Writing to a string cannot fail.
    let _ = write!(
        page,
        "\nFour boxes with 20 Mb/s, 100 ms and 2 % loss (computed from TCP's steady state), a 7B model \
         with 2.65 s a step and a rank of 16: a slice's weights have {weights:.0} MB, its change \
         (`send_share: 0.01`) {change:.2} MB.\n\n| `every` | weights: share of the speed | changes \
         |\n|---|---|---|\n"
    );
    for share in &slow.shares {
        let percent = |share: f64| 100.0 * share;
        let (with_weights, with_changes) =
            (percent(share.with_weights), percent(share.with_changes));
        let _ = writeln!(page, "| {} | {with_weights:.0} % | {with_changes:.0} % |", share.every);
    }
}

fn describe_single(seeds: &[SeedResult]) -> String {
    let nlls: Vec<f64> = seeds.iter().map(|seed| seed.one_box.nll).collect();
    let (mean, error) = mean_and_error(&nlls);
    format!("One box: {mean:.4} ± {error:.4} nats per token.")
}

fn write_row(page: &mut String, report: &AcrossReport, of: impl Fn(&SeedResult) -> &SharedResult) {
    let change = |seed: &SeedResult| of(seed).result.nll / seed.one_box.nll - 1.0;
    let changes: Vec<f64> = report.seeds.iter().map(|seed| 100.0 * change(seed)).collect();
    let drifts: Vec<f64> =
        report.seeds.iter().flat_map(|seed| of(seed).result.drifts.iter().copied()).collect();
    let (mean, error) = mean_and_error(&changes);
    let worst = changes.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let Some(first) = report.seeds.first() else { return };
    let SharedResult { boxes, every, merge, result } = of(first);
    // Writing to a string cannot fail.
    let _ = writeln!(
        page,
        "| {boxes} | {every} | {merge} | {mean:+.1} ± {error:.1} % | {worst:+.1} % | {:.3} | {:.0} kB |",
        mean_and_error(&drifts).0,
        result.sent_bytes / 1e3
    );
}

#[expect(clippy::cast_precision_loss, reason = "tens of seeds")]
fn mean_and_error(values: &[f64]) -> (f64, f64) {
    let count = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0).max(1.0) / count).sqrt())
}
