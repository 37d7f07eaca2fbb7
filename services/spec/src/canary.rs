//! Canary settings: the proof that agents sample from the policy that was ordered.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wire::v1;

use crate::field_checks::{FieldResult, check_range};

/// The proof that agents sample from the policy that was ordered.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CanarySpec {
    /// Agents report the log-probabilities of a canary text.
    pub canary: bool,
    /// Largest mean absolute difference between two agents that agree, in nats per token.
    #[schemars(range(min = 1e-6, max = 10.0))]
    pub tolerance: f64,
}

impl Default for CanarySpec {
    fn default() -> Self {
        Self { canary: false, tolerance: wire::CANARY_TOLERANCE }
    }
}

impl CanarySpec {
    pub(crate) fn check_fields(&self, section: &str) -> FieldResult {
        check_range(&format!("{section}.tolerance"), self.tolerance, 1e-6, 10.0)
    }

    /// Converts the section to its form in the `spec` fact. The digest of the base's tokenizer is
    /// left empty, for the submission to fill in.
    pub fn to_proto(self) -> v1::spec::Proof {
        let Self { canary, tolerance } = self;
        v1::spec::Proof { canary, tolerance, tokenizer: String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_off_unless_asked_for_and_its_keys_are_known() {
        let read = |yaml: &str| serde_saphyr::from_str::<CanarySpec>(yaml);
        assert_eq!(read("{}").unwrap(), CanarySpec { canary: false, tolerance: 0.02 });
        let asked = read("{ canary: true, tolerance: 0.1 }").unwrap();
        assert!(asked.check_fields("raft.proof").is_ok() && asked.to_proto().canary);
        assert!(read("{ canaries: true }").is_err());
        for wrong in [0.0, -1.0, f64::NAN, 11.0] {
            let error = CanarySpec { canary: true, tolerance: wrong }.check_fields("raft.proof");
            assert_eq!(error.unwrap_err().field, "raft.proof.tolerance", "{wrong}");
        }
    }
}
