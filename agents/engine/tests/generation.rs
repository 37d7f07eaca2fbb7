//! The same seed gives the same sample, bit for bit, with any other samples beside it.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use engine::{
    AdmitError, BatchGenerator, Device, LanguageModel, LayerModule, LoraAdapter, LoraSpec,
    MatrixDtype, ModelTokenizer, PromptInput, PromptRequest, SampleCompletion, SamplingParameters,
    ScoreOptions, ScratchShape, generate_all, write_scratch_model,
};
use std::collections::BTreeMap;

fn model() -> (LanguageModel, ModelTokenizer) {
    let dir = tempfile::tempdir().unwrap();
    let mut config = write_scratch_model(dir.path(), &ScratchShape::default()).unwrap();
    // Large weights, so that a single different bit soon changes a token.
    config.initializer_range = 0.3;
    (
        LanguageModel::init_random(config, 5, &Device::Cpu).unwrap(),
        ModelTokenizer::load_tokenizer(dir.path()).unwrap(),
    )
}

fn requests() -> Vec<PromptRequest<usize>> {
    (0..24)
        .map(|tag| PromptRequest {
            tag,
            prompt: PromptInput::Text(
                "the quick brown fox".chars().cycle().take(3 + tag * 5).collect(),
            ),
            seeds: (0..1 + tag as u64 % 4).map(|sample| sample * 1000 + tag as u64).collect(),
            sampling: SamplingParameters {
                temperature: [1.0, 0.7, 0.0][tag % 3],
                top_k: [0, 20][tag % 2],
                top_p: [1.0, 0.9][tag / 2 % 2],
                max_new_tokens: 20 + tag,
            },
        })
        .collect()
}

type Samples = BTreeMap<(usize, usize), SampleCompletion<usize>>;

fn collect(completions: impl IntoIterator<Item = SampleCompletion<usize>>) -> Samples {
    completions.into_iter().map(|one| ((one.tag, one.index), one)).collect()
}

fn run(slots: usize, requests: Vec<PromptRequest<usize>>) -> Samples {
    let (model, tokenizer) = model();
    let results = generate_all(&model, &tokenizer, slots, requests, |_, _| {}).unwrap();
    collect(results.into_iter().flat_map(Result::unwrap))
}

#[test]
fn a_sample_does_not_depend_on_slots_or_order() {
    let alone = run(1, requests());
    assert!(alone.values().any(|one| one.tokens.len() > 30), "samples are long enough to differ");
    for slots in [2, 7, 64] {
        assert_eq!(run(slots, requests()), alone, "{slots} slots");
    }
    assert_eq!(run(9, requests().into_iter().rev().collect()), alone, "in reverse");
}

#[test]
fn a_sample_s_logprob_is_the_model_s_own_however_it_was_drawn() {
    let ask = |temperature, top_k, max_new_tokens, samples| {
        let sampling = SamplingParameters { temperature, top_k, top_p: 1.0, max_new_tokens };
        let prompt = PromptInput::Text("the quick".into());
        run(8, vec![PromptRequest { tag: 0, prompt, seeds: (0..samples).collect(), sampling }])
    };
    let one = |samples: &Samples| samples.values().next().unwrap().clone();
    let (greedy, cut) = (one(&ask(0.0, 0, 12, 1)), one(&ask(0.6, 1, 12, 1)));
    assert_eq!((&greedy.tokens, &greedy.logprobs), (&cut.tokens, &cut.logprobs));
    assert!(greedy.logprob() < 0.0 && greedy.logprob().is_finite());
    // At temperature 1 a token is as frequent as its logprob states.
    const DRAWS: u32 = 4000;
    let drawn = ask(1.0, 0, 1, u64::from(DRAWS));
    let mut counts: BTreeMap<Vec<u32>, (u32, f64)> = BTreeMap::new();
    for sample in drawn.values() {
        let (count, logprob) = counts.entry(sample.tokens.clone()).or_default();
        (*count, *logprob) = (*count + 1, sample.logprob());
    }
    for (count, logprob) in counts.values() {
        let share = f64::from(*count) / f64::from(DRAWS);
        assert!((share - logprob.exp()).abs() < 0.04, "{share} {}", logprob.exp());
    }
    let likely = counts.values().map(|(_, logprob)| logprob.exp()).fold(0.0, f64::max);
    assert!(likely > 0.05, "some are likelier than others: {likely}");
}

/// An adapter is computed beside weights that are not f32.
#[test]
fn a_sample_of_a_bf16_or_q8_0_model_with_an_adapter_does_not_depend_on_slots() {
    for dtype in [MatrixDtype::Bf16, MatrixDtype::Q8_0] {
        check_adapted_samples(dtype);
    }
}

fn check_adapted_samples(dtype: MatrixDtype) {
    let dir = tempfile::tempdir().unwrap();
    let mut config = write_scratch_model(dir.path(), &ScratchShape::default()).unwrap();
    config.initializer_range = 0.3;
    LanguageModel::init_random(config, 5, &Device::Cpu)
        .unwrap()
        .save_directory(dir.path())
        .unwrap();
    let model = LanguageModel::load_with_dtype(dir.path(), &Device::Cpu, dtype).unwrap();
    let spec = LoraSpec { rank: 4, alpha: 8.0, modules: LayerModule::ALL.into(), rslora: false };
    let path = dir.path().join("adapter");
    LoraAdapter::new(&spec, model.model_config(), 1).unwrap().save_peft(&path, "base").unwrap();
    shake(&path.join("adapter_model.safetensors"));
    let adapter = LoraAdapter::load_peft(&path, model.model_config()).unwrap();
    let tokenizer = ModelTokenizer::load_tokenizer(dir.path()).unwrap();
    let run = |model: &LanguageModel, slots| {
        let results = generate_all(model, &tokenizer, slots, requests(), |_, _| {}).unwrap();
        collect(results.into_iter().flat_map(Result::unwrap))
    };
    let adapted = model.with_adapter(&adapter).unwrap();
    let alone = run(&adapted, 1);
    assert!(alone != run(&model, 1), "the adapter matters");
    for slots in [2, 7, 64] {
        assert_eq!(run(&adapted, slots), alone, "{slots} slots");
    }
    // Packed weights have the same sums, whether they are packed before or after.
    let packed = model.clone().into_packed().unwrap();
    for packed in [packed.with_adapter(&adapter), Ok(adapted.clone().into_packed().unwrap())] {
        assert_eq!(run(&packed.unwrap(), 7), alone, "packed");
    }
    let text = "a text that is as long as a canary";
    let score = |model: LanguageModel| {
        BatchGenerator::<()>::new(model, tokenizer.clone(), 1).score_canary(text, 20).unwrap()
    };
    assert_eq!(score(packed), score(model));
    assert!(adapted.with_adapter(&adapter).is_err());
    assert!(adapted.save_directory(&path).is_err());
}

/// Overwrites the file's tensors, because a new adapter's B is zero.
fn shake(path: &std::path::Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for (index, value) in bytes[8 + header..].as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *value = (((index * 7919) % 101) as f32 / 1000.0 - 0.05).to_le_bytes();
    }
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_sample_does_not_depend_on_the_thread_count() {
    let expected = run(16, requests());
    for threads in [1, 3, 8] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(|| run(16, requests())), expected, "{threads} threads");
    }
}

#[test]
fn requests_admitted_while_others_run_give_the_same_samples() {
    let expected = run(1, requests());
    let (model, tokenizer) = model();
    let mut generator = BatchGenerator::new(model, tokenizer, 5);
    let mut requests = requests().into_iter();
    let mut finished = Vec::new();
    let mut step = 0;
    while requests.len() > 0 || !generator.is_idle() {
        if step % 3 == 0 {
            requests
                .next()
                .into_iter()
                .for_each(|request| generator.admit_request(request).unwrap());
        }
        finished.extend(generator.generate_step().unwrap());
        step += 1;
    }
    assert_eq!(collect(finished), expected);
}

#[test]
fn a_bad_request_is_refused_and_the_others_are_served() {
    let mut all = requests();
    all[1].prompt = PromptInput::Text("x".repeat(600));
    all[2].prompt = PromptInput::Text(String::new());
    all[3].sampling.temperature = f64::NAN;
    all[4].prompt = PromptInput::Tokens(vec![9999]);
    let (model, tokenizer) = model();
    let results = generate_all(&model, &tokenizer, 8, all, |_, _| {}).unwrap();
    assert!(matches!(results[1], Err(AdmitError::PromptTooLong { tokens: 600, positions: 512 })));
    assert!(matches!(results[2], Err(AdmitError::EmptyPrompt)));
    assert!(matches!(results[3], Err(AdmitError::Sampling { field: "temperature", .. })));
    assert!(matches!(results[4], Err(AdmitError::Vocabulary(_))));
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 20);
}

#[test]
fn a_sample_ends_with_the_model_s_last_position() {
    let (model, tokenizer) = model();
    let request = PromptRequest {
        tag: 0,
        prompt: PromptInput::Tokens(vec![1; 510]),
        seeds: vec![1],
        sampling: SamplingParameters { temperature: 0.0, top_k: 0, top_p: 1.0, max_new_tokens: 99 },
    };
    let results = generate_all(&model, &tokenizer, 8, vec![request], |_, _| {}).unwrap();
    let completions = results.into_iter().flat_map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!(completions[0].tokens.len(), 3);
}

#[test]
fn a_prompt_is_scored_as_if_its_tokens_were_drawn_and_samples_can_be_watched_and_ended() {
    let (model, tokenizer) = model();
    let greedy = |max_new_tokens| SamplingParameters {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        max_new_tokens,
    };
    let ask = |prompt: Vec<u32>, max_new_tokens| PromptRequest {
        tag: (),
        prompt: PromptInput::Tokens(prompt),
        seeds: vec![1],
        sampling: greedy(max_new_tokens),
    };
    let scored = ScoreOptions { alternatives: 3, prompt: true };
    let prompt = tokenizer.encode_prompt("the quick brown fox").unwrap();
    let mut generator = BatchGenerator::new(model, tokenizer, 2);
    generator.admit_scored_request(ask(prompt.clone(), 6), scored).unwrap();
    let mut drawn = Vec::new();
    let first = loop {
        let done = generator.generate_step().unwrap();
        if let Some(running) = generator.running_samples().next() {
            assert_eq!(running.tokens.len(), running.alternatives.len());
            drawn = running.tokens.to_vec();
        }
        if let Some(done) = done.into_iter().next() {
            break done;
        }
    };
    assert_eq!(first.tokens[..drawn.len()], drawn);
    assert_eq!(first.prompt_scores.len(), prompt.len() - 1);
    for ((token, logprob), likely) in
        first.tokens.iter().zip(&first.logprobs).zip(&first.alternatives)
    {
        assert_eq!((likely[0], likely.len()), ((*token, *logprob), 3));
    }
    // The same tokens as a prompt have the same scores, but for the kernels of longer passes.
    let whole = [prompt.as_slice(), &first.tokens].concat();
    generator.admit_scored_request(ask(whole, 1), scored).unwrap();
    let second = generator.generate_step().unwrap().remove(0);
    let scores = &second.prompt_scores[prompt.len() - 1..];
    assert_eq!(scores.len(), first.tokens.len());
    for (score, (token, logprob)) in scores.iter().zip(first.tokens.iter().zip(&first.logprobs)) {
        assert_eq!(score.token, *token);
        assert!((score.logprob - logprob).abs() < 1e-3, "{score:?}, {logprob}");
    }
    generator.admit_request(ask(prompt, 20)).unwrap();
    generator.generate_step().unwrap();
    assert_eq!(generator.open_samples(), 1);
    generator.cancel_samples(|(), index| index == 0);
    assert!(generator.is_idle());
}
