//! Room for what a training leaves behind.

use super::{Finding, Severity, gib};
use crate::snapshot::Snapshot;

/// A 7B model's files, once.
const LITTLE: u64 = 20 << 30;

pub(super) fn check(box_: &Snapshot) -> Option<Finding> {
    let free = box_.disk_free.filter(|free| *free < LITTLE)?;
    Some(Finding {
        id: "C-35",
        severity: Severity::Warn,
        seen: format!("{} free for models and checkpoints", gib(free)),
        why: "a base of 7B has 15 GB, and llama.cpp wants it a second time as GGUF",
        remedy: "free some, or put --cache-dir on another disk".into(),
        source: "two bytes a parameter",
    })
}
