//! `flotilla audit RUN`.

use std::{
    process::ExitCode,
    sync::Mutex,
    time::{Duration, Instant},
};

use control::{AuditReport, Depth, Finding, Progress, Where};
use indicatif::{ProgressBar, ProgressStyle};
use wire::RunId;

use crate::{cli::AuditArgs, fleet::FleetArgs, output};

use super::FINDINGS;

/// Nothing was found, but not everything could be looked at.
const NOT_CHECKED: u8 = 4;

/// Between lines of progress where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

pub(crate) async fn audit(
    fleet: &FleetArgs,
    args: &AuditArgs,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let run = RunId::new(args.run.as_str())?;
    let depth = match (args.no_store, args.deep) {
        (true, _) => Depth::Log,
        (false, false) => Depth::Files,
        (false, true) => Depth::Bytes,
    };
    let control = fleet.control().await?;
    let meter = Meter::new();
    let report = control.audit(&run, depth, &|progress| meter.show(progress)).await?;
    meter.end();
    if json {
        output::print_json(&report)?;
    } else {
        print(&report);
    }
    Ok(if !report.is_clean() {
        ExitCode::from(FINDINGS)
    } else if !report.not_checked.is_empty() {
        ExitCode::from(NOT_CHECKED)
    } else {
        ExitCode::SUCCESS
    })
}

fn print(report: &AuditReport) {
    let AuditReport { run, tally, .. } = report;
    output::print(&format!(
        "{run}: {} facts; samples: {} planned, {} accepted, {} judged, {} kept; \
         {} checkpoints, {} evals",
        tally.facts,
        tally.planned_samples,
        tally.accepted_samples,
        tally.judged_samples,
        tally.kept_samples,
        tally.checkpoints,
        tally.evals
    ));
    report.findings.iter().for_each(|finding| output::print(&describe(finding)));
    if report.findings_left_out > 0 {
        output::print(&format!("and {} findings more", report.findings_left_out));
    }
    report.not_checked.iter().for_each(|why| output::print(&format!("not checked: {why}")));
    let clean = if report.is_clean() { "clean; " } else { "" };
    output::print(&format!("{clean}checked: {}", report.checked.join(", ")));
}

fn describe(finding: &Finding) -> String {
    let Finding { place, what, subject, sequence, url, expected, found } = finding;
    let fact = match (subject, sequence) {
        (Some(subject), Some(sequence)) => format!("{subject} (sequence {sequence})"),
        (Some(subject), None) => subject.clone(),
        (None, Some(sequence)) => format!("sequence {sequence}"),
        (None, None) => "the run".to_owned(),
    };
    let mut line = match (place, url) {
        (Where::Store, Some(url)) => format!("finding: {url} {what}"),
        (Where::Store | Where::Log, _) => format!("finding: {fact}: {what}"),
    };
    for (name, value) in [("expected", expected), ("found", found)] {
        if let Some(value) = value {
            line = format!("{line}, {name} {value}");
        }
    }
    if url.is_some() { format!("{line}; named by {fact}") } else { line }
}

/// How far it is: a bar on a terminal, now and then a line elsewhere.
struct Meter {
    bar: Option<ProgressBar>,
    said: Mutex<Instant>,
}

impl Meter {
    fn new() -> Self {
        let bar = output::on_terminal().then(|| ProgressBar::new(0).with_style(style("files")));
        Self { bar, said: Mutex::new(Instant::now()) }
    }

    fn show(&self, Progress { unit, done, total }: Progress) {
        if let Some(bar) = &self.bar {
            if bar.length() != Some(total) {
                bar.set_style(style(unit));
                bar.set_length(total);
            }
            return bar.set_position(done);
        }
        let Ok(mut said) = self.said.lock() else { return };
        if said.elapsed() >= LINE_EVERY {
            *said = Instant::now();
            output::say(&format!("audited {done} of {total} {unit}"));
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn style(unit: &str) -> ProgressStyle {
    let count =
        if unit == "bytes" { "{bytes}/{total_bytes} {bytes_per_sec}" } else { "{pos}/{len} files" };
    let template = format!("{:>18} {{wide_bar:.green}} {count}", "audit");
    ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
