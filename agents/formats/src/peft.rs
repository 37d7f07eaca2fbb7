//! PEFT's adapter directory: `adapter_config.json` and `adapter_model.safetensors`. Kinds of
//! adapters that are not plain LoRA are refused by the name of the setting that asks for them, and
//! so is every setting that is unknown here and says something.

mod pattern;

use crate::{LoraSpec, Module};
use pattern::{Ordered, Pattern};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};

pub const CONFIG_FILE: &str = "adapter_config.json";
pub const TENSOR_FILE: &str = "adapter_model.safetensors";
/// Before a base model's own names.
pub const PREFIX: &str = "base_model.model.";
pub const MAX_RANK: usize = 1 << 14;

/// Of a configuration, whose patterns may have a line a module.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
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

/// The part of `adapter_config.json` that changes what the adapter computes.
#[derive(Debug, Clone)]
pub struct Settings {
    rank: usize,
    alpha: f64,
    rslora: bool,
    /// As they are written: which modules an adapter has, its tensors say.
    targets: BTreeMap<&'static str, Value>,
    rank_pattern: Pattern,
    alpha_pattern: Pattern,
}

/// Say which modules carry a pair.
const TARGETS: [&str; 4] =
    ["target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"];

impl Settings {
    pub fn plain(spec: &LoraSpec) -> Self {
        let modules: BTreeSet<&str> = spec.modules.iter().map(|module| module.name()).collect();
        Self {
            rank: spec.rank,
            alpha: spec.alpha,
            rslora: spec.rslora,
            targets: BTreeMap::from([("target_modules", json!(modules))]),
            rank_pattern: Pattern::default(),
            alpha_pattern: Pattern::default(),
        }
    }

    /// The rank a module's pair must have.
    pub fn rank(&self, layer: usize, module: Module) -> usize {
        self.rank_at(&path(layer, module))
    }

    /// What the product of a module's pair, which has this rank, is multiplied by.
    pub fn scale(&self, layer: usize, module: Module, rank: usize) -> f64 {
        self.scale_at(&path(layer, module), rank)
    }

    /// Of the module of that path in the base model, which need not be in a layer.
    pub fn rank_at(&self, path: &str) -> usize {
        self.rank_pattern.of(path).and_then(rank).unwrap_or(self.rank)
    }

    /// See [`Self::rank_at`].
    pub fn scale_at(&self, path: &str, rank: usize) -> f64 {
        let alpha = self.alpha_pattern.of(path).and_then(alpha).unwrap_or(self.alpha);
        let rank = rank as f64;
        alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Reads `adapter_config.json` of an adapter's directory.
    pub fn load(dir: &Path) -> Result<Self, SettingsError> {
        let path = dir.join(CONFIG_FILE);
        let mut text = String::new();
        std::fs::File::open(&path)
            .and_then(|file| file.take(CONFIG_BYTES_MAX).read_to_string(&mut text))
            .map_err(|source| SettingsError::File { path: path.clone(), source })?;
        Self::parse(&text, &path)
    }

    /// `path` is named in errors.
    pub fn parse(text: &str, path: &Path) -> Result<Self, SettingsError> {
        let json = |source| SettingsError::Json { path: path.into(), source };
        let map: Map<String, Value> = serde_json::from_str(text).map_err(json)?;
        refuse_what_is_not_computed(&map, path)?;
        let patterns: Patterns = serde_json::from_str(text).map_err(json)?;
        let invalid = |field, found: &Value, expected| SettingsError::Invalid {
            path: path.into(),
            field,
            found: found.to_string(),
            expected,
        };
        let require = |field| {
            map.get(field).ok_or_else(|| SettingsError::Missing { path: path.into(), field })
        };
        let (found_rank, found_alpha) = (require("r")?, require("lora_alpha")?);
        let modules = map.get("target_modules").unwrap_or(&Value::Null);
        if !modules.is_array() && !modules.is_string() {
            return Err(invalid("target_modules", modules, "module names or an expression"));
        }
        let target = |name: &&'static str| Some((*name, ordered(map.get(*name)?)));
        let is_rank = |value: &Value| rank(value).is_some();
        let is_alpha = |value: &Value| alpha(value).is_some();
        Ok(Self {
            rank: rank(found_rank)
                .ok_or_else(|| invalid("r", found_rank, "a positive rank within reason"))?,
            alpha: alpha(found_alpha)
                .ok_or_else(|| invalid("lora_alpha", found_alpha, "a number other than 0"))?,
            rslora: map.get("use_rslora").and_then(Value::as_bool).unwrap_or(false),
            targets: TARGETS.iter().filter_map(target).collect(),
            rank_pattern: pattern("rank_pattern", patterns.rank_pattern, is_rank, path)?,
            alpha_pattern: pattern("alpha_pattern", patterns.alpha_pattern, is_alpha, path)?,
        })
    }

    /// The text of an `adapter_config.json` with which PEFT loads the adapter; `base` becomes
    /// `base_model_name_or_path`.
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
        let mut fields: BTreeMap<String, Field<'_>> =
            plain.into_iter().map(|(name, value)| (name, Field::Plain(value))).collect();
        // Older releases of PEFT do not know it.
        if let Some(excluded) = self.targets.get("exclude_modules").filter(|one| !one.is_null()) {
            fields.insert("exclude_modules".into(), Field::Plain(excluded.clone()));
        }
        for (name, pattern) in
            [("rank_pattern", &self.rank_pattern), ("alpha_pattern", &self.alpha_pattern)]
        {
            fields.insert(name.into(), Field::Pattern(pattern.written()));
        }
        let text = serde_json::to_string_pretty(&fields).expect("text keys and plain values");
        text + "\n"
    }
}

#[derive(Deserialize)]
struct Patterns {
    #[serde(default)]
    rank_pattern: Ordered,
    #[serde(default)]
    alpha_pattern: Ordered,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Field<'a> {
    Plain(Value),
    Pattern(&'a Ordered),
}

/// From the base model's root, as PEFT matches it.
fn path(layer: usize, module: Module) -> String {
    format!("model.layers.{layer}.{}", module.path())
}

fn rank(value: &Value) -> Option<usize> {
    let rank = value.as_u64().and_then(|rank| usize::try_from(rank).ok());
    rank.filter(|rank| (1..=MAX_RANK).contains(rank))
}

fn alpha(value: &Value) -> Option<f64> {
    value.as_f64().filter(|alpha| *alpha != 0.0)
}

/// PEFT writes sets in any order; equal adapters are to be equal files.
fn ordered(value: &Value) -> Value {
    let mut value = value.clone();
    if let Some(items) = value.as_array_mut()
        && items.iter().all(Value::is_string)
    {
        items.sort_by(|a, b| a.as_str().cmp(&b.as_str()));
    }
    value
}

fn pattern(
    field: &str,
    written: Ordered,
    is_sane: impl Fn(&Value) -> bool,
    path: &Path,
) -> Result<Pattern, SettingsError> {
    let refuse =
        |found| SettingsError::Unsupported { path: path.into(), field: field.into(), found };
    if let Some((key, value)) = written.0.iter().find(|(_, value)| !is_sane(value)) {
        return Err(refuse(format!("{key}: {value}")));
    }
    Pattern::new(written).map_err(refuse)
}

/// Settings that say nothing about what a loaded adapter computes, or are read above. Every other
/// must be absent, null, false or empty.
const READ_OR_HARMLESS: [&str; 23] = [
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

fn refuse_what_is_not_computed(map: &Map<String, Value>, path: &Path) -> Result<(), SettingsError> {
    let refuse = |field: &str, value: &Value| {
        let (field, found) = (field.to_owned(), value.to_string());
        Err(SettingsError::Unsupported { path: path.into(), field, found })
    };
    let field = |name| map.get(name).unwrap_or(&Value::Null);
    match field("peft_type").as_str() {
        Some("LORA") => {}
        _ => return refuse("peft_type", field("peft_type")),
    }
    if !matches!(field("bias").as_str(), None | Some("none")) {
        return refuse("bias", field("bias"));
    }
    // The others change the base's weights, or need to know them.
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
        !READ_OR_HARMLESS.contains(&name.as_str()) && !is_empty(value)
    };
    match map.iter().find(matters) {
        Some((name, value)) => refuse(name, value),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
