//! Conversions against those of llama.cpp's own converters, and their perplexities.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::path::{Path, PathBuf};
use std::process::Command;

use formats::convert::{self, ConversionDtype};
use formats::gguf::GgufFile;

fn golden() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/golden");
    let there = path.join("hf").is_dir();
    if !there {
        eprintln!("skipped: {} is absent", path.display());
    }
    there.then_some(path)
}

fn data(file: &GgufFile, name: &str) -> Vec<u8> {
    let tensor = file.find_tensor(name).unwrap_or_else(|| panic!("{name} is missing"));
    let mut bytes = vec![0; (tensor.range.end - tensor.range.start) as usize];
    file.read(tensor, 0, &mut bytes).unwrap();
    bytes
}

#[test]
fn adapters_are_what_llama_cpps_converter_makes_of_them() {
    let Some(golden) = golden() else { return };
    let directory = tempfile::tempdir().unwrap();
    for (base, adapter) in [("qwen2-tiny", "qwen2-r8-qv"), ("llama-tiny", "llama-r8-qv")] {
        let out = directory.path().join(adapter);
        let (base, peft) = (golden.join("hf").join(base), golden.join("peft").join(adapter));
        convert::convert_lora(&base, &peft, &out, ConversionDtype::F32).unwrap();
        let ours = GgufFile::open(&out).unwrap();
        let theirs =
            GgufFile::open(&golden.join("gguf-lora").join(adapter).with_extension("gguf")).unwrap();
        assert_eq!(ours.tensors.len(), theirs.tensors.len());
        for tensor in &theirs.tensors {
            assert_eq!(
                ours.find_tensor(&tensor.name).unwrap().shape,
                tensor.shape,
                "{}",
                tensor.name
            );
            assert_eq!(data(&ours, &tensor.name), data(&theirs, &tensor.name), "{}", tensor.name);
        }
        for (name, value) in &ours.fields {
            assert_eq!(theirs.find_field(name), Some(value), "{name}");
        }
    }
}

/// Finds the program of `make test`, or of `PATH`.
fn llama_perplexity() -> Option<PathBuf> {
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/llama.cpp/bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::iter::once(fetched).chain(std::env::split_paths(&path));
    let found =
        places.into_iter().map(|place| place.join("llama-perplexity")).find(|path| path.is_file());
    if found.is_none() {
        eprintln!("skipped: no llama-perplexity; deploy/fetch-llama-cpp.sh gets one");
    }
    found
}

/// Measures the first 8 chunks, as llama.cpp prints them. It may lose its last line, so the running
/// value of each chunk is read too, and the run is repeated when that is lost as well.
fn perplexity(program: &Path, model: &Path, adapter: Option<&Path>, text: &Path) -> String {
    for _ in 0..5 {
        let mut command = Command::new(program);
        command.args(["-c", "512", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-t", "2"]);
        command.args(["--chunks", "8", "-f"]).arg(text).arg("-m").arg(model);
        if let Some(adapter) = adapter {
            command.arg("--lora").arg(adapter);
        }
        let output = command.output().unwrap();
        let printed =
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "{printed}");
        if let Some((_, rest)) = printed.split_once("Final estimate: PPL = ") {
            return rest.split(' ').next().unwrap().to_owned();
        }
        if let Some((_, rest)) = printed.split_once("[8]") {
            return rest.split(',').next().unwrap().to_owned();
        }
    }
    panic!("llama-perplexity lost its result five times");
}

#[test]
fn llama_cpp_computes_the_same_of_a_converted_model_and_adapter() {
    let (Some(golden), Some(program)) = (golden(), llama_perplexity()) else { return };
    let directory = tempfile::tempdir().unwrap();
    let text = golden.join("corpus/eval_docs.txt");
    for (base, adapter, alone, adapted) in [
        ("qwen2-tiny", "qwen2-r8-qv", "186.1307", "187.2695"),
        ("llama-tiny", "llama-r8-qv", "316.5044", "324.3660"),
    ] {
        let (base, peft) = (golden.join("hf").join(base), golden.join("peft").join(adapter));
        let model = directory.path().join("model.gguf");
        let lora = directory.path().join("lora.gguf");
        let mut heard = (0, 0);
        convert::convert_model(&base, &model, ConversionDtype::F32, &mut |done, total| {
            heard = (done, total);
        })
        .unwrap();
        assert!(heard.0 == heard.1 && heard.1 > 1 << 20, "{heard:?}");
        convert::convert_lora(&base, &peft, &lora, ConversionDtype::F32).unwrap();
        assert_eq!(perplexity(&program, &model, None, &text), alone);
        assert_eq!(perplexity(&program, &model, Some(&lora), &text), adapted);
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
    let (Some(golden), Some(program)) = (golden(), llama_perplexity()) else { return };
    let directory = tempfile::tempdir().unwrap();
    let (base, adapter) = (golden.join("hf/llama-tiny"), golden.join("peft/llama-r8-qv"));
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
    let text = golden.join("corpus/eval_docs.txt");
    assert_eq!(perplexity(&program, &model, None, &text), "324.3660");
}
