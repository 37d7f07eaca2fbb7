//! The settings in which two runs differ.

use std::collections::{BTreeMap, BTreeSet};

use cycle::Run;
use serde::Serialize;
use serde_json::Value;
use wire::v1;

/// Beginnings of paths in the `spec` fact, with those in a spec. The first that fits counts. The
/// page (`spec.js`) has the same list.
const SPEC_NAMES: [(&str, &str); 22] = [
    ("suites", "evals"),
    ("promotion", "promote"),
    ("queue.from_minute", "queue.from"),
    ("queue.until_minute", "queue.until"),
    ("base.tree.path", "base"),
    ("base.adapter.path", "base.adapter"),
    ("sft.dataset.digest", "sft.data"),
    ("sft.dataset", "sft.data"),
    ("sft.training.lora", "sft.lora"),
    ("raft.prompts.digest", "raft.prompts"),
    ("raft.heldout.digest", "raft.heldout"),
    ("raft.teacher.path", "raft.teacher"),
    ("raft.prompt_suites", "evals"),
    ("raft.training.lora", "raft.lora"),
    ("raft.training.objective.name", "raft.objective"),
    ("raft.training.objective.settings", "raft.objective"),
    ("raft.training.objective", "raft.objective"),
    ("raft.schedules.temperature", "raft.sampling.temperature"),
    ("raft.schedules.learning_rate", "raft.training.learning_rate"),
    ("raft.schedules.min_reward", "raft.selection.min_reward"),
    ("raft.schedules.keep_share", "raft.selection.keep_share"),
    ("raft.gates.pass_rates", "raft.gates.pass_rate"),
];

/// Values for each cycle, which count in place of the one value for all.
const SCHEDULES: &str = "raft.schedules.";

/// Results of a forked run, which are no settings.
const RESULTS: [&str; 4] = ["fork.cycles", "fork.prompts", "fork.judged", "fork.passed"];

/// A setting that differs between two runs: its path in a spec and both values. What only the `spec`
/// fact has, such as digests, has its path there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SettingDifference {
    pub setting: String,
    pub a: String,
    pub b: String,
}

/// Returns the settings of the resolved specs that differ, sorted by path.
pub fn compare_settings(a: &Run, b: &Run) -> serde_json::Result<Vec<SettingDifference>> {
    let spec = |run: &Run| {
        // The id and the time differ between any two runs, and a sweep repeats settings.
        let spec = v1::Spec {
            run: String::new(),
            submitted_at: None,
            user: String::new(),
            sweep: None,
            ..run.spec.clone()
        };
        serde_json::to_value(spec)
    };
    Ok(list_differences(&spec(a)?, &spec(b)?))
}

fn list_differences(a: &Value, b: &Value) -> Vec<SettingDifference> {
    let [a, b] = [a, b].map(|spec| {
        let mut settings = BTreeMap::new();
        collect_settings("", spec, &mut settings);
        settings
    });
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let differing = names.into_iter().filter(|name| a.get(*name) != b.get(*name));
    let text = |value: Option<&Value>| match value {
        None => "-".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    let difference = |name: &String| SettingDifference {
        setting: name.clone(),
        a: text(a.get(name)),
        b: text(b.get(name)),
    };
    differing.map(difference).collect()
}

/// Adds the values below a path of the `spec` fact by their paths in a spec.
fn collect_settings(path: &str, value: &Value, found: &mut BTreeMap<String, Value>) {
    let inner =
        |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    if RESULTS.contains(&path) {
        return;
    }
    match value {
        Value::Null => {}
        Value::Object(section) => {
            for (key, value) in section {
                collect_settings(&inner(&to_snake_case(key)), value, found);
            }
        }
        Value::Array(items) if items.iter().any(|item| item["name"].is_string()) => {
            for item in items {
                let name = item["name"].as_str().unwrap_or_default();
                collect_settings(&inner(name), item, found);
            }
        }
        value if path.starts_with(SCHEDULES) => {
            found.insert(spec_path(path), value.clone());
        }
        value => {
            found.entry(spec_path(path)).or_insert_with(|| value.clone());
        }
    }
}

/// Returns the path in a spec of a path in the `spec` fact.
fn spec_path(path: &str) -> String {
    let renamed = SPEC_NAMES.iter().find_map(|(fact, spec)| {
        let rest = path.strip_prefix(fact)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{spec}{rest}"))
    });
    renamed.unwrap_or_else(|| path.to_owned())
}

/// Returns a name as specs write it: Protobuf's JSON writes `minReward` for `min_reward`.
fn to_snake_case(name: &str) -> String {
    let letters = name.chars().flat_map(|letter| {
        let before = letter.is_ascii_uppercase().then_some('_');
        before.into_iter().chain([letter.to_ascii_lowercase()])
    });
    letters.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn differing(a: &Value, b: &Value) -> Vec<String> {
        let texts = list_differences(a, b).into_iter();
        texts.map(|it| format!("{}: {} {}", it.setting, it.a, it.b)).collect()
    }

    #[test]
    fn runs_differ_in_what_they_were_asked() {
        let a = json!({"seed": "1", "raft": {"cycles": 3, "sampling": {"temperature": 1.0}}});
        let b = json!({"seed": "1", "raft": {"cycles": 4, "gates": {"patience": 2}}});
        let (deep, deeper) = (json!({"raft": {"minReward": 1}}), json!({"raft": {"minReward": 2}}));
        assert_eq!(differing(&deep, &deeper), ["raft.min_reward: 1 2"]);
        let expected =
            ["raft.cycles: 3 4", "raft.gates.patience: - 2", "raft.sampling.temperature: 1.0 -"];
        assert_eq!(differing(&a, &b), expected);
        assert!(differing(&a, &a).is_empty());
    }

    #[test]
    fn settings_have_the_names_that_specs_give_them() {
        let a = json!({
            "suites": [{"name": "text", "text": {"digest": "b3:a"}}],
            "raft": {
                "promptSuites": [{"name": "carry", "samplesPerPrompt": 2}],
                "training": {
                    "learningRate": 0.5,
                    "lora": {"r": 8},
                    "objective": {"name": "grpo", "settings": {"kl": 0.1}},
                },
            },
            "fork": {"run": "a-1", "cycle": 2, "cycles": [{"done": {"cycle": 1}}]},
        });
        let b = json!({
            "suites": [{"name": "text", "text": {"digest": "b3:b"}}],
            "raft": {
                "promptSuites": [{"name": "carry", "samplesPerPrompt": 4}],
                "training": {
                    "learningRate": 0.25,
                    "lora": {"r": 16},
                    "objective": {"name": "dapo", "settings": {"kl": 0.2}},
                },
                "schedules": {"learningRate": [0.5, 0.25]},
            },
            "fork": {"run": "a-1", "cycle": 3, "cycles": [{"done": {"cycle": 2}}]},
        });
        let expected = [
            "evals.carry.samples_per_prompt: 2 4",
            "evals.text.text.digest: b3:a b3:b",
            "fork.cycle: 2 3",
            "raft.lora.r: 8 16",
            "raft.objective: grpo dapo",
            "raft.objective.kl: 0.1 0.2",
            "raft.training.learning_rate: 0.5 [0.5,0.25]",
        ];
        assert_eq!(differing(&a, &b), expected);
    }

    #[test]
    fn the_page_gives_settings_the_same_names() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../gateway/page/spec.js");
        let page = std::fs::read_to_string(page).unwrap();
        let listed = page.split("const SPEC_NAMES = [").nth(1).unwrap().split("];").next().unwrap();
        let texts: Vec<&str> = listed.split('"').skip(1).step_by(2).collect();
        let expected: Vec<&str> =
            SPEC_NAMES.iter().flat_map(|(fact, spec)| [*fact, *spec]).collect();
        assert_eq!(texts, expected);
    }
}
