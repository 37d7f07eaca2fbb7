//! The draft of a user's first RAFT run: a commented spec from a model, prompts and a verifier.

use serde_json::json;
use wire::PromptEntry;

use crate::{schema::add_schema_line, verifier::VerifierSpec};

/// The fewest prompts that tell a pass rate.
const HELDOUT_PROMPTS_MIN: usize = 20;
/// With less than this many times as many prompts, none are held out.
const TRAINED_PER_HELDOUT_MIN: usize = 3;

/// The answers of a user about a new RAFT run. Everything else has the defaults of a first run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDraft {
    pub name: String,
    pub pool: String,
    pub base: DraftBase,
    /// A path as seen from the spec's directory.
    pub prompts: String,
    /// The name of a built-in verifier, or the YAML of one.
    pub verifier: String,
    /// The number of prompts to hold out.
    pub heldout: Option<usize>,
    /// True if the model has a chat template.
    pub is_chat: bool,
    pub cycles: u32,
}

/// The base of a new run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DraftBase {
    /// A directory as seen from the spec's directory, or a hub model.
    Model(String),
    Checkpoint(String),
}

impl DraftBase {
    /// Returns the YAML section of the base.
    pub(crate) fn to_section(&self) -> String {
        match self {
            Self::Checkpoint(checkpoint) => format!("{{ checkpoint: {} }}", json!(checkpoint)),
            Self::Model(model) => format!("{{ model: {} }}", json!(model)),
        }
    }
}

impl RunDraft {
    /// The rank of the LoRA adapter.
    pub const RANK: u64 = 16;
    /// The longest sequence of the training, in tokens.
    pub const MAX_TOKENS: u64 = 1024;
    /// With fewer prompts, none are held out.
    pub const HELDOUT_FROM: usize = (1 + TRAINED_PER_HELDOUT_MIN) * HELDOUT_PROMPTS_MIN;

    /// Returns a tenth of the prompts, but enough to tell a pass rate. `None` if few would be left.
    pub fn count_heldout(prompts: usize) -> Option<usize> {
        let count = HELDOUT_PROMPTS_MIN.max(prompts / 10);
        (prompts >= (1 + TRAINED_PER_HELDOUT_MIN) * count).then_some(count)
    }

    /// Suggests a built-in verifier by the fields of the prompts; `None` if none fits.
    pub fn suggest_verifier(prompts: &[PromptEntry]) -> Option<&'static str> {
        let has = |field: &str| prompts.iter().any(|prompt| prompt.fields.contains_key(field));
        let answers = || prompts.iter().map(|prompt| prompt.answer.as_deref());
        let is_number = |answer: &str| answer.trim().replace(',', "").parse::<f64>().is_ok();
        if has("schema") {
            Some("json_schema")
        } else if ["test", "tests", "test_list"].into_iter().any(has) {
            Some("python")
        } else if has("cases") {
            Some("stdio")
        } else if answers().all(|answer| answer.is_some_and(is_number)) {
            Some("numeric")
        } else if answers().all(|answer| answer.is_some()) {
            Some("exact")
        } else {
            None
        }
    }

    /// Returns the YAML section of a verifier that is given by its name or as YAML.
    pub fn verifier_section(given: &str) -> String {
        // One line, so that it stays within its section.
        let given = given.trim().replace(['\n', '\r'], " ");
        match given.as_str() {
            name if VerifierSpec::NAMES.contains(&name) => format!("{{ {name}: {{}} }}"),
            yaml if yaml.starts_with('{') => yaml.to_owned(),
            yaml => format!("{{ {yaml} }}"),
        }
    }

    /// Returns the spec, with a comment for what users change most. `file` is the name that its
    /// comments give the spec.
    pub fn to_yaml(&self, file: &str) -> String {
        let quoted = |text: &str| json!(text).to_string();
        let [name, pool, prompts] = [&self.name, &self.pool, &self.prompts].map(|it| quoted(it));
        let base = self.base.to_section();
        let heldout = match self.heldout {
            Some(count) => format!(
                "  heldout: {{ count: {count} }}         # measured after each cycle, never trained on\n"
            ),
            None => {
                "  # heldout: { count: 20 }       # prompts to measure by; there are too few now\n"
                    .to_owned()
            }
        };
        let chat = if self.is_chat {
            "  chat: true                     # prompts become messages of a user\n"
        } else {
            "  # chat: true                   # for a model with a chat template\n"
        };
        let mut verifier = Self::verifier_section(&self.verifier);
        if self.verifier.trim() == "exact" {
            verifier += "  # { exact: { extract: '#(.+)$' } } compares a part of an answer";
        }
        let cycles = self.cycles;
        let (rank, max_tokens) = (Self::RANK, Self::MAX_TOKENS);
        add_schema_line(&format!(
            "\
# Reward-ranked fine-tuning: sample, keep what the verifier passes, train on it, again.
# Check it with `flotilla run check {file}`, start it with `flotilla run submit {file}`.
name: {name}
seed: 1
pool: {pool}
base: {base}
raft:
  prompts: {prompts}
{heldout}{chat}  cycles: {cycles}
  samples_per_prompt: 8          # more for hard prompts
  sampling: {{ temperature: 0.8, max_new_tokens: 512 }}
  verifier: {verifier}
  selection: {{ keep_per_prompt: 1, min_reward: 1.0 }}
  training: {{ epochs: 1, batch_size: 16, learning_rate: 0.0001, max_tokens: {max_tokens} }}
  lora: {{ r: {rank}, alpha: {} }}
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
    fn a_verifier_is_suggested_by_the_fields_of_the_prompts() {
        for (lines, expected) in [
            (
                "{\"prompt\": \"2+2\", \"answer\": 4}\n{\"prompt\": \"x\", \"answer\": \"1,000\"}",
                Some("numeric"),
            ),
            ("{\"prompt\": \"a\", \"answer\": \"yes\"}", Some("exact")),
            ("{\"prompt\": \"a\", \"schema\": {}}", Some("json_schema")),
            ("{\"prompt\": \"a\", \"test_list\": []}", Some("python")),
            ("{\"prompt\": \"a\"}", None),
        ] {
            let prompts = PromptEntry::parse_all(lines.as_bytes()).unwrap();
            assert_eq!(RunDraft::suggest_verifier(&prompts), expected, "{lines}");
        }
    }

    #[test]
    fn enough_prompts_are_held_out_to_tell_a_pass_rate() {
        assert_eq!([79, 80, 1000].map(RunDraft::count_heldout), [None, Some(20), Some(100)]);
        assert_eq!(RunDraft::HELDOUT_FROM, 80);
    }

    #[test]
    fn the_spec_of_a_draft_is_valid() {
        let draft = RunDraft {
            name: "mine".into(),
            pool: "default".into(),
            base: DraftBase::Model("org/a model: 7B".into()),
            prompts: "p.jsonl".into(),
            verifier: "numeric".into(),
            heldout: RunDraft::count_heldout(100),
            is_chat: true,
            cycles: 3,
        };
        let text = draft.to_yaml("mine.yaml");
        assert!(text.contains("prompts: \"p.jsonl\""), "{text}");
        let spec = RunSpec::parse(&text).unwrap();
        let raft = spec.raft.unwrap();
        assert_eq!(spec.base.model.as_deref(), Some("org/a model: 7B"));
        assert!(raft.heldout.is_some() && raft.chat.wraps_texts() && raft.cycles == 3);
        let other = RunDraft {
            base: DraftBase::Checkpoint("base-1".into()),
            verifier: "exact: { extract: '#(\\d+)$' }".into(),
            heldout: RunDraft::count_heldout(79),
            is_chat: false,
            ..draft
        };
        let spec = RunSpec::parse(&other.to_yaml("mine.yaml")).unwrap();
        assert!(spec.raft.unwrap().heldout.is_none());
    }
}
