//! What becomes of a run's best checkpoint.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    field_checks::{FieldResult, check_range, ensure_field},
    raft::RaftSpec,
};

/// The channel that moves to the run's best checkpoint, if that is better than the channel's model.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PromoteSpec {
    /// Name of the channel.
    #[schemars(regex(pattern = "^[a-z0-9][a-z0-9_-]{0,63}$"), example = &"stable")]
    pub channel: String,
    /// Largest probability of a wrong decision, however often the models are compared.
    #[schemars(range(min = 1e-6, max = 0.5))]
    #[serde(default = "default_alpha")]
    pub alpha: f64,
}

fn default_alpha() -> f64 {
    0.05
}

impl PromoteSpec {
    pub(crate) fn check_fields(&self, raft: Option<&RaftSpec>) -> FieldResult {
        let legal = wire::RunId::new(self.channel.as_str()).is_ok();
        let remedy = "must be the name of a channel, as in `flotilla channel list`";
        ensure_field(legal, "promote.channel", remedy)?;
        check_range("promote.alpha", self.alpha, 1e-6, 0.5)?;
        let compares = raft.is_some_and(|raft| raft.heldout.is_some());
        let remedy = "needs `raft.heldout`: prompts by which the channel's model and the run's are \
                      compared";
        ensure_field(compares, "promote", remedy)
    }
}

#[cfg(test)]
mod tests {
    use crate::RunSpec;

    const SPEC: &str = "base: { channel: stable }
promote: { channel: stable }
evals: [{ name: t, text: t.txt }]
raft: { prompts: 'feedback:stable', heldout: h.jsonl, verifier: { numeric: {} } }
";

    #[test]
    fn files_and_feedback_are_told_apart() {
        let spec = RunSpec::parse(SPEC).unwrap();
        assert_eq!(spec.file_names(), ["h.jsonl", "t.txt"]);
        let spec = RunSpec::parse(&SPEC.replace("h.jsonl", "'hub:org/name:test'")).unwrap();
        assert_eq!(spec.file_names(), ["t.txt"]);
        assert_eq!(spec.feedback_channels(), ["stable"]);
    }

    #[test]
    fn a_promotion_needs_held_out_prompts() {
        let refused = |yaml: &str| RunSpec::parse(yaml).unwrap_err().to_string();
        let error = refused(&SPEC.replace("heldout: h.jsonl, ", ""));
        assert!(error.contains("promote") && error.contains("raft.heldout"), "{error}");
        let error =
            refused(&SPEC.replace("promote: { channel: stable }", "promote: { channel: A }"));
        assert!(error.contains("promote.channel"), "{error}");
    }
}
