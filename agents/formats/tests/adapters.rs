//! Adapters that llama.cpp's own converter gets wrong, and adapters that must be refused.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::fs;
use std::path::{Path, PathBuf};

use formats::convert::{self, ConversionDtype};
use formats::gguf::GgufFile;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

const VOCAB: usize = 6;
const HIDDEN: usize = 8;
const RANK: usize = 4;
const QUERY: &str = "model.layers.0.self_attn.q_proj";
const DOWN: &str = "model.layers.1.mlp.down_proj";

struct Case {
    directory: TempDir,
}

type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

impl Case {
    fn new(model_type: &str, change: Value, tensors: &Tensors) -> Self {
        let case = Self { directory: tempfile::tempdir().unwrap() };
        fs::create_dir(case.base()).unwrap();
        fs::create_dir(case.adapter()).unwrap();
        let config = json!({
            "model_type": model_type, "vocab_size": VOCAB, "hidden_size": HIDDEN,
            "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "max_position_embeddings": 64,
        });
        fs::write(case.base().join("config.json"), config.to_string()).unwrap();
        let mut settings = json!({
            "peft_type": "LORA", "r": RANK, "lora_alpha": 8, "bias": "none",
            "target_modules": ["q_proj", "down_proj"],
        });
        let settings = settings.as_object_mut().unwrap();
        settings.append(&mut change.as_object().unwrap().clone());
        let text = json!(settings).to_string();
        fs::write(case.adapter().join("adapter_config.json"), text).unwrap();
        write_safetensors(&case.adapter().join("adapter_model.safetensors"), tensors);
        case
    }

    fn base(&self) -> PathBuf {
        self.directory.path().join("base")
    }

    fn adapter(&self) -> PathBuf {
        self.directory.path().join("adapter")
    }

    fn converted(&self) -> GgufFile {
        let out = self.directory.path().join("out.gguf");
        convert::convert_lora(&self.base(), &self.adapter(), &out, ConversionDtype::F32).unwrap();
        GgufFile::open(&out).unwrap()
    }

    fn refusal(&self) -> String {
        let out = self.directory.path().join("out.gguf");
        let error =
            convert::convert_lora(&self.base(), &self.adapter(), &out, ConversionDtype::F32)
                .unwrap_err();
        let left: Vec<_> = fs::read_dir(self.directory.path()).unwrap().collect();
        assert_eq!(left.len(), 2, "nothing is left of a conversion that failed: {left:?}");
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text += &format!(": {cause}");
            source = cause.source();
        }
        text
    }
}

fn write_safetensors(path: &Path, tensors: &Tensors) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, shape, values) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let offsets = [start, data.len()];
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": offsets});
        header.insert(name.clone(), entry);
    }
    let header = json!(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    fs::write(path, file).unwrap();
}

fn pair(module: &str, outputs: usize, inputs: usize) -> Tensors {
    let count = |from: usize, many: usize| (from..from + many).map(|n| n as f32).collect();
    let name = |end: &str| format!("base_model.model.{module}.{end}.weight");
    vec![
        (name("lora_A"), vec![RANK, inputs], count(1, RANK * inputs)),
        (name("lora_B"), vec![outputs, RANK], count(100, outputs * RANK)),
    ]
}

fn both() -> Tensors {
    [pair(QUERY, HIDDEN, HIDDEN), pair(DOWN, HIDDEN, 12)].concat()
}

fn values(file: &GgufFile, name: &str) -> Vec<f32> {
    let tensor = file.find_tensor(name).unwrap_or_else(|| panic!("{name} is missing"));
    let mut bytes = vec![0; (tensor.range.end - tensor.range.start) as usize];
    file.read(tensor, 0, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

fn alpha(file: &GgufFile) -> f64 {
    file.find_field("adapter.lora.alpha").and_then(formats::gguf::GgufValue::as_f64).unwrap()
}

/// Returns the factor of llama.cpp for B A, and how much larger B is than PEFT's.
fn scales(case: &Case) -> [f64; 2] {
    let file = case.converted();
    let scale = alpha(&file) / RANK as f64;
    [("blk.0.attn_q.weight.lora_b"), ("blk.1.ffn_down.weight.lora_b")]
        .map(|name| scale * f64::from(values(&file, name)[0]) / 100.0)
}

#[test]
fn every_pair_is_scaled_as_peft_scales_it() {
    for (change, expected) in [
        (json!({}), [2.0, 2.0]),
        (json!({"use_rslora": true}), [4.0, 4.0]),
        (json!({"alpha_pattern": {"down_proj": 2}}), [2.0, 0.5]),
        (json!({"alpha_pattern": {"q_proj": 32}, "use_rslora": true}), [16.0, 4.0]),
    ] {
        let case = Case::new("qwen2", change.clone(), &both());
        assert_eq!(scales(&case), expected, "{change}");
    }
}

#[test]
fn what_reads_and_writes_tokens_is_converted_where_the_base_has_two_of_them() {
    let mut tensors = pair("lm_head", VOCAB, HIDDEN);
    let name = |end: &str| format!("base_model.model.model.embed_tokens.lora_embedding_{end}");
    let a = (0..RANK * VOCAB).map(|n| n as f32).collect();
    tensors.push((name("A"), vec![RANK, VOCAB], a));
    tensors.push((name("B"), vec![HIDDEN, RANK], vec![1.0; HIDDEN * RANK]));
    let file = Case::new("llama", json!({}), &tensors).converted();
    let a = file.find_tensor("token_embd.weight.lora_a").unwrap();
    assert_eq!(a.shape, [VOCAB as u64, RANK as u64]);
    assert_eq!(values(&file, &a.name)[..RANK], [0.0, 6.0, 12.0, 18.0]);
    assert!(file.find_tensor("output.weight.lora_b").is_some());
}

#[test]
fn adapters_that_would_be_converted_wrongly_are_refused_with_the_reason() {
    let with = |name: &str, shape: &[usize]| {
        let mut tensors = both();
        let count = shape.iter().product();
        tensors.push((format!("base_model.model.{name}"), shape.to_vec(), vec![1.0; count]));
        tensors
    };
    let plain = json!({});
    for (change, tensors, expected) in [
        (json!({"use_dora": true}), both(), "use_dora"),
        (json!({"modules_to_save": ["lm_head"]}), both(), "modules_to_save"),
        (json!({"init_lora_weights": "pissa"}), both(), "pissa"),
        (plain.clone(), with("x.lora_magnitude_vector", &[8]), "DoRA"),
        (plain.clone(), with("lm_head.weight", &[VOCAB, HIDDEN]), "whole weight"),
        (plain.clone(), with("model.layers.0.self_attn.q_proj.lora_B.bias", &[8]), "bias"),
        (plain.clone(), pair(QUERY, HIDDEN, 9), "trained on another base"),
        (plain.clone(), pair("model.layers.2.mlp.up_proj", 12, HIDDEN), "trained on another base"),
        (plain.clone(), pair("model.layers.0.mlp.experts", 12, HIDDEN), "trained on another base"),
        (plain.clone(), both()[..1].to_vec(), "no lora_B"),
        (plain.clone(), both()[1..].to_vec(), "no lora_A"),
        (plain.clone(), vec![("q.lora_A.weight".into(), vec![1], vec![1.0])], "is not PEFT's"),
    ] {
        let refusal = Case::new("qwen2", change, &tensors).refusal();
        assert!(refusal.contains(expected), "{refusal}");
    }
    let tied = Case::new("qwen2", plain, &pair("lm_head", VOCAB, HIDDEN));
    let config = fs::read_to_string(tied.base().join("config.json")).unwrap();
    let config = config.replacen('{', r#"{"tie_word_embeddings":true,"#, 1);
    fs::write(tied.base().join("config.json"), config).unwrap();
    assert!(tied.refusal().contains("tie_word_embeddings"), "{}", tied.refusal());
}
