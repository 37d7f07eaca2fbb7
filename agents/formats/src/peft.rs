//! A PEFT adapter directory: `adapter_config.json` and `adapter_model.safetensors`. Only plain LoRA
//! is supported. Any other kind of adapter is refused with the name of the setting that asks for
//! it, and so is an unknown setting with a value that is not empty.

mod pattern;

use crate::{LayerModule, LoraSpec};
use pattern::{ModulePattern, OrderedObject};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};

pub const CONFIG_FILE: &str = "adapter_config.json";
pub const TENSOR_FILE: &str = "adapter_model.safetensors";
pub const BASE_NAME_PREFIX: &str = "base_model.model.";
/// The largest accepted rank of a LoRA pair.
pub const MAX_RANK: usize = 1 << 14;

/// Patterns may have an entry for each module.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

#[derive(Debug, thiserror::Error)]
pub enum AdapterSettingsError {
    #[error("could not read {path}; is it a PEFT adapter directory? (M101)")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{path} is not valid JSON (F106)")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{path}: field `{field}` is missing (M104)")]
    Missing { path: PathBuf, field: &'static str },
    #[error("{path}: field `{field}` is {found}, expected {expected} (M104)")]
    Invalid { path: PathBuf, field: &'static str, found: String, expected: &'static str },
    #[error("{path}: `{field}` = {found} is not supported; save the adapter as plain LoRA (M107)")]
    Unsupported { path: PathBuf, field: String, found: String },
}

/// The part of `adapter_config.json` that changes what the adapter computes: ranks and scales of
/// its LoRA pairs.
#[derive(Debug, Clone)]
pub struct AdapterSettings {
    /// For modules that no pattern matches.
    rank: usize,
    /// For modules that no pattern matches.
    alpha: f64,
    /// True to scale by alpha / sqrt(rank) instead of alpha / rank.
    rslora: bool,
    /// The fields that select modules, only to write them back: the tensors decide which modules
    /// have a pair.
    targets: BTreeMap<&'static str, Value>,
    rank_pattern: ModulePattern,
    alpha_pattern: ModulePattern,
}

const TARGET_FIELDS: [&str; 4] =
    ["target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"];

impl AdapterSettings {
    /// Creates the settings of a new adapter, without patterns.
    pub fn from_spec(spec: &LoraSpec) -> Self {
        let modules: BTreeSet<&str> =
            spec.modules.iter().map(|module| module.peft_name()).collect();
        Self {
            rank: spec.rank,
            alpha: spec.alpha,
            rslora: spec.rslora,
            targets: BTreeMap::from([("target_modules", json!(modules))]),
            rank_pattern: ModulePattern::default(),
            alpha_pattern: ModulePattern::default(),
        }
    }

    /// Returns the rank that the pair of a layer's module must have.
    pub fn module_rank(&self, layer: usize, module: LayerModule) -> usize {
        self.rank_at(&module_path(layer, module))
    }

    /// Returns the scale of the pair of a module, which has this rank.
    pub fn module_scale(&self, layer: usize, module: LayerModule, rank: usize) -> f64 {
        self.scale_at(&module_path(layer, module), rank)
    }

    /// Returns the rank of a pair. `path` is the module's path in the base model, also outside a
    /// layer.
    pub(crate) fn rank_at(&self, path: &str) -> usize {
        self.rank_pattern.value_for(path).and_then(parse_rank).unwrap_or(self.rank)
    }

    /// Returns the scale of a pair of this rank at the module's path in the base model.
    pub(crate) fn scale_at(&self, path: &str, rank: usize) -> f64 {
        let alpha = self.alpha_pattern.value_for(path).and_then(parse_alpha).unwrap_or(self.alpha);
        let rank = rank as f64;
        alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Returns true if all pairs have the same alpha, divided by their rank.
    pub fn has_one_scale(&self) -> bool {
        !self.rslora && self.alpha_pattern.as_written().0.is_empty()
    }

    /// Reads `adapter_config.json` of an adapter directory.
    pub fn from_dir(dir: &Path) -> Result<Self, AdapterSettingsError> {
        let path = dir.join(CONFIG_FILE);
        let mut text = String::new();
        std::fs::File::open(&path)
            .and_then(|file| file.take(CONFIG_BYTES_MAX).read_to_string(&mut text))
            .map_err(|source| AdapterSettingsError::File { path: path.clone(), source })?;
        Self::parse(&text, &path)
    }

    /// Parses an `adapter_config.json`. `path` is only named in errors.
    pub fn parse(text: &str, path: &Path) -> Result<Self, AdapterSettingsError> {
        let json = |source| AdapterSettingsError::Json { path: path.into(), source };
        let map: Map<String, Value> = serde_json::from_str(text).map_err(json)?;
        check_supported(&map, path)?;
        let patterns: AdapterPatterns = serde_json::from_str(text).map_err(json)?;
        let invalid = |field, found: &Value, expected| AdapterSettingsError::Invalid {
            path: path.into(),
            field,
            found: found.to_string(),
            expected,
        };
        let require = |field| {
            map.get(field).ok_or_else(|| AdapterSettingsError::Missing { path: path.into(), field })
        };
        let (found_rank, found_alpha) = (require("r")?, require("lora_alpha")?);
        let modules = map.get("target_modules").unwrap_or(&Value::Null);
        if !modules.is_array() && !modules.is_string() {
            return Err(invalid("target_modules", modules, "module names or an expression"));
        }
        let target = |name: &&'static str| Some((*name, sort_strings(map.get(*name)?)));
        let is_rank = |value: &Value| parse_rank(value).is_some();
        let is_alpha = |value: &Value| parse_alpha(value).is_some();
        Ok(Self {
            rank: parse_rank(found_rank)
                .ok_or_else(|| invalid("r", found_rank, "a positive rank within reason"))?,
            alpha: parse_alpha(found_alpha)
                .ok_or_else(|| invalid("lora_alpha", found_alpha, "a number other than 0"))?,
            rslora: map.get("use_rslora").and_then(Value::as_bool).unwrap_or(false),
            targets: TARGET_FIELDS.iter().filter_map(target).collect(),
            rank_pattern: build_pattern("rank_pattern", patterns.rank_pattern, is_rank, path)?,
            alpha_pattern: build_pattern("alpha_pattern", patterns.alpha_pattern, is_alpha, path)?,
        })
    }

    /// Returns the `adapter_config.json` with which PEFT loads the adapter. `base` becomes
    /// `base_model_name_or_path`. Equal settings give equal texts.
    pub fn to_text(&self, base: &str) -> String {
        let target = |name| self.targets.get(name).cloned().unwrap_or_default();
        let Value::Object(plain) = json!({
            "auto_mapping": null, "base_model_name_or_path": base, "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true, "init_lora_weights": true, "layer_replication": null,
            "layers_pattern": target("layers_pattern"),
            "layers_to_transform": target("layers_to_transform"), "lora_alpha": self.alpha,
            "lora_dropout": 0.0, "modules_to_save": null, "peft_type": "LORA", "r": self.rank,
            "revision": null, "target_modules": target("target_modules"),
            "task_type": "CAUSAL_LM", "use_dora": false, "use_rslora": self.rslora,
        }) else {
            unreachable!("the value above is an object");
        };
        let mut fields: BTreeMap<String, SettingField<'_>> =
            plain.into_iter().map(|(name, value)| (name, SettingField::Plain(value))).collect();
        // Older releases of PEFT do not know the field.
        if let Some(excluded) = self.targets.get("exclude_modules").filter(|one| !one.is_null()) {
            fields.insert("exclude_modules".into(), SettingField::Plain(excluded.clone()));
        }
        for (name, pattern) in
            [("rank_pattern", &self.rank_pattern), ("alpha_pattern", &self.alpha_pattern)]
        {
            fields.insert(name.into(), SettingField::Pattern(pattern.as_written()));
        }
        let text = serde_json::to_string_pretty(&fields).expect("text keys and plain values");
        text + "\n"
    }
}

/// Parsed separately to keep the order of their keys.
#[derive(Deserialize)]
struct AdapterPatterns {
    #[serde(default)]
    rank_pattern: OrderedObject,
    #[serde(default)]
    alpha_pattern: OrderedObject,
}

#[derive(Serialize)]
#[serde(untagged)]
enum SettingField<'a> {
    Plain(Value),
    Pattern(&'a OrderedObject),
}

/// Returns the path from the base model's root, against which PEFT matches its patterns.
fn module_path(layer: usize, module: LayerModule) -> String {
    format!("model.layers.{layer}.{}", module.layer_path())
}

/// Accepts 1 to [`MAX_RANK`].
fn parse_rank(value: &Value) -> Option<usize> {
    let rank = value.as_u64().and_then(|rank| usize::try_from(rank).ok());
    rank.filter(|rank| (1..=MAX_RANK).contains(rank))
}

/// Accepts any number but 0.
fn parse_alpha(value: &Value) -> Option<f64> {
    value.as_f64().filter(|alpha| *alpha != 0.0)
}

/// Sorts a list of strings. PEFT writes sets in any order, and equal adapters must give equal
/// files.
fn sort_strings(value: &Value) -> Value {
    let mut value = value.clone();
    if let Some(items) = value.as_array_mut()
        && items.iter().all(Value::is_string)
    {
        items.sort_by(|a, b| a.as_str().cmp(&b.as_str()));
    }
    value
}

/// Fails if a value is out of range, or a key is not a regular expression.
fn build_pattern(
    field: &str,
    written: OrderedObject,
    is_sane: impl Fn(&Value) -> bool,
    path: &Path,
) -> Result<ModulePattern, AdapterSettingsError> {
    let refuse =
        |found| AdapterSettingsError::Unsupported { path: path.into(), field: field.into(), found };
    if let Some((key, value)) = written.0.iter().find(|(_, value)| !is_sane(value)) {
        return Err(refuse(format!("{key}: {value}")));
    }
    ModulePattern::new(written).map_err(refuse)
}

/// Settings that do not change what a loaded adapter computes, or that [`AdapterSettings::parse`]
/// reads. Any other setting must be absent, null, false or empty.
const KNOWN_FIELDS: [&str; 23] = [
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
];

/// Checks that the adapter is plain LoRA; the error names the setting that is not.
fn check_supported(map: &Map<String, Value>, path: &Path) -> Result<(), AdapterSettingsError> {
    let refuse = |field: &str, value: &Value| {
        let (field, found) = (field.to_owned(), value.to_string());
        Err(AdapterSettingsError::Unsupported { path: path.into(), field, found })
    };
    let field = |name| map.get(name).unwrap_or(&Value::Null);
    match field("peft_type").as_str() {
        Some("LORA") => {}
        _ => return refuse("peft_type", field("peft_type")),
    }
    if !matches!(field("bias").as_str(), None | Some("none")) {
        return refuse("bias", field("bias"));
    }
    // The other initialisations change the base's weights, or must know them.
    match field("init_lora_weights") {
        Value::Null | Value::Bool(_) => {}
        Value::String(kind) if matches!(kind.as_str(), "gaussian" | "orthogonal") => {}
        other => return refuse("init_lora_weights", other),
    }
    let is_empty = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        _ => false,
    };
    let matters = |(name, value): &(&String, &Value)| {
        !KNOWN_FIELDS.contains(&name.as_str()) && !is_empty(value)
    };
    match map.iter().find(matters) {
        Some((name, value)) => refuse(name, value),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
