//! Exports of a small model with an adapter.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::path::{Path, PathBuf};

use model_export::{ExportError, ExportFormat, ExportRequest, WeightType, export_model};

fn base() -> PathBuf {
    golden::small_set().model_path("qwen2-tiny")
}

fn adapter() -> PathBuf {
    golden::small_set().adapter_path("qwen2-r8-qv")
}

fn request<'a>(
    (base, adapter, out): (&'a Path, &'a Path, &'a Path),
    format: ExportFormat,
    weight_type: &str,
) -> ExportRequest<'a> {
    ExportRequest {
        base,
        adapter: Some(adapter),
        out,
        name: "stable",
        format,
        weight_type: WeightType::from_name(weight_type).unwrap(),
        llama_cpp: None,
    }
}

#[test]
fn each_format_is_written_and_near_the_trained_model() {
    let (base, adapter) = (base(), adapter());
    for (format, weight_type, files) in [
        (ExportFormat::Merged, "f32", vec!["stable"]),
        (ExportFormat::Gguf, "f32", vec!["stable.gguf"]),
        (ExportFormat::Gguf, "q8_0", vec!["stable.gguf"]),
        (ExportFormat::Ollama, "f16", vec!["Modelfile", "stable.gguf"]),
        (ExportFormat::Lemonade, "bf16", vec!["stable.gguf"]),
    ] {
        let out = tempfile::tempdir().unwrap();
        let asked = request((&base, &adapter, out.path()), format, weight_type);
        let exported = export_model(&asked, &mut |_, _, _| ()).unwrap();
        let mut found: Vec<String> = std::fs::read_dir(out.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        found.sort();
        assert_eq!(found, files, "{format:?}: nothing else is left");
        assert!(exported.distance <= exported.tolerance, "{format:?}: {exported:?}");
        assert!(!exported.commands.is_empty());
        println!("{format:?} {weight_type}: {:.5} nats per token", exported.distance);
    }
}

#[test]
fn llama_cpp_s_own_types_are_made_and_compared_by_it() {
    let Some(llama_cpp) = requirements::require_llama_cpp() else { return };
    let (base, adapter) = (base(), adapter());
    let out = tempfile::tempdir().unwrap();
    let asked = ExportRequest {
        llama_cpp: Some(&llama_cpp),
        ..request((&base, &adapter, out.path()), ExportFormat::Gguf, "Q4_K_M")
    };
    let exported = export_model(&asked, &mut |_, _, _| ()).unwrap();
    println!("Q4_K_M: {:.5} nats per token", exported.distance);
    assert!(exported.distance > 0.0, "it is not the same model");
    let exact = out.path().join("f16");
    let asked = request((&base, &adapter, &exact), ExportFormat::Gguf, "f16");
    let exact = export_model(&asked, &mut |_, _, _| ()).unwrap();
    let bytes = |path: &Path| path.metadata().unwrap().len();
    assert!(bytes(&exported.path) < bytes(&exact.path));
}

#[test]
fn models_that_only_llama_cpp_loads_are_compared_by_it() {
    let Some(llama_cpp) = requirements::require_llama_cpp() else { return };
    let golden = golden::small_set();
    for (model, adapter, format, weight_type) in [
        ("qwen3moe-tiny", "qwen3moe-r4-qkvo", ExportFormat::Merged, "bf16"),
        ("gemma2-tiny", "gemma2-r4-all", ExportFormat::Gguf, "f32"),
        ("phi3-tiny", "phi3-r4-all", ExportFormat::Ollama, "q8_0"),
        ("mistral-tiny", "mistral-r4-qv", ExportFormat::Lemonade, "bf16"),
    ] {
        let (base, adapter) = (golden.model_path(model), golden.adapter_path(adapter));
        let out = tempfile::tempdir().unwrap();
        let asked = ExportRequest {
            llama_cpp: Some(&llama_cpp),
            ..request((&base, &adapter, out.path()), format, weight_type)
        };
        let exported = export_model(&asked, &mut |_, _, _| ()).unwrap();
        assert!(exported.path.exists(), "{model}");
        println!("{model} {weight_type}: {:.5} nats per token", exported.distance);
        let asked = ExportRequest { llama_cpp: Some(Path::new("/nonexistent")), ..asked };
        let refused = export_model(&asked, &mut |_, _, _| panic!("work began")).unwrap_err();
        assert!(matches!(refused, ExportError::Verify(_)), "{refused}");
    }
}

#[test]
fn an_export_replaces_an_older_one_as_a_whole() {
    let (base, adapter) = (base(), adapter());
    let out = tempfile::tempdir().unwrap();
    let old = out.path().join("stable");
    std::fs::create_dir_all(&old).unwrap();
    std::fs::write(old.join("model.safetensors.index.json"), "{}").unwrap();
    for adapter in [Some(&*adapter), None] {
        let asked = ExportRequest {
            adapter,
            ..request((&base, &base, out.path()), ExportFormat::Merged, "f32")
        };
        let exported = export_model(&asked, &mut |_, _, _| ()).unwrap();
        assert!(exported.path.join("model.safetensors").exists());
        assert!(!exported.path.join("model.safetensors.index.json").exists(), "{adapter:?}");
        assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 1, "nothing else is left");
    }
}

#[test]
fn a_missing_llama_cpp_is_named() {
    let (base, adapter) = (base(), adapter());
    let out = tempfile::tempdir().unwrap();
    let asked = ExportRequest {
        llama_cpp: Some(Path::new("/nonexistent")),
        ..request((&base, &adapter, out.path()), ExportFormat::Gguf, "q4_k_m")
    };
    let error = export_model(&asked, &mut |_, _, _| ()).unwrap_err();
    assert!(matches!(error, ExportError::Installation(_)), "{error}");
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0, "no parts are left");
}
