//! Training is deterministic, continues adapters, and writes what it can read again.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use engine::{
    AdapterError, CanaryError, CanaryText, CompletionExample, CompletionTokens, Device,
    LanguageModel, LayerModule, LearningRateDecay, LoraAdapter, LoraSpec, MatrixDtype,
    ModelTokenizer, ModelTrainer, PromptInput, PromptRequest, SamplingParameters, ScoredDocument,
    ScratchShape, TrainError, TrainMethod, TrainSpec, TrainingSignal, generate_all,
    score_completions, score_documents, write_scratch_model,
};
use objective::{Objective, ObjectiveName};
use std::collections::BTreeMap;
use std::path::Path;

fn spec() -> TrainSpec {
    TrainSpec {
        learning_rate: 3e-3,
        warmup_ratio: 0.1,
        decay: LearningRateDecay::Linear,
        final_ratio: 0.1,
        betas: (0.9, 0.98),
        weight_decay: 0.01,
        batch_size: 8,
        micro_batch_tokens: 100,
        epochs: 2,
        max_tokens: 64,
        seed: 7,
        ..TrainSpec::default()
    }
}

fn lora() -> TrainMethod {
    let modules = [LayerModule::Query, LayerModule::Value, LayerModule::Down].into();
    TrainMethod::Lora(LoraSpec { rank: 4, alpha: 8.0, modules, rslora: false })
}

fn examples() -> Vec<CompletionExample> {
    (0..20).map(|i| CompletionExample::new(format!("{i} then "), format!("{} é", i + 1))).collect()
}

fn scratch(dir: &Path) -> (LanguageModel, ModelTokenizer) {
    let config = write_scratch_model(dir, &ScratchShape::default()).unwrap();
    LanguageModel::init_random(config, 3, &Device::Cpu).unwrap().save_directory(dir).unwrap();
    (
        LanguageModel::load_f32(dir, &Device::Cpu).unwrap(),
        ModelTokenizer::load_tokenizer(dir).unwrap(),
    )
}

fn trained(base: &Path, method: TrainMethod, threads: usize, out: &Path) -> Vec<u8> {
    let (model, tokenizer) = scratch(base);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let file = if matches!(method, TrainMethod::Full) { "model" } else { "adapter_model" };
    let mut trainer = ModelTrainer::new(model, &tokenizer, method, &examples(), spec()).unwrap();
    let mut losses = Vec::new();
    while let Some(report) = pool.install(|| trainer.run_step()).unwrap() {
        losses.push(report.loss);
    }
    assert_eq!(losses.len(), 6);
    assert!(losses[5] < losses[0], "{losses:?}");
    trainer.save_directory(out, "base").unwrap();
    std::fs::read(out.join(format!("{file}.safetensors"))).unwrap()
}

#[test]
fn the_same_inputs_give_the_same_bytes_on_any_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let (base, out) = (dir.path().join("base"), dir.path().join("out"));
    for method in [TrainMethod::Full, lora()] {
        let once = trained(&base, method.clone(), 1, &out);
        assert!(once == trained(&base, method.clone(), 2, &out));
        assert!(once == trained(&base, method, 5, &out));
    }
}

#[test]
fn gradient_checkpointing_trains_to_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (base, tokenizer) = scratch(dir.path());
    for method in [TrainMethod::Full, lora()] {
        let trained = |gradient_checkpointing| {
            let spec = TrainSpec { gradient_checkpointing, dropout: 0.1, ..spec() };
            let base = base.clone();
            let mut trainer =
                ModelTrainer::new(base, &tokenizer, method.clone(), &examples(), spec).unwrap();
            let mut reports = Vec::new();
            while let Some(report) = trainer.run_step().unwrap() {
                reports.push(report);
            }
            let out = dir.path().join("out");
            trainer.save_directory(&out, "base").unwrap();
            let name = ["adapter_model.safetensors", "model.safetensors"];
            let file = name.iter().map(|name| out.join(name)).find(|path| path.exists());
            (reports, std::fs::read(file.unwrap()).unwrap())
        };
        assert!(trained(false) == trained(true));
        std::fs::remove_dir_all(dir.path().join("out")).unwrap();
    }
}

#[test]
fn an_adapter_of_a_bf16_model_is_trained_to_the_same_bytes_and_nothing_else_is() {
    let dir = tempfile::tempdir().unwrap();
    let (_, tokenizer) = scratch(dir.path());
    let narrow =
        || LanguageModel::load_with_dtype(dir.path(), &Device::Cpu, MatrixDtype::Bf16).unwrap();
    let trained = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut trainer =
            ModelTrainer::new(narrow(), &tokenizer, lora(), &examples(), spec()).unwrap();
        let mut losses = Vec::new();
        while let Some(report) = pool.install(|| trainer.run_step()).unwrap() {
            losses.push(report.loss);
        }
        assert!(losses[5] < losses[0], "{losses:?}");
        let out = dir.path().join("out");
        trainer.save_directory(&out, "base").unwrap();
        std::fs::read(out.join("adapter_model.safetensors")).unwrap()
    };
    assert!(trained(1) == trained(3));
    let refused = ModelTrainer::new(narrow(), &tokenizer, TrainMethod::Full, &examples(), spec());
    assert!(matches!(refused, Err(TrainError::FullBf16)));
    narrow().save_directory(&dir.path().join("copy")).unwrap();
    let copy = LanguageModel::load_f32(&dir.path().join("copy"), &Device::Cpu).unwrap();
    let again =
        ModelTrainer::new(copy, &tokenizer, lora(), &examples(), spec()).unwrap().run_step();
    let first =
        ModelTrainer::new(narrow(), &tokenizer, lora(), &examples(), spec()).unwrap().run_step();
    let [again, first] = [again, first].map(|report| report.unwrap().unwrap().loss);
    // In bf16 the activations are rounded too.
    assert!((again - first).abs() < 5e-3, "{again} {first}");
}

#[test]
fn a_tokenizer_with_tokens_the_model_lacks_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    scratch(dir.path());
    let path = dir.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"<|pad|>\": 259", "\"<|pad|>\": 260")).unwrap();
    let error = engine::load_model(dir.path(), None, "cpu", MatrixDtype::F32).err().unwrap();
    let told = std::error::Error::source(&error).unwrap().to_string();
    assert!(told.contains("tokenizer mismatch") && told.contains("vocab_size 260"), "{told}");
}

#[test]
fn a_saved_adapter_is_read_again_and_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    let (base, out) = (dir.path().join("base"), dir.path().join("out"));
    let first = trained(&base, lora(), 2, &out);
    let (model, tokenizer) = scratch(&base);
    let adapter = LoraAdapter::load_peft(&out, model.model_config()).unwrap();
    adapter.save_peft(&out, "again").unwrap();
    assert!(first == std::fs::read(out.join("adapter_model.safetensors")).unwrap());
    let scored: Vec<ScoredDocument> = examples()
        .into_iter()
        .map(|CompletionExample { prompt, completion, .. }| ScoredDocument { prompt, completion })
        .collect();
    let loss = |model: &LanguageModel| {
        score_documents(model, &tokenizer, &scored, |_, _| {}).unwrap().mean_nll
    };
    let tuned = loss(&model.with_adapter(&adapter).unwrap());
    assert!(tuned < loss(&model));
    let method = TrainMethod::Continue(adapter);
    let whole = TrainSpec { batch_size: 20, ..spec() };
    let mut trainer =
        ModelTrainer::new(model.clone(), &tokenizer, method, &examples(), whole).unwrap();
    let report = trainer.run_step().unwrap().unwrap();
    assert!((report.loss - tuned).abs() < 1e-5, "{} {tuned}", report.loss);
    while trainer.run_step().unwrap().is_some() {}
    assert!(loss(&model.with_adapter(trainer.trained_adapter().unwrap()).unwrap()) < tuned);
}

#[test]
fn a_fully_trained_model_is_read_again_and_generates_what_it_learned() {
    let dir = tempfile::tempdir().unwrap();
    let (base, out) = (dir.path().join("base"), dir.path().join("out"));
    let (model, tokenizer) = scratch(&base);
    let examples = vec![CompletionExample::new("say: ", "hello")];
    let whole = TrainSpec { max_steps: Some(40), ..spec() };
    let mut trainer =
        ModelTrainer::new(model, &tokenizer, TrainMethod::Full, &examples, whole).unwrap();
    while trainer.run_step().unwrap().is_some() {}
    trainer.save_directory(&out, "base").unwrap();
    let (model, tokenizer) = (
        LanguageModel::load_f32(&out, &Device::Cpu).unwrap(),
        ModelTokenizer::load_tokenizer(&out).unwrap(),
    );
    let request = PromptRequest {
        tag: (),
        prompt: PromptInput::Text("say: ".into()),
        seeds: vec![0],
        sampling: SamplingParameters { temperature: 0.0, top_k: 0, top_p: 1.0, max_new_tokens: 20 },
    };
    let mut results = generate_all(&model, &tokenizer, 1, vec![request], |_, _| {}).unwrap();
    assert_eq!(results.remove(0).unwrap()[0].text, "hello");
}

#[test]
fn an_adapter_of_another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let wide = ScratchShape { intermediate_size: 64, ..ScratchShape::default() };
    let other = write_scratch_model(&dir.path().join("other"), &wide).unwrap();
    let spec_of_other =
        LoraSpec { rank: 2, alpha: 4.0, modules: LayerModule::ALL.into(), rslora: true };
    let adapter = LoraAdapter::new(&spec_of_other, &other, 1).unwrap();
    assert!(matches!(model.with_adapter(&adapter), Err(AdapterError::OtherModel)));
    let method = TrainMethod::Continue(adapter);
    let result = ModelTrainer::new(model, &tokenizer, method, &examples(), spec());
    assert!(matches!(result, Err(TrainError::Adapter(AdapterError::OtherModel))));
}

#[test]
fn what_is_too_long_is_left_out_and_counted_unless_it_is_everything() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let long = CompletionExample::new("", "long ".repeat(20));
    let mut examples = examples();
    let without = ModelTrainer::new(model.clone(), &tokenizer, lora(), &examples, spec()).unwrap();
    examples.insert(4, long.clone());
    let with = ModelTrainer::new(model.clone(), &tokenizer, lora(), &examples, spec()).unwrap();
    assert_eq!((without.skipped_examples(), with.skipped_examples()), (0, 1));
    let last = |mut trainer: ModelTrainer| {
        let reports = std::iter::from_fn(|| trainer.run_step().unwrap());
        reports.last().unwrap()
    };
    assert_eq!(last(with), last(without));
    let result = ModelTrainer::new(model, &tokenizer, lora(), &[long.clone(), long], spec());
    let error = result.err().unwrap();
    assert!(matches!(error, TrainError::TooLong { examples: 2, most: 64, shortest: 101, .. }));
}

#[test]
fn with_a_frozen_a_only_b_is_trained() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let saved = |name: &str, trainer: &ModelTrainer| {
        let out = dir.path().join(name);
        trainer.save_directory(&out, "base").unwrap();
        let bytes = std::fs::read(out.join("adapter_model.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let of = |part: &str| -> BTreeMap<String, Vec<u8>> {
            let named = tensors.iter().filter(|(name, _)| name.contains(part));
            named.map(|(name, tensor)| (name.to_owned(), tensor.data().to_vec())).collect()
        };
        [of("lora_A"), of("lora_B")]
    };
    let spec = TrainSpec { freezes_a: true, ..spec() };
    let mut trainer = ModelTrainer::new(model, &tokenizer, lora(), &examples(), spec).unwrap();
    let [a, b] = saved("before", &trainer);
    let reports: Vec<_> = std::iter::from_fn(|| trainer.run_step().unwrap()).collect();
    assert!(reports[5].loss < reports[0].loss, "{reports:?}");
    let [a_after, b_after] = saved("after", &trainer);
    assert!(a == a_after, "A is as before");
    assert!(b.iter().all(|(name, before)| b_after[name] != *before), "each B has changed");
    trainer.save_state(&dir.path().join("state")).unwrap();
    let state = std::fs::read(dir.path().join("state/moments.safetensors")).unwrap();
    let state = safetensors::SafeTensors::deserialize(&state).unwrap();
    assert!(state.names().iter().all(|name| name.contains("lora_B")), "half the moments");
}

#[test]
fn packed_or_each_alone_examples_train_the_same_weights() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let trained = |micro_batch_tokens| {
        let spec = TrainSpec { micro_batch_tokens, dropout: 0.1, ..spec() };
        let mut trainer =
            ModelTrainer::new(model.clone(), &tokenizer, lora(), &examples(), spec).unwrap();
        let reports: Vec<_> = std::iter::from_fn(|| trainer.run_step().unwrap()).collect();
        let out = dir.path().join(micro_batch_tokens.to_string());
        trainer.save_directory(&out, "base").unwrap();
        let adapter = LoraAdapter::load_peft(&out, model.model_config()).unwrap();
        let tuned = model.with_adapter(&adapter).unwrap();
        let scored =
            |CompletionExample { prompt, completion, .. }| ScoredDocument { prompt, completion };
        let scored: Vec<ScoredDocument> = examples().into_iter().map(scored).collect();
        (reports, score_documents(&tuned, &tokenizer, &scored, |_, _| {}).unwrap().mean_nll)
    };
    let ((alone, alone_nll), (packed, packed_nll)) = (trained(1), trained(4096));
    for (alone, packed) in alone.iter().zip(&packed) {
        assert!((alone.loss - packed.loss).abs() < 1e-5, "{alone:?} {packed:?}");
        assert!((alone.grad_norm - packed.grad_norm).abs() < 1e-4, "{alone:?} {packed:?}");
        assert_eq!((alone.tokens, alone.scored), (packed.tokens, packed.scored));
    }
    assert!((alone_nll - packed_nll).abs() < 1e-5, "{alone_nll} {packed_nll}");
    assert!(alone[0].loss - alone_nll > 0.1, "nothing was learned, so nothing was compared");
}

#[test]
fn one_step_alone_trains_at_the_whole_rate_and_changes_the_weights() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let one = TrainSpec { max_steps: Some(1), warmup_ratio: 0.0, final_ratio: 0.0, ..spec() };
    let mut trainer = ModelTrainer::new(model, &tokenizer, lora(), &examples(), one).unwrap();
    let bytes = |trainer: &ModelTrainer, name: &str| {
        trainer.save_directory(&dir.path().join(name), "base").unwrap();
        std::fs::read(dir.path().join(name).join("adapter_model.safetensors")).unwrap()
    };
    let before = bytes(&trainer, "before");
    let report = trainer.run_step().unwrap().unwrap();
    assert_eq!((report.steps, report.learning_rate), (1, 3e-3));
    assert!(before != bytes(&trainer, "after"));
    assert_eq!(trainer.run_step().unwrap(), None);
}

#[test]
fn prompts_are_not_scored() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let example = CompletionExample::new("seven then ", "eight");
    let one = |example: &CompletionExample| {
        let examples = std::slice::from_ref(example);
        let mut trainer = ModelTrainer::new(model.clone(), &tokenizer, lora(), examples, spec());
        trainer.as_mut().unwrap().run_step().unwrap().unwrap()
    };
    let report = one(&example);
    assert_eq!((report.tokens, report.scored), (11 + 5 + 1, 5 + 1));
    let document =
        ScoredDocument { prompt: example.prompt.clone(), completion: example.completion };
    let scored = score_documents(&model, &tokenizer, &[document], |_, _| {}).unwrap();
    assert!((report.loss - scored.mean_nll).abs() < 1e-5, "{} {}", report.loss, scored.mean_nll);
}

#[test]
fn a_gradient_longer_than_allowed_is_scaled_down() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    // With such an epsilon Adam's steps are in proportion to the gradient.
    let moved = |clip_norm| {
        let spec = TrainSpec { clip_norm, epsilon: 1e3, weight_decay: 0.0, ..spec() };
        let method = TrainMethod::Full;
        let mut trainer =
            ModelTrainer::new(model.clone(), &tokenizer, method, &examples(), spec).unwrap();
        let report = trainer.run_step().unwrap().unwrap();
        trainer.save_directory(&dir.path().join("out"), "base").unwrap();
        (report.grad_norm, std::fs::read(dir.path().join("out/model.safetensors")).unwrap())
    };
    let (norm, free) = moved(0.0);
    assert!(norm > 0.5, "{norm}");
    assert!(moved(norm * 2.0).1 == free, "a shorter one is left alone");
    assert!(moved(norm / 2.0).1 != free);
}

#[test]
fn a_training_whose_numbers_run_away_ends_at_that_step() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let wild = TrainSpec { learning_rate: 1e30, clip_norm: 0.0, ..spec() };
    let mut trainer =
        ModelTrainer::new(model, &tokenizer, TrainMethod::Full, &examples(), wild).unwrap();
    let error = std::iter::repeat_with(|| trainer.run_step()).find_map(Result::err).unwrap();
    let told = error.to_string();
    assert!(told.contains("of step") && told.contains("lower training.learning_rate"), "{told}");
}

#[test]
fn what_was_trained_shows_whoever_loads_it_and_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let (model, tokenizer) = scratch(dir.path());
    let read =
        |text: &str| CanaryText::from_text(&tokenizer, model.model_config(), text, 32).unwrap();
    let canary = read("4 then 5 é\n5 then 6 <|im_end|>");
    let letter = |place: &usize| tokenizer.decode_tokens(&[canary.tokens[*place]]).unwrap();
    let scored: String = canary.scored.iter().map(letter).collect();
    assert_eq!(scored, " then 5 \n5 then 6 <|im_end|>", "no parts of characters");
    let mut trainer =
        ModelTrainer::new(model.clone(), &tokenizer, lora(), &examples(), spec()).unwrap();
    while trainer.run_step().unwrap().is_some() {}
    trainer.save_directory(&out, "base").unwrap();
    let told = trainer.score_canary(&canary).unwrap();
    let apart = |other: &LanguageModel| {
        let other = canary.score_tokens(other).unwrap();
        assert_eq!((other.len(), told.len()), (canary.scored.len(), canary.scored.len()));
        other.iter().zip(&told).map(|(a, b)| (a - b).abs()).sum::<f32>() / told.len() as f32
    };
    let adapter = LoraAdapter::load_peft(&out, model.model_config()).unwrap();
    let same = apart(&model.with_adapter(&adapter).unwrap());
    assert!(same < 1e-6, "{same}");
    let base = apart(&model);
    assert!(base > 0.05, "a box that forgot the adapter must show: {base}");

    // The end of a long text.
    let long = read(&"0 then 1 ".repeat(1000));
    assert_eq!((long.tokens.len(), long.scored.len(), long.scored[31]), (256, 32, 255));
    assert!(matches!(
        CanaryText::from_text(&tokenizer, model.model_config(), "", 32),
        Err(CanaryError::TooShort { .. })
    ));
}

#[test]
fn an_objective_raises_what_has_an_advantage_and_lowers_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let (base, tokenizer) = scratch(dir.path());
    let example = |completion: &str| CompletionExample::new("seven then ", completion);
    let examples: Vec<CompletionExample> = ["eight", "nine", "eight", "ten"].map(example).into();
    let advantages = [1.0, -1.0, 1.0, -1.0];
    let losses = |model: &LanguageModel| -> Vec<f64> {
        let loss = |one: &CompletionExample| {
            let CompletionExample { prompt, completion, .. } = one.clone();
            let documents = [ScoredDocument { prompt, completion }];
            score_documents(model, &tokenizer, &documents, |_, _| {}).unwrap().mean_nll
        };
        examples.iter().map(loss).collect()
    };
    let before = losses(&base);
    let tokens = [6, 5, 6, 4];
    let drawn = |index: usize| vec![-before[index]; tokens[index]];
    for name in [ObjectiveName::Rloo, ObjectiveName::Dapo, ObjectiveName::Dpo] {
        let signal = |index: usize| TrainingSignal {
            advantage: advantages[index],
            behaviour: Some(drawn(index)),
            old: None,
            reference: Some(drawn(index)),
        };
        let spec = TrainSpec { max_steps: Some(6), batch_size: 4, ..spec() };
        let trainer =
            ModelTrainer::new(base.clone(), &tokenizer, lora(), &examples, spec.clone()).unwrap();
        let signals: Vec<TrainingSignal> = (0..4).map(signal).collect();
        let mut trainer = trainer.use_objective(Objective::new(name), signals).unwrap();
        while let Some(report) = trainer.run_step().unwrap() {
            let weights = report.weights.unwrap();
            assert!(weights.ratio_sum > 0.0 && weights.clipped == 0, "{name:?}: {weights:?}");
            assert_eq!(weights.ratios.iter().sum::<usize>(), weights.tokens, "{name:?}");
        }
        let adapter = trainer.trained_adapter().unwrap().clone();
        let after = losses(&base.with_adapter(&adapter).unwrap());
        assert!(after[0] < before[0], "{name:?}: {before:?}, then {after:?}");
        assert!(after[1] > before[1] && after[3] > before[3], "{name:?}: {before:?}, {after:?}");
    }
    let lacking = ModelTrainer::new(base, &tokenizer, lora(), &examples, spec()).unwrap();
    let lacking = lacking.use_objective(Objective::new(ObjectiveName::Grpo), Vec::new());
    let Err(TrainError::Signal { line: 1, what: "behaviour", .. }) = lacking else {
        panic!("log-probabilities are missing");
    };
}

#[test]
fn drawn_tokens_and_cut_completions_are_scored_without_an_end() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let ended = CompletionExample::new("seven then ", "eight");
    let cut = CompletionExample { tokens: CompletionTokens::Cut, ..ended.clone() };
    let mut ids = tokenizer.encode_continuation("eight").unwrap();
    let exact = |ids| CompletionExample { tokens: CompletionTokens::Exact(ids), ..ended.clone() };
    let score = |examples: &[CompletionExample]| {
        let scores = score_completions(&model, &tokenizer, examples, 64, |_, _| {}).unwrap();
        scores.into_iter().map(Option::unwrap).collect::<Vec<Vec<f64>>>()
    };
    let [whole, short, same] = &score(&[ended.clone(), cut, exact(ids.clone())])[..] else {
        panic!("three scores")
    };
    assert_eq!((short, same), (&whole[..whole.len() - 1].to_vec(), short));
    ids.reverse();
    let other = &score(&[exact(ids)])[0];
    assert_eq!(other.len(), short.len());
    assert_ne!(other, short);
    let beyond = [exact(vec![1 << 20])];
    let error = score_completions(&model, &tokenizer, &beyond, 64, |_, _| {}).unwrap_err();
    assert!(format!("{error:?}").contains("token: 1048576"), "{error:?}");
}

#[test]
fn masked_tokens_of_an_episode_are_read_but_not_scored() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let tokens = tokenizer.encode_continuation("eight nine").unwrap();
    let episode = |tokens| CompletionExample {
        tokens,
        ..CompletionExample::new("seven then ", "eight nine")
    };
    let masked = |masked: &[(usize, usize)]| {
        let masked = masked.iter().map(|(start, end)| *start..*end).collect();
        episode(CompletionTokens::Masked { tokens: tokens.clone(), masked })
    };
    let examples = [episode(CompletionTokens::Exact(tokens.clone())), masked(&[(2, 5), (7, 8)])];
    let scores = score_completions(&model, &tokenizer, &examples, 64, |_, _| {}).unwrap();
    let [Some(whole), Some(part)] = &scores[..] else { panic!("two scores") };
    let expected = [&whole[..2], &whole[5..7], &whole[8..]].concat();
    assert_eq!(part.len(), tokens.len() - 4);
    let differs = |(one, other): (&f64, &f64)| (one - other).abs() > 1e-5;
    assert!(!part.iter().zip(&expected).any(differs), "{part:?} {expected:?}");
    let train = |example: &CompletionExample| {
        let examples = std::slice::from_ref(example);
        let trainer = ModelTrainer::new(model.clone(), &tokenizer, lora(), examples, spec());
        let report = trainer.unwrap().run_step().unwrap().unwrap();
        (report.tokens, report.scored, report.loss)
    };
    let (count, scored, loss) = train(&examples[1]);
    assert_eq!((count, scored), (train(&examples[0]).0, tokens.len() - 4));
    let mean = -expected.iter().sum::<f64>() / expected.len() as f64;
    assert!((loss - mean).abs() < 1e-4, "{loss} {mean}");
    for wrong in [&[(0, 1)][..], &[(3, 2)], &[(2, 99)], &[(4, 6), (5, 7)]] {
        let error = score_completions(&model, &tokenizer, &[masked(wrong)], 64, |_, _| {});
        assert!(format!("{:?}", error.unwrap_err()).contains("Masked"), "{wrong:?}");
    }
}
