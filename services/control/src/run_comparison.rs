//! The settings in which two runs differ.

use cycle::Run;
use serde::Serialize;
use serde_json::{Map, Value};
use wire::v1;

/// A setting that differs between two runs: its path in the resolved spec and both values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SettingDifference {
    pub setting: String,
    pub a: String,
    pub b: String,
}

/// Returns the settings of the resolved specs that differ, sorted by path.
pub fn compare_settings(a: &Run, b: &Run) -> serde_json::Result<Vec<SettingDifference>> {
    let spec = |run: &Run| {
        // The id and the time differ between any two runs.
        let spec = v1::Spec { run: String::new(), submitted_at: None, ..run.spec.clone() };
        serde_json::to_value(spec)
    };
    let mut found = Vec::new();
    collect_differences("", &spec(a)?, &spec(b)?, &mut found);
    Ok(found)
}

fn collect_differences(path: &str, a: &Value, b: &Value, found: &mut Vec<SettingDifference>) {
    if let Some((left, right)) = as_sections(a, b) {
        let mut keys: Vec<&String> = left.keys().chain(right.keys()).collect();
        keys.sort();
        keys.dedup();
        for key in keys {
            let name = to_snake_case(key);
            let inner = if path.is_empty() { name } else { format!("{path}.{name}") };
            let value = |map: &Map<String, Value>| map.get(key).cloned().unwrap_or_default();
            collect_differences(&inner, &value(&left), &value(&right), found);
        }
    } else if a != b {
        let text = |value: &Value| match value {
            Value::Null => "-".to_owned(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        found.push(SettingDifference { setting: path.to_owned(), a: text(a), b: text(b) });
    }
}

/// Returns a name as specs write it: Protobuf's JSON writes `minReward` for `min_reward`.
fn to_snake_case(name: &str) -> String {
    let letters = name.chars().flat_map(|letter| {
        let before = letter.is_ascii_uppercase().then_some('_');
        before.into_iter().chain([letter.to_ascii_lowercase()])
    });
    letters.collect()
}

/// Returns both values as objects, if at least one is an object and the other is one or null.
fn as_sections(a: &Value, b: &Value) -> Option<(Map<String, Value>, Map<String, Value>)> {
    let section = |value: &Value| match value {
        Value::Object(section) => Some(section.clone()),
        Value::Null => Some(Map::new()),
        _ => None,
    };
    let some = a.is_object() || b.is_object();
    section(a).zip(section(b)).filter(|_| some)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn runs_differ_in_what_they_were_asked() {
        let a = json!({"seed": "1", "raft": {"cycles": 3, "sampling": {"temperature": 1.0}}});
        let b = json!({"seed": "1", "raft": {"cycles": 4, "gates": {"patience": 2}}});
        let differing = |a: &Value, b: &Value| {
            let mut found = Vec::new();
            collect_differences("", a, b, &mut found);
            found.into_iter().map(|difference| difference.setting).collect::<Vec<String>>()
        };
        let (deep, deeper) = (json!({"raft": {"minReward": 1}}), json!({"raft": {"minReward": 2}}));
        assert_eq!(differing(&deep, &deeper), ["raft.min_reward"]);
        let expected = ["raft.cycles", "raft.gates.patience", "raft.sampling.temperature"];
        assert_eq!(differing(&a, &b), expected);
        assert!(differing(&a, &a).is_empty());
    }
}
