//! Settings of the table's architectures that PyTorch and llama.cpp compute, and llama.cpp's own
//! converters write, but not the native conversion. Those converters ignore others, such as
//! windows, so that llama.cpp would compute something else.

use serde_json::{Map, Value, json};

use crate::Architecture;

/// Biases that llama.cpp loads, with the architectures for which it does.
const BIASES: [(&str, &[Architecture]); 2] = [
    ("mlp_bias", &[Architecture::Llama, Architecture::Granite]),
    ("attention_bias", &[Architecture::Granite]),
];

/// The objects of which one has the rope's settings.
const ROPE_OBJECTS: [&str; 2] = ["rope_parameters", "rope_scaling"];

/// The rope's settings that llama.cpp computes as transformers does.
const ROPE_FIELDS: [&str; 7] = [
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
];

/// Returns the object of a `config.json` with the usual values in place of such settings: biases,
/// and positions that are stretched linearly or by YaRN.
pub(crate) fn replace_upstream_settings(
    map: &Map<String, Value>,
    architecture: Architecture,
) -> Map<String, Value> {
    let mut usual = map.clone();
    for (field, architectures) in BIASES {
        if architectures.contains(&architecture) && map.get(field) == Some(&Value::Bool(true)) {
            usual.insert(field.to_owned(), Value::Bool(false));
        }
    }
    let is_there = |field: &&str| map.get(*field).is_some_and(Value::is_object);
    let objects: Vec<&str> = ROPE_OBJECTS.into_iter().filter(is_there).collect();
    // Gemma 3 and Phi-3 have ropes of their own.
    let has_one_rope = !matches!(architecture, Architecture::Gemma3 | Architecture::Phi3);
    if let ([field], true) = (objects.as_slice(), has_one_rope)
        && let Some(rope) = usual.get_mut(*field).and_then(Value::as_object_mut)
        && is_stretched(rope)
    {
        rope.remove("type");
        rope.insert("rope_type".to_owned(), json!("default"));
    }
    usual
}

/// Returns true for a rope whose positions are divided by a factor, for all frequencies or as YaRN
/// does.
fn is_stretched(rope: &Map<String, Value>) -> bool {
    let kind = rope.get("rope_type").or_else(|| rope.get("type")).and_then(Value::as_str);
    let has_start = || rope.get("original_max_position_embeddings").is_some_and(Value::is_u64);
    let is_known = match kind {
        Some("linear") => true,
        Some("yarn") => has_start(),
        _ => false,
    };
    let factor = rope.get("factor").and_then(Value::as_f64);
    let is_usable = factor.is_some_and(|factor| factor.is_finite() && factor >= 1.0);
    is_known && is_usable && rope.keys().all(|field| ROPE_FIELDS.contains(&field.as_str()))
}
