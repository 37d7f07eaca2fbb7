//! Held-out prompts: a file of their own, or a part of the training prompts.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::derive_seed;

use crate::field_checks::{FieldResult, check_count, check_range, ensure_field};

/// The number of prompts to hold out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HeldoutSize {
    /// Share of the distinct questions, above 0 and below 1.
    Share(f64),
    Count(u32),
}

impl HeldoutSize {
    /// Chooses the questions to hold out. `questions` are normalised, each with its number of
    /// prompts.
    ///
    /// A question's place in the order depends only on its text and the seed. With a share, added
    /// questions do not move the others. With a count, the last question may exceed the count by
    /// its duplicates.
    pub fn choose_questions(
        self,
        questions: &BTreeMap<String, usize>,
        seed: u64,
    ) -> BTreeSet<&String> {
        let mut order: Vec<(u64, &String, usize)> = questions
            .iter()
            .map(|(text, count)| (derive_seed(seed, &["heldout", text]), text, *count))
            .collect();
        order.sort_unstable();
        let mut taken = 0;
        let chosen = order.iter().take_while(|(hash, _, count)| {
            let is_wanted = match self {
                // A relative error of 2⁻⁵³ does not matter here.
                #[expect(clippy::cast_precision_loss, reason = "a share of all hashes")]
                Self::Share(share) => (*hash as f64) < share * u64::MAX as f64,
                Self::Count(most) => taken < most as usize,
            };
            taken += count;
            is_wanted
        });
        chosen.map(|(_, text, _)| *text).collect()
    }
}

/// The prompts that are measured and not trained on.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(untagged, expecting = "expected a file, {share: 0.1} or {count: 50} of the prompts")]
pub enum HeldoutSpec {
    /// A file of its own, `hub:ORG/NAME` or `feedback:CHANNEL`.
    File(String),
    /// A part of the training prompts.
    Split(HeldoutSplitSpec),
}

/// The size of the held-out part. Exactly one of `share` and `count` is set.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(extend("oneOf" = [{ "required": ["share"] }, { "required": ["count"] }]))]
pub struct HeldoutSplitSpec {
    /// Share of the distinct prompts.
    #[schemars(range(min = 1e-6, max = 0.999))]
    share: Option<f64>,
    /// Number of prompts.
    #[schemars(range(min = 1))]
    count: Option<u32>,
}

impl HeldoutSpec {
    pub(crate) fn file_name(&self) -> Option<&str> {
        match self {
            Self::File(name) => Some(name),
            Self::Split(_) => None,
        }
    }
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
