//! `flotilla audit RUN`.

use std::process::ExitCode;

use control::{AuditReport, Depth, Finding, Progress, Where};
use wire::RunId;

use crate::{cli::AuditArgs, fleet::FleetArgs, meter::Meter, output};

use super::FINDINGS;

/// Nothing was found, but not everything could be looked at.
const NOT_CHECKED: u8 = 4;

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
    let show = |Progress { unit, done, total }| meter.show("audit", unit, done, total);
    let report = control.audit(&run, depth, &show).await?;
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
    report.caveats.iter().for_each(|caveat| output::print(&format!("caveat: {caveat}")));
    report.notes.iter().for_each(|note| output::print(&format!("note: {note}")));
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
