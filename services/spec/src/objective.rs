//! The `raft.objective` setting: the loss that a cycle's training minimises.

use std::collections::BTreeMap;

use objective::{Objective, ObjectiveName, Requirement, SettingError, SettingKey};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use wire::v1;

use crate::error::FieldError;
use crate::field_checks::ensure_field;
use crate::yaml::describe_choice;

/// An objective's name, or its name with settings.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(untagged, expecting = "expected an objective such as dr_grpo, or {dapo: {kl: 0.001}}")]
pub enum ObjectiveSpec {
    Name(String),
    Settings(BTreeMap<String, BTreeMap<String, f64>>),
}

impl Default for ObjectiveSpec {
    fn default() -> Self {
        Self::Name(ObjectiveName::Raft.as_str().to_owned())
    }
}

/// The other settings of a run on which an objective depends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ObjectiveContext {
    pub(crate) samples_per_prompt: u32,
    pub(crate) max_new_tokens: u32,
    /// The samples of a cycle are drawn by the weights from which its training starts.
    pub(crate) is_on_policy: bool,
    /// Samples of earlier cycles are trained on again.
    pub(crate) replays: bool,
    /// Samples have the log-probability of each token.
    pub(crate) has_token_logprobs: bool,
    pub(crate) has_verifier: bool,
    pub(crate) has_teacher: bool,
}

impl ObjectiveContext {
    /// Requires a teacher for distillation, and the drawn tokens that it scores.
    fn check_teacher(&self, field: &str, objective: &Objective) -> Result<(), FieldError> {
        let name = objective.name().as_str();
        if !objective.uses_teacher() {
            let remedy = format!("must be left out: {name} learns from none; distillation does");
            return ensure_field(!self.has_teacher, "raft.teacher", remedy);
        }
        ensure_field(
            self.has_teacher,
            field,
            format!(
                "{name} needs the log-probabilities of a teacher; set `raft.teacher: {{model: …}}`"
            ),
        )?;
        ensure_field(
            self.has_token_logprobs,
            field,
            format!("{name} needs the tokens that were drawn; set `raft.token_logprobs: true`"),
        )
    }
}

impl ObjectiveSpec {
    fn parse(&self, max_new_tokens: u32) -> Result<Objective, SettingError> {
        let (name, settings) = match self {
            Self::Name(name) => (name.as_str(), None),
            Self::Settings(all) => all
                .first_key_value()
                .map_or(("", None), |(name, settings)| (name.as_str(), Some(settings))),
        };
        let mut objective = Objective::new(ObjectiveName::find(name)?);
        for (key, value) in settings.into_iter().flatten() {
            objective.set(key, *value)?;
        }
        if objective.settings().any(|it| it == (SettingKey::MaxTokens, None)) {
            objective.set(SettingKey::MaxTokens.as_str(), f64::from(max_new_tokens))?;
        }
        objective.check_settings()?;
        Ok(objective)
    }

    /// Returns the objective, if the run has what it needs.
    pub(crate) fn check_fields(
        &self,
        field: &str,
        context: ObjectiveContext,
    ) -> Result<Objective, FieldError> {
        let is_one = !matches!(self, Self::Settings(all) if all.len() != 1);
        ensure_field(is_one, field, "must name one objective")?;
        let parsed = self.parse(context.max_new_tokens);
        let mut objective = parsed.map_err(|error| explain_setting(field, error))?;
        let name = objective.name().as_str();
        context.check_teacher(field, &objective)?;
        objective.set_off_policy(!context.is_on_policy);
        ensure_field(
            context.has_token_logprobs || !objective.uses_drawn_logprobs(),
            field,
            format!(
                "{name} needs the log-probabilities with which the samples were drawn; set \
                 `raft.token_logprobs: true`{}",
                if context.is_on_policy {
                    ""
                } else {
                    ", or `staleness: 0` and `from_base: false`"
                }
            ),
        )?;
        let needs = objective.requirements();
        ensure_field(
            context.has_verifier || !needs.contains(&Requirement::Rewards),
            "raft.verifier",
            format!(
                "is missing: {name} learns from rewards; name the verifier that judges the \
                 samples, or use the objective ssd, dft or distillation"
            ),
        )?;
        if needs.contains(&Requirement::Groups) {
            ensure_field(
                context.samples_per_prompt > 1,
                "raft.samples_per_prompt",
                format!("must be at least 2: {name} compares the samples of a prompt"),
            )?;
        }
        ensure_field(
            !context.replays || objective.name() == ObjectiveName::Raft,
            "raft.selection.replay",
            format!("must be left out: {name} trains on samples of the present weights"),
        )?;
        Ok(objective)
    }

    /// Converts the setting to its form in the `spec` fact; `None` for `raft`.
    pub(crate) fn to_proto(
        &self,
        max_new_tokens: u32,
        is_on_policy: bool,
    ) -> Option<v1::Objective> {
        let mut objective = self.parse(max_new_tokens).ok()?;
        objective.set_off_policy(!is_on_policy);
        (objective.name() != ObjectiveName::Raft).then(|| objective.to_message())
    }
}

/// Names the setting at fault, and what it may be.
fn explain_setting(field: &str, error: SettingError) -> FieldError {
    let names = ObjectiveName::ALL.map(ObjectiveName::as_str);
    let (field, remedy) = match &error {
        SettingError::NoObjective { name, .. } => (field.to_owned(), describe_choice(name, &names)),
        SettingError::Unknown { objective, key, known } => {
            let known: Vec<&str> = known.split(", ").collect();
            (format!("{field}.{objective}"), format!("a key {}", describe_choice(key, &known)))
        }
        SettingError::OutOfRange { objective, key, value, min, max } => (
            format!("{field}.{objective}.{key}"),
            format!("must be from {min} to {max}, not {value}"),
        ),
        SettingError::Missing { .. } | SettingError::Excluded { .. } => {
            (field.to_owned(), format!("is not valid: {error}"))
        }
    };
    FieldError { field, remedy }
}

/// Describes the names of all objectives, and the settings of each with their ranges and defaults.
pub(crate) fn objective_schema(_: &mut SchemaGenerator) -> Schema {
    let names = ObjectiveName::ALL.map(ObjectiveName::as_str);
    let settings: Map<String, Value> = ObjectiveName::ALL
        .into_iter()
        .map(|it| (it.as_str().to_owned(), settings_schema(it)))
        .collect();
    json_schema!({
        "anyOf": [
            {
                "description": "The name of an objective, with the settings of its paper.",
                "type": "string",
                "enum": names,
            },
            {
                "description": "The name of an objective, with settings that replace its paper's.",
                "type": "object",
                "minProperties": 1,
                "maxProperties": 1,
                "additionalProperties": false,
                "properties": settings,
            },
        ],
    })
}

fn settings_schema(name: ObjectiveName) -> Value {
    let objective = Objective::new(name);
    let describe = |key: SettingKey, default: Option<f64>| {
        let (low, high) = key.range();
        let mut setting = json!({
            "description": key.meaning(),
            "type": "number",
            "minimum": low,
            "maximum": high,
        });
        if let Some(default) = default {
            setting["default"] = default.into();
        }
        setting
    };
    let mut settings: Map<String, Value> = objective
        .settings()
        .map(|(key, it)| (key.as_str().to_owned(), describe(key, it)))
        .collect();
    if settings.contains_key(SettingKey::ClipLow.as_str()) {
        let mut both = describe(SettingKey::ClipLow, None);
        both["description"] = "clip_low and clip_high at once".into();
        settings.insert("clip".to_owned(), both);
    }
    json!({
        "description": name.meaning(),
        "type": "object",
        "additionalProperties": false,
        "properties": settings,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: ObjectiveContext = ObjectiveContext {
        samples_per_prompt: 8,
        max_new_tokens: 64,
        is_on_policy: true,
        replays: false,
        has_token_logprobs: false,
        has_verifier: true,
        has_teacher: false,
    };

    fn read(yaml: &str) -> ObjectiveSpec {
        serde_saphyr::from_str(yaml).unwrap()
    }

    #[test]
    fn an_objective_is_a_name_or_a_name_with_settings() {
        assert_eq!(read("raft").to_proto(64, true), None);
        let dr_grpo = read("dr_grpo");
        assert!(dr_grpo.check_fields("raft.objective", CONTEXT).is_ok());
        assert_eq!(
            dr_grpo.to_proto(64, true).unwrap().settings,
            [("max_tokens".into(), 64.0)].into()
        );
        let dapo = read("{dapo: {kl: 0.001}}");
        assert!(dapo.check_fields("raft.objective", CONTEXT).is_ok());
        assert_eq!(dapo.to_proto(64, true).unwrap().settings, [("kl".into(), 0.001)].into());
    }

    #[test]
    fn what_a_run_lacks_for_an_objective_is_named() {
        let refused = |yaml: &str, context| {
            let error = read(yaml).check_fields("raft.objective", context).unwrap_err();
            format!("{}: {}", error.field, error.remedy)
        };
        let lonely = ObjectiveContext { samples_per_prompt: 1, ..CONTEXT };
        let stale = ObjectiveContext { is_on_policy: false, ..CONTEXT };
        let replaying = ObjectiveContext { replays: true, ..CONTEXT };
        let taught = ObjectiveContext { has_teacher: true, ..CONTEXT };
        let unjudged = ObjectiveContext { has_verifier: false, ..CONTEXT };
        for (yaml, context, expected) in [
            ("ppo", CONTEXT, "raft.objective: must be one of raft, ssd"),
            ("grppo", CONTEXT, "not grppo; did you mean grpo?"),
            ("{grpo: {gama: 1}}", CONTEXT, "raft.objective.grpo: a key must be one of clip_low, "),
            ("{grpo: {kl: -1}}", CONTEXT, "raft.objective.grpo.kl: must be from 0 to 1000, not -1"),
            ("{grpo: {}, rloo: {}}", CONTEXT, "must name one objective"),
            ("rloo", lonely, "raft.samples_per_prompt: must be at least 2"),
            ("grpo", stale, "staleness: 0"),
            ("dpo", replaying, "raft.selection.replay: must be left out"),
            ("distillation", CONTEXT, "raft.teacher: {model"),
            ("distillation", taught, "raft.token_logprobs: true"),
            ("ssd", taught, "raft.teacher: must be left out"),
            ("raft", unjudged, "raft.verifier: is missing"),
            ("{ssd: {mask_tokens: 2}}", CONTEXT, "raft.token_logprobs: true"),
        ] {
            let said = refused(yaml, context);
            assert!(said.contains(expected), "{said}");
        }
        assert!(read("rloo").check_fields("raft.objective", stale).is_ok());
        let recorded = ObjectiveContext { has_token_logprobs: true, ..taught };
        let without = ObjectiveContext { has_verifier: false, ..recorded };
        assert!(read("distillation").check_fields("raft.objective", without).is_ok());
        assert!(read("ssd").check_fields("raft.objective", unjudged).is_ok());
        let recorded = ObjectiveContext { has_token_logprobs: true, ..stale };
        assert!(
            read("grpo").check_fields("raft.objective", recorded).unwrap().uses_drawn_logprobs()
        );
        assert!(read("grpo").to_proto(64, false).unwrap().off_policy);
    }
}
