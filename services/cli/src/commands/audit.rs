//! `flotilla audit`: checks of a run's log and files.

use std::process::ExitCode;

use control::{AuditDepth, AuditFinding, AuditReport, FindingSource, TaskProgress};
use wire::RunId;

use crate::{
    args::{AuditArgs, GlobalArgs},
    exit_codes, output,
    progress_meter::ProgressMeter,
};

pub(crate) async fn audit_run(flags: &GlobalArgs, args: &AuditArgs) -> anyhow::Result<ExitCode> {
    let run = RunId::new(args.run.as_str())?;
    let depth = match (args.no_store, args.deep) {
        (true, _) => AuditDepth::Log,
        (false, false) => AuditDepth::Files,
        (false, true) => AuditDepth::Bytes,
    };
    let control = flags.fleet.connect_control().await?;
    let meter = ProgressMeter::new();
    let show = |TaskProgress { unit, done, total }| meter.show_progress("audit", unit, done, total);
    let report = control.audit_run(&run, depth, &show).await?;
    meter.finish_bar();
    output::print_json_or(flags.json, &report, || print_report(&report))?;
    if report.is_clean() && !report.not_checked.is_empty() {
        return Ok(exit_codes::not_checked_code());
    }
    Ok(exit_codes::findings_code(!report.is_clean()))
}

fn print_report(report: &AuditReport) {
    output::print_line(&report.describe_counts());
    report.findings.iter().for_each(|finding| output::print_line(&describe_finding(finding)));
    if report.findings_left_out > 0 {
        output::print_line(&format!("and {} more findings", report.findings_left_out));
    }
    report.caveats.iter().for_each(|caveat| output::print_line(&format!("caveat: {caveat}")));
    report.notes.iter().for_each(|note| output::print_line(&format!("note: {note}")));
    report.not_checked.iter().for_each(|why| output::print_line(&format!("not checked: {why}")));
    let clean = if report.is_clean() { "clean; " } else { "" };
    output::print_line(&format!("{clean}checked: {}", report.checked.join(", ")));
}

fn describe_finding(finding: &AuditFinding) -> String {
    let AuditFinding { place, what, subject, sequence, url, expected, found } = finding;
    let fact = match (subject, sequence) {
        (Some(subject), Some(sequence)) => format!("{subject} (sequence {sequence})"),
        (Some(subject), None) => subject.clone(),
        (None, Some(sequence)) => format!("sequence {sequence}"),
        (None, None) => "the run".to_owned(),
    };
    let mut line = match (place, url) {
        (FindingSource::Store, Some(url)) => format!("finding: {url} {what}"),
        (FindingSource::Store | FindingSource::Log, _) => format!("finding: {fact}: {what}"),
    };
    for (name, value) in [("expected", expected), ("found", found)] {
        if let Some(value) = value {
            line = format!("{line}, {name} {value}");
        }
    }
    if url.is_some() { format!("{line}; named by {fact}") } else { line }
}
