//! Damaged or foreign model files are refused with the file and the tensor; shards are found.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use engine::{
    Device, LanguageModel, LayerModule, LoraAdapter, LoraSpec, MatrixDtype, ModelError,
    ModelTokenizer, ScratchShape, score_chunks, write_scratch_model,
};
use safetensors::SafeTensors;
use std::collections::HashMap;
use std::error::Error;
use std::path::Path;

fn scratch(dir: &Path) -> LanguageModel {
    let config =
        write_scratch_model(dir, &ScratchShape { layers: 1, ..ScratchShape::default() }).unwrap();
    let model = LanguageModel::init_random(config, 3, &Device::Cpu).unwrap();
    model.save_directory(dir).unwrap();
    model
}

fn refusal(dir: &Path) -> String {
    let error: ModelError = LanguageModel::load_f32(dir, &Device::Cpu).unwrap_err();
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

#[test]
fn shards_are_read_like_a_single_file() {
    let dir = tempfile::tempdir().unwrap();
    scratch(dir.path());
    let single = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&single).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut map = HashMap::new();
    for (number, (name, view)) in tensors.iter().enumerate() {
        let file = format!("model-{:05}-of-00002.safetensors", number % 2 + 1);
        map.entry(file).or_insert_with(Vec::new).push((name.to_owned(), view));
    }
    let mut index = serde_json::Map::new();
    for (file, tensors) in map {
        index.extend(tensors.iter().map(|(name, _)| (name.clone(), file.clone().into())));
        safetensors::serialize_to_file(tensors, None, &dir.path().join(file)).unwrap();
    }
    std::fs::remove_file(&single).unwrap();
    let index = serde_json::json!({"metadata": {}, "weight_map": index}).to_string();
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    let again = tempfile::tempdir().unwrap();
    LanguageModel::load_f32(dir.path(), &Device::Cpu)
        .unwrap()
        .save_directory(again.path())
        .unwrap();
    assert!(bytes == std::fs::read(again.path().join("model.safetensors")).unwrap());
    assert!(again.path().join("tokenizer.json").exists());
}

#[test]
fn a_damaged_directory_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    assert!(refusal(dir.path()).contains("config.json"));
    scratch(dir.path());
    write_scratch_model(dir.path(), &ScratchShape { layers: 2, ..ScratchShape::default() })
        .unwrap();
    assert!(refusal(dir.path()).contains("`model.layers.1."), "{}", refusal(dir.path()));
    write_scratch_model(
        dir.path(),
        &ScratchShape { layers: 1, intermediate_size: 8, ..ScratchShape::default() },
    )
    .unwrap();
    assert!(refusal(dir.path()).contains("expected [8, 128]"), "{}", refusal(dir.path()));
    let file = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    assert!(refusal(dir.path()).contains("not a valid safetensors file"));
}

/// Covers a pair of another rank, a tensor of the embedding, an adapter of a deeper and of a wider
/// model.
#[test]
fn an_adapter_that_does_not_fit_is_refused_by_tensor_and_shapes() {
    let dir = tempfile::tempdir().unwrap();
    let config = scratch(dir.path()).model_config().clone();
    let adapter = dir.path().join("adapter");
    let save = |shape: ScratchShape| {
        let other = write_scratch_model(&dir.path().join("other"), &shape).unwrap();
        let spec =
            LoraSpec { rank: 4, alpha: 8.0, modules: [LayerModule::Up].into(), rslora: false };
        LoraAdapter::new(&spec, &other, 1).unwrap().save_peft(&adapter, "base").unwrap();
    };
    let refusal = || {
        let error = LoraAdapter::load_peft(&adapter, &config).unwrap_err();
        error.source().map_or_else(|| error.to_string(), ToString::to_string)
    };
    let one = ScratchShape { layers: 1, ..ScratchShape::default() };
    save(ScratchShape { layers: 2, ..one });
    assert!(refusal().contains("layers.1.mlp.up_proj.lora_A.weight` matches no module"));
    save(ScratchShape { intermediate_size: 64, ..one });
    assert!(refusal().contains("up_proj.lora_B.weight` has shape [64, 4], expected [352, 4]"));
    save(one);
    LoraAdapter::load_peft(&adapter, &config).unwrap();
    let settings = adapter.join("adapter_config.json");
    let text = std::fs::read_to_string(&settings).unwrap();
    std::fs::write(&settings, text.replace("\"r\": 4", "\"r\": 8")).unwrap();
    assert!(refusal().contains("lora_A.weight` has shape [4, 128], expected [8, 128]"));
    std::fs::write(&settings, text).unwrap();
    let path = adapter.join("adapter_model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut named = tensors.tensors();
    named.push(("base_model.model.lm_head.lora_A.weight".into(), named[0].1.clone()));
    safetensors::serialize_to_file(named, None, &path).unwrap();
    assert!(refusal().contains("changes the embedding or the head"), "{}", refusal());
}

#[test]
fn a_model_that_is_mapped_computes_what_one_that_is_read_does() {
    let (wide, narrow) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    scratch(wide.path());
    let load =
        |dir: &Path| LanguageModel::load_with_dtype(dir, &Device::Cpu, MatrixDtype::Bf16).unwrap();
    let read = load(wide.path());
    read.save_directory(narrow.path()).unwrap();
    let mapped = load(narrow.path());
    let file = narrow.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let tokenizer = ModelTokenizer::load_tokenizer(wide.path()).unwrap();
    let text = "what is read and what is mapped ".repeat(20);
    let score = |model: &LanguageModel| {
        score_chunks(model, &tokenizer, &text, 64, None, |_, _| {}).unwrap()
    };
    assert_eq!(score(&mapped).mean_nll, score(&read).mean_nll);
    mapped.save_directory(narrow.path()).unwrap();
    assert!(std::fs::read(&file).unwrap() == bytes, "saved where it is mapped from");
    // The map keeps the old file, even if another takes its name.
    std::fs::write(narrow.path().join("other"), "short").unwrap();
    std::fs::rename(narrow.path().join("other"), &file).unwrap();
    assert_eq!(score(&mapped).mean_nll, score(&read).mean_nll);
}
