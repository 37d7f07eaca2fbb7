//! Perplexities and generations of other programs, to every printed digit and token.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use engine::{
    Device, LanguageModel, LoraAdapter, ModelTokenizer, PromptInput, PromptRequest,
    SamplingParameters, generate_all, layout_chunks, score_chunks, score_sliding,
};
use golden::{
    GOLDEN_CONTEXT, GoldenPerplexity, GoldenSet, GreedyGeneration, architecture_set,
    assert_printed, golden_sets, small_set,
};

fn load(set: &GoldenSet, model: &str, adapter: Option<&String>) -> (LanguageModel, ModelTokenizer) {
    let path = set.model_path(model);
    let tokenizer = ModelTokenizer::load_tokenizer(&path).unwrap();
    let model = LanguageModel::load_f32(&path, &Device::Cpu).unwrap();
    let Some(adapter) = adapter else { return (model, tokenizer) };
    let adapter = LoraAdapter::load_peft(&set.adapter_path(adapter), model.model_config()).unwrap();
    (model.with_adapter(&adapter).unwrap(), tokenizer)
}

fn read_text(set: &GoldenSet, name: &str) -> String {
    std::fs::read_to_string(set.text_path(name)).unwrap()
}

fn check_chunks(set: &GoldenSet, figure: &GoldenPerplexity) {
    let (model, tokenizer) = load(set, &figure.model, figure.adapter.as_ref());
    let text = read_text(set, &figure.text);
    let ours =
        score_chunks(&model, &tokenizer, &text, GOLDEN_CONTEXT, figure.limit, |_, _| {}).unwrap();
    let what = format!("{}: {figure:?}", set.root.display());
    assert_printed(ours.perplexity, &figure.perplexity, &what);
    for (ours, printed) in [(ours.stderr, &figure.stderr), (ours.mean_nll, &figure.mean_nll)] {
        printed.iter().for_each(|printed| assert_printed(ours, printed, &what));
    }
    assert_eq!((ours.chunks, ours.tokens), (figure.chunks, 255 * figure.chunks), "{what}");
}

#[test]
fn chunks_give_llama_perplexity_s_figures() {
    for set in golden_sets() {
        set.figures.perplexities.iter().for_each(|figure| check_chunks(&set, figure));
    }
}

/// SentencePiece's tokenizer, and adapters of a base without biases.
#[test]
fn a_mistral_gives_the_figures_and_tokens_of_transformers() {
    let set = architecture_set();
    let of_mistral = |model: &str| model == "mistral-tiny";
    let figures = set.figures.perplexities.iter().filter(|figure| of_mistral(&figure.model));
    let figures: Vec<_> = figures.collect();
    assert_eq!(figures.len(), 2);
    figures.into_iter().for_each(|figure| check_chunks(&set, figure));
    let texts = set.figures.generations.iter().filter(|figure| of_mistral(&figure.model));
    let texts: Vec<_> = texts.collect();
    assert_eq!(texts.len(), 6);
    texts.into_iter().for_each(|figure| check_generation(&set, figure));
}

#[test]
fn a_model_that_only_others_compute_is_refused_with_their_names() {
    let set = architecture_set();
    let refusal = |name: &str| {
        let error = LanguageModel::load_f32(&set.model_path(name), &Device::Cpu).unwrap_err();
        let source = std::error::Error::source(&error).unwrap();
        format!("{error}: {source}")
    };
    for name in set.plain_models().filter(|name| *name != "mistral-tiny") {
        let refused = refusal(name);
        for part in ["config.json", "--trainer-engine pytorch", "llama.cpp", "qwen2, qwen3"] {
            assert!(refused.contains(part), "{name}: {refused}");
        }
    }
}

#[test]
fn a_sliding_window_gives_transformers_figures() {
    for set in golden_sets() {
        for figure in &set.figures.sliding {
            let (model, tokenizer) = load(&set, &figure.model, None);
            let text = read_text(&set, &figure.text);
            let ours =
                score_sliding(&model, &tokenizer, &text, GOLDEN_CONTEXT, figure.stride, |_, _| {})
                    .unwrap();
            assert_printed(ours.perplexity, &figure.perplexity, "perplexity");
            assert_printed(ours.mean_nll, &figure.mean_nll, "mean");
            assert_printed(ours.bits_per_byte, &figure.bits_per_byte, "bits per byte");
            assert_eq!(ours.tokens, figure.tokens);
        }
    }
}

fn check_generation(set: &GoldenSet, figure: &GreedyGeneration) {
    let (model, tokenizer) = load(set, &figure.model, figure.adapter.as_ref());
    let sampling = SamplingParameters {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        max_new_tokens: figure.tokens.len(),
    };
    let prompt = PromptInput::Text(figure.prompt.clone());
    let request = PromptRequest { tag: (), prompt, seeds: vec![0], sampling };
    let answers = generate_all(&model, &tokenizer, 1, vec![request], |_, _| {}).unwrap();
    let answer = answers.into_iter().next().unwrap().unwrap().remove(0);
    assert_eq!(answer.tokens, figure.tokens, "{figure:?}");
}

#[test]
fn the_most_likely_tokens_are_those_of_transformers() {
    let set = small_set();
    assert!(!set.figures.generations.is_empty());
    set.figures.generations.iter().for_each(|figure| check_generation(&set, figure));
}

#[test]
fn a_text_laid_out_for_another_program_has_the_same_chunks_and_one_more() {
    let set = small_set();
    let (model, tokenizer) = load(&set, "qwen2-tiny", None);
    let text = read_text(&set, "eval_docs.txt");
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
    let expected = score_chunks(&model, &tokenizer, &text, 512, None, |_, _| {}).unwrap();
    assert_eq!((all.chunks, all.tokens), (expected.chunks, expected.tokens));
}

#[test]
fn a_dora_adapter_is_refused_by_name() {
    let set = small_set();
    let (model, _) = load(&set, "qwen2-tiny", None);
    let error = LoraAdapter::load_peft(&set.adapter_path("qwen2-dora"), model.model_config());
    assert!(error.as_ref().unwrap_err().to_string().contains("use_dora"), "{error:?}");
}

#[test]
fn a_text_that_is_too_short_is_an_error_with_the_counts() {
    let (model, tokenizer) = load(&small_set(), "qwen2-tiny", None);
    let error = score_chunks(&model, &tokenizer, "too short", 512, None, |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("1024"), "{error}");
}
