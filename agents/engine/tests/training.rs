//! Training is deterministic, continues adapters, and writes what it can read again.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use engine::{
    Adapter, AdapterError, Canary, CanaryError, Decay, Device, Document, Dtype, Example, LoraSpec,
    Method, Model, Module, Prompt, Request, Sampling, Shape, Tokenizer, TrainError, TrainSpec,
    Trainer, documents, generate_all, write_scratch,
};
use std::path::Path;

fn spec() -> TrainSpec {
    TrainSpec {
        learning_rate: 3e-3,
        warmup_ratio: 0.1,
        decay: Decay::Linear,
        final_ratio: 0.1,
        betas: (0.9, 0.98),
        epsilon: 1e-8,
        weight_decay: 0.01,
        dropout: 0.0,
        clip_norm: 1.0,
        batch_size: 8,
        micro_batch_tokens: 100,
        gradient_checkpointing: false,
        epochs: 2,
        max_steps: None,
        max_tokens: 64,
        seed: 7,
    }
}

fn lora() -> Method {
    let modules = [Module::Query, Module::Value, Module::Down].into();
    Method::Lora(LoraSpec { rank: 4, alpha: 8.0, modules, rslora: false })
}

fn examples() -> Vec<Example> {
    (0..20)
        .map(|i| Example { prompt: format!("{i} then "), completion: format!("{} é", i + 1) })
        .collect()
}

fn scratch(dir: &Path) -> (Model, Tokenizer) {
    let config = write_scratch(dir, &Shape::default()).unwrap();
    Model::init(config, 3, &Device::Cpu).unwrap().save(dir).unwrap();
    (Model::load(dir, &Device::Cpu).unwrap(), Tokenizer::load(dir).unwrap())
}

fn trained(base: &Path, method: Method, threads: usize, out: &Path) -> Vec<u8> {
    let (model, tokenizer) = scratch(base);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let file = if matches!(method, Method::Full) { "model" } else { "adapter_model" };
    let mut trainer = Trainer::new(model, &tokenizer, method, &examples(), spec()).unwrap();
    let mut losses = Vec::new();
    while let Some(report) = pool.install(|| trainer.step()).unwrap() {
        losses.push(report.loss);
    }
    assert_eq!(losses.len(), 6);
    assert!(losses[5] < losses[0], "{losses:?}");
    trainer.save(out, "base").unwrap();
    std::fs::read(out.join(format!("{file}.safetensors"))).unwrap()
}

#[test]
fn the_same_inputs_give_the_same_bytes_on_any_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let (base, out) = (dir.path().join("base"), dir.path().join("out"));
    for method in [Method::Full, lora()] {
        let once = trained(&base, method.clone(), 1, &out);
        assert!(once == trained(&base, method.clone(), 2, &out));
        assert!(once == trained(&base, method, 5, &out));
    }
}

#[test]
fn gradient_checkpointing_trains_to_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (base, tokenizer) = scratch(dir.path());
    for method in [Method::Full, lora()] {
        let trained = |gradient_checkpointing| {
            let spec = TrainSpec { gradient_checkpointing, dropout: 0.1, ..spec() };
            let base = base.clone();
            let mut trainer =
                Trainer::new(base, &tokenizer, method.clone(), &examples(), spec).unwrap();
            let mut reports = Vec::new();
            while let Some(report) = trainer.step().unwrap() {
                reports.push(report);
            }
            let out = dir.path().join("out");
            trainer.save(&out, "base").unwrap();
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
    let narrow = || Model::load_as(dir.path(), &Device::Cpu, Dtype::Bf16).unwrap();
    let trained = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut trainer = Trainer::new(narrow(), &tokenizer, lora(), &examples(), spec()).unwrap();
        let mut losses = Vec::new();
        while let Some(report) = pool.install(|| trainer.step()).unwrap() {
            losses.push(report.loss);
        }
        assert!(losses[5] < losses[0], "{losses:?}");
        let out = dir.path().join("out");
        trainer.save(&out, "base").unwrap();
        std::fs::read(out.join("adapter_model.safetensors")).unwrap()
    };
    assert!(trained(1) == trained(3));
    let refused = Trainer::new(narrow(), &tokenizer, Method::Full, &examples(), spec());
    assert!(matches!(refused, Err(TrainError::Narrow)));
    narrow().save(&dir.path().join("copy")).unwrap();
    let copy = Model::load(&dir.path().join("copy"), &Device::Cpu).unwrap();
    let again = Trainer::new(copy, &tokenizer, lora(), &examples(), spec()).unwrap().step();
    let first = Trainer::new(narrow(), &tokenizer, lora(), &examples(), spec()).unwrap().step();
    let [again, first] = [again, first].map(|report| report.unwrap().unwrap().loss);
    // In bf16 what is multiplied with the weights is rounded too.
    assert!((again - first).abs() < 5e-3, "{again} {first}");
}

#[test]
fn a_tokenizer_with_tokens_the_model_lacks_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    scratch(dir.path());
    let path = dir.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"<|pad|>\": 259", "\"<|pad|>\": 260")).unwrap();
    let error = engine::load(dir.path(), None, "cpu", Dtype::F32).err().unwrap();
    let told = std::error::Error::source(&error).unwrap().to_string();
    assert!(told.contains("tokenizer mismatch") && told.contains("vocab_size 260"), "{told}");
}

#[test]
fn a_saved_adapter_is_read_again_and_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    let (base, out) = (dir.path().join("base"), dir.path().join("out"));
    let first = trained(&base, lora(), 2, &out);
    let (model, tokenizer) = scratch(&base);
    let adapter = Adapter::load(&out, model.config()).unwrap();
    adapter.save(&out, "again").unwrap();
    assert!(first == std::fs::read(out.join("adapter_model.safetensors")).unwrap());
    let scored: Vec<Document> = examples()
        .into_iter()
        .map(|Example { prompt, completion }| Document { prompt, completion })
        .collect();
    let loss = |model: &Model| documents(model, &tokenizer, &scored, |_, _| {}).unwrap().mean_nll;
    let tuned = loss(&model.with_adapter(&adapter).unwrap());
    assert!(tuned < loss(&model));
    let method = Method::Continue(adapter);
    let whole = TrainSpec { batch_size: 20, ..spec() };
    let mut trainer = Trainer::new(model.clone(), &tokenizer, method, &examples(), whole).unwrap();
    let report = trainer.step().unwrap().unwrap();
    assert!((report.loss - tuned).abs() < 1e-5, "{} {tuned}", report.loss);
    while trainer.step().unwrap().is_some() {}
    assert!(loss(&model.with_adapter(trainer.adapter().unwrap()).unwrap()) < tuned);
}

#[test]
fn a_fully_trained_model_is_read_again_and_generates_what_it_learned() {
    let dir = tempfile::tempdir().unwrap();
    let (base, out) = (dir.path().join("base"), dir.path().join("out"));
    let (model, tokenizer) = scratch(&base);
    let examples = vec![Example { prompt: "say: ".into(), completion: "hello".into() }];
    let whole = TrainSpec { max_steps: Some(40), ..spec() };
    let mut trainer = Trainer::new(model, &tokenizer, Method::Full, &examples, whole).unwrap();
    while trainer.step().unwrap().is_some() {}
    trainer.save(&out, "base").unwrap();
    let (model, tokenizer) =
        (Model::load(&out, &Device::Cpu).unwrap(), Tokenizer::load(&out).unwrap());
    let request = Request {
        tag: (),
        prompt: Prompt::Text("say: ".into()),
        seeds: vec![0],
        sampling: Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, max_new_tokens: 20 },
    };
    let mut results = generate_all(&model, &tokenizer, 1, vec![request], |_, _| {}).unwrap();
    assert_eq!(results.remove(0).unwrap()[0].text, "hello");
}

#[test]
fn an_adapter_of_another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let wide = Shape { intermediate_size: 64, ..Shape::default() };
    let other = write_scratch(&dir.path().join("other"), &wide).unwrap();
    let spec_of_other = LoraSpec { rank: 2, alpha: 4.0, modules: Module::ALL.into(), rslora: true };
    let adapter = Adapter::new(&spec_of_other, &other, 1).unwrap();
    assert!(matches!(model.with_adapter(&adapter), Err(AdapterError::OtherModel)));
    let method = Method::Continue(adapter);
    let result = Trainer::new(model, &tokenizer, method, &examples(), spec());
    assert!(matches!(result, Err(TrainError::Adapter(AdapterError::OtherModel))));
}

#[test]
fn what_is_too_long_is_left_out_and_counted_unless_it_is_everything() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let long = Example { prompt: String::new(), completion: "long ".repeat(20) };
    let mut examples = examples();
    let without = Trainer::new(model.clone(), &tokenizer, lora(), &examples, spec()).unwrap();
    examples.insert(4, long.clone());
    let with = Trainer::new(model.clone(), &tokenizer, lora(), &examples, spec()).unwrap();
    assert_eq!((without.skipped(), with.skipped()), (0, 1));
    let last = |mut trainer: Trainer| {
        let reports = std::iter::from_fn(|| trainer.step().unwrap());
        reports.last().unwrap()
    };
    assert_eq!(last(with), last(without));
    let result = Trainer::new(model, &tokenizer, lora(), &[long.clone(), long], spec());
    let error = result.err().unwrap();
    assert!(matches!(error, TrainError::TooLong { examples: 2, most: 64, shortest: 101, .. }));
}

#[test]
fn packed_or_each_alone_examples_train_the_same_weights() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let trained = |micro_batch_tokens| {
        let spec = TrainSpec { micro_batch_tokens, dropout: 0.1, ..spec() };
        let mut trainer =
            Trainer::new(model.clone(), &tokenizer, lora(), &examples(), spec).unwrap();
        let reports: Vec<_> = std::iter::from_fn(|| trainer.step().unwrap()).collect();
        let out = dir.path().join(micro_batch_tokens.to_string());
        trainer.save(&out, "base").unwrap();
        let adapter = Adapter::load(&out, model.config()).unwrap();
        let tuned = model.with_adapter(&adapter).unwrap();
        let scored = |Example { prompt, completion }| Document { prompt, completion };
        let scored: Vec<Document> = examples().into_iter().map(scored).collect();
        (reports, documents(&tuned, &tokenizer, &scored, |_, _| {}).unwrap().mean_nll)
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
    let mut trainer = Trainer::new(model, &tokenizer, lora(), &examples(), one).unwrap();
    let bytes = |trainer: &Trainer, name: &str| {
        trainer.save(&dir.path().join(name), "base").unwrap();
        std::fs::read(dir.path().join(name).join("adapter_model.safetensors")).unwrap()
    };
    let before = bytes(&trainer, "before");
    let report = trainer.step().unwrap().unwrap();
    assert_eq!((report.steps, report.learning_rate), (1, 3e-3));
    assert!(before != bytes(&trainer, "after"));
    assert_eq!(trainer.step().unwrap(), None);
}

#[test]
fn prompts_are_not_scored() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let example = Example { prompt: "seven then ".into(), completion: "eight".into() };
    let one = |example: &Example| {
        let examples = std::slice::from_ref(example);
        let mut trainer = Trainer::new(model.clone(), &tokenizer, lora(), examples, spec());
        trainer.as_mut().unwrap().step().unwrap().unwrap()
    };
    let report = one(&example);
    assert_eq!((report.tokens, report.scored), (11 + 5 + 1, 5 + 1));
    let document = Document { prompt: example.prompt.clone(), completion: example.completion };
    let scored = documents(&model, &tokenizer, &[document], |_, _| {}).unwrap();
    assert!((report.loss - scored.mean_nll).abs() < 1e-5, "{} {}", report.loss, scored.mean_nll);
}

#[test]
fn a_gradient_longer_than_allowed_is_scaled_down() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    // So large an epsilon has Adam take steps in proportion to the gradient.
    let moved = |clip_norm| {
        let spec = TrainSpec { clip_norm, epsilon: 1e3, weight_decay: 0.0, ..spec() };
        let method = Method::Full;
        let mut trainer =
            Trainer::new(model.clone(), &tokenizer, method, &examples(), spec).unwrap();
        let report = trainer.step().unwrap().unwrap();
        trainer.save(&dir.path().join("out"), "base").unwrap();
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
    let mut trainer = Trainer::new(model, &tokenizer, Method::Full, &examples(), wild).unwrap();
    let error = std::iter::repeat_with(|| trainer.step()).find_map(Result::err).unwrap();
    let told = error.to_string();
    assert!(told.contains("of step") && told.contains("lower training.learning_rate"), "{told}");
}

#[test]
fn what_was_trained_shows_whoever_loads_it_and_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let (model, tokenizer) = scratch(dir.path());
    let read = |text: &str| Canary::read(&tokenizer, model.config(), text, 32).unwrap();
    let canary = read("4 then 5 é\n5 then 6 <|im_end|>");
    let letter = |place: &usize| tokenizer.decode(&[canary.tokens[*place]]).unwrap();
    let scored: String = canary.scored.iter().map(letter).collect();
    assert_eq!(scored, " then 5 \n5 then 6 <|im_end|>", "no parts of characters");
    let mut trainer = Trainer::new(model.clone(), &tokenizer, lora(), &examples(), spec()).unwrap();
    while trainer.step().unwrap().is_some() {}
    trainer.save(&out, "base").unwrap();
    let told = trainer.canary(&canary).unwrap();
    let apart = |other: &Model| {
        let other = canary.score(other).unwrap();
        assert_eq!((other.len(), told.len()), (canary.scored.len(), canary.scored.len()));
        other.iter().zip(&told).map(|(a, b)| (a - b).abs()).sum::<f32>() / told.len() as f32
    };
    let adapter = Adapter::load(&out, model.config()).unwrap();
    let same = apart(&model.with_adapter(&adapter).unwrap());
    assert!(same < 1e-6, "{same}");
    let base = apart(&model);
    assert!(base > 0.05, "a box that forgot the adapter must show: {base}");

    // Of a long text, the end.
    let long = read(&"0 then 1 ".repeat(1000));
    assert_eq!((long.tokens.len(), long.scored.len(), long.scored[31]), (256, 32, 255));
    assert!(matches!(
        Canary::read(&tokenizer, model.config(), "", 32),
        Err(CanaryError::TooShort { .. })
    ));
}
