//! Conversions against those of llama.cpp's own converters, and their perplexities.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::path::{Path, PathBuf};
use std::process::Command;

use formats::convert::{self, ConversionDtype};
use formats::gguf::{GgufArray, GgufFile, GgufValue};
use formats::safetensors::ModelWeights;
use formats::{Architecture, ModelConfig, list_weight_files};
use golden::{architecture_set, golden_sets, small_set};

fn data(file: &GgufFile, name: &str) -> Vec<u8> {
    let tensor = file.find_tensor(name).unwrap_or_else(|| panic!("{name} is missing"));
    let mut bytes = vec![0; (tensor.range.end - tensor.range.start) as usize];
    file.read(tensor, 0, &mut bytes).unwrap();
    bytes
}

/// Fields whose values llama.cpp assumes where its converter leaves them out.
const DEFAULTS: [&str; 8] = [
    ".attention.key_length",
    ".attention.value_length",
    ".rope.dimension_count",
    ".rope.freq_base",
    ".vocab_size",
    ".add_bos_token",
    ".add_eos_token",
    ".add_space_prefix",
];

/// The name by which llama.cpp recognises Phi-3's tokenizer, which its converter takes from the
/// directory.
const NAME: &str = "general.name";
const SCORES: &str = "tokenizer.ggml.scores";
const KINDS: &str = "tokenizer.ggml.token_type";

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
    for (name, value) in ours.fields.iter().filter(|(name, _)| name != NAME) {
        let theirs = theirs.find_field(name);
        if name == SCORES {
            assert_same_scores(value, theirs.unwrap(), &ours);
            continue;
        }
        if name == KINDS {
            assert_same_kinds(value, theirs.unwrap(), &ours);
            continue;
        }
        let is_default = theirs.is_none() && is_one_of(name, &DEFAULTS);
        assert!(is_default || theirs == Some(value), "{name}: {value:?} for {theirs:?}");
    }
    for (name, _) in &theirs.fields {
        // The general fields that ours lacks only describe the file.
        let is_used = name != UNUSED && !name.starts_with("general.");
        assert!(!is_used || ours.find_field(name).is_some(), "{name} is missing");
    }
}

/// Checks the kinds of all tokens. The unknown token of Phi-3, which texts do not produce, is a
/// control token in llama.cpp's files.
fn assert_same_kinds(ours: &GgufValue, theirs: &GgufValue, file: &GgufFile) {
    let unknown = file.find_field("tokenizer.ggml.unknown_token_id").and_then(GgufValue::as_u64);
    let (ours, theirs) = (ours.as_i32s().unwrap(), theirs.as_i32s().unwrap());
    assert_eq!(ours.len(), theirs.len());
    for (id, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        let is_unknown = Some(id as u64) == unknown && (*ours, *theirs) == (2, 3);
        assert!(ours == theirs || is_unknown, "token {id}: {ours} for {theirs}");
    }
}

/// Checks the scores of all tokens that merges make. No others are used: those of single letters,
/// bytes and special tokens.
fn assert_same_scores(ours: &GgufValue, theirs: &GgufValue, file: &GgufFile) {
    let scores = |value: &GgufValue| match value {
        GgufValue::Array(GgufArray::F32(scores)) => scores.clone(),
        other => panic!("{other:?}"),
    };
    let (ours, theirs) = (scores(ours), scores(theirs));
    let field = |name| file.find_field(name).unwrap();
    let tokens = field("tokenizer.ggml.tokens").as_strings().unwrap();
    let kinds = field("tokenizer.ggml.token_type").as_i32s().unwrap();
    assert_eq!((ours.len(), theirs.len()), (tokens.len(), tokens.len()));
    let mut compared = 0;
    for (id, token) in tokens.iter().enumerate() {
        // 1 is a token of text.
        if kinds[id] == 1 && token.chars().count() > 1 {
            assert_eq!(ours[id], theirs[id], "{token}");
            compared += 1;
        }
    }
    assert!(compared > 50, "{compared}");
}

#[test]
fn adapters_are_what_llama_cpps_converter_makes_of_them() {
    let directory = tempfile::tempdir().unwrap();
    for set in golden_sets().into_iter().chain([architecture_set()]) {
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

#[test]
fn models_of_every_architecture_are_what_llama_cpps_converter_makes_of_them() {
    let (set, directory) = (architecture_set(), tempfile::tempdir().unwrap());
    let mut architectures = Vec::new();
    for name in set.plain_models() {
        let (model, out) = (set.model_path(name), directory.path().join(name));
        convert::convert_model(&model, &out, ConversionDtype::Q8_0, &mut |_, _| {}).unwrap();
        assert_same_contents(&out, &set.root.join("gguf").join(name).with_extension("gguf"));
        let config = ModelConfig::from_dir(&model).unwrap();
        let weights = ModelWeights::open(&model, &list_weight_files(&model).unwrap()).unwrap();
        let size = |name| weights.get(name).unwrap().entry.shape.iter().product::<u64>();
        let parameters: u64 = weights.tensor_names().map(size).sum();
        assert_eq!(config.count_parameters(), u128::from(parameters), "{name}");
        let shape = formats::memory_estimate::ModelShape::from_config(&config);
        assert_eq!(shape.parameter_count(), parameters, "{name}");
        architectures.push(config.architecture);
    }
    let first = [Architecture::Qwen2, Architecture::Qwen3, Architecture::Llama];
    let others = Architecture::ALL.into_iter().filter(|one| !first.contains(one));
    let missing: Vec<_> = others.filter(|one| !architectures.contains(one)).collect();
    assert!(missing.is_empty(), "no model of {missing:?}");
}

const WITH_IMAGES: (&str, &str) = ("gemma3-images-tiny", "gemma3-images-r4-all");

/// Copies a model with images, with the names that its tensors have in transformers 5.
fn copy_with_module_names(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
    let file = std::fs::read(from.join("model.safetensors")).unwrap();
    let (length, rest) = file.split_at(8);
    let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&rest[..length]).unwrap();
    let renamed = header.into_iter().map(|(name, entry)| match name.as_str() {
        "__metadata__" => (name, entry),
        _ => match name.strip_prefix("language_model.model.") {
            Some(rest) => (format!("model.language_model.{rest}"), entry),
            None => (format!("model.{name}"), entry),
        },
    });
    let header = serde_json::Value::Object(renamed.collect()).to_string();
    let start = (header.len() as u64).to_le_bytes();
    let copy = [&start[..], header.as_bytes(), &rest[length..]].concat();
    std::fs::write(to.join("model.safetensors"), copy).unwrap();
}

#[test]
fn the_text_part_of_a_model_with_images_is_found_under_both_kinds_of_names() {
    let (set, directory) = (architecture_set(), tempfile::tempdir().unwrap());
    let (copy, out) = (directory.path().join("copy"), directory.path().join("out"));
    copy_with_module_names(&set.model_path(WITH_IMAGES.0), &copy);
    convert::convert_model(&copy, &out, ConversionDtype::Q8_0, &mut |_, _| {}).unwrap();
    let theirs = set.root.join("gguf").join(WITH_IMAGES.0).with_extension("gguf");
    assert_same_contents(&out, &theirs);
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

/// The largest relative difference of a perplexity from PyTorch's.
const TOLERANCE: f64 = 1e-4;

#[test]
fn llama_cpp_and_pytorch_agree_on_every_architecture() {
    let Some(program) = llama_perplexity() else { return };
    let (set, directory) = (architecture_set(), tempfile::tempdir().unwrap());
    let (model, lora) = (directory.path().join("model.gguf"), directory.path().join("lora.gguf"));
    for figure in &set.figures.perplexities {
        let base = set.model_path(&figure.model);
        convert::convert_model(&base, &model, ConversionDtype::F32, &mut |_, _| {}).unwrap();
        if let Some(adapter) = &figure.adapter {
            let peft = set.adapter_path(adapter);
            convert::convert_lora(&base, &peft, &lora, ConversionDtype::F32).unwrap();
        }
        let adapter = figure.adapter.as_ref().map(|_| lora.as_path());
        let found = perplexity(&program, &model, adapter, &set.text_path(&figure.text));
        let (found, expected): (f64, f64) =
            (found.parse().unwrap(), figure.perplexity.parse().unwrap());
        assert!((found / expected - 1.0).abs() < TOLERANCE, "{found} for {figure:?}");
    }
}

/// Merged weights are rounded to the base's bf16.
const MERGED_TOLERANCE: f64 = 0.02;

#[test]
fn merged_models_of_every_architecture_are_their_bases_and_adapters() {
    let Some(program) = llama_perplexity() else { return };
    let (set, directory) = (architecture_set(), tempfile::tempdir().unwrap());
    let model = directory.path().join("model.gguf");
    for (base, adapter) in set.adapted_models() {
        let expected = set.first_chunks(base, Some(adapter));
        let merged = directory.path().join(adapter);
        let (base, peft) = (set.model_path(base), set.adapter_path(adapter));
        convert::merge_adapter(&base, &peft, &merged, &mut |_, _| {}).unwrap();
        convert::convert_model(&merged, &model, ConversionDtype::F32, &mut |_, _| {}).unwrap();
        let found = perplexity(&program, &model, None, &set.text_path(&expected.text));
        let (found, expected): (f64, f64) =
            (found.parse().unwrap(), expected.perplexity.parse().unwrap());
        assert!((found / expected - 1.0).abs() < MERGED_TOLERANCE, "{adapter}: {found} {expected}");
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
fn a_merged_model_keeps_its_vision_tensors() {
    let (set, directory) = (architecture_set(), tempfile::tempdir().unwrap());
    let (base, adapter) = (set.model_path(WITH_IMAGES.0), set.adapter_path(WITH_IMAGES.1));
    let merged = directory.path().join("merged");
    convert::merge_adapter(&base, &adapter, &merged, &mut |_, _| {}).unwrap();
    let (before, after) = (weights(&base), weights(&merged));
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    assert!(before.keys().any(|name| name.starts_with("vision_tower.")));
    let touched = |name: &str| name.starts_with("language_model.") && name.contains("_proj");
    for name in before.keys() {
        assert_eq!(before[name] != after[name], touched(name), "{name}");
    }
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
