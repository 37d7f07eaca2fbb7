//! Conversions against those of llama.cpp's own converters, and their perplexities.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::path::{Path, PathBuf};
use std::process::Command;

use formats::convert::{self, ConversionDtype};
use formats::gguf::GgufFile;
use golden::{golden_sets, small_set};

fn data(file: &GgufFile, name: &str) -> Vec<u8> {
    let tensor = file.find_tensor(name).unwrap_or_else(|| panic!("{name} is missing"));
    let mut bytes = vec![0; (tensor.range.end - tensor.range.start) as usize];
    file.read(tensor, 0, &mut bytes).unwrap();
    bytes
}

/// Fields whose values llama.cpp assumes where its converter leaves them out.
const DEFAULTS: [&str; 6] = [
    ".attention.key_length",
    ".attention.value_length",
    ".rope.dimension_count",
    ".vocab_size",
    ".add_bos_token",
    ".add_eos_token",
];

/// A field that only other kinds of models use.
const UNUSED: &str = "tokenizer.ggml.add_sep_token";

/// Checks that all tensors and fields are equal.
fn assert_same_contents(ours: &Path, theirs: &Path) {
    let (ours, theirs) = (GgufFile::open(ours).unwrap(), GgufFile::open(theirs).unwrap());
    assert_eq!(ours.tensors.len(), theirs.tensors.len());
    for tensor in &theirs.tensors {
        let name = &tensor.name;
        assert_eq!(ours.find_tensor(name).unwrap().shape, tensor.shape, "{name}");
        assert_eq!(data(&ours, name), data(&theirs, name), "{name}");
    }
    let is_one_of = |name: &str, ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
    for (name, value) in &ours.fields {
        let theirs = theirs.find_field(name);
        let is_default = theirs.is_none() && is_one_of(name, &DEFAULTS);
        assert!(is_default || theirs == Some(value), "{name}: {value:?} for {theirs:?}");
    }
    for (name, _) in &theirs.fields {
        // The general fields that ours lacks only describe the file.
        let is_used = name != UNUSED && !name.starts_with("general.");
        assert!(!is_used || ours.find_field(name).is_some(), "{name} is missing");
    }
}

#[test]
fn adapters_are_what_llama_cpps_converter_makes_of_them() {
    let directory = tempfile::tempdir().unwrap();
    for set in golden_sets() {
        for (base, adapter) in set.adapted_models() {
            let out = directory.path().join(adapter);
            let (base, peft) = (set.model_path(base), set.adapter_path(adapter));
            convert::convert_lora(&base, &peft, &out, ConversionDtype::F32).unwrap();
            let theirs = set.root.join("gguf-lora").join(adapter).with_extension("gguf");
            assert_same_contents(&out, &theirs);
        }
    }
}

#[test]
fn models_are_what_llama_cpps_converter_makes_of_them() {
    let (set, directory) = (small_set(), tempfile::tempdir().unwrap());
    for (name, dtype) in [
        ("qwen2-tiny", ConversionDtype::Q8_0),
        ("qwen3-tiny", ConversionDtype::Bf16),
        ("llama-tiny", ConversionDtype::Q8_0),
    ] {
        let out = directory.path().join(name);
        convert::convert_model(&set.model_path(name), &out, dtype, &mut |_, _| {}).unwrap();
        assert_same_contents(&out, &set.root.join("gguf").join(name).with_extension("gguf"));
    }
}

fn llama_perplexity() -> Option<PathBuf> {
    requirements::require_llama_cpp().map(|directory| directory.join("llama-perplexity"))
}

/// Measures the first 8 chunks, as llama.cpp prints them. It may lose its last lines, so it computes
/// a ninth one after them.
fn perplexity(program: &Path, model: &Path, adapter: Option<&Path>, text: &Path) -> String {
    for _ in 0..5 {
        let mut command = Command::new(program);
        command.args(["-c", "512", "-b", "512", "-fa", "off", "-ctk", "f32", "-ctv", "f32"]);
        command.args(["-t", "2", "--chunks", "9", "-f"]).arg(text).arg("-m").arg(model);
        if let Some(adapter) = adapter {
            command.arg("--lora").arg(adapter);
        }
        let output = command.output().unwrap();
        let printed =
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "{printed}");
        if let Some((_, rest)) = printed.split_once("[8]") {
            return rest.split(',').next().unwrap().to_owned();
        }
    }
    panic!("llama-perplexity lost its result five times");
}

#[test]
fn llama_cpp_computes_the_same_of_a_converted_model_and_adapter() {
    let Some(program) = llama_perplexity() else { return };
    let directory = tempfile::tempdir().unwrap();
    let (model, lora) = (directory.path().join("model.gguf"), directory.path().join("lora.gguf"));
    for set in golden_sets() {
        for (base, adapter) in set.adapted_models() {
            let (alone, adapted) =
                (set.first_chunks(base, None), set.first_chunks(base, Some(adapter)));
            let (base, peft) = (set.model_path(base), set.adapter_path(adapter));
            let mut progress = (0, 0);
            convert::convert_model(&base, &model, ConversionDtype::F32, &mut |done, total| {
                progress = (done, total);
            })
            .unwrap();
            assert!(progress.0 == progress.1 && progress.1 > 100_000, "{progress:?}");
            convert::convert_lora(&base, &peft, &lora, ConversionDtype::F32).unwrap();
            let text = set.text_path(&alone.text);
            assert_eq!(perplexity(&program, &model, None, &text), alone.perplexity);
            assert_eq!(perplexity(&program, &model, Some(&lora), &text), adapted.perplexity);
        }
    }
}

/// Reads all tensors of a model.
fn weights(directory: &Path) -> std::collections::BTreeMap<String, Vec<f32>> {
    let file =
        formats::safetensors::SafetensorsFile::open(&directory.join("model.safetensors")).unwrap();
    let values = |name: &String| (name.clone(), file.get(name).unwrap().read_values().unwrap());
    file.tensor_entries().keys().map(values).collect()
}

#[test]
fn a_merged_model_is_its_base_and_what_the_adapter_adds() {
    let Some(program) = llama_perplexity() else { return };
    let (set, directory) = (small_set(), tempfile::tempdir().unwrap());
    let (base, adapter) = (set.model_path("llama-tiny"), set.adapter_path("llama-r8-qv"));
    let merged = directory.path().join("merged");
    convert::merge_adapter(&base, &adapter, &merged, &mut |_, _| {}).unwrap();
    let (before, after) = (weights(&base), weights(&merged));
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    let touched = |name: &&String| name.contains("q_proj") || name.contains("v_proj");
    for name in before.keys() {
        assert_eq!(before[name] != after[name], touched(&name), "{name}");
    }
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        let read = |directory: &Path| std::fs::read(directory.join(name)).unwrap();
        assert_eq!(read(&base), read(&merged), "{name}");
    }
    let again = convert::merge_adapter(&base, &adapter, &merged, &mut |_, _| {}).unwrap_err();
    assert!(again.to_string().contains("already exists"), "{again}");
    let model = directory.path().join("model.gguf");
    convert::convert_model(&merged, &model, ConversionDtype::F32, &mut |_, _| {}).unwrap();
    let expected = set.first_chunks("llama-tiny", Some("llama-r8-qv"));
    let text = set.text_path(&expected.text);
    assert_eq!(perplexity(&program, &model, None, &text), expected.perplexity);
}
