//! The check of the disk space for the files of a training.

use super::{DoctorFinding, Severity, format_gib};
use hardware::host_snapshot::HostSnapshot;

/// The space for the files of one 7B model.
const FREE_BYTES_MIN: u64 = 20 << 30;

pub(super) fn check_disk(box_: &HostSnapshot) -> Option<DoctorFinding> {
    let free = box_.disk_free.filter(|free| *free < FREE_BYTES_MIN)?;
    Some(DoctorFinding {
        id: "C-35",
        severity: Severity::Warn,
        seen: format!("{} free for models and checkpoints", format_gib(free)),
        why: "a base of 7B has 15 GB, and llama.cpp needs a second copy as GGUF",
        remedy: "free some, or put --cache-dir on another disk".into(),
        source: "two bytes a parameter",
    })
}
