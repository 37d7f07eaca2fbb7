//! A GGUF file gives the same model as its source.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use engine::{Device, LanguageModel, ModelTokenizer, score_chunks};
use formats::convert::{self, ConversionDtype};
use std::path::Path;

#[test]
fn a_gguf_file_gives_the_figures_of_the_directory_it_was_made_of() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/golden");
    if !golden.exists() {
        println!("skipped: {} is absent", golden.display());
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let text = std::fs::read_to_string(golden.join("corpus/eval_docs.txt")).unwrap();
    for (name, expected) in [("qwen2-tiny", 186.1307), ("llama-tiny", 316.5044)] {
        let base = golden.join("hf").join(name);
        for (dtype, tolerance) in [(ConversionDtype::F32, 5e-5), (ConversionDtype::Q8_0, 0.5)] {
            convert::convert_model(&base, &path, dtype, &mut |_, _| {}).unwrap();
            let model = LanguageModel::load_f32(&path, &Device::Cpu).unwrap();
            let tokenizer = ModelTokenizer::load_tokenizer(&path).unwrap();
            let figure = score_chunks(&model, &tokenizer, &text, 512, Some(8), |_, _| {}).unwrap();
            let off = (figure.perplexity - expected).abs();
            assert!(off < tolerance, "{name} {dtype:?}: {}", figure.perplexity);
        }
    }
}
