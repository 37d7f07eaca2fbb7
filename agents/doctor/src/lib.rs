//! The doctor: pure checks of a [`HostSnapshot`]. Each finding states the observation, its
//! consequence, the remedy and the source of that knowledge.

mod catalogue;
mod devices;
mod disk;
mod environment;
mod fixes;
mod kernel;
mod memory;
mod plan;
mod role;
mod stack;
mod torch_checks;
mod training_arguments;

use serde::{Deserialize, Serialize};

pub use catalogue::{CHECKS, CheckedPart, DoctorCheck, render_page};
pub use fixes::{Fix, FixChange, FixEffect, FixInputs, plan_fixes};
pub use formats::memory_estimate as estimate;
pub use memory::memory_budget;
pub use plan::{TrainingPlan, check_plan};
pub use role::{filter_by_role, findings_for_role};
pub use torch_checks::check_torch_environment;
pub use training_arguments::{TrainingArguments, TrainingArgumentsError};

use hardware::{HardwareProfile, host_snapshot::HostSnapshot};

/// The weight of a finding. A failure withholds the roles that would use the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    Info,
    Warn,
    Fail,
}

/// A problem, or another fact worth knowing, of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DoctorFinding {
    /// The stable id of the check, such as `C-28`.
    pub id: &'static str,
    pub severity: Severity,
    pub seen: String,
    pub why: &'static str,
    pub remedy: String,
    /// The source of the knowledge.
    pub source: &'static str,
}

/// Returns all findings of a host under a profile, the worst first, then by id.
pub fn check_host(box_: &HostSnapshot, profile: &HardwareProfile) -> Vec<DoctorFinding> {
    let mut findings = devices::check_devices(box_);
    findings.extend(kernel::check_kernel(box_));
    findings.extend(memory::check_memory(box_));
    findings.extend(environment::check_variables(box_, profile));
    findings.extend(stack::check_stack(box_, profile));
    findings.extend(disk::check_disk(box_));
    sort_findings(findings)
}

pub(crate) fn sort_findings(mut findings: Vec<DoctorFinding>) -> Vec<DoctorFinding> {
    findings.sort_by_key(|finding| (std::cmp::Reverse(finding.severity), finding.id));
    findings
}

/// Returns the highest severity; `None` without findings.
pub fn worst_severity(findings: &[DoctorFinding]) -> Option<Severity> {
    findings.iter().map(|finding| finding.severity).max()
}

pub(crate) fn parse_major_minor(version: &str) -> Option<(u64, u64)> {
    let mut parts = version.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next().unwrap_or("0").parse().unwrap_or(0)))
}

/// Formats bytes as `16.50 GB`.
pub fn format_gb(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}

/// Formats bytes as `16.5 GiB`.
pub(crate) fn format_gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64)
}

#[cfg(test)]
mod tests;
