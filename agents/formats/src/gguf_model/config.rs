//! The settings of a file as a `config.json` would have them, then read as one.

use serde_json::{Map, Value as Json, json};

use super::GgufModelError;
use crate::convert::{ROPE_FACTORS, rope_factors};
use crate::gguf::{File, Value};
use crate::{Architecture, Config, Element};

pub(super) fn config(file: &File) -> Result<Config, GgufModelError> {
    let refuse =
        |field, what: String| Err(GgufModelError::Field { path: file.path().into(), field, what });
    let kind = file.field("general.type").and_then(Value::as_str).unwrap_or("model");
    if kind != "model" {
        return refuse("general.type", format!("is {kind}, expected model"));
    }
    let Some(name) = file.field("general.architecture").and_then(Value::as_str) else {
        return refuse("general.architecture", "is missing".into());
    };
    let known = Architecture::ALL.into_iter().find(|known| known.model_type() == name);
    let Some(architecture) = known else {
        let what = format!("is {name}, which only llama.cpp runs (--engine llama.cpp)");
        return refuse("general.architecture", what);
    };
    let field = |end: &str| file.field(&format!("{name}.{end}"));
    match field("rope.scaling.type").and_then(Value::as_str) {
        None | Some("none") => {}
        Some(other) => {
            let what = format!("is {other}, which only llama.cpp runs (--engine llama.cpp)");
            return refuse("rope.scaling.type", what);
        }
    }
    let config = Config::from_json(&settings(file, architecture, field), file.path())?;
    check_rope(file, config)
}

fn settings<'a>(
    file: &File,
    architecture: Architecture,
    field: impl Fn(&str) -> Option<&'a Value>,
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
        map.extend(field(end).and_then(Value::as_u64).map(|size| (name.to_owned(), json!(size))));
    }
    for (name, end) in
        [("rms_norm_eps", "attention.layer_norm_rms_epsilon"), ("rope_theta", "rope.freq_base")]
    {
        let exact = field(end).map(in_short_digits);
        map.extend(exact.flatten().map(|number| (name.to_owned(), json!(number))));
    }
    let rows = |name: &str| Some(file.tensor(name)?.shape.first().copied()).flatten();
    map.insert("vocab_size".into(), json!(rows("token_embd.weight")));
    map.insert("model_type".into(), json!(architecture.model_type()));
    map.insert("tie_word_embeddings".into(), json!(file.tensor("output.weight").is_none()));
    let biased = file.tensor("blk.0.attn_q.bias").is_some();
    if architecture != Architecture::Qwen2 {
        map.insert("attention_bias".into(), json!(biased));
    }
    let mut ends: Vec<u64> = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"]
        .into_iter()
        .filter_map(|name| file.field(name)?.as_u64())
        .collect();
    ends.dedup();
    map.insert("eos_token_id".into(), json!(ends));
    map.extend(file.tensor(ROPE_FACTORS).and_then(|_| rope(file)));
    map
}

/// 1e-6 is 1e-6 here, not the double that is nearest to the float.
fn in_short_digits(value: &Value) -> Option<f64> {
    match value {
        Value::F32(number) => number.to_string().parse().ok(),
        other => other.as_f64(),
    }
}

/// A file has what the frequencies are divided by, and not what that follows from: it is taken
/// for Llama 3's own, which [`check_rope`] holds against the file.
fn rope(file: &File) -> Option<(String, Json)> {
    let factor = factors(file)?.into_iter().fold(1.0, f32::max);
    let scaling = json!({
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    Some(("rope_scaling".into(), scaling))
}

fn factors(file: &File) -> Option<Vec<f32>> {
    let tensor = file.tensor(ROPE_FACTORS)?;
    let size = tensor.range.end - tensor.range.start;
    // A head's: anything longer is none of these.
    let mut bytes = vec![0; usize::try_from(size).ok().filter(|size| *size <= 1 << 20)?];
    file.read(tensor, 0, &mut bytes).ok()?;
    let mut values = Vec::new();
    Element::F32.decode(&bytes, &mut values);
    Some(values)
}

fn check_rope(file: &File, config: Config) -> Result<Config, GgufModelError> {
    let Some(found) = factors(file) else { return Ok(config) };
    let expected = rope_factors(&config).unwrap_or_default();
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * b.abs();
    if found.len() == expected.len() && found.iter().zip(&expected).all(near) {
        return Ok(config);
    }
    let what = "is not Llama 3's scaling of 8192 positions; use the Hugging Face directory, or \
                llama.cpp (--engine llama.cpp)";
    Err(GgufModelError::Field { path: file.path().into(), field: ROPE_FACTORS, what: what.into() })
}
