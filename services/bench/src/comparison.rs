//! Compares two reports: `flotilla-bench compare OLD NEW`.

use std::{collections::BTreeMap, path::Path, process::ExitCode};

use cli::output;

use super::{
    format_value,
    report_file::{FigureRow, ReportFile, read_report},
};

/// Prints each figure of both reports with its change. Fails if a figure is worse by more than
/// `tolerance`, a share of the old value.
pub(super) fn compare_files(old: &Path, new: &Path, tolerance: f64) -> anyhow::Result<ExitCode> {
    let (old, new) = (read_report(old)?, read_report(new)?);
    for difference in list_differences(&old, &new) {
        output::print_message(&difference);
    }
    let changes = compare_figures(&old.figures, &new.figures);
    let rows = changes.iter().map(|change| change.table_row(tolerance));
    output::print_text(&output::format_table(["", ">before", ">now", ">change", ""], rows));
    let worse = changes.iter().filter(|change| change.is_worse(tolerance)).count();
    output::print_text(&format!(
        "\n{worse} of {} figures worse by more than {:.0} %",
        changes.len(),
        100.0 * tolerance
    ));
    Ok(if worse == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns what makes two reports hard to compare.
fn list_differences(old: &ReportFile, new: &ReportFile) -> Vec<String> {
    let mut differences = Vec::new();
    if old.machine != new.machine {
        differences.push(format!("other machines: {} before, {} now", old.machine, new.machine));
    }
    if old.release != new.release {
        differences.push("one of the builds is a debug build".to_owned());
    }
    differences
}

/// A figure in two reports; it may be in one of them only.
struct FigureChange {
    name: String,
    unit: String,
    before: Option<f64>,
    now: Option<f64>,
}

impl FigureChange {
    /// Returns the new value divided by the old one.
    fn ratio(&self) -> Option<f64> {
        Some(self.now? / self.before.filter(|before| *before > 0.0)?)
    }

    fn is_worse(&self, tolerance: f64) -> bool {
        self.ratio().is_some_and(|ratio| ratio > 1.0 + tolerance)
    }

    fn table_row(&self, tolerance: f64) -> [String; 5] {
        let value = |value: Option<f64>| {
            value.map_or("-".to_owned(), |value| format!("{} {}", format_value(value), self.unit))
        };
        let ratio = self.ratio();
        let change =
            ratio.map_or("-".to_owned(), |ratio| format!("{:+.0} %", 100.0 * (ratio - 1.0)));
        let mark = match ratio {
            Some(_) if self.is_worse(tolerance) => "worse",
            Some(ratio) if ratio < 1.0 - tolerance => "better",
            _ => "",
        };
        [self.name.clone(), value(self.before), value(self.now), change, mark.to_owned()]
    }
}

/// Returns the figures in the order of the new report, then those that it lacks.
fn compare_figures(old: &[FigureRow], new: &[FigureRow]) -> Vec<FigureChange> {
    let mut before: BTreeMap<(&str, &str), f64> =
        old.iter().map(|row| ((&*row.name, &*row.unit), row.measured)).collect();
    let change = |name: &str, unit: &str, before, now| FigureChange {
        name: name.to_owned(),
        unit: unit.to_owned(),
        before,
        now,
    };
    let mut changes: Vec<FigureChange> = new
        .iter()
        .map(|row| {
            let old = before.remove(&(&*row.name, &*row.unit));
            change(&row.name, &row.unit, old, Some(row.measured))
        })
        .collect();
    let gone = before.into_iter();
    changes.extend(gone.map(|((name, unit), measured)| change(name, unit, Some(measured), None)));
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(machine: &str, figures: &[(&str, f64)]) -> String {
        let figures: Vec<_> = figures
            .iter()
            .map(|(name, measured)| {
                serde_json::json!({
                    "name": name, "measured": measured, "unit": "ms", "limit": null,
                    "ratio": null, "over": false, "how": "",
                })
            })
            .collect();
        serde_json::json!({
            "machine": machine, "load": [0.0, 0.0, 0.0], "release": true, "version": "1",
            "figures": figures,
        })
        .to_string()
    }

    #[test]
    fn a_figure_that_is_worse_fails_the_comparison() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, figures: &[(&str, f64)]| {
            let path = directory.path().join(name);
            std::fs::write(&path, report(name, figures)).unwrap();
            path
        };
        let old = write("old", &[("a", 1.0), ("b", 2.0), ("gone", 3.0)]);
        let new = write("new", &[("b", 2.16), ("a", 0.5), ("added", 1.0)]);
        let exit = |tolerance| format!("{:?}", compare_files(&old, &new, tolerance).unwrap());
        assert_eq!(exit(0.1), format!("{:?}", ExitCode::SUCCESS));
        assert_eq!(exit(0.05), format!("{:?}", ExitCode::FAILURE));
        let (before, now) = (read_report(&old).unwrap(), read_report(&new).unwrap());
        assert_eq!(list_differences(&before, &now), ["other machines: old before, new now"]);
        let changes = compare_figures(&before.figures, &now.figures);
        let rows: Vec<_> =
            changes.iter().map(|change| change.table_row(0.1)[3..].join(" ")).collect();
        assert_eq!(rows, ["+8 % ", "-50 % better", "- ", "- "]);
    }

    #[test]
    fn a_file_that_is_no_report_is_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notes.json");
        std::fs::write(&path, "{}").unwrap();
        let error = compare_files(&path, &path, 0.1).unwrap_err().to_string();
        assert!(error.contains("notes.json is no output of `flotilla-bench --json`"), "{error}");
    }
}
