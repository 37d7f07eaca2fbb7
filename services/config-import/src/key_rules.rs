//! The tables' form: a rule for each key of a program's configuration.

use serde_json::Value;

use crate::{
    program::SourceProgram,
    setting::{Setting, read_number},
    task::TrainingTask,
};

/// A key and its treatment. `[]` in the key matches any place of a list; a `*` at its end matches
/// any rest.
pub(crate) type KeyRule = (&'static str, KeyAction);

/// The treatment of a key.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KeyAction {
    /// The value becomes a setting of the spec.
    Set(Setting),
    /// The value describes a data set, together with the other keys of its section.
    Data(DataField),
    /// The same for a data set to evaluate on.
    EvalData(DataField),
    /// The key has no effect, for this reason.
    Ignore(&'static str),
    /// A run behaves as if the value were off or one of these; otherwise it differs, for this
    /// reason.
    Expect(&'static [&'static str], &'static str),
}

/// A part of a data set's description.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DataField {
    /// A file, a data set of the hub, or the format of `Files`.
    Path,
    Files,
    /// A name in `dataset_info.json`.
    Registered,
    /// The directory of `dataset_info.json`.
    Registry,
    /// The form of an example, such as `alpaca`.
    Form,
    Split,
    Subset,
    /// The column from which this field of a row is taken.
    Column(&'static str),
}

/// The rules of a program.
pub(crate) struct ProgramTable {
    pub(crate) program: SourceProgram,
    /// The first rule that matches a key counts; the first rule of a setting names its main key.
    pub(crate) rules: &'static [&'static [KeyRule]],
    /// Keys that only configurations of one task have. The first that is written counts.
    pub(crate) task_keys: &'static [(&'static str, TrainingTask)],
    /// The task if the keys leave it open.
    pub(crate) task: TrainingTask,
    /// True if the program cuts examples that are longer than its limit. A run skips them.
    pub(crate) cuts_examples: bool,
    /// The program's defaults that differ from a spec's.
    pub(crate) defaults: &'static [(Setting, &'static str)],
    /// Defaults of one task, in place of `defaults`.
    pub(crate) task_defaults: &'static [(TrainingTask, Setting, &'static str)],
}

impl ProgramTable {
    fn all_rules(&self) -> impl Iterator<Item = &'static KeyRule> {
        self.rules.iter().flat_map(|rules| rules.iter())
    }

    /// Returns the first rule that matches a key, with its place in the table.
    pub(crate) fn find_rule(&self, key: &str) -> Option<(usize, KeyAction)> {
        let general = remove_indices(key);
        let matches = |(_, (pattern, _)): &(usize, &KeyRule)| match pattern.strip_suffix('*') {
            Some(prefix) => general.starts_with(prefix),
            None => general == *pattern,
        };
        self.all_rules().enumerate().find(matches).map(|(place, (_, action))| (place, *action))
    }

    /// Returns the main key of a setting.
    pub(crate) fn main_key(&self, setting: Setting) -> Option<&'static str> {
        let sets = |action: &KeyAction| matches!(action, KeyAction::Set(own) if *own == setting);
        self.all_rules().find(|(_, action)| sets(action)).map(|(pattern, _)| *pattern)
    }

    /// Returns the key that is most similar to a misspelled one.
    pub(crate) fn find_similar_key(&self, key: &str) -> Option<&'static str> {
        let patterns = self.all_rules().map(|(pattern, _)| *pattern);
        spec::find_similar(&remove_indices(key), patterns.filter(|it| !it.ends_with('*')))
    }

    /// Returns the program's default of a setting.
    pub(crate) fn default_values(
        &self,
        task: TrainingTask,
    ) -> impl Iterator<Item = (Setting, &'static str)> {
        let own = self.task_defaults.iter().filter(move |(of, ..)| *of == task);
        own.map(|(_, setting, value)| (*setting, *value)).chain(self.defaults.iter().copied())
    }
}

/// Returns `a[].b` for `a[12].b`.
fn remove_indices(key: &str) -> String {
    let mut is_index = false;
    let kept = key.chars().filter(|sign| {
        is_index &= *sign != ']';
        let is_kept = !is_index;
        is_index |= *sign == '[';
        is_kept
    });
    kept.collect()
}

/// Returns true for a value that switches a feature off.
pub(crate) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => {
            ["", "none", "null", "no", "off", "false"].contains(&text.to_ascii_lowercase().as_str())
        }
        Value::Array(items) => items.is_empty(),
        Value::Object(section) => section.is_empty(),
    }
}

/// Returns true if a value is written as one of these texts or has the same number.
pub(crate) fn is_one_of(value: &Value, texts: &[&str]) -> bool {
    let same = |text: &&str| match (value, text.parse::<f64>()) {
        (Value::String(own), _) if own.eq_ignore_ascii_case(text) => true,
        (Value::Bool(flag), _) => flag.to_string() == **text,
        (value, Ok(number)) => {
            read_number(value).is_some_and(|own| (own - number).abs() <= number.abs() * 1e-12)
        }
        _ => false,
    };
    texts.iter().any(same)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_key_of_a_list_matches_at_any_place() {
        assert_eq!(remove_indices("datasets[12].roles[0].name"), "datasets[].roles[].name");
        assert_eq!(remove_indices("plain.key"), "plain.key");
    }

    #[test]
    fn values_are_compared_as_texts_or_numbers() {
        assert!(is_one_of(&json!(1e-8), &["1e-08"]) && is_one_of(&json!("Train"), &["train"]));
        assert!(is_one_of(&json!(true), &["true"]) && !is_one_of(&json!(2), &["1"]));
        assert!(!is_one_of(&json!([1]), &["1"]));
        for off in [json!(null), json!(false), json!(0), json!("None"), json!([]), json!({})] {
            assert!(is_off(&off), "{off}");
        }
    }
}
