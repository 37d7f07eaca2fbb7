//! What is wrong with a box, from one look at it: pure checks over a [`Snapshot`]. Each finding
//! says what was seen, why it matters, what to do, and whose experience it is.

mod arguments;
mod catalogue;
mod devices;
mod disk;
mod environment;
mod kernel;
mod memory;
mod plan;
mod role;
mod stack;

use serde::{Deserialize, Serialize};

pub use arguments::{Arguments, ArgumentsError};
pub use catalogue::{CHECKS, Check, page};
pub(crate) use environment::{allocator, overridden};
pub use memory::budget;
pub use plan::{Plan, for_plan};
pub use role::{Part, for_role, of_role};

use crate::{Profile, snapshot::Snapshot};

/// How much a finding matters. A failure withholds the roles that would use the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    Info,
    Warn,
    Fail,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable: `C-28`.
    pub id: &'static str,
    pub severity: Severity,
    pub seen: String,
    pub why: &'static str,
    pub remedy: String,
    /// Where it is known from.
    pub source: &'static str,
}

/// Everything found on a box that is to be treated so, the worst first, then by id.
pub fn check(box_: &Snapshot, profile: &Profile) -> Vec<Finding> {
    let mut findings = devices::check(box_);
    findings.extend(kernel::check(box_));
    findings.extend(memory::check(box_));
    findings.extend(environment::check(box_, profile));
    findings.extend(stack::check(box_, profile));
    findings.extend(disk::check(box_));
    sorted(findings)
}

pub(crate) fn sorted(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.sort_by_key(|finding| (std::cmp::Reverse(finding.severity), finding.id));
    findings
}

/// The worst there is.
pub fn worst(findings: &[Finding]) -> Option<Severity> {
    findings.iter().map(|finding| finding.severity).max()
}

/// Major and minor of a version.
pub(crate) fn number(version: &str) -> Option<(u64, u64)> {
    let mut parts = version.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next().unwrap_or("0").parse().unwrap_or(0)))
}

/// `16.5 GiB`
pub(crate) fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64)
}

#[cfg(test)]
mod tests;
