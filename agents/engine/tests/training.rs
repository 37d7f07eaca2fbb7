//! Training is deterministic, continues adapters, and writes what it can read again.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use engine::{
    Adapter, AdapterError, Decay, Device, Document, Dtype, Example, LoraSpec, Method, Model,
    Module, Prompt, Request, Sampling, Shape, Tokenizer, TrainError, TrainSpec, Trainer, documents,
    generate_all, write_scratch,
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
        clip_norm: 1.0,
        batch_size: 8,
        micro_batch_tokens: 100,
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
    assert!((again - first).abs() < 1e-5, "{again} {first}");
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
fn an_example_that_is_too_long_is_named_by_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tokenizer) = scratch(dir.path());
    let mut examples = examples();
    examples[4].completion = "long ".repeat(20);
    let result = Trainer::new(model, &tokenizer, lora(), &examples, spec());
    assert!(matches!(result, Err(TrainError::TooLong { line: 5, most: 64, .. })));
}
