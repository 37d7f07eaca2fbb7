//! The spec that grows from the settings of a configuration.

use serde_json::Value;

use crate::{
    import_options::ImportOptions,
    setting::Setting,
    settings::ConfigSettings,
    spec_tree::{SpecTree, write_value},
    task::TrainingTask,
};

/// A spec that is being built, with the settings that it is built from.
pub(crate) struct SpecDraft<'a> {
    pub(crate) options: &'a ImportOptions<'a>,
    pub(crate) task: TrainingTask,
    pub(crate) settings: ConfigSettings,
    pub(crate) tree: SpecTree,
}

impl SpecDraft<'_> {
    /// Returns the path of a field in the task's section.
    pub(crate) fn field_path(&self, field: &str) -> String {
        format!("{}.{field}", self.task.section_name())
    }

    /// Sets a field of the spec to a setting's value, and notes it.
    pub(crate) fn set_field(&mut self, setting: Setting, field: &str, value: impl Into<Value>) {
        self.set_with_advice(setting, field, value, "");
    }

    /// Sets a field of the spec to a setting's value, and notes it with advice.
    pub(crate) fn set_with_advice(
        &mut self,
        setting: Setting,
        field: &str,
        value: impl Into<Value>,
        advice: &str,
    ) {
        let value = value.into();
        let shown = write_value(&value);
        let explanation = if advice.is_empty() { shown } else { format!("{shown}; {advice}") };
        self.settings.note_used(setting, field, &explanation);
        self.tree.set_value(field, value);
    }

    /// Sets the limit of an example's tokens, if it is given. A run skips longer examples; the note
    /// says so if the program cuts them.
    pub(crate) fn copy_max_tokens(&mut self, field: &str) {
        let Some(number) = self.settings.number_of(Setting::MaxTokens) else { return };
        let cuts = self.settings.cuts_examples();
        let advice = if cuts { "longer examples are skipped, not cut" } else { "" };
        self.set_with_advice(Setting::MaxTokens, field, number, advice);
    }

    /// Sets a field to the number of a setting, if it is given.
    pub(crate) fn copy_number(&mut self, setting: Setting, field: &str) {
        if let Some(number) = self.settings.number_of(setting) {
            self.set_field(setting, field, number);
        }
    }
}
