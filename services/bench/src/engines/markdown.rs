//! Writes the report as Markdown: the output of the command and a part of `docs/PERFORMANCE.md`.

use std::fmt::Write;

use super::{EngineSpeeds, EngineTask, EnginesReport, ROUNDS, TASKS, generate_order};
use crate::format_load;

pub(super) fn write_markdown(report: &EnginesReport) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "### Engines side by side\n\n\
         Random weights in the shape of Qwen2.5-0.5B (494 M parameters), bf16, {} threads. Each task has a\n\
         process of its own, and engines take turns. The fastest of {ROUNDS} rounds and the most memory count;\n\
         generate orders run once.\n\n\
         Machine: {}. Load average before {}, after {}.\n",
        report.threads,
        report.machine,
        format_load(&report.load_before),
        format_load(&report.load_after),
    );
    write_limits(&mut text, report);
    for engine in &report.engines {
        let _ = writeln!(text, "- **{}**: {}", short_name(&engine.name), engine.name);
    }
    let _ = writeln!(text, "\n#### Tokens per second\n");
    write_task_table(&mut text, report, |engine, task, first| {
        let Some(speed) = engine.speeds.get(&task.cli_name()) else { return "-".into() };
        match first.and_then(|first| first.speeds.get(&task.cli_name())) {
            Some(ours) => format!(
                "{:.1} ({:.2} ×)",
                speed.tokens_per_s,
                ours.tokens_per_s / speed.tokens_per_s
            ),
            None => format!("{:.1}", speed.tokens_per_s),
        }
    });
    write_order_row(&mut text, report);
    let _ = writeln!(
        text,
        "\nIn parentheses: the embedded engine's speed as a multiple.\n\n#### Peak memory, GB\n"
    );
    write_task_table(&mut text, report, |engine, task, _| {
        engine
            .speeds
            .get(&task.cli_name())
            .map_or("-".into(), |speed| format!("{:.2}", speed.peak_rss_bytes as f64 / 1e9))
    });
    let _ = writeln!(text, "\n#### Conversion to GGUF\n");
    let _ = writeln!(text, "| | MB/s read | peak memory, GB |\n|---|---|---|");
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

/// Writes the machine's limits, and the share of them that the embedded engine reaches.
fn write_limits(text: &mut String, report: &EnginesReport) {
    let (Some((machine, size)), Some(ours)) = (report.limits, report.engines.first()) else {
        return;
    };
    let rate = |task: EngineTask| {
        ours.speeds.get(&task.cli_name()).map_or(0.0, |speed| speed.tokens_per_s)
    };
    let reading =
        rate(EngineTask::Decode(1)) * size.decoded_bytes as f64 / machine.read_bytes_per_s;
    let multiplying =
        |task, products: u64| 100.0 * rate(task) * products as f64 / machine.multiply_adds_per_s;
    let _ = writeln!(
        text,
        "Memory is read at {:.1} GB/s, and registers are multiplied at {:.0} G multiply-adds/s. The\n\
         embedded engine decodes one sequence at {:.0} % of the former (bytes of the weights ÷ time);\n\
         of the latter, prefill reaches {:.0} %, and decoding 8 and 32 sequences {:.0} and {:.0} %.\n",
        machine.read_bytes_per_s / 1e9,
        machine.multiply_adds_per_s / 1e9,
        100.0 * reading,
        multiplying(EngineTask::Prefill, size.prefill_products),
        multiplying(EngineTask::Decode(8), size.decode_products),
        multiplying(EngineTask::Decode(32), size.decode_products),
    );
}

fn write_order_row(text: &mut String, report: &EnginesReport) {
    let speed = |engine: &EngineSpeeds| {
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
    let _ = writeln!(text, "| {} | {} |", generate_order::order_title(), cells.join(" | "));
}

fn write_task_table(
    text: &mut String,
    report: &EnginesReport,
    cell: impl Fn(&EngineSpeeds, EngineTask, Option<&EngineSpeeds>) -> String,
) {
    let names: Vec<&str> = report.engines.iter().map(|engine| short_name(&engine.name)).collect();
    let _ = writeln!(text, "| | {} |\n|---{}|", names.join(" | "), "|---".repeat(names.len()));
    for task in TASKS {
        let first = report.engines.first();
        let cells: Vec<String> = report
            .engines
            .iter()
            .enumerate()
            .map(|(index, engine)| cell(engine, task, first.filter(|_| index > 0)))
            .collect();
        let _ = writeln!(text, "| {} | {} |", task.report_title(), cells.join(" | "));
    }
}

fn short_name(name: &str) -> &str {
    name.split([' ', '-']).next().unwrap_or(name)
}
