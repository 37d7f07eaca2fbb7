//! How a spec says what boxes must show of the policy they sample with.

use serde::Deserialize;
use wire::v1;

use crate::check::{Checked, within};

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProofSpec {
    /// Whether they are asked what the tokens of a text are worth to it.
    pub canary: bool,
    /// Nats a token.
    pub tolerance: f64,
}

impl Default for ProofSpec {
    fn default() -> Self {
        Self { canary: false, tolerance: 0.02 }
    }
}

impl ProofSpec {
    pub(crate) fn check(&self, section: &str) -> Checked {
        within(&format!("{section}.tolerance"), self.tolerance, 1e-6, 10.0)
    }

    /// Which tokenizer the base has is still to be found out.
    pub(crate) fn resolve(self) -> v1::spec::Proof {
        let Self { canary, tolerance } = self;
        v1::spec::Proof { canary, tolerance, tokenizer: String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_off_unless_asked_for_and_its_keys_are_known() {
        let read = |yaml: &str| serde_saphyr::from_str::<ProofSpec>(yaml);
        assert_eq!(read("{}").unwrap(), ProofSpec { canary: false, tolerance: 0.02 });
        let asked = read("{ canary: true, tolerance: 0.1 }").unwrap();
        assert!(asked.check("raft.proof").is_ok() && asked.resolve().canary);
        assert!(read("{ canaries: true }").is_err());
        for wrong in [0.0, -1.0, f64::NAN, 11.0] {
            let error = ProofSpec { canary: true, tolerance: wrong }.check("raft.proof");
            assert_eq!(error.unwrap_err().field, "raft.proof.tolerance", "{wrong}");
        }
    }
}
