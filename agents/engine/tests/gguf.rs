//! A GGUF file gives the same model as its source.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use engine::{Device, LanguageModel, MatrixDtype, ModelTokenizer, score_chunks};
use formats::convert::{self, ConversionDtype};
use golden::{GOLDEN_CONTEXT, GoldenSet, golden_sets, small_set};
use std::path::Path;

/// Checks the perplexity of a file or directory against that of its source. `tolerance` is relative.
fn check_model(set: &GoldenSet, name: &str, path: &Path, dtype: MatrixDtype, tolerance: f64) {
    let figure = set.first_chunks(name, None);
    let text = std::fs::read_to_string(set.text_path(&figure.text)).unwrap();
    let model = LanguageModel::load_with_dtype(path, &Device::Cpu, dtype).unwrap();
    let tokenizer = ModelTokenizer::load_tokenizer(path).unwrap();
    let ours =
        score_chunks(&model, &tokenizer, &text, GOLDEN_CONTEXT, figure.limit, |_, _| {}).unwrap();
    let expected: f64 = figure.perplexity.parse().unwrap();
    let off = (ours.perplexity / expected - 1.0).abs();
    assert!(off < tolerance, "{}: {} for {expected}", path.display(), ours.perplexity);
}

/// Of a perplexity with four decimals.
const EXACT: f64 = 2e-5;
/// Of weights with 8 bits.
const QUANTIZED: f64 = 3e-3;

#[test]
fn a_gguf_file_gives_the_figures_of_the_directory_it_was_made_of() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    for set in golden_sets() {
        for name in ["qwen2-tiny", "llama-tiny"] {
            for (dtype, tolerance) in
                [(ConversionDtype::F32, EXACT), (ConversionDtype::Q8_0, QUANTIZED)]
            {
                convert::convert_model(&set.model_path(name), &path, dtype, &mut |_, _| {})
                    .unwrap();
                check_model(&set, name, &path, MatrixDtype::F32, tolerance);
            }
        }
    }
}

#[test]
fn a_file_of_llama_cpps_converter_gives_the_figures_of_the_directory_it_was_made_of() {
    let set = small_set();
    // The weights of the bf16 file are those of its source.
    for (name, tolerance) in
        [("qwen2-tiny", QUANTIZED), ("qwen3-tiny", EXACT), ("llama-tiny", QUANTIZED)]
    {
        let path = set.root.join("gguf").join(name).with_extension("gguf");
        check_model(&set, name, &path, MatrixDtype::F32, tolerance);
    }
}

#[test]
fn weights_and_activations_in_8_bits_change_the_figures_little() {
    for set in golden_sets() {
        for name in ["qwen2-tiny", "llama-tiny"] {
            check_model(&set, name, &set.model_path(name), MatrixDtype::Q8_0, QUANTIZED);
        }
    }
    let file = small_set().root.join("gguf/qwen2-tiny.gguf");
    check_model(&small_set(), "qwen2-tiny", &file, MatrixDtype::Q8_0, QUANTIZED);
}
