//! Files of results. Each has the result of one measurement, its settings and its conditions.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::conditions::{Conditions, summarise_conditions};

/// A directory of results, and the origins of those that were read.
pub(super) struct ResultFiles {
    directory: PathBuf,
    origins: BTreeMap<String, ResultOrigin>,
}

/// The content of a file.
#[derive(Debug, Serialize, Deserialize)]
struct StoredResult {
    origin: ResultOrigin,
    settings: Value,
    result: Value,
}

/// The measurement of a result.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ResultOrigin {
    Conditions(Conditions),
    /// A person's remark on a measurement whose conditions were not recorded.
    Note(String),
}

impl ResultFiles {
    pub(super) fn open_or_create(directory: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
        Ok(Self { directory: directory.to_owned(), origins: BTreeMap::new() })
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.directory.join(name).exists()
    }

    /// Reads a result, and fails if it was measured with other settings.
    pub(super) fn read<T: DeserializeOwned>(
        &mut self,
        name: &str,
        settings: &Value,
    ) -> anyhow::Result<T> {
        let file = self.directory.join(name);
        let bytes = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        let file = file.display();
        let mistake = || format!("{file}: not a result of this build; delete the file");
        let stored: StoredResult = serde_json::from_slice(&bytes).with_context(mistake)?;
        if let Some(difference) = find_difference("settings", &stored.settings, settings) {
            bail!(
                "{file}: {difference}; delete the file to measure it again, or use a build with \
                 its settings"
            );
        }
        let result = serde_json::from_value(stored.result).with_context(mistake)?;
        self.origins.insert(name.to_owned(), stored.origin);
        Ok(result)
    }

    pub(super) fn write(
        &self,
        name: &str,
        settings: Value,
        conditions: Conditions,
        result: Value,
    ) -> anyhow::Result<()> {
        let origin = ResultOrigin::Conditions(conditions);
        let file = self.directory.join(name);
        let bytes = serde_json::to_vec(&StoredResult { origin, settings, result })?;
        durable_files::replace_file(&file, &bytes, 0o644)
            .with_context(|| format!("write {}", file.display()))
    }

    /// Returns the origin of each result that was read, by the name of its file.
    pub(super) fn into_origins(self) -> BTreeMap<String, ResultOrigin> {
        self.origins
    }
}

/// Writes the conditions of all measurements, and the notes on those without, as Markdown.
pub(super) fn write_origins(text: &mut String, origins: &BTreeMap<String, ResultOrigin>) {
    let mut recorded = Vec::new();
    let mut notes: BTreeMap<&str, usize> = BTreeMap::new();
    for origin in origins.values() {
        match origin {
            ResultOrigin::Conditions(conditions) => recorded.push(conditions),
            ResultOrigin::Note(note) => *notes.entry(note).or_default() += 1,
        }
    }
    // Writing to a string cannot fail.
    if !recorded.is_empty() {
        let (count, summary) = (recorded.len(), summarise_conditions(&recorded));
        let _ = writeln!(text, "Results with recorded conditions: {count}, {summary}");
    }
    for (note, count) in notes {
        let _ = writeln!(text, "Results without recorded conditions: {count}, {note}.");
    }
}

/// Returns the first field whose values differ, with both values.
fn find_difference(field: &str, stored: &Value, present: &Value) -> Option<String> {
    if let (Some(of_file), Some(of_build)) = (stored.as_object(), present.as_object()) {
        let names: BTreeSet<&String> = of_file.keys().chain(of_build.keys()).collect();
        return names.into_iter().find_map(|name| {
            find_difference(&format!("{field}.{name}"), &stored[name], &present[name])
        });
    }
    let is_different = stored != present;
    is_different.then(|| format!("{field} is {stored} in the file and {present} in this build"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::conditions::ConditionsMeter;

    use super::*;

    #[test]
    fn a_result_is_read_with_the_conditions_of_its_measurement() {
        let directory = tempfile::tempdir().unwrap();
        let mut files = ResultFiles::open_or_create(&directory.path().join("results")).unwrap();
        let settings = json!({ "seed": 1, "raft": { "learning_rate": "0.002" } });
        assert!(!files.contains("a.json"));
        let conditions = ConditionsMeter::start().finish();
        let expected = json!({ "conditions": conditions });
        files.write("a.json", settings.clone(), conditions, json!([0.1, 0.25])).unwrap();
        assert!(files.contains("a.json"));
        assert_eq!(files.read::<Vec<f64>>("a.json", &settings).unwrap(), [0.1, 0.25]);
        assert_eq!(json!(files.into_origins()["a.json"]), expected);
    }

    #[test]
    fn the_field_that_differs_is_named() {
        let stored = json!({ "seed": 1, "raft": { "epochs": 3, "cycles": 6 } });
        assert_eq!(find_difference("settings", &stored, &stored), None);
        let other = json!({ "seed": 1, "raft": { "cycles": 6 } });
        for (stored, present, expected) in [
            (&stored, &other, "settings.raft.epochs is 3 in the file and null in this build"),
            (&other, &stored, "settings.raft.epochs is null in the file and 3 in this build"),
        ] {
            assert_eq!(find_difference("settings", stored, present).as_deref(), Some(expected));
        }
    }

    #[test]
    fn a_file_of_another_format_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("a.json"), r#"{"version":"0.2.0","result":[]}"#).unwrap();
        let mut files = ResultFiles::open_or_create(directory.path()).unwrap();
        let error = files.read::<Value>("a.json", &json!({})).unwrap_err();
        assert!(error.to_string().ends_with("a.json: not a result of this build; delete the file"));
    }
}
