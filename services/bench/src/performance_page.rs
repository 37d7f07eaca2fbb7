//! Writes `docs/PERFORMANCE.md` from the JSON reports of measurements.

use std::{
    fmt::Write,
    path::{Path, PathBuf},
};

use anyhow::Context;
use serde::Deserialize;

use super::{engines, format_load, format_value};

/// A report as `--json` prints it.
#[derive(Debug, Deserialize)]
struct BenchDocument {
    machine: String,
    load: Vec<f64>,
    release: bool,
    version: String,
    figures: Vec<FigureRow>,
    /// The engines' report of `bench engine`.
    engines: Option<engines::EnginesReport>,
}

/// One figure of a report.
#[derive(Debug, Deserialize)]
struct FigureRow {
    name: String,
    measured: f64,
    unit: String,
    limit: Option<f64>,
    ratio: Option<f64>,
    over: bool,
    how: String,
}

/// The beginning of the page.
const PAGE_HEAD: &str = "# Performance

Written by `flotilla-bench --page` from what `flotilla-bench … --json` measured; nothing in it is
typed by hand. A limit is what a peer or the machine itself took in the same run, times the ratio
that is aimed at; a ratio above 1 is **over** it.";

/// Returns the page as Markdown, with a section for each report file.
pub(super) fn write_page(files: &[PathBuf]) -> anyhow::Result<String> {
    let mut text = PAGE_HEAD.to_owned();
    for path in files {
        let measured = read_document(path)?;
        let BenchDocument { machine, load, release, version, figures, engines } = &measured;
        let build = if *release { "release" } else { "debug" };
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "\n\n## {}\n\n{machine}; {build} build {version}; load average at the start {}.\n\n\
             | | measured | limit | ratio | how |\n|---|---|---|---|---|",
            section_title(figures),
            format_load(load),
        );
        for FigureRow { name, measured, unit, limit, ratio, over, how } in figures {
            let measured = format!("{} {unit}", format_value(*measured));
            let limit = limit.map_or("-".into(), |limit| format!("{} {unit}", format_value(limit)));
            let mark = if *over { " **over**" } else { "" };
            let ratio = ratio.map_or("-".into(), |ratio| format!("{ratio:.2}{mark}"));
            let how = how.replace('|', "\\|");
            let _ = write!(text, "\n| {name} | {measured} | {limit} | {ratio} | {how} |");
        }
        if let Some(report) = engines {
            let _ = write!(text, "\n\n{}", engines::format_report(report));
        }
    }
    Ok(text)
}

/// Returns the names of the measured areas, each once, separated by commas.
fn section_title(figures: &[FigureRow]) -> String {
    let mut titles: Vec<&str> = Vec::new();
    for row in figures {
        let title = row.name.split(':').next().unwrap_or(&row.name);
        if !titles.contains(&title) {
            titles.push(title);
        }
    }
    titles.join(", ")
}

/// Reads a report file.
fn read_document(path: &Path) -> anyhow::Result<BenchDocument> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is not what `flotilla-bench --json` prints", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_each_measurement_s_machine_and_figures() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("engine.json");
        let figure = |name: &str, over| {
            serde_json::json!({
                "name": name, "measured": 12.5, "unit": "ms", "limit": 10.0, "ratio": 1.25,
                "over": over, "how": "a | b",
            })
        };
        let measured = serde_json::json!({
            "machine": "a machine", "load": [0.5, 0.25, 1.0], "release": true, "version": "1.2.3",
            "figures": [figure("engine: one", true), figure("engine: two", false)],
        });
        std::fs::write(&path, measured.to_string()).unwrap();
        let page = write_page(&[path.clone(), path.clone()]).unwrap();
        assert_eq!(page.matches("## engine\n").count(), 2, "{page}");
        assert!(page.contains("a machine; release build 1.2.3; load average at the start 0.50"));
        assert!(page.contains("| engine: one | 12.5 ms | 10.0 ms | 1.25 **over** | a \\| b |"));
        std::fs::write(&path, "{}").unwrap();
        assert!(write_page(&[path]).unwrap_err().to_string().contains("engine.json"));
    }
}
