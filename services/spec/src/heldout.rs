//! Held-out prompts: a file of their own, or a part of the training prompts.

use serde::Deserialize;

use crate::field_checks::{FieldResult, check_count, check_range, ensure_field};

/// The number of prompts to hold out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HeldoutSize {
    /// Share of the distinct questions, above 0 and below 1.
    Share(f64),
    Count(u32),
}

/// The prompts that are measured and not trained on.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected a file, {share: 0.1} or {count: 50} of the prompts")]
pub enum HeldoutSpec {
    /// A file of its own.
    File(String),
    /// A part of the training prompts.
    Split(HeldoutSplitSpec),
}

/// The size of the held-out part. Exactly one field is set.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldoutSplitSpec {
    share: Option<f64>,
    count: Option<u32>,
}

impl HeldoutSplitSpec {
    /// Returns the size of the held-out part; `None` unless exactly one field is set.
    pub fn heldout_size(self) -> Option<HeldoutSize> {
        match (self.share, self.count) {
            (Some(share), None) => Some(HeldoutSize::Share(share)),
            (None, Some(count)) => Some(HeldoutSize::Count(count)),
            _ => None,
        }
    }

    pub(crate) fn check_fields(self, field: &str) -> FieldResult {
        match self.heldout_size() {
            Some(HeldoutSize::Share(share)) => {
                check_range(&format!("{field}.share"), share, 1e-6, 0.999)
            }
            Some(HeldoutSize::Count(held)) => {
                check_count(&format!("{field}.count"), held, 1, u32::MAX)
            }
            None => ensure_field(false, field, "write share or count, and not both"),
        }
    }
}
