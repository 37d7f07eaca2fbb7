//! Writes the report as Markdown. `docs/RAFT-FIGURES.md` is this output.

use std::fmt::Write;

use super::{
    PATIENCE, RaftReport, VariantRuns,
    run_result::{MeanEstimate, RunResult},
};
use crate::format_load;

/// A mean difference of at most this many standard errors is reported as a tie.
const TIE_STDERRS: f64 = 2.0;

// Writing to a string cannot fail.
/// Formats the whole report.
pub(super) fn write_markdown(report: &RaftReport) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "# RAFT in figures\n\n\
         Written by `flotilla-bench raft`; nothing in it is typed by hand. Rates follow from the seeds,\n\
         whatever the machine is doing; times do not.\n\n\
         Machine: {}. Load average before {}, after {}; {:.0} min in all{}.",
        report.machine,
        format_load(&report.load_before),
        format_load(&report.load_after),
        report.wall_s / 60.0,
        if report.release { "" } else { ", with a debug build" },
    );
    write_variants(&mut text, report);
    write_harder_task(&mut text, &report.harder);
    write_staleness(&mut text, &report.ahead);
    text.trim_end().to_owned()
}

/// Writes the comparison of the selection strategies.
fn write_variants(text: &mut String, report: &RaftReport) {
    let Some(first) = report.policies.first() else { return };
    let Some(course) = first.courses.first() else { return };
    let cycles = course.cycles.len();
    let (prompts, samples) = course.cycles.last().map_or((0, 0), |c| (c.prompts, c.sampled));
    let _ = writeln!(
        text,
        "\n## What is kept\n\n\
         Held-out pass rate in percent after each cycle: mean over {} seeds ± its standard error. Sums of\n\
         two-digit numbers, each policy on the same {} bases, with the same {samples} samples of {prompts}\n\
         prompts a cycle.\n",
        report.seeds, report.seeds,
    );
    let numbers: Vec<String> = (1..cycles).map(|cycle| format!("cycle {cycle}")).collect();
    let _ = writeln!(text, "| | base | {} | trained on |", numbers.join(" | "));
    let _ = writeln!(text, "|---|{}---|", "---:|".repeat(cycles));
    for policy in &report.policies {
        let rates: Vec<String> = (0..cycles)
            .map(|cycle| format_percent(&cycle_values(policy, cycle, |figures| figures.pass_rate)))
            .collect();
        let kept = cycle_values(policy, cycles - 1, |figures| f64::from(figures.kept));
        let _ = writeln!(
            text,
            "| {} | {} | {:.0} in the last |",
            policy.title,
            rates.join(" | "),
            MeanEstimate::from_values(&kept).mean
        );
    }
    let _ = writeln!(text);
    for other in report.policies.iter().skip(1) {
        let _ = writeln!(text, "- {}", compare_default(first, other));
    }
}

/// Returns one value of a cycle for each seed.
fn cycle_values(
    policy: &VariantRuns,
    cycle: usize,
    figure: impl Fn(&super::run_result::CycleResult) -> f64,
) -> Vec<f64> {
    policy.courses.iter().filter_map(|course| course.cycles.get(cycle)).map(figure).collect()
}

/// Formats the mean and standard error of rates in percent.
fn format_percent(values: &[f64]) -> String {
    let MeanEstimate { mean, stderr } = MeanEstimate::from_values(values);
    format!("{:.1} ± {:.1}", mean * 100.0, stderr * 100.0)
}

/// Compares the default strategy with another one after the last cycle, seed by seed.
fn compare_default(default: &VariantRuns, other: &VariantRuns) -> String {
    let pairs = default.courses.iter().zip(&other.courses);
    let differences: Vec<f64> =
        pairs.map(|(default, other)| default.last_rate() - other.last_rate()).collect();
    let MeanEstimate { mean, stderr } = MeanEstimate::from_values(&differences);
    let word = match mean {
        _ if mean.abs() <= TIE_STDERRS * stderr => "ties with",
        0.0.. => "is better than",
        _ => "is worse than",
    };
    format!(
        "After the last cycle the default {word} {}: by {:+.1} ± {:.1} points, seed by seed.",
        other.title,
        mean * 100.0,
        stderr * 100.0
    )
}

/// Writes the table of the harder task.
fn write_harder_task(text: &mut String, course: &RunResult) {
    let _ = writeln!(
        text,
        "\n## Where cycles stop helping\n\n\
         Sums of three-digit numbers, with `gates: {{ patience: {PATIENCE} }}`: the run\n\
         {}. A prompt is solved when one of\n\
         its samples passes; only those are trained on.\n",
        course.message
    );
    let _ = writeln!(
        text,
        "| cycle | held-out pass rate, % | prompts solved | seconds sampling | training |\n|---:|---:|---:|---:|---:|"
    );
    for figures in &course.cycles {
        let solved = match figures.prompts {
            0 => "-".to_owned(),
            prompts => format!("{} of {prompts}", figures.solved),
        };
        let best = if figures.cycle == course.best { " (best)" } else { "" };
        let _ = writeln!(
            text,
            "| {} | {:.1} ± {:.1}{best} | {solved} | {:.1} | {:.1} |",
            figures.cycle,
            figures.pass_rate * 100.0,
            figures.stderr * 100.0,
            figures.generate_s,
            figures.train_s,
        );
    }
}

/// Writes the comparison of `staleness` 0 and 1.
fn write_staleness(text: &mut String, [after, ahead]: &[RunResult; 2]) {
    let _ = writeln!(
        text,
        "\n## Sampling ahead\n\n\
         Two-digit sums, seed 1, a trainer and a generator with a core each, as two boxes would be. A run's\n\
         time is from its submission to its end.\n\n\
         | `staleness` | seconds | held-out pass rate, % |\n|---:|---:|---|"
    );
    for (staleness, course) in [after, ahead].into_iter().enumerate() {
        let rates: Vec<String> =
            course.cycles.iter().map(|cycle| format!("{:.1}", cycle.pass_rate * 100.0)).collect();
        let _ = writeln!(text, "| {staleness} | {:.1} | {} |", course.wall_s, rates.join(" → "));
    }
    let _ =
        writeln!(text, "\nSampling ahead takes {:.2} times as long.", ahead.wall_s / after.wall_s);
}
