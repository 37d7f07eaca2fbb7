//! Takes each key of a configuration once, and notes its treatment.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{ImportError, ImportNote, KeyStatus};

/// Keys and reasons. An entry that ends in `.` or `_` matches all keys with this prefix.
const IGNORED_KEYS: [(&str, &str); 21] = [
    ("output_dir", "a run's outputs are in the fleet's store"),
    (
        "sft_checkpoint",
        "a run starts from a model; merge the adapter (`flotilla convert merge`) and name that",
    ),
    ("hardware.", "agents detect their hardware"),
    ("logging.", "everything is in the log; see `flotilla run show`"),
    ("generation.batch_size", "each generator takes what it has room for (--slots)"),
    ("training.dataloader_", "trainers read ahead by themselves"),
    ("training.gradient_checkpointing", "trainers manage their memory themselves"),
    ("training.bf16", "each box chooses its own precision"),
    ("training.fp16", "each box chooses its own precision"),
    ("training.optim", "it is AdamW"),
    ("training.save_", "checkpoints are saved by time and by raft.training.save_every"),
    ("training.eval_", "every checkpoint is measured on the spec's evals"),
    ("training.logging_", "every step is logged"),
    ("lora.bias", "adapters have no biases"),
    ("lora.task_type", "it is causal language modelling"),
    (
        "learning_rate_schedule",
        "halo-forge never read it; the rate of each cycle is in training.learning_rate",
    ),
    ("curriculum_stats_path", "pass rates of prompts are in the log"),
    ("curriculum_progressive_", "there is no such curriculum"),
    ("experimental_attention", "the box's profile selects the attention implementation"),
    ("model.trust_remote_code", "no code of a model is ever run"),
    ("model.attn_implementation", "the box's profile selects the attention implementation"),
];

/// The keys that have not been taken, with the notes so far.
pub(super) struct ConfigKeys {
    /// Sections are joined by `.`.
    remaining: BTreeMap<String, Value>,
    notes: Vec<ImportNote>,
}

impl ConfigKeys {
    /// Flattens a configuration into keys such as `section.key`. Keys with the value null count as
    /// missing.
    pub(super) fn from_config(config: Value) -> Result<Self, ImportError> {
        let Value::Object(config) = config else { return Err(ImportError::Shape) };
        let mut left = BTreeMap::new();
        for (name, value) in config {
            match value {
                Value::Object(section) => {
                    left.extend(
                        section.into_iter().map(|(key, value)| (format!("{name}.{key}"), value)),
                    );
                }
                value => {
                    left.insert(name, value);
                }
            }
        }
        left.retain(|_, value| !value.is_null());
        Ok(Self { remaining: left, notes: Vec::new() })
    }

    /// Notes that the others of the named keys are ignored. `becomes` is the spec field that
    /// receives the value.
    pub(super) fn take_first(&mut self, names: &[&str], becomes: &str) -> Option<(String, Value)> {
        let mut taken = None;
        for name in names {
            let Some(value) = self.remaining.remove(*name) else { continue };
            if let Some((first, _)) = &taken {
                let said = format!("{first} has the same meaning");
                self.add_note(name, KeyStatus::Ignored, &said);
                continue;
            }
            self.add_note(name, KeyStatus::Used, &format!("{becomes}: {value}"));
            taken = Some(((*name).to_owned(), value));
        }
        taken
    }

    pub(super) fn take_text(
        &mut self,
        names: &[&str],
        becomes: &str,
    ) -> Result<Option<String>, ImportError> {
        let Some((key, value)) = self.take_first(names, becomes) else { return Ok(None) };
        match value {
            Value::String(text) => Ok(Some(text)),
            value => Err(value_error(key, "a text", &value)),
        }
    }

    /// Accepts texts such as `5e-5`, which some YAML readers do not read as numbers.
    pub(super) fn take_number(
        &mut self,
        names: &[&str],
        becomes: &str,
    ) -> Result<Option<f64>, ImportError> {
        let Some((key, value)) = self.take_first(names, becomes) else { return Ok(None) };
        let number = match &value {
            Value::Number(number) => number.as_f64(),
            Value::String(text) => text.trim().parse().ok(),
            _ => None,
        };
        let number = number.filter(|number: &f64| number.is_finite());
        number.map(Some).ok_or_else(|| value_error(key, "a number", &value))
    }

    pub(super) fn take_integer(
        &mut self,
        names: &[&str],
        becomes: &str,
    ) -> Result<Option<u32>, ImportError> {
        let Some(number) = self.take_number(names, becomes)? else { return Ok(None) };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
        let whole = number as u32;
        if f64::from(whole).to_bits() == number.to_bits() || (whole, number) == (0, 0.0) {
            return Ok(Some(whole));
        }
        Err(value_error(names[0].to_owned(), "a whole number", &number.into()))
    }

    /// Treats a missing key as false.
    pub(super) fn take_flag(&mut self, names: &[&str], becomes: &str) -> Result<bool, ImportError> {
        match self.take_first(names, becomes) {
            None => Ok(false),
            Some((_, Value::Bool(flag))) => Ok(flag),
            Some((key, value)) => Err(value_error(key, "true or false", &value)),
        }
    }

    pub(super) fn ignore_key(&mut self, name: &str, why: &str) {
        if self.remaining.remove(name).is_some() {
            self.add_note(name, KeyStatus::Ignored, why);
        }
    }

    pub(super) fn add_note(&mut self, key: &str, fate: KeyStatus, said: &str) {
        self.notes.push(ImportNote {
            key: key.to_owned(),
            status: fate,
            explanation: said.to_owned(),
        });
    }

    /// Replaces the note on the first of the named keys that was used.
    pub(super) fn replace_note(&mut self, names: &[&str], fate: KeyStatus, said: &str) {
        let used =
            |note: &&mut ImportNote| note.status == KeyStatus::Used && names.contains(&&*note.key);
        if let Some(note) = self.notes.iter_mut().find(used) {
            (note.status, note.explanation) = (fate, said.to_owned());
        }
    }

    /// Adds notes on keys that were not taken.
    pub(super) fn into_notes(mut self) -> Vec<ImportNote> {
        for name in std::mem::take(&mut self.remaining).into_keys() {
            let starts = |known: &&(&str, &str)| {
                let section = known.0.ends_with(['.', '_']);
                if section { name.starts_with(known.0) } else { name == known.0 }
            };
            match IGNORED_KEYS.iter().find(starts) {
                Some((_, why)) => self.add_note(&name, KeyStatus::Ignored, why),
                None => {
                    self.add_note(&name, KeyStatus::Unknown, "not a known key of halo-forge 1");
                }
            }
        }
        self.notes
    }
}

fn value_error(key: String, expected: &'static str, found: &Value) -> ImportError {
    ImportError::Value { key, expected, found: found.to_string() }
}
