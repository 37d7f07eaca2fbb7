//! Damaged or foreign model files are refused with the file and the tensor; shards are found.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use engine::{Device, Model, ModelError, Shape, write_scratch};
use safetensors::SafeTensors;
use std::collections::HashMap;
use std::error::Error;
use std::path::Path;

fn scratch(dir: &Path) -> Model {
    let config = write_scratch(dir, &Shape { layers: 1, ..Shape::default() }).unwrap();
    let model = Model::init(config, 3, &Device::Cpu).unwrap();
    model.save(dir).unwrap();
    model
}

fn refusal(dir: &Path) -> String {
    let error: ModelError = Model::load(dir, &Device::Cpu).unwrap_err();
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
    Model::load(dir.path(), &Device::Cpu).unwrap().save(again.path()).unwrap();
    assert!(bytes == std::fs::read(again.path().join("model.safetensors")).unwrap());
    assert!(again.path().join("tokenizer.json").exists());
}

#[test]
fn a_damaged_directory_is_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    assert!(refusal(dir.path()).contains("config.json"));
    scratch(dir.path());
    write_scratch(dir.path(), &Shape { layers: 2, ..Shape::default() }).unwrap();
    assert!(refusal(dir.path()).contains("`model.layers.1."), "{}", refusal(dir.path()));
    write_scratch(dir.path(), &Shape { layers: 1, intermediate_size: 8, ..Shape::default() })
        .unwrap();
    assert!(refusal(dir.path()).contains("expected [8, 128]"), "{}", refusal(dir.path()));
    let file = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    assert!(refusal(dir.path()).contains("not a valid safetensors file"));
}
