//! The exit codes besides 0 (done), 1 (a failure) and 2 (wrong usage).

use std::process::ExitCode;

/// A run failed, or a check has findings.
const FINDINGS: u8 = 3;
/// There are no findings, but some checks could not be made.
const NOT_CHECKED: u8 = 4;

pub(crate) fn findings_code(has_findings: bool) -> ExitCode {
    if has_findings { ExitCode::from(FINDINGS) } else { ExitCode::SUCCESS }
}

pub(crate) fn not_checked_code() -> ExitCode {
    ExitCode::from(NOT_CHECKED)
}
