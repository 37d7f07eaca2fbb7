//! Measurement with a real llama.cpp, on models whose perplexities other programs computed.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use evaluator::{
    EvaluatorLimits, EvaluatorPaths, LlamaCppEvaluator, MeasureStep, MeasurementInput,
    PerplexityResult, TextFormat, WrongLogits, measure_with_candle, measure_with_llama_cpp,
};
use golden::{GOLDEN_CONTEXT, GoldenSet, assert_printed, golden_sets, small_set};
use hardware::HardwareProfile;
use llama::LlamaConverters;
use requirements::{require_llama_cpp, require_llama_cpp_sources, require_torch_python};

struct Rig {
    golden: GoldenSet,
    programs: PathBuf,
    directory: tempfile::TempDir,
}

impl Rig {
    fn new() -> Option<Self> {
        Self::with_set(small_set())
    }

    fn with_set(golden: GoldenSet) -> Option<Self> {
        let programs = require_llama_cpp()?;
        Some(Self { golden, programs, directory: tempfile::tempdir().unwrap() })
    }

    fn source(&self, model: &str, adapter: Option<&str>, chunks: usize) -> MeasurementInput {
        MeasurementInput {
            base: self.golden.model_path(model),
            adapter: adapter.map(|name| self.golden.adapter_path(name)),
            text: self.golden.text_path("eval_docs.txt"),
            format: TextFormat::Text,
            n_ctx: GOLDEN_CONTEXT,
            stride: 0,
            chunks,
        }
    }

    fn llama(
        &self,
        programs: &Path,
        profile: &HardwareProfile,
    ) -> anyhow::Result<LlamaCppEvaluator> {
        let places = EvaluatorPaths {
            gguf_cache: self.directory.path().join("gguf"),
            device_checks: self.directory.path().join("canaries.json"),
        };
        let limits = EvaluatorLimits {
            threads: 2,
            silence_limit: Duration::from_secs(300),
            gguf_cache_bytes: 1 << 30,
            repeat_log: false,
        };
        let found = LlamaCppEvaluator::find_installation(Some(programs), profile, places, limits)?;
        Ok(LlamaCppEvaluator { dtype: formats::ConversionDtype::F32, ..found })
    }

    fn measure(&self, source: &MeasurementInput, key: &str) -> anyhow::Result<PerplexityResult> {
        let llama = self.llama(&self.programs, &HardwareProfile::load_named("cpu").unwrap())?;
        measure_with_llama_cpp(source, key, &llama, &mut |_| {})
    }
}

#[test]
fn the_reference_figures_come_out_to_every_digit() {
    for set in golden_sets() {
        let Some(rig) = Rig::with_set(set) else { return };
        for expected in &rig.golden.figures.perplexities {
            let (model, adapter) = (expected.model.as_str(), expected.adapter.as_deref());
            let mut source = rig.source(model, adapter, expected.limit.unwrap_or(0));
            source.text = rig.golden.text_path(&expected.text);
            let figures = rig.measure(&source, model).unwrap();
            assert_printed(figures.perplexity, &expected.perplexity, format!("{expected:?}"));
            let tokens = 255 * expected.chunks;
            assert_eq!((figures.chunks, figures.tokens), (expected.chunks, tokens));
            if let Some(stderr) = &expected.stderr {
                // The program prints five decimals or three.
                let off = (figures.stderr - stderr.parse::<f64>().unwrap()).abs();
                assert!(off < 1e-3, "{figures:?} {expected:?}");
            }
            if let Some(mean) = &expected.mean_nll {
                // It is computed from a perplexity of four decimals.
                let off = (figures.mean_nll - mean.parse::<f64>().unwrap()).abs();
                assert!(off < 1e-6 + 5e-5 / figures.perplexity, "{figures:?} {expected:?}");
            }
            assert_eq!(figures.canary, None, "there is nothing to compare a CPU with");
            let engine = &figures.engine;
            assert!(engine.starts_with("llama.cpp ") && engine.ends_with(" CPU f32"), "{engine}");
        }
    }
}

#[test]
fn both_engines_agree_on_every_figure() {
    let Some(rig) = Rig::new() else { return };
    let source =
        MeasurementInput { n_ctx: 256, ..rig.source("llama-tiny", Some("llama-r8-qv"), 3) };
    let mut heard = Vec::new();
    let llama = rig.llama(&rig.programs, &HardwareProfile::load_named("cpu").unwrap()).unwrap();
    let there = measure_with_llama_cpp(&source, "k", &llama, &mut |step| {
        if let MeasureStep::Chunks(done, total) = step {
            heard.push((done, total));
        }
    });
    let (there, here) = (
        there.unwrap(),
        measure_with_candle(&source, "cpu", engine::MatrixDtype::F32, |_, _| {}).unwrap(),
    );
    let near = |one: f64, other: f64| (one - other).abs() <= 1e-6 * other.abs();
    assert!(near(there.mean_nll, here.mean_nll), "{there:?} {here:?}");
    assert!(near(there.bits_per_byte.unwrap(), here.bits_per_byte.unwrap()), "{there:?} {here:?}");
    assert!((there.stderr - here.stderr).abs() < 1e-3, "{there:?} {here:?}");
    let common = |figures: &PerplexityResult| {
        (figures.tokens, figures.chunks, figures.protocol, figures.tokenizer.unwrap())
    };
    assert_eq!(common(&there), common(&here));
    assert_eq!(heard.last(), Some(&(3, 3)), "{heard:?}");
}

/// Runs the script that makes and measures a model outside of the table, and returns its output.
fn run_other_model(python: &Path, arguments: &[&Path]) -> String {
    let script = golden::other_model_script();
    let output = Command::new(python)
        .arg("-s")
        .arg(script)
        .args(arguments)
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn pytorch_agrees_on_models_that_only_llama_cpp_s_converters_know() {
    let Some(rig) = Rig::new() else { return };
    let (Some(python), Some(sources)) = (require_torch_python(), require_llama_cpp_sources())
    else {
        return;
    };
    let directory = rig.directory.path();
    run_other_model(&python, &[Path::new("make"), directory]);
    let (model, adapter) = (directory.join("model"), directory.join("adapter"));
    let mut llama = rig.llama(&rig.programs, &HardwareProfile::load_named("cpu").unwrap()).unwrap();
    let source = |adapter: Option<&Path>| MeasurementInput {
        base: model.clone(),
        adapter: adapter.map(Path::to_owned),
        ..rig.source("llama-tiny", None, 0)
    };
    let absent = measure_with_llama_cpp(&source(None), "k", &llama, &mut |_| {}).unwrap_err();
    assert!(format!("{absent:#}").contains("--llama-cpp-sources"), "{absent:#}");
    llama.converters = Some(LlamaConverters::find_converters(&sources, Some(&python)).unwrap());
    let (text, context) = (source(None).text, GOLDEN_CONTEXT.to_string());
    let arguments = [Path::new("measure"), &model, &text, Path::new(&context), &adapter];
    let printed = run_other_model(&python, &arguments);
    let losses: Vec<f64> = printed.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(losses.len(), 2, "{printed}");
    for (adapter, expected) in [None, Some(&*adapter)].into_iter().zip(&losses) {
        let figures = measure_with_llama_cpp(&source(adapter), "k", &llama, &mut |_| {}).unwrap();
        assert!((figures.mean_nll / expected - 1.0).abs() < 1e-5, "{figures:?} {expected}");
    }
    assert!((losses[1] - losses[0]).abs() > 0.01, "the adapter changes the losses: {losses:?}");
    let cached = std::fs::read_dir(directory.join("gguf")).unwrap().flatten();
    let cached = cached.filter(|entry| entry.path().extension().is_some_and(|end| end == "gguf"));
    assert_eq!(cached.count(), 2, "the base and the adapter were converted once");
}

#[test]
fn unsupported_measurements_are_refused_by_name() {
    let Some(rig) = Rig::new() else { return };
    let refused = |source: &MeasurementInput, key: &str, expected: &str| {
        let error = format!("{:#}", rig.measure(source, key).unwrap_err());
        assert!(error.contains(expected), "{error}");
    };
    let source = rig.source("qwen2-tiny", None, 2);
    refused(
        &MeasurementInput { stride: 256, ..source.clone() },
        "q",
        "does not support the sliding protocol",
    );
    refused(
        &MeasurementInput { format: TextFormat::Documents, ..source.clone() },
        "q",
        "does not support the documents protocol",
    );
    refused(&MeasurementInput { n_ctx: 30_000, ..source.clone() }, "q", "30000");
    refused(&rig.source("qwen2-tiny", Some("qwen2-dora"), 2), "q", "use_dora");
    refused(&rig.source("llama-tiny", Some("qwen3-r4-all"), 2), "l", "adapter");
    let text = rig.directory.path().join("short");
    std::fs::write(&text, "too short").unwrap();
    refused(&MeasurementInput { text, ..source }, "q", "1024");
}

#[test]
fn another_tokenizer_than_the_gguf_file_s_is_noticed() {
    let Some(rig) = Rig::new() else { return };
    // Enough that llama.cpp works for a while: its output just before its end may be lost.
    let source = rig.source("qwen2-tiny", None, 6);
    rig.measure(&source, "same key").unwrap();
    let other = rig.directory.path().join("other");
    std::fs::create_dir(&other).unwrap();
    for entry in source.base.read_dir().unwrap().flatten() {
        std::fs::copy(entry.path(), other.join(entry.file_name())).unwrap();
    }
    let path = other.join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_str(&text).unwrap();
    let merges = tokenizer["model"]["merges"].as_array_mut().unwrap();
    merges.truncate(merges.len() / 2);
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let error = rig.measure(&MeasurementInput { base: other, ..source }, "same key").unwrap_err();
    assert!(format!("{error:#}").contains("tokenizer mismatch"), "{error:#}");
}

#[test]
fn a_gguf_file_is_measured_as_it_is_and_half_of_one_refused() {
    let Some(rig) = Rig::new() else { return };
    let source = rig.source("llama-tiny", None, 8);
    let figures = rig.measure(&source, "key").unwrap();
    let converted = rig.directory.path().join("gguf").read_dir().unwrap().flatten();
    let file = converted.map(|entry| entry.path()).find(|path| formats::is_gguf(path)).unwrap();
    let direct =
        rig.measure(&MeasurementInput { base: file.clone(), ..source.clone() }, "").unwrap();
    assert!((direct.perplexity / figures.perplexity - 1.0).abs() < 1e-4, "{direct:?}");
    assert_eq!((direct.bits_per_byte, direct.tokens), (None, figures.tokens));

    let half = rig.directory.path().join("half.gguf");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&half, &bytes[..bytes.len() / 2]).unwrap();
    let error =
        format!("{:#}", rig.measure(&MeasurementInput { base: half, ..source }, "").unwrap_err());
    assert!(
        error.contains("llama-perplexity failed") && error.contains("exit status: 1"),
        "{error}"
    );
}

/// A llama.cpp with a GPU: really the CPU, whose perplexities are then multiplied.
fn with_pretended_gpu(rig: &Rig, factor: f64) -> PathBuf {
    let directory = rig.directory.path().join(format!("gpu-{factor}"));
    std::fs::create_dir(&directory).unwrap();
    let real = rig.programs.join("llama-perplexity");
    let script = format!(
        "#!/bin/sh\n\
         case \" $* \" in\n\
         *' --list-devices '*)\n\
           printf 'Available devices:\\n  Vulkan0: Pretended (8192 MiB, 8000 MiB free)\\n'; exit;;\n\
         *' -ngl 99 --device Vulkan0 '*) echo gpu >>{log};;\n\
         *' -ngl 0 --device none '*) echo cpu >>{log}; exec {real} \"$@\";;\n\
         *) exec {real} \"$@\";;\n\
         esac\n\
         for one; do\n\
           shift; [ \"$one\" = Vulkan0 ] && one=none; [ \"$one\" = 99 ] && one=0; set -- \"$@\" \"$one\"\n\
         done\n\
         {real} \"$@\" | awk 'NF == 4 {{ $2 *= {factor}; $3 += log({factor}) }} {{ print }}'\n",
        log = rig.directory.path().join("runs").display(),
        real = real.display(),
    );
    for name in ["llama-perplexity", "llama-server"] {
        std::fs::write(directory.join(name), &script).unwrap();
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(directory.join(name), executable).unwrap();
    }
    directory
}

fn runs(rig: &Rig) -> Vec<String> {
    let text = std::fs::read_to_string(rig.directory.path().join("runs")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_device_that_computes_wrong_logits_is_not_measured_on() {
    let Some(rig) = Rig::new() else { return };
    let profile = HardwareProfile::load_named("gfx1151").unwrap();
    let llama = rig.llama(&with_pretended_gpu(&rig, 1.05), &profile).unwrap();
    let source = rig.source("llama-tiny", None, 3);
    let error = measure_with_llama_cpp(&source, "k", &llama, &mut |_| {}).unwrap_err();
    let wrong: &WrongLogits = error.downcast_ref().unwrap();
    assert!((wrong.ratio - 1.05).abs() < 1e-3, "{wrong:?}");
    let said = format!("{error:#}");
    assert!(said.contains("wrong logits on Vulkan0") && said.contains("865374bb"), "{said}");
    assert_eq!(runs(&rig), ["cpu", "gpu"]);
    // A failed check is not remembered: the next attempt repeats it.
    measure_with_llama_cpp(&source, "k", &llama, &mut |_| {}).unwrap_err();
    assert_eq!(runs(&rig).len(), 4);
}

#[test]
fn a_device_that_computes_rightly_is_compared_once_for_a_base() {
    let Some(rig) = Rig::new() else { return };
    let profile = HardwareProfile::load_named("gfx1151").unwrap();
    let llama = rig.llama(&with_pretended_gpu(&rig, 1.001), &profile).unwrap();
    let source = rig.source("llama-tiny", Some("llama-r8-qv"), 3);
    let measure = |key| measure_with_llama_cpp(&source, key, &llama, &mut |_| {}).unwrap();
    let figures = measure("k");
    assert!((figures.canary.unwrap() - 1.001).abs() < 1e-4, "{figures:?}");
    assert!(figures.engine.contains(" Vulkan0 "), "{}", figures.engine);
    assert_eq!(runs(&rig), ["cpu", "gpu", "gpu"]);
    assert_eq!(measure("k").canary, figures.canary);
    assert_eq!(runs(&rig).len(), 4, "remembered");
    measure("another base");
    assert_eq!(runs(&rig).len(), 7, "compared anew");
}

#[test]
fn a_build_without_the_profile_s_device_is_refused_with_the_remedy() {
    let Some(rig) = Rig::new() else { return };
    let profile = HardwareProfile::load_named("gfx906").unwrap();
    let error = rig.llama(&rig.programs, &profile).unwrap_err().to_string();
    assert!(
        error.contains("no ROCm or Vulkan device") && error.contains("--profile cpu"),
        "{error}"
    );
}
