//! The `training.across` section: one adapter trained on several boxes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1;

use crate::field_checks::{FieldResult, check_count, check_range, ensure_field};

/// Boxes that train at most.
const WORKERS_MAX: u32 = 64;

/// A number of boxes, or `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(untagged, expecting = "expected a number of boxes, or auto")]
pub enum WorkersSpec {
    Count(#[schemars(range(min = 1, max = 64))] u32),
    /// All boxes that can train.
    Word(AutoWord),
}

impl Default for WorkersSpec {
    fn default() -> Self {
        Self::Word(AutoWord::Auto)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AutoWord {
    Auto,
}

/// The way in which the weights of boxes are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MergeSpec {
    /// The mean of the weights, by trained tokens.
    #[default]
    Average,
    /// A step of the outer optimizer along the mean change.
    Nesterov,
    /// The mean of the products BA, reduced to the rank of the adapter.
    Stack,
    /// One merge, of those adapters that improve the likelihood of a held-out text.
    Soup,
}

/// The outer optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OuterSpec {
    /// Learning rate of a merge.
    #[schemars(range(min = 1e-3, max = 10.0))]
    pub rate: f64,
    /// Share of the previous merge's step that is added to the next one.
    #[schemars(range(min = 0.0, max = 0.999))]
    pub momentum: f64,
}

impl Default for OuterSpec {
    /// The values of arXiv:2311.08105.
    fn default() -> Self {
        Self { rate: 0.7, momentum: 0.9 }
    }
}

/// The training of one adapter on several boxes.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AcrossSpec {
    /// The largest number of boxes.
    pub workers: WorkersSpec,
    /// Steps of a box between two merges.
    #[schemars(range(min = 1, max = 100_000))]
    pub every: u32,
    /// The way in which the weights of the boxes are merged.
    pub merge: MergeSpec,
    /// The outer optimizer. Only with `merge: nesterov`.
    pub outer: Option<OuterSpec>,
    /// The share of the changed values that a box sends, in 2 bits each. Absent: a box sends its
    /// weights. Only with `merge: average` or `nesterov`.
    #[schemars(range(min = 1e-4, max = 1.0))]
    pub send_share: Option<f64>,
}

impl Default for AcrossSpec {
    fn default() -> Self {
        Self {
            workers: WorkersSpec::default(),
            every: 20,
            merge: MergeSpec::default(),
            outer: None,
            send_share: None,
        }
    }
}

impl AcrossSpec {
    pub(crate) fn check_fields(&self, section: &str) -> FieldResult {
        let field = |name: &str| format!("{section}.{name}");
        if let WorkersSpec::Count(count) = self.workers {
            check_count(&field("workers"), count, 1, WORKERS_MAX)?;
        }
        check_count(&field("every"), self.every, 1, 100_000)?;
        let is_used = self.outer.is_none() || self.merge == MergeSpec::Nesterov;
        ensure_field(is_used, &field("outer"), "needs `merge: nesterov`")?;
        let outer = self.outer.unwrap_or_default();
        check_range(&field("outer.rate"), outer.rate, 1e-3, 10.0)?;
        check_range(&field("outer.momentum"), outer.momentum, 0.0, 0.999)?;
        let Some(share) = self.send_share else { return Ok(()) };
        check_range(&field("send_share"), share, 1e-4, 1.0)?;
        let remedy = "needs `merge: average` or `nesterov`";
        let fits = matches!(self.merge, MergeSpec::Average | MergeSpec::Nesterov);
        ensure_field(fits, &field("send_share"), remedy)
    }

    /// Converts the section to its form in the `spec` fact.
    pub(crate) fn to_proto(&self) -> v1::Across {
        let outer = match self.merge {
            MergeSpec::Average | MergeSpec::Stack | MergeSpec::Soup => {
                OuterSpec { rate: 1.0, momentum: 0.0 }
            }
            MergeSpec::Nesterov => self.outer.unwrap_or_default(),
        };
        v1::Across {
            workers: match self.workers {
                WorkersSpec::Count(count) => count,
                WorkersSpec::Word(AutoWord::Auto) => 0,
            },
            every: self.every,
            outer_rate: outer.rate,
            outer_momentum: outer.momentum,
            method: match self.merge {
                MergeSpec::Average | MergeSpec::Nesterov => v1::across::Method::Step,
                MergeSpec::Stack => v1::across::Method::Stack,
                MergeSpec::Soup => v1::across::Method::Soup,
            }
            .into(),
            send_share: self.send_share.unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_gives_its_outer_optimizer() {
        let parse = |text: &str| serde_saphyr::from_str::<AcrossSpec>(text).unwrap();
        let values = |text: &str| {
            let spec = parse(text);
            spec.check_fields("a").map_err(|error| error.field)?;
            let v1::Across { workers, every, outer_rate, outer_momentum, .. } = spec.to_proto();
            Ok::<_, String>((workers, every, outer_rate, outer_momentum))
        };
        assert_eq!(values("workers: auto"), Ok((0, 20, 1.0, 0.0)));
        assert_eq!(values("{ workers: 4, merge: nesterov, every: 5 }"), Ok((4, 5, 0.7, 0.9)));
        assert_eq!(values("{ merge: nesterov, outer: { rate: 0.5 } }"), Ok((0, 20, 0.5, 0.9)));
        for (text, field) in [
            ("workers: 0", "a.workers"),
            ("every: 0", "a.every"),
            ("outer: { rate: 0.5 }", "a.outer"),
            ("{ merge: nesterov, outer: { momentum: 1 } }", "a.outer.momentum"),
            ("{ merge: stack, outer: {} }", "a.outer"),
            ("send_share: 0", "a.send_share"),
            ("send_share: 1.5", "a.send_share"),
            ("{ merge: stack, send_share: 0.01 }", "a.send_share"),
            ("{ merge: soup, send_share: 0.01 }", "a.send_share"),
        ] {
            assert_eq!(values(text), Err(field.to_owned()));
        }
        let proto = |text: &str| parse(text).to_proto();
        assert_eq!(proto("merge: stack").method(), v1::across::Method::Stack);
        assert_eq!(proto("send_share: 0.01").send_share, 0.01);
        assert_eq!(proto("merge: soup").method(), v1::across::Method::Soup);
        assert!(serde_saphyr::from_str::<AcrossSpec>("merge: mean").is_err());
        assert!(serde_saphyr::from_str::<AcrossSpec>("workers: all").is_err());
    }
}
