//! Translates the settings of a GGUF file into the fields of a `config.json` and parses those.

use serde_json::{Map, Value as Json, json};

use super::GgufModelError;
use crate::convert::{ROPE_FACTORS, rope_factors};
use crate::gguf::{GgufFile, GgufValue};
use crate::{Architecture, FloatDtype, ModelConfig};

pub(super) fn read_config(file: &GgufFile) -> Result<ModelConfig, GgufModelError> {
    let refuse = |field, what: String| {
        Err(GgufModelError::Field { path: file.file_path().into(), field, what })
    };
    let kind = file.find_field("general.type").and_then(GgufValue::as_str).unwrap_or("model");
    if kind != "model" {
        return refuse("general.type", format!("is {kind}, expected model"));
    }
    let Some(name) = file.find_field("general.architecture").and_then(GgufValue::as_str) else {
        return refuse("general.architecture", "is missing".into());
    };
    // Mistral's files are those of Llama.
    let known = Architecture::list_embedded().find(|known| known.model_type() == name);
    let Some(architecture) = known else {
        let what = format!("is {name}, which only llama.cpp runs (--engine llama.cpp)");
        return refuse("general.architecture", what);
    };
    let field = |end: &str| file.find_field(&format!("{name}.{end}"));
    match field("rope.scaling.type").and_then(GgufValue::as_str) {
        None | Some("none") => {}
        Some(other) => {
            let what = format!("is {other}, which only llama.cpp runs (--engine llama.cpp)");
            return refuse("rope.scaling.type", what);
        }
    }
    let config =
        ModelConfig::from_json(&config_fields(file, architecture, field), file.file_path())?;
    check_rope_factors(file, config)
}

/// Builds the `config.json`. `field` finds a setting of the architecture by the end of its name.
fn config_fields<'a>(
    file: &GgufFile,
    architecture: Architecture,
    field: impl Fn(&str) -> Option<&'a GgufValue>,
) -> Map<String, Json> {
    let mut map = Map::new();
    for (name, end) in [
        ("num_hidden_layers", "block_count"),
        ("max_position_embeddings", "context_length"),
        ("hidden_size", "embedding_length"),
        ("intermediate_size", "feed_forward_length"),
        ("num_attention_heads", "attention.head_count"),
        ("num_key_value_heads", "attention.head_count_kv"),
        ("head_dim", "attention.key_length"),
    ] {
        map.extend(
            field(end).and_then(GgufValue::as_u64).map(|size| (name.to_owned(), json!(size))),
        );
    }
    for (name, end) in
        [("rms_norm_eps", "attention.layer_norm_rms_epsilon"), ("rope_theta", "rope.freq_base")]
    {
        let exact = field(end).map(to_short_f64);
        map.extend(exact.flatten().map(|number| (name.to_owned(), json!(number))));
    }
    let rows = |name: &str| Some(file.find_tensor(name)?.shape.first().copied()).flatten();
    map.insert("vocab_size".into(), json!(rows("token_embd.weight")));
    map.insert("model_type".into(), json!(architecture.model_type()));
    map.insert("tie_word_embeddings".into(), json!(file.find_tensor("output.weight").is_none()));
    let biased = file.find_tensor("blk.0.attn_q.bias").is_some();
    if architecture != Architecture::Qwen2 {
        map.insert("attention_bias".into(), json!(biased));
    }
    let mut ends: Vec<u64> = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"]
        .into_iter()
        .filter_map(|name| file.find_field(name)?.as_u64())
        .collect();
    ends.dedup();
    map.insert("eos_token_id".into(), json!(ends));
    map.extend(file.find_tensor(ROPE_FACTORS).and_then(|_| rope_scaling_field(file)));
    map
}

/// Returns the shortest `f64` that prints the same: the `f32` 1e-6 becomes 1e-6, not the nearest
/// double.
fn to_short_f64(value: &GgufValue) -> Option<f64> {
    match value {
        GgufValue::F32(number) => number.to_string().parse().ok(),
        other => other.as_f64(),
    }
}

/// A GGUF file contains the divisors of the frequencies, not the parameters that they follow from:
/// Llama 3's are assumed, and [`check_rope_factors`] compares the result with the file.
fn rope_scaling_field(file: &GgufFile) -> Option<(String, Json)> {
    let factor = read_rope_factors(file)?.into_iter().fold(1.0, f32::max);
    let scaling = json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    Some(("rope_scaling".into(), scaling))
}

/// Returns `None` if the file has none or they cannot be read.
fn read_rope_factors(file: &GgufFile) -> Option<Vec<f32>> {
    let tensor = file.find_tensor(ROPE_FACTORS)?;
    let size = tensor.range.end - tensor.range.start;
    // There is one divisor for each half of a head: a longer tensor is something else.
    let mut bytes = vec![0; usize::try_from(size).ok().filter(|size| *size <= 1 << 20)?];
    file.read(tensor, 0, &mut bytes).ok()?;
    let mut values = Vec::new();
    FloatDtype::F32.decode_floats(&bytes, &mut values);
    Some(values)
}

/// Checks the divisors in the file within a relative error of 1e-4.
fn check_rope_factors(file: &GgufFile, config: ModelConfig) -> Result<ModelConfig, GgufModelError> {
    let Some(found) = read_rope_factors(file) else { return Ok(config) };
    let expected = rope_factors(&config).unwrap_or_default();
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * b.abs();
    if found.len() == expected.len() && found.iter().zip(&expected).all(near) {
        return Ok(config);
    }
    let what = "is not Llama 3's scaling of 8192 positions; use the Hugging Face directory, or \
                llama.cpp (--engine llama.cpp)";
    Err(GgufModelError::Field {
        path: file.file_path().into(),
        field: ROPE_FACTORS,
        what: what.into(),
    })
}
