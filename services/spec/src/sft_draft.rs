//! The draft of a user's first SFT run: a commented spec from a model and examples.

use serde_json::json;

use crate::{
    run_draft::{DraftBase, RunDraft},
    schema::add_schema_line,
};

/// The answers of a user about a new SFT run. Everything else has the defaults of a first run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SftDraft {
    pub name: String,
    pub base: DraftBase,
    /// A path as seen from the spec's directory.
    pub data: String,
    /// True if the model has a chat template.
    pub is_chat: bool,
}

impl SftDraft {
    /// Returns the spec, with a comment for what users change most. `file` is the name that its
    /// comments give the spec.
    pub fn to_yaml(&self, file: &str) -> String {
        let [name, data] = [&self.name, &self.data].map(|it| json!(it).to_string());
        let (base, rank, max_tokens) =
            (self.base.to_section(), RunDraft::RANK, RunDraft::MAX_TOKENS);
        let chat = if self.is_chat {
            "  chat: true                     # prompts become messages of a user\n"
        } else {
            "  # chat: true                   # for a model with a chat template\n"
        };
        add_schema_line(&format!(
            "\
# Supervised fine-tuning: train on examples.
# Check it with `flotilla run check {file}`, start it with `flotilla run submit {file}`.
name: {name}
seed: 1
base: {base}
sft:
  data: {data}
{chat}  training: {{ epochs: 3, batch_size: 16, learning_rate: 0.0001, max_tokens: {max_tokens} }}
  lora: {{ r: {rank}, alpha: {} }}     # without it, all weights are trained
",
            2 * rank
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RunSpec;

    #[test]
    fn the_spec_of_a_draft_of_examples_is_valid() {
        for is_chat in [false, true] {
            let draft = SftDraft {
                name: "mine".into(),
                base: DraftBase::Model("org/a model: 7B".into()),
                data: "my \"examples\".jsonl".into(),
                is_chat,
            };
            let spec = RunSpec::parse(&draft.to_yaml("run.yaml")).unwrap();
            assert_eq!(spec.base.model.as_deref(), Some("org/a model: 7B"));
            let sft = spec.sft.unwrap();
            assert_eq!((sft.data.as_str(), sft.chat.wraps_texts()), (draft.data.as_str(), is_chat));
        }
    }
}
