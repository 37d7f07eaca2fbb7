//! The spec of a run that trains nothing and measures a model, from a few settings.

use serde_json::json;

use crate::run_draft::RunDraft;

/// The samples by which models are compared. Everything else has the defaults of a run, such as its
/// seed, so that the same random numbers draw them with each model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeasureDraft {
    /// A file, `hub:ORG/NAME` or `feedback:CHANNEL`.
    pub prompts: String,
    /// The name of a built-in verifier, or the YAML of one; `None`: the samples are not judged.
    pub verifier: Option<String>,
    /// Further keys of the section `raft` in YAML, such as `chat: true, sampling: {temperature: 0}`.
    pub settings: Option<String>,
}

impl MeasureDraft {
    /// The name of the runs; their ids are `measure-<number>`.
    pub const NAME: &str = "measure";

    /// Returns the spec of the run that measures the model at a path of the store.
    pub fn to_yaml(&self, model: &str, pool: &str) -> String {
        let [prompts, pool] = [&*self.prompts, pool].map(|text| json!(text).to_string());
        let model = json!(format!("store:{model}"));
        let mut keys =
            format!("cycles: 0, allow_overlap: true, prompts: {prompts}, heldout: {prompts}");
        if let Some(verifier) = &self.verifier {
            keys += &format!(", verifier: {}", RunDraft::verifier_section(verifier));
        }
        if let Some(settings) = &self.settings {
            // One line, so that they stay within the section.
            keys += &format!(", {}", settings.trim().replace(['\n', '\r'], " "));
        }
        let name = Self::NAME;
        format!("name: {name}\npool: {pool}\nbase: {{ model: {model} }}\nraft: {{ {keys} }}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HeldoutSpec, RunSpec};

    #[test]
    fn a_measurement_is_a_valid_run_without_training_judged_or_not() {
        let draft = MeasureDraft {
            prompts: "my \"prompts\".jsonl".into(),
            verifier: Some("numeric: {tolerance: 0.01}".into()),
            settings: Some(
                "heldout_samples_per_prompt: 3, chat: true,\n\
                 sampling: {temperature: 0, max_new_tokens: 4096}"
                    .into(),
            ),
        };
        let spec = RunSpec::parse(&draft.to_yaml("runs/a-1/checkpoints/x", "gpu")).unwrap();
        assert_eq!(spec.base.model.as_deref(), Some("store:runs/a-1/checkpoints/x"));
        assert_eq!((&*spec.name, &*spec.pool, spec.seed), ("measure", "gpu", 0));
        let raft = spec.raft.unwrap();
        assert_eq!(raft.heldout, Some(HeldoutSpec::File(draft.prompts.clone())));
        assert_eq!((raft.cycles, raft.heldout_samples_per_prompt), (0, 3));
        assert_eq!(raft.sampling.temperature.first_value(), 0.0);
        assert!(raft.verifier.is_some() && raft.chat.wraps_texts());
        let unjudged = MeasureDraft { verifier: None, settings: None, ..draft };
        let spec = RunSpec::parse(&unjudged.to_yaml("models/m", "default")).unwrap();
        assert!(spec.raft.unwrap().verifier.is_none());
    }

    #[test]
    fn a_run_that_trains_nothing_needs_something_to_measure() {
        let yaml = "base: { model: m }\nraft: { prompts: p.jsonl, cycles: 0 }\n";
        let error = RunSpec::parse(yaml).unwrap_err().to_string();
        assert!(
            error.contains("raft.cycles: must be from 1") && error.contains("evals"),
            "{error}"
        );
        let measured = format!("{yaml}evals: [{{ name: t, text: t.txt }}]\n");
        assert_eq!(RunSpec::parse(&measured).unwrap().raft.unwrap().cycles, 0);
    }
}
