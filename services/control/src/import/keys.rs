//! The keys of a configuration, each taken once and accounted for.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Fate, ImportError, Note};

/// Keys that mean nothing here, whole sections as `name.`, and why.
const IGNORED: [(&str, &str); 21] = [
    ("output_dir", "what a run makes is in the fleet's store"),
    (
        "sft_checkpoint",
        "a run starts from a model; merge the adapter (`flotilla convert merge`) and name that",
    ),
    ("hardware.", "agents find out what their boxes are"),
    ("logging.", "everything is in the log; see `flotilla run show`"),
    ("generation.batch_size", "each generator takes what it has room for (--slots)"),
    ("training.dataloader_", "trainers read ahead by themselves"),
    ("training.gradient_checkpointing", "trainers see to their memory themselves"),
    ("training.bf16", "each box trains in what it is good at"),
    ("training.fp16", "each box trains in what it is good at"),
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
    ("experimental_attention", "the box's profile says how attention is computed"),
    ("model.trust_remote_code", "no code of a model is ever run"),
    ("model.attn_implementation", "the box's profile says how attention is computed"),
];

pub(super) struct Keys {
    left: BTreeMap<String, Value>,
    notes: Vec<Note>,
}

impl Keys {
    pub(super) fn of(config: Value) -> Result<Self, ImportError> {
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
        Ok(Self { left, notes: Vec::new() })
    }

    /// The first of these that is there; the others are told of as passed over.
    pub(super) fn take(&mut self, names: &[&str], becomes: &str) -> Option<(String, Value)> {
        let mut taken = None;
        for name in names {
            let Some(value) = self.left.remove(*name) else { continue };
            if let Some((first, _)) = &taken {
                let said = format!("{first} says the same");
                self.note(name, Fate::Ignored, &said);
                continue;
            }
            self.note(name, Fate::Used, &format!("{becomes}: {value}"));
            taken = Some(((*name).to_owned(), value));
        }
        taken
    }

    pub(super) fn text(
        &mut self,
        names: &[&str],
        becomes: &str,
    ) -> Result<Option<String>, ImportError> {
        let Some((key, value)) = self.take(names, becomes) else { return Ok(None) };
        match value {
            Value::String(text) => Ok(Some(text)),
            value => Err(wrong(key, "a text", &value)),
        }
    }

    /// `5e-5` is a text to some readers of YAML, and a number all the same.
    pub(super) fn number(
        &mut self,
        names: &[&str],
        becomes: &str,
    ) -> Result<Option<f64>, ImportError> {
        let Some((key, value)) = self.take(names, becomes) else { return Ok(None) };
        let number = match &value {
            Value::Number(number) => number.as_f64(),
            Value::String(text) => text.trim().parse().ok(),
            _ => None,
        };
        let number = number.filter(|number: &f64| number.is_finite());
        number.map(Some).ok_or_else(|| wrong(key, "a number", &value))
    }

    pub(super) fn whole(
        &mut self,
        names: &[&str],
        becomes: &str,
    ) -> Result<Option<u32>, ImportError> {
        let Some(number) = self.number(names, becomes)? else { return Ok(None) };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
        let whole = number as u32;
        if f64::from(whole).to_bits() == number.to_bits() || (whole, number) == (0, 0.0) {
            return Ok(Some(whole));
        }
        Err(wrong(names[0].to_owned(), "a whole number", &number.into()))
    }

    pub(super) fn flag(&mut self, names: &[&str], becomes: &str) -> Result<bool, ImportError> {
        match self.take(names, becomes) {
            None => Ok(false),
            Some((_, Value::Bool(flag))) => Ok(flag),
            Some((key, value)) => Err(wrong(key, "true or false", &value)),
        }
    }

    pub(super) fn ignore(&mut self, name: &str, why: &str) {
        if self.left.remove(name).is_some() {
            self.note(name, Fate::Ignored, why);
        }
    }

    pub(super) fn note(&mut self, key: &str, fate: Fate, said: &str) {
        self.notes.push(Note { key: key.to_owned(), fate, said: said.to_owned() });
    }

    /// Instead of what was said of it before.
    /// Says otherwise of whichever of these names the file has.
    pub(super) fn renote(&mut self, names: &[&str], fate: Fate, said: &str) {
        let used = |note: &&mut Note| note.fate == Fate::Used && names.contains(&&*note.key);
        if let Some(note) = self.notes.iter_mut().find(used) {
            (note.fate, note.said) = (fate, said.to_owned());
        }
    }

    /// What became of all, those left over too.
    pub(super) fn end(mut self) -> Vec<Note> {
        for name in std::mem::take(&mut self.left).into_keys() {
            let starts = |known: &&(&str, &str)| {
                let section = known.0.ends_with(['.', '_']);
                if section { name.starts_with(known.0) } else { name == known.0 }
            };
            match IGNORED.iter().find(starts) {
                Some((_, why)) => self.note(&name, Fate::Ignored, why),
                None => {
                    self.note(&name, Fate::Unknown, "no key of halo-forge 1 that is known here");
                }
            }
        }
        self.notes
    }
}

fn wrong(key: String, expected: &'static str, found: &Value) -> ImportError {
    ImportError::Value { key, expected, found: found.to_string() }
}
