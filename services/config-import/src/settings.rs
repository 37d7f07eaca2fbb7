//! The settings that a configuration gives, with a note on each of its keys.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::{
    flat_config::FlatConfig,
    key_rules::{DataField, KeyAction, ProgramTable, is_off, is_one_of},
    report::{ImportError, ImportNote, KeyStatus},
    setting::{Setting, SettingValue, read_words},
    task::TrainingTask,
};

/// A setting's value, with the key that gives it.
#[derive(Debug)]
struct GivenSetting {
    key: String,
    value: SettingValue,
    origin: ValueOrigin,
}

/// The origin of a setting's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueOrigin {
    Key,
    /// The key is missing; the program's default is used.
    Default,
    /// The key is `null`, which is no limit. A run has one; the program's default is used.
    NoLimit,
}

/// Limits that a program does not have if their key is `null`.
const OPTIONAL_LIMITS: [Setting; 2] = [Setting::MaxTokens, Setting::MaxNewTokens];

/// The description of a data set: the keys of one section, with their texts.
pub(crate) type DataEntry = BTreeMap<DataField, (String, Vec<String>)>;

/// All settings of a configuration. Each key gets one note; a later note on it replaces the
/// earlier one.
pub(crate) struct ConfigSettings {
    program: &'static str,
    cuts_examples: bool,
    given: BTreeMap<Setting, GivenSetting>,
    /// Keys that are `null`, by their setting.
    null_keys: BTreeMap<Setting, String>,
    /// By the section of its keys, such as `datasets[0]`.
    data: BTreeMap<String, DataEntry>,
    eval_data: BTreeMap<String, DataEntry>,
    notes: BTreeMap<String, (KeyStatus, String)>,
    /// Keys by the field of the spec that they became.
    field_keys: BTreeMap<String, String>,
}

impl ConfigSettings {
    /// Reads the keys by the rules of a program. Fails if a value has another form than its
    /// setting.
    pub(crate) fn read(config: &FlatConfig<'_>, table: &ProgramTable) -> Result<Self, ImportError> {
        let mut settings = Self {
            program: table.program.title(),
            cuts_examples: table.cuts_examples,
            given: BTreeMap::new(),
            null_keys: BTreeMap::new(),
            data: BTreeMap::new(),
            eval_data: BTreeMap::new(),
            notes: BTreeMap::new(),
            field_keys: BTreeMap::new(),
        };
        let mut ranked: Vec<(usize, KeyAction, &String, &Value)> = Vec::new();
        for (key, value) in &config.keys {
            match table.find_rule(key) {
                Some((place, action)) => ranked.push((place, action, key, value)),
                None => settings.note_unknown(key, table),
            }
        }
        // Of two keys with one meaning, the one whose rule comes first counts.
        ranked.sort_by_key(|(place, _, key, _)| (*place, *key));
        for (_, action, key, value) in ranked {
            settings.add_key(config, key, value, action)?;
        }
        Ok(settings)
    }

    fn note_unknown(&mut self, key: &str, table: &ProgramTable) {
        let similar = match table.find_similar_key(key) {
            Some(similar) => format!("; did you mean {similar}?"),
            None => String::new(),
        };
        let program = self.program;
        self.add_note(key, KeyStatus::Unknown, format!("not a known key of {program}{similar}"));
    }

    fn add_key(
        &mut self,
        config: &FlatConfig<'_>,
        key: &str,
        value: &Value,
        action: KeyAction,
    ) -> Result<(), ImportError> {
        if value.is_null() {
            self.add_note(key, KeyStatus::Ignored, "it has no value".to_owned());
            if let KeyAction::Set(setting) = action {
                self.null_keys.entry(setting).or_insert_with(|| key.to_owned());
            }
            return Ok(());
        }
        let wrong = |expected| ImportError::Value {
            place: config.describe_place(key),
            expected,
            found: cut_text(&value.to_string()),
        };
        match action {
            KeyAction::Set(setting) => {
                let value = setting.parse_value(value).map_err(wrong)?;
                self.add_setting(setting, key, value);
            }
            KeyAction::Data(field) | KeyAction::EvalData(field) => {
                let texts = read_words(value).ok_or_else(|| wrong("a text, or a list of texts"))?;
                let is_training = matches!(action, KeyAction::Data(_));
                let sections = if is_training { &mut self.data } else { &mut self.eval_data };
                let entry = sections.entry(data_section(key).to_owned()).or_default();
                entry.entry(field).or_insert_with(|| (key.to_owned(), texts));
                self.note_unused(key);
            }
            KeyAction::Ignore(reason) => {
                self.add_note(key, KeyStatus::Ignored, reason.to_owned());
            }
            KeyAction::Expect(allowed, reason) => {
                let agrees = is_off(value) || is_one_of(value, allowed);
                let (status, explanation) = if agrees {
                    (KeyStatus::Ignored, "a run does the same")
                } else {
                    (KeyStatus::Differs, reason)
                };
                self.add_note(key, status, explanation.to_owned());
            }
        }
        Ok(())
    }

    fn add_setting(&mut self, setting: Setting, key: &str, value: SettingValue) {
        self.note_unused(key);
        let Some(first) = self.given.get(&setting) else {
            let given = GivenSetting { key: key.to_owned(), value, origin: ValueOrigin::Key };
            self.given.insert(setting, given);
            return;
        };
        let first_key = &first.key;
        let (status, explanation) = if first.value == value {
            (KeyStatus::Ignored, format!("{first_key} has the same meaning"))
        } else {
            (KeyStatus::Differs, format!("{first_key} has the same meaning and another value"))
        };
        self.add_note(key, status, explanation);
    }

    /// Notes a key that has not become a field of the spec so far.
    fn note_unused(&mut self, key: &str) {
        self.add_note(key, KeyStatus::Ignored, "it has no effect on such a run".to_owned());
    }

    /// Adds the program's defaults for settings that no key gives. They are noted once they are
    /// used.
    pub(crate) fn add_defaults(&mut self, table: &ProgramTable, task: TrainingTask) {
        for (setting, text) in table.default_values(task) {
            if self.given.contains_key(&setting) {
                continue;
            }
            let written = serde_json::from_str(text).unwrap_or_else(|_| Value::from(text));
            // Tests read every default of every table.
            if let (Some(key), Ok(value)) = (table.main_key(setting), setting.parse_value(&written))
            {
                let given = self.default_setting(setting, key, value);
                self.given.insert(setting, given);
            }
        }
    }

    fn default_setting(
        &self,
        setting: Setting,
        main_key: &str,
        value: SettingValue,
    ) -> GivenSetting {
        let null_key = self.null_keys.get(&setting);
        let origin = if null_key.is_some() && OPTIONAL_LIMITS.contains(&setting) {
            ValueOrigin::NoLimit
        } else {
            ValueOrigin::Default
        };
        let key = null_key.map_or(main_key, String::as_str).to_owned();
        GivenSetting { key, value, origin }
    }

    /// Returns true if the program cuts examples that are longer than its limit.
    pub(crate) fn cuts_examples(&self) -> bool {
        self.cuts_examples
    }

    pub(crate) fn has_key(&self, key: &str) -> bool {
        self.notes.contains_key(key)
    }

    /// Returns true if a key of the configuration gives the setting.
    pub(crate) fn is_written(&self, setting: Setting) -> bool {
        self.given.get(&setting).is_some_and(|given| given.origin == ValueOrigin::Key)
    }

    pub(crate) fn key_of(&self, setting: Setting) -> Option<&str> {
        self.given.get(&setting).map(|given| given.key.as_str())
    }

    fn value_of(&self, setting: Setting) -> Option<&SettingValue> {
        self.given.get(&setting).map(|given| &given.value)
    }

    pub(crate) fn text_of(&self, setting: Setting) -> Option<String> {
        match self.value_of(setting)? {
            SettingValue::Text(text) => Some(text.clone()),
            _ => None,
        }
    }

    /// Returns a name in lower case.
    pub(crate) fn word_of(&self, setting: Setting) -> Option<String> {
        self.text_of(setting).map(|text| text.to_ascii_lowercase())
    }

    pub(crate) fn words_of(&self, setting: Setting) -> Option<Vec<String>> {
        match self.value_of(setting)? {
            SettingValue::Words(words) => Some(words.clone()),
            _ => None,
        }
    }

    pub(crate) fn number_of(&self, setting: Setting) -> Option<f64> {
        match self.value_of(setting)? {
            SettingValue::Number(number) => Some(*number),
            _ => None,
        }
    }

    pub(crate) fn numbers_of(&self, setting: Setting) -> Option<Vec<f64>> {
        match self.value_of(setting)? {
            SettingValue::Numbers(numbers) => Some(numbers.clone()),
            _ => None,
        }
    }

    pub(crate) fn flag_of(&self, setting: Setting) -> Option<bool> {
        match self.value_of(setting)? {
            SettingValue::Flag(flag) => Some(*flag),
            _ => None,
        }
    }

    pub(crate) fn data_entries(&self) -> Vec<DataEntry> {
        self.data.values().cloned().collect()
    }

    /// Returns the descriptions of data sets to measure on, each with the training data of the
    /// same section.
    pub(crate) fn eval_entries(&self) -> Vec<(DataEntry, DataEntry)> {
        let training = |section: &String| self.data.get(section).cloned().unwrap_or_default();
        let entries = self.eval_data.iter();
        entries.map(|(section, entry)| (entry.clone(), training(section))).collect()
    }

    /// Notes that a setting became a field of the spec. `explanation` has the value, and
    /// hints.
    pub(crate) fn note_used(&mut self, setting: Setting, field: &str, explanation: &str) {
        let Some(given) = self.given.get(&setting) else { return };
        let key = given.key.clone();
        let (status, origin) = match given.origin {
            ValueOrigin::Key => (KeyStatus::Used, String::new()),
            ValueOrigin::Default => {
                (KeyStatus::Default, format!(" (the default of {})", self.program))
            }
            ValueOrigin::NoLimit => {
                (KeyStatus::Differs, "; null is no limit, but a run has one".to_owned())
            }
        };
        self.field_keys.insert(field.to_owned(), key.clone());
        self.add_note(&key, status, format!("{field}: {explanation}{origin}"));
    }

    /// Notes that a run treats a setting differently than the program, unless it is a default.
    pub(crate) fn note_differs(&mut self, setting: Setting, explanation: &str) {
        if self.is_written(setting) {
            self.note_setting(setting, KeyStatus::Differs, explanation);
        }
    }

    /// Notes that a setting has no effect, unless it is a default.
    pub(crate) fn note_ignored(&mut self, setting: Setting, explanation: &str) {
        if self.is_written(setting) {
            self.note_setting(setting, KeyStatus::Ignored, explanation);
        }
    }

    /// Notes a setting, also if it is a default.
    pub(crate) fn note_setting(&mut self, setting: Setting, status: KeyStatus, explanation: &str) {
        if let Some(key) = self.key_of(setting).map(str::to_owned) {
            self.add_note(&key, status, explanation.to_owned());
        }
    }

    pub(crate) fn add_note(&mut self, key: &str, status: KeyStatus, explanation: String) {
        self.notes.insert(key.to_owned(), (status, explanation));
    }

    /// Notes that a key became a field of the spec.
    pub(crate) fn note_field(&mut self, key: &str, field: &str, explanation: &str) {
        self.field_keys.insert(field.to_owned(), key.to_owned());
        self.add_note(key, KeyStatus::Used, format!("{field}: {explanation}"));
    }

    /// Returns the key that became a field of the spec.
    pub(crate) fn field_key(&self, field: &str) -> Option<&str> {
        self.field_keys.get(field).map(String::as_str)
    }

    /// Returns the notes, sorted by status and key.
    pub(crate) fn into_notes(self) -> Vec<ImportNote> {
        let note = |(key, (status, explanation))| ImportNote { status, key, explanation };
        let mut notes: Vec<ImportNote> = self.notes.into_iter().map(note).collect();
        notes.sort();
        notes
    }
}

/// Returns the section of a data set's key: `datasets[0]` for `datasets[0].type.field_system`.
fn data_section(key: &str) -> &str {
    match (key.find(']'), key.rsplit_once('.')) {
        (Some(end), _) => &key[..=end],
        (None, Some((section, _))) => section,
        (None, None) => "",
    }
}

/// The longest value that a message repeats, in characters.
const SHOWN_MAX: usize = 60;

pub(crate) fn cut_text(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
