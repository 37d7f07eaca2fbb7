//! PEFT's adapter directory: `adapter_config.json` and `adapter_model.safetensors`. Kinds of
//! adapters the engine does not compute are refused by the name of the setting that asks for them.

use super::{Adapter, AdapterError, LoraSpec, MAX_RANK, Module, Pair};
use crate::config::Config;
use crate::tensors::{self, TensorFileError};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const CONFIG_FILE: &str = "adapter_config.json";
const TENSOR_FILE: &str = "adapter_model.safetensors";
const PREFIX: &str = "base_model.model.";

/// The part of `adapter_config.json` that changes what the adapter computes.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    rank: usize,
    alpha: f64,
    rslora: bool,
    modules: BTreeSet<String>,
    rank_pattern: Map<String, Value>,
    alpha_pattern: Map<String, Value>,
}

impl Settings {
    pub(crate) fn plain(spec: &LoraSpec) -> Self {
        Self {
            rank: spec.rank,
            alpha: spec.alpha,
            rslora: spec.rslora,
            modules: spec.modules.iter().map(|module| module.name().to_owned()).collect(),
            rank_pattern: Map::new(),
            alpha_pattern: Map::new(),
        }
    }

    /// `rank` is the tensors' own, so `rank_pattern` needs no lookup.
    pub(crate) fn scale(&self, layer: usize, module: Module, rank: usize) -> f64 {
        let path = module.parameter(layer, "");
        let path = path.trim_end_matches('.');
        let special = self.alpha_pattern.iter().find(|(pattern, _)| matches(pattern, path));
        let alpha = special.and_then(|(_, value)| value.as_f64()).unwrap_or(self.alpha);
        let rank = rank as f64;
        alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    fn parse(map: &Map<String, Value>, path: &Path) -> Result<Self, AdapterError> {
        refuse_what_is_not_computed(map, path)?;
        let invalid = |field, found: &Value, expected| AdapterError::Invalid {
            path: path.into(),
            field,
            found: found.to_string(),
            expected,
        };
        let require = |field| {
            map.get(field).ok_or_else(|| AdapterError::Missing { path: path.into(), field })
        };
        let rank = require("r")?;
        let alpha = require("lora_alpha")?;
        let targets = map.get("target_modules").unwrap_or(&Value::Null);
        let modules = match targets {
            Value::Array(names) => names.iter().filter_map(Value::as_str).map(Into::into).collect(),
            Value::String(name) => BTreeSet::from([name.clone()]),
            _ => return Err(invalid("target_modules", targets, "a list of module names")),
        };
        let pattern =
            |field| map.get(field).and_then(Value::as_object).cloned().unwrap_or_default();
        let alpha_pattern: Map<String, Value> = pattern("alpha_pattern");
        for (name, value) in alpha_pattern.iter().chain(&pattern("rank_pattern")) {
            if !plain_pattern(name) || value.as_f64().is_none_or(|value| value == 0.0) {
                let (field, found) = ("alpha_pattern or rank_pattern".into(), name.clone());
                return Err(AdapterError::Unsupported { path: path.into(), field, found });
            }
        }
        Ok(Self {
            rank: rank
                .as_u64()
                .and_then(|rank| usize::try_from(rank).ok())
                .filter(|rank| (1..=MAX_RANK).contains(rank))
                .ok_or_else(|| invalid("r", rank, "a positive rank within reason"))?,
            alpha: alpha
                .as_f64()
                .filter(|alpha| *alpha != 0.0)
                .ok_or_else(|| invalid("lora_alpha", alpha, "a number other than 0"))?,
            rslora: map.get("use_rslora").and_then(Value::as_bool).unwrap_or(false),
            modules,
            rank_pattern: pattern("rank_pattern"),
            alpha_pattern,
        })
    }

    fn to_json(&self, base: &str) -> Value {
        json!({
            "alpha_pattern": self.alpha_pattern, "auto_mapping": null,
            "base_model_name_or_path": base, "bias": "none", "fan_in_fan_out": false,
            "inference_mode": true, "init_lora_weights": true, "layer_replication": null,
            "layers_pattern": null, "layers_to_transform": null, "lora_alpha": self.alpha,
            "lora_dropout": 0.0, "modules_to_save": null, "peft_type": "LORA", "r": self.rank,
            "rank_pattern": self.rank_pattern, "revision": null, "target_modules": self.modules,
            "task_type": "CAUSAL_LM", "use_dora": false, "use_rslora": self.rslora,
        })
    }
}

/// PEFT reads pattern keys as regular expressions over the end of a module's path; only plain
/// names are honoured here.
fn plain_pattern(pattern: &str) -> bool {
    pattern.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.')
}

fn matches(pattern: &str, path: &str) -> bool {
    path.strip_suffix(pattern).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Settings that must be absent, null, false or empty: each would change the arithmetic.
const REFUSED: [&str; 19] = [
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "arrow_config",
    "corda_config",
    "eva_config",
    "kasa_config",
    "loftq_config",
    "lora_ga_config",
    "monteclora_config",
    "velora_config",
    "megatron_config",
];

fn refuse_what_is_not_computed(map: &Map<String, Value>, path: &Path) -> Result<(), AdapterError> {
    let refuse = |field: &str, value: &Value| {
        let (field, found) = (field.to_owned(), value.to_string());
        Err(AdapterError::Unsupported { path: path.into(), field, found })
    };
    let field = |name| map.get(name).unwrap_or(&Value::Null);
    match field("peft_type").as_str() {
        Some("LORA") => {}
        _ => return refuse("peft_type", field("peft_type")),
    }
    if !matches!(field("bias").as_str(), None | Some("none")) {
        return refuse("bias", field("bias"));
    }
    match field("init_lora_weights") {
        Value::Null | Value::Bool(_) => {}
        Value::String(kind) if kind == "gaussian" => {}
        other => return refuse("init_lora_weights", other),
    }
    let empty = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        _ => false,
    };
    match REFUSED.iter().find(|name| !empty(field(name))) {
        Some(name) => refuse(name, field(name)),
        None => Ok(()),
    }
}

impl Adapter {
    /// Reads a PEFT adapter for a model of this shape.
    pub fn load(dir: &Path, config: &Config) -> Result<Self, AdapterError> {
        let path = dir.join(CONFIG_FILE);
        let text = std::fs::read_to_string(&path)
            .map_err(|source| AdapterError::File { path: path.clone(), source })?;
        let map = serde_json::from_str(&text)
            .map_err(|source| AdapterError::Json { path: path.clone(), source })?;
        let settings = Settings::parse(&map, &path)?;
        let path = dir.join(TENSOR_FILE);
        let mut found = tensors::read(&path)?;
        let mut pairs = BTreeMap::new();
        for layer in 0..config.layers {
            for module in Module::ALL {
                let name = |part| format!("{PREFIX}{}", module.parameter(layer, part));
                let (a_name, b_name) = (name("lora_A.weight"), name("lora_B.weight"));
                let Some(a) = found.remove(&a_name) else { continue };
                let Some(b) = found.remove(&b_name) else {
                    let missing = TensorFileError::Missing { path, name: b_name };
                    return Err(missing.into());
                };
                let (outputs, inputs) = module.shape(config);
                let rank = a.dims().first().copied().unwrap_or(0).clamp(1, MAX_RANK);
                for (tensor, name, expected) in
                    [(&a, a_name, [rank, inputs]), (&b, b_name, [outputs, rank])]
                {
                    if tensor.dims() != expected {
                        let (found, expected) = (tensor.dims().to_vec(), expected.to_vec());
                        let wrong = TensorFileError::Shape { path, name, found, expected };
                        return Err(wrong.into());
                    }
                }
                let scale = settings.scale(layer, module, rank);
                pairs.insert((layer, module), Pair { a, b, scale });
            }
        }
        match found.into_keys().next() {
            Some(name) => Err(AdapterError::UnknownTensor { path, name }),
            None if pairs.is_empty() => {
                let name = "any lora_A".to_owned();
                Err(TensorFileError::Missing { path, name }.into())
            }
            None => Ok(Self { pairs, settings }),
        }
    }

    /// Writes a directory that PEFT loads; `base` becomes `base_model_name_or_path`.
    pub fn save(&self, dir: &Path, base: &str) -> Result<(), AdapterError> {
        std::fs::create_dir_all(dir)
            .map_err(|source| AdapterError::File { path: dir.into(), source })?;
        let path = dir.join(CONFIG_FILE);
        std::fs::write(&path, format!("{:#}\n", self.settings.to_json(base)))
            .map_err(|source| AdapterError::File { path, source })?;
        let named =
            self.named().into_iter().map(|(name, tensor)| (format!("{PREFIX}{name}"), tensor));
        Ok(tensors::write(&dir.join(TENSOR_FILE), named)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(change: Value) -> Result<Settings, AdapterError> {
        let mut map = json!({
            "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"],
            "bias": "none", "use_dora": false, "rank_pattern": {}, "alpha_pattern": {},
            "loftq_config": {}, "modules_to_save": null,
        });
        let map = map.as_object_mut().unwrap();
        map.append(&mut change.as_object().unwrap().clone());
        Settings::parse(map, Path::new("adapter_config.json"))
    }

    #[test]
    fn the_scale_follows_rslora_and_alpha_pattern() {
        let scale = |change, layer, rank| parsed(change).unwrap().scale(layer, Module::Query, rank);
        assert_eq!(scale(json!({}), 0, 8), 2.0);
        assert_eq!(scale(json!({}), 0, 4), 4.0);
        assert_eq!(scale(json!({"use_rslora": true}), 0, 4), 8.0);
        let pattern = json!({"alpha_pattern": {"layers.1.self_attn.q_proj": 4.0, "v_proj": 1.0}});
        assert_eq!(scale(pattern.clone(), 0, 8), 2.0);
        assert_eq!(scale(pattern.clone(), 1, 8), 0.5);
        assert_eq!(scale(pattern, 11, 8), 2.0);
    }

    #[test]
    fn adapters_of_other_kinds_are_refused_by_name() {
        for (field, value) in [
            ("peft_type", json!("LOHA")),
            ("use_dora", json!(true)),
            ("bias", json!("lora_only")),
            ("modules_to_save", json!(["lm_head"])),
            ("init_lora_weights", json!("pissa")),
            ("layer_replication", json!([[0, 4]])),
            ("fan_in_fan_out", json!(true)),
            ("r", json!(0)),
            ("lora_alpha", json!("big")),
            ("alpha_pattern", json!({"^model.*": 3})),
        ] {
            let error = parsed(json!({field: value})).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
