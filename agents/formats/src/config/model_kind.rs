//! Checks that a `config.json` describes a model of a supported architecture, whose own settings
//! change nothing that is not computed.

use std::borrow::Cow;
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::ModelConfigError;
use super::fields::{ConfigFields, MAX_POSITIONS};
use crate::Architecture;
use crate::architecture::ImageModel;

const MODEL_TYPE_BYTES_MAX: usize = 64;

impl<'a> ConfigFields<'a> {
    /// Returns the object of a model without images. Of a model with images it is that of the text
    /// part: the fields of `text_config`, those beside it, and what transformers assumes.
    pub(crate) fn read_text_part(&self) -> Result<Cow<'a, Map<String, Value>>, ModelConfigError> {
        let is_named =
            |model: &&ImageModel| self.get("model_type").is_some_and(|it| *it == model.model_type);
        let with_images =
            |text: Architecture| Some((text, text.traits().with_images.as_ref().filter(is_named)?));
        let Some((text, model)) = Architecture::ALL.into_iter().find_map(with_images) else {
            return Ok(Cow::Borrowed(self.map));
        };
        self.check_class(model.class_name)?;
        let part = self.nested_fields("text_config")?;
        let kind = part.and_then(|part| part.get("model_type"));
        if let Some(other) = kind.filter(|kind| **kind != text.model_type()) {
            return Err(self.unsupported_error("text_config.model_type", other, text.model_type()));
        }
        let defaults = model.text_defaults.iter();
        let mut fields: Map<String, Value> =
            defaults.map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        let of_part = part.into_iter().flat_map(|part| part.map);
        let named = self.map.iter().chain(of_part).filter(|(_, value)| !value.is_null());
        fields.extend(named.map(|(name, value)| (name.clone(), value.clone())));
        // transformers writes its default into the text part of a model that has other tokens.
        let end = self.get("eos_token_id").map(|end| ("eos_token_id".to_owned(), end.clone()));
        fields.extend(end);
        fields.insert("model_type".to_owned(), json!(text.model_type()));
        fields.insert("architectures".to_owned(), json!([text.class_name()]));
        Ok(Cow::Owned(fields))
    }
}

impl ConfigFields<'_> {
    /// Reads the architecture from `model_type` and checks that `architectures` agrees.
    pub(super) fn read_architecture(&self) -> Result<Architecture, ModelConfigError> {
        let Some(architecture) = self.find_architecture()? else {
            return Err(self.unknown_model_error(self.require_field("model_type")?));
        };
        self.check_class(architecture.class_name())?;
        Ok(architecture)
    }

    /// Checks that `architectures` names no other class.
    fn check_class(&self, class: &'static str) -> Result<(), ModelConfigError> {
        let classes = self.get("architectures").and_then(Value::as_array);
        match classes.and_then(|classes| classes.iter().find(|name| **name != class)) {
            Some(other) => Err(self.unsupported_error("architectures", other, class)),
            None => Ok(()),
        }
    }

    /// Returns the architecture of the table that `model_type` names; `None` for one outside of it.
    pub(crate) fn find_architecture(&self) -> Result<Option<Architecture>, ModelConfigError> {
        let found = self.require_field("model_type")?;
        Ok(Architecture::ALL.into_iter().find(|one| *found == one.model_type()))
    }

    /// Returns the `model_type` of a causal language model outside of the table, which PyTorch and
    /// llama.cpp's converters may know. Fails if it needs code of its directory, its weights are
    /// quantised, or it is no such model.
    pub(crate) fn read_other_model(&self) -> Result<String, ModelConfigError> {
        let found = self.require_field("model_type")?;
        // transformers reads one of these files instead, which may name code.
        if let Some(files) = self.get("configuration_files") {
            return Err(self.unsupported_error("configuration_files", files, "config.json alone"));
        }
        if let Some(settings) = self.get("quantization_config") {
            return Err(self.quantized_error(settings));
        }
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "_-.".contains(letter);
        let name = found.as_str().filter(|name| {
            (1..=MODEL_TYPE_BYTES_MAX).contains(&name.len()) && name.chars().all(is_plain)
        });
        let is_causal = |class: &Value| {
            let ends = ["ForCausalLM", "LMHeadModel"];
            class.as_str().is_some_and(|class| ends.iter().any(|end| class.ends_with(end)))
        };
        let classes = self.get("architectures").and_then(Value::as_array);
        let has_class =
            classes.is_some_and(|classes| !classes.is_empty() && classes.iter().all(is_causal));
        match name {
            Some(name) if has_class && self.get("auto_map").is_none() => Ok(name.to_owned()),
            _ => Err(self.unknown_model_error(found)),
        }
    }

    /// Names the supported architectures of the same family, or all of them.
    pub(crate) fn unknown_model_error(&self, found: &Value) -> ModelConfigError {
        let path = PathBuf::from(self.path);
        let found = found.as_str().map_or_else(|| found.to_string(), str::to_owned);
        let known = || Architecture::ALL.into_iter().map(Architecture::model_type);
        let family = family_name(&found);
        let mut nearest: Vec<&str> =
            known().filter(|name| !family.is_empty() && family_name(name) == family).collect();
        if nearest.is_empty() {
            nearest = known().collect();
        }
        let nearest = nearest.join(", ");
        let code = self.get("auto_map").and_then(Value::as_object);
        match code.and_then(|map| map.values().next()) {
            Some(code) => {
                // `modeling_x.Class`, possibly after the name of another repository and `--`.
                let class = code.as_str().or_else(|| code[0].as_str()).unwrap_or_default();
                let class = class.rsplit("--").next().unwrap_or_default();
                let code = match class.split_once('.') {
                    Some((module, _)) => format!("{module}.py"),
                    None => "a Python file".to_owned(),
                };
                ModelConfigError::OwnCode { path, code, nearest }
            }
            None => ModelConfigError::UnknownModel { path, found, nearest },
        }
    }

    /// Checks the settings that change what a model computes.
    pub(super) fn check_supported(
        &self,
        architecture: Architecture,
    ) -> Result<(), ModelConfigError> {
        let expected = architecture.traits().activation;
        for field in ["hidden_activation", "hidden_act"] {
            if let Some(found) = self.get(field) {
                if *found != expected {
                    return Err(self.unsupported_error(field, found, expected));
                }
                // Gemma's second field is of its first release.
                break;
            }
        }
        if self.read_flag("mlp_bias")? {
            return Err(self.unsupported_error("mlp_bias", &Value::Bool(true), "false"));
        }
        if !architecture.is_embedded() && self.read_flag("attention_bias")? {
            return Err(self.unsupported_error("attention_bias", &Value::Bool(true), "false"));
        }
        if let Some(settings) = self.get("quantization_config") {
            return Err(self.quantized_error(settings));
        }
        match architecture {
            Architecture::Gemma2 => self.check_local_layers(2),
            Architecture::Gemma3 => self.check_local_layers(6),
            Architecture::SmolLm3 => {
                self.check_rotated_layers()?;
                self.check_full_attention()
            }
            _ => self.check_full_attention(),
        }
    }

    fn quantized_error(&self, settings: &Value) -> ModelConfigError {
        let method = settings["quant_method"].as_str().unwrap_or("of an unnamed method");
        let name = self.get("_name_or_path").and_then(Value::as_str).unwrap_or_default();
        let original = if name.is_empty() { String::new() } else { format!(", of {name}") };
        ModelConfigError::Quantized { path: self.path.into(), method: method.to_owned(), original }
    }

    /// Checks that no layer uses a sliding window: by `layer_types` if it exists, by
    /// `use_sliding_window` otherwise. The size of a window is ignored, because files contain it
    /// even if no layer uses it.
    fn check_full_attention(&self) -> Result<(), ModelConfigError> {
        let Some(kinds) = self.read_layer_kinds()? else {
            return match self.read_flag("use_sliding_window")? {
                true => {
                    Err(self.unsupported_error("use_sliding_window", &Value::Bool(true), "false"))
                }
                false => Ok(()),
            };
        };
        match kinds.iter().find(|kind| **kind != "full_attention") {
            Some(other) => Err(self.unsupported_error("layer_types", other, "full_attention")),
            None => Ok(()),
        }
    }

    /// Checks that the last of every `period` layers is global and the others are local, which
    /// llama.cpp assumes.
    fn check_local_layers(&self, period: usize) -> Result<(), ModelConfigError> {
        let expected = if period == 2 {
            "sliding_attention and full_attention by turns"
        } else {
            "five times sliding_attention, then full_attention"
        };
        let pattern = self.get("sliding_window_pattern").or(self.get("_sliding_window_pattern"));
        if let Some(found) = pattern.filter(|found| **found != period) {
            return Err(self.unsupported_error("sliding_window_pattern", found, expected));
        }
        for (layer, kind) in self.read_layer_kinds()?.into_iter().flatten().enumerate() {
            let is_global = (layer + 1) % period == 0;
            let right = if is_global { "full_attention" } else { "sliding_attention" };
            if *kind != right {
                return Err(self.unsupported_error("layer_types", kind, expected));
            }
        }
        Ok(())
    }

    /// Checks that every fourth layer is not rotated, which llama.cpp assumes.
    fn check_rotated_layers(&self) -> Result<(), ModelConfigError> {
        let Some(rotated) = self.get("no_rope_layers").and_then(Value::as_array) else {
            return Ok(());
        };
        let differs = |(layer, one): (usize, &Value)| *one != u8::from((layer + 1) % 4 != 0);
        match rotated.iter().enumerate().any(differs) {
            true => Err(self.unsupported_error(
                "no_rope_layers",
                &Value::Array(rotated.clone()),
                "0 for every fourth layer, 1 for the others",
            )),
            false => Ok(()),
        }
    }

    fn read_layer_kinds(&self) -> Result<Option<&Vec<Value>>, ModelConfigError> {
        let Some(kinds) = self.get("layer_types") else { return Ok(None) };
        let refuse = || self.invalid_error("layer_types", kinds.to_string(), "a list of kinds");
        kinds.as_array().map(Some).ok_or_else(refuse)
    }

    /// Reads the size of a window that PyTorch computes and the other engines do not.
    pub(super) fn read_window(
        &self,
        architecture: Architecture,
    ) -> Result<Option<usize>, ModelConfigError> {
        let has_window = matches!(architecture, Architecture::Mistral | Architecture::Phi3);
        match self.get("sliding_window").filter(|_| has_window) {
            Some(_) => self.read_size("sliding_window", MAX_POSITIONS).map(Some),
            None => Ok(None),
        }
    }
}

/// Returns the letters before the first digit or sign: `gemma` of `gemma3_text`.
fn family_name(model_type: &str) -> &str {
    let end = model_type.find(|letter: char| !letter.is_ascii_alphabetic());
    &model_type[..end.unwrap_or(model_type.len())]
}
