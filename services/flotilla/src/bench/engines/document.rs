//! The report as Markdown: what the command prints, and a part of `docs/PERFORMANCE.md`.

use std::fmt::Write;

use super::{Engine, ROUNDS, Report, TASKS, Task, raft};
use crate::bench::load_text;

pub(super) fn write(report: &Report) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "### Engines side by side\n\n\
         Random weights in the shape of Qwen2.5-0.5B (494 M parameters) in bf16, {} threads, one process a task.\n\
         They take turns at each task; the fastest of {ROUNDS} counts, and the most memory. Generate\n\
         orders come once, after that.\n\n\
         Machine: {}. Load average before {}, after {}.\n",
        report.threads,
        report.machine,
        load_text(&report.load_before),
        load_text(&report.load_after),
    );
    for engine in &report.engines {
        let _ = writeln!(text, "- **{}**: {}", short(&engine.name), engine.name);
    }
    let _ = writeln!(text, "\n#### Tokens a second\n");
    table(&mut text, report, |engine, task, first| {
        let Some(speed) = engine.speeds.get(&task.name()) else { return "-".into() };
        match first.and_then(|first| first.speeds.get(&task.name())) {
            Some(ours) => format!(
                "{:.1} ({:.2} ×)",
                speed.tokens_per_s,
                ours.tokens_per_s / speed.tokens_per_s
            ),
            None => format!("{:.1}", speed.tokens_per_s),
        }
    });
    sampled(&mut text, report);
    let _ = writeln!(
        text,
        "\nIn parentheses: how many times as fast the embedded engine is.\n\n#### Peak memory, GB\n"
    );
    table(&mut text, report, |engine, task, _| {
        engine
            .speeds
            .get(&task.name())
            .map_or("-".into(), |speed| format!("{:.2}", speed.peak_rss_bytes as f64 / 1e9))
    });
    let _ = writeln!(text, "\n#### Conversion of the directory to a GGUF file\n");
    let _ = writeln!(text, "| | MB read a second | peak memory, GB |\n|---|---|---|");
    for conversion in &report.conversions {
        let _ = writeln!(
            text,
            "| {} | {:.0} | {:.2} |",
            conversion.name,
            conversion.megabytes_per_s,
            conversion.peak_rss_bytes as f64 / 1e9
        );
    }
    text.trim_end().to_owned()
}

/// A row of the table before, which has an engine's cell only where it made the samples.
fn sampled(text: &mut String, report: &Report) {
    let speed = |engine: &Engine| {
        let mut made = report.sampled.iter().filter(|made| made.engine == engine.name);
        made.next().map(|made| made.tokens_per_s)
    };
    let first = report.engines.first().and_then(speed);
    let cells: Vec<String> = report
        .engines
        .iter()
        .enumerate()
        .map(|(index, engine)| match (speed(engine), first) {
            (Some(speed), Some(ours)) if index > 0 => format!("{speed:.1} ({:.2} ×)", ours / speed),
            (Some(speed), _) => format!("{speed:.1}"),
            (None, _) => "-".into(),
        })
        .collect();
    let _ = writeln!(text, "| {} | {} |", raft::title(), cells.join(" | "));
}

/// One row a task, one column an engine; cells of all but the first see the first.
fn table(
    text: &mut String,
    report: &Report,
    cell: impl Fn(&Engine, Task, Option<&Engine>) -> String,
) {
    let names: Vec<&str> = report.engines.iter().map(|engine| short(&engine.name)).collect();
    let _ = writeln!(text, "| | {} |\n|---{}|", names.join(" | "), "|---".repeat(names.len()));
    for task in TASKS {
        let first = report.engines.first();
        let cells: Vec<String> = report
            .engines
            .iter()
            .enumerate()
            .map(|(index, engine)| cell(engine, task, first.filter(|_| index > 0)))
            .collect();
        let _ = writeln!(text, "| {} | {} |", task.title(), cells.join(" | "));
    }
}

/// Without versions.
fn short(name: &str) -> &str {
    name.split([' ', '-']).next().unwrap_or(name)
}
