//! Perplexities of other programs, to every printed digit.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use engine::{
    Device, LanguageModel, LoraAdapter, ModelTokenizer, layout_chunks, score_chunks, score_sliding,
};
use std::path::{Path, PathBuf};

fn golden() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/golden");
    if !path.exists() {
        println!("skipped: {} is absent", path.display());
    }
    path.exists().then_some(path)
}

struct Case {
    model: LanguageModel,
    tokenizer: ModelTokenizer,
    text: String,
}

fn case(root: &Path, model: &str, adapter: Option<&str>, text: &str) -> Case {
    let dir = root.join("hf").join(model);
    let mut model = LanguageModel::load_f32(&dir, &Device::Cpu).unwrap();
    if let Some(adapter) = adapter {
        let adapter =
            LoraAdapter::load_peft(&root.join("peft").join(adapter), model.model_config()).unwrap();
        model = model.with_adapter(&adapter).unwrap();
    }
    let text = std::fs::read_to_string(root.join("corpus").join(text)).unwrap();
    Case { model, tokenizer: ModelTokenizer::load_tokenizer(&dir).unwrap(), text }
}

fn chunked(case: &Case, limit: Option<usize>) -> engine::PerplexityScore {
    score_chunks(&case.model, &case.tokenizer, &case.text, 512, limit, |_, _| {}).unwrap()
}

#[test]
fn chunks_give_llama_perplexity_s_figures() {
    let Some(root) = golden() else { return };
    let docs = case(&root, "qwen2-tiny", None, "eval_docs.txt");
    let all = chunked(&docs, None);
    assert_eq!(format!("{:.4} {:.5}", all.perplexity, all.stderr), "159.8976 3.76666");
    assert!((all.mean_nll - 5.074_533).abs() < 1e-6, "{}", all.mean_nll);
    assert_eq!((all.chunks, all.tokens), (54, 13770));
    let first = chunked(&docs, Some(8));
    assert_eq!(format!("{:.4} {:.4}", first.perplexity, first.stderr), "186.1307 10.7964");
    let license = chunked(&case(&root, "qwen2-tiny", None, "eval_license.txt"), None);
    assert_eq!(format!("{:.4} {:.5}", license.perplexity, license.stderr), "643.4062 21.64208");
}

#[test]
fn adapters_and_the_llama_architecture_give_the_reference_figures() {
    let Some(root) = golden() else { return };
    for (model, adapter, expected) in [
        ("qwen2-tiny", Some("qwen2-r8-qv"), "187.2695"),
        ("llama-tiny", None, "316.5044"),
        ("llama-tiny", Some("llama-r8-qv"), "324.3660"),
    ] {
        let figure = chunked(&case(&root, model, adapter, "eval_docs.txt"), Some(8));
        assert_eq!(format!("{:.4}", figure.perplexity), expected, "{model} {adapter:?}");
    }
}

#[test]
fn a_text_laid_out_for_another_program_has_the_same_chunks_and_one_more() {
    let Some(root) = golden() else { return };
    let Case { model, tokenizer, text } = case(&root, "qwen2-tiny", None, "eval_docs.txt");
    for (context, limit) in [(512, None), (512, Some(8)), (64, Some(3)), (1000, None)] {
        let layout =
            layout_chunks(&tokenizer, model.model_config(), &text, context, limit).unwrap();
        let here = score_chunks(&model, &tokenizer, &text, context, Some(1), |_, _| {}).unwrap();
        let there =
            score_chunks(&model, &tokenizer, &layout.text, context, Some(1), |_, _| {}).unwrap();
        assert_eq!(here, there, "{context} {limit:?}");
        assert_eq!(layout.tokens, layout.chunks * here.tokens);
        assert!(layout.has_extra_chunk);
        let tokens = tokenizer.encode_continuation(layout.text.trim_end_matches('\n')).unwrap();
        assert_eq!(tokens.len() / context, layout.chunks + 1, "{context} {limit:?}");
    }
    let all = layout_chunks(&tokenizer, model.model_config(), &text, 512, None).unwrap();
    assert_eq!((all.chunks, all.tokens), (54, 13770));
}

#[test]
fn a_sliding_window_gives_transformers_figures() {
    let Some(root) = golden() else { return };
    let Case { model, tokenizer, text } = case(&root, "qwen2-tiny", None, "eval_docs.txt");
    let figure = score_sliding(&model, &tokenizer, &text, 512, 256, |_, _| {}).unwrap();
    assert_eq!(format!("{:.4} {:.6}", figure.perplexity, figure.mean_nll), "153.8851 5.036206");
    assert_eq!(format!("{:.6} {}", figure.bits_per_byte, figure.tokens), "2.389502 28122");
}

#[test]
fn a_dora_adapter_is_refused_by_name() {
    let Some(root) = golden() else { return };
    let model = case(&root, "qwen2-tiny", None, "eval_docs.txt").model;
    let error =
        LoraAdapter::load_peft(&root.join("peft/qwen2-dora"), model.model_config()).unwrap_err();
    assert!(error.to_string().contains("use_dora"), "{error}");
}

#[test]
fn a_text_that_is_too_short_is_an_error_with_the_counts() {
    let Some(root) = golden() else { return };
    let Case { model, tokenizer, .. } = case(&root, "qwen2-tiny", None, "eval_docs.txt");
    let error = score_chunks(&model, &tokenizer, "too short", 512, None, |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("1024"), "{error}");
}
