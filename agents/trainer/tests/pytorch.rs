//! The PyTorch trainer as the agent runs it: started, called, ended early, resumed.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use agent::{AdaptiveTimeout, WorkerError, WorkerLauncher, WorkerProcess};
use engine::{
    AdapterMerge, CompletionExample, Device, LanguageModel, LearningRateDecay, LoraAdapter,
    MergeErrors, MergeRule, ModelTokenizer, ModelTrainer, OuterOptimizer, ScratchShape,
    TrainMethod, TrainSpec, TrainingSignal, score_completions, write_scratch_model,
};
use hardware::HardwareProfile;
use objective::{Objective, ObjectiveName};
use requirements::require_torch_python;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use trainer::{PyTorchProgram, PythonRunner};

const LIMIT: Duration = Duration::from_secs(240);

struct Bench {
    directory: tempfile::TempDir,
    pytorch: PyTorchProgram,
    launch: WorkerLauncher,
    base: PathBuf,
    environment: Vec<(String, String)>,
}

/// Returns the device that PyTorch trains on: the CPU, unless `FLOTILLA_TORCH_DEVICE` names another.
fn device() -> String {
    std::env::var("FLOTILLA_TORCH_DEVICE").unwrap_or_else(|_| "cpu".into())
}

fn examples() -> Vec<CompletionExample> {
    let completion = |i: usize| format!("{} {}", i + 1, "indeed ".repeat(i % 4));
    let example = |i| CompletionExample::new(format!("{i} plus one is "), completion(i));
    (0..17).map(example).collect()
}

impl Bench {
    fn new(python: &Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let base = scratch(directory.path());
        let interpreter = PythonRunner::Interpreter(python.to_owned());
        let pytorch = PyTorchProgram::write_program(interpreter, directory.path()).unwrap();
        let profile = HardwareProfile::load_named("cpu").unwrap();
        let launch = WorkerLauncher {
            device: device(),
            ..WorkerLauncher::new("unused".into(), directory.path(), profile)
        };
        let line = |CompletionExample { prompt, completion, .. }: CompletionExample| {
            format!("{}\n", json!({ "prompt": prompt, "completion": completion }))
        };
        let text: String = examples().into_iter().map(line).collect();
        std::fs::write(directory.path().join("data.jsonl"), text).unwrap();
        Self { directory, pytorch, launch, base, environment: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A call that trains six steps of a new adapter, saving into `out`.
    fn call(&self, out: &str) -> Value {
        let out = self.path(out);
        std::fs::create_dir_all(&out).unwrap();
        json!({
            "base": self.base, "base_name": "b3:base", "random_init": false, "adapter": null,
            "dataset": self.path("data.jsonl"), "seed": 7, "out": out, "resume": null,
            "training": {
                "maxSteps": 6, "batchSize": 4, "learningRate": 0.001, "schedule": "LINEAR",
                "warmupRatio": 0.1, "finalRatio": 0.1, "beta1": 0.9, "beta2": 0.999,
                "maxGradNorm": 1.0, "weightDecay": 0.01, "maxTokens": 512,
                "lora": { "r": 8, "alpha": 16, "targetModules": ["v_proj", "q_proj"] },
            },
            "policy": {
                "device": device(), "dtype": "f32", "attention": "sdpa",
                "gradient_checkpointing": false, "dataloader_workers": 0, "pin_memory": false,
                "micro_batch_tokens": 64, "memory_fraction": null, "save_s": 86_400.0,
            },
        })
    }

    fn start(&self) -> WorkerProcess {
        let mut command = self.pytorch.worker_command(&self.launch, "train");
        command.environment.extend(self.environment.iter().cloned());
        WorkerProcess::start(&command).unwrap()
    }

    /// Starts a worker that answers many calls, as one worker for each would, but imports PyTorch once.
    fn start_many(&self) -> WorkerProcess {
        let mut command = self.pytorch.worker_command(&self.launch, "train");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/python/tests/many_calls.py");
        let program = command.arguments.len() - 1;
        command.arguments.insert(program, script.into());
        WorkerProcess::start(&command).unwrap()
    }

    /// Returns the answer and all progress messages before it.
    async fn ask(
        &self,
        worker: &WorkerProcess,
        call: &Value,
    ) -> (Result<Value, WorkerError>, Vec<Value>) {
        let heard: Arc<Mutex<Vec<Value>>> = Arc::default();
        let hearing = heard.clone();
        let mut patience = AdaptiveTimeout::new(LIMIT, LIMIT);
        let answered = worker.call_with_progress(call, &mut patience, move |progress: Value| {
            // Unpublished steps delay a training, and no agent publishes here.
            hearing.lock().unwrap().push(progress);
            std::future::ready(())
        });
        let answer = answered.await;
        let heard = heard.lock().unwrap().clone();
        (answer, heard)
    }

    /// Returns the steps of a training that must succeed.
    async fn train(&self, call: &Value) -> Vec<Value> {
        self.train_by(&self.start(), call).await
    }

    /// Returns the steps of a training by this worker that must succeed.
    async fn train_by(&self, worker: &WorkerProcess, call: &Value) -> Vec<Value> {
        let (answer, heard) = self.ask(worker, call).await;
        if let Err(error) = &answer {
            panic!("{error}\n{}", worker.log_tail().await);
        }
        assert_eq!(answer.unwrap(), json!({ "stopped_at": null }));
        steps(&heard)
    }

    async fn refusal(&self, call: &Value) -> String {
        match self.ask(&self.start(), call).await.0 {
            Err(WorkerError::Refused(message)) => message,
            other => panic!("not refused: {other:?}"),
        }
    }
}

fn steps(heard: &[Value]) -> Vec<Value> {
    heard.iter().filter_map(|progress| progress.get("step").cloned()).collect()
}

/// The losses of single steps: a message has the mean since the last saved one.
fn losses(steps: &[Value]) -> Vec<f64> {
    let told: Vec<f64> = steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect();
    let sum = |n: usize| if n == 0 { 0.0 } else { told[n - 1] * n as f64 };
    (1..=told.len()).map(|n| sum(n) - sum(n - 1)).collect()
}

/// A small model of random weights, as the embedded engine writes it.
fn scratch(directory: &Path) -> PathBuf {
    let base = directory.join("base");
    let config = write_scratch_model(&base, &ScratchShape::default()).unwrap();
    LanguageModel::init_random(config, 3, &Device::Cpu).unwrap().save_directory(&base).unwrap();
    base
}

fn candle_spec(rate: f64, steps: usize) -> TrainSpec {
    TrainSpec {
        learning_rate: rate,
        warmup_ratio: 0.1,
        decay: LearningRateDecay::Linear,
        final_ratio: 0.1,
        weight_decay: 0.01,
        batch_size: 4,
        micro_batch_tokens: 64,
        max_steps: Some(steps),
        seed: 7,
        ..TrainSpec::default()
    }
}

fn candle_trainer(base: &Path, method: TrainMethod, spec: TrainSpec) -> ModelTrainer {
    let model = LanguageModel::load_f32(base, &Device::Cpu).unwrap();
    let tokenizer = ModelTokenizer::load_tokenizer(base).unwrap();
    ModelTrainer::new(model, &tokenizer, method, &examples(), spec).unwrap()
}

/// Returns the embedded engine's negative log-likelihood of the dataset, in nats per token.
fn candle_nll(base: &Path, adapter: &Path) -> f64 {
    let model = LanguageModel::load_f32(base, &Device::Cpu).unwrap();
    let adapter = LoraAdapter::load_peft(adapter, model.model_config()).unwrap();
    let model = model.with_adapter(&adapter).unwrap();
    let tokenizer = ModelTokenizer::load_tokenizer(base).unwrap();
    let scores = score_completions(&model, &tokenizer, &examples(), usize::MAX, |_, _| {}).unwrap();
    let scores: Vec<f64> = scores.into_iter().flatten().flatten().collect();
    -scores.iter().sum::<f64>() / scores.len() as f64
}

fn candle_losses(base: &Path, method: TrainMethod, rate: f64) -> Vec<f64> {
    let mut trainer = candle_trainer(base, method, candle_spec(rate, 12));
    let mut losses = Vec::new();
    while let Some(report) = trainer.run_step().unwrap() {
        losses.push(report.loss);
    }
    losses
}

/// Twelve steps are three epochs: the order of the data must be the same as well.
fn assert_follows(steps: &[Value], candle: &[f64]) {
    let torch = losses(steps);
    assert_eq!(torch.len(), candle.len());
    let off = |(ours, theirs): (&f64, &f64)| (ours - theirs).abs() / theirs;
    let worst = torch.iter().zip(candle).map(off).fold(0.0, f64::max);
    println!("largest difference {worst:.2e} of the loss\ntorch  {torch:?}\ncandle {candle:?}");
    assert!(worst < 0.01, "{worst}");
    let spread = candle.iter().copied().fold(0.0, f64::max) / candle[11];
    assert!(spread > 1.03, "losses that stay where they are show nothing");
}

#[tokio::test]
async fn the_loss_of_all_weights_follows_the_embedded_engine_s_within_one_percent() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    let mut call = bench.call("out");
    call["training"].as_object_mut().unwrap().remove("lora");
    call["training"]["maxSteps"] = json!(12);
    call["training"]["learningRate"] = json!(0.003);
    let steps = bench.train(&call).await;
    assert_follows(&steps, &candle_losses(&bench.base, TrainMethod::Full, 0.003));
}

#[tokio::test]
async fn the_loss_of_an_adapter_follows_the_embedded_engine_s_within_one_percent() {
    let Some(python) = require_torch_python() else { return };
    let set = golden::small_set();
    let (base, adapter) = (set.model_path("qwen2-tiny"), set.adapter_path("qwen2-r8-qv"));
    let bench = Bench { base: base.clone(), ..Bench::new(&python) };
    let mut call = bench.call("out");
    call["adapter"] = json!(adapter);
    call["training"]["maxSteps"] = json!(12);
    let steps = bench.train(&call).await;
    let model = LanguageModel::load_f32(&base, &Device::Cpu).unwrap();
    let method =
        TrainMethod::Continue(LoraAdapter::load_peft(&adapter, model.model_config()).unwrap());
    assert_follows(&steps, &candle_losses(&base, method, 0.001));
    LoraAdapter::load_peft(&bench.path("out/12/checkpoint"), model.model_config()).unwrap();
}

#[tokio::test]
async fn with_a_frozen_a_the_loss_follows_the_embedded_engine_s_within_one_percent() {
    let Some(python) = require_torch_python() else { return };
    let set = golden::small_set();
    let (base, adapter) = (set.model_path("qwen2-tiny"), set.adapter_path("qwen2-r8-qv"));
    let bench = Bench { base: base.clone(), ..Bench::new(&python) };
    let mut call = bench.call("out");
    call["adapter"] = json!(adapter);
    call["training"]["maxSteps"] = json!(12);
    call["training"]["lora"]["freezeA"] = json!(true);
    let steps = bench.train(&call).await;
    let model = LanguageModel::load_f32(&base, &Device::Cpu).unwrap();
    let method =
        TrainMethod::Continue(LoraAdapter::load_peft(&adapter, model.model_config()).unwrap());
    let spec = TrainSpec { freezes_a: true, ..candle_spec(0.001, 12) };
    let mut trainer = candle_trainer(&base, method, spec);
    let mut losses = Vec::new();
    while let Some(report) = trainer.run_step().unwrap() {
        losses.push(report.loss);
    }
    assert_follows(&steps, &losses);
}

#[tokio::test]
async fn a_loaded_checkpoint_has_the_reported_canary_log_probabilities() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    let worker = bench.start_many();
    for packing in [true, false] {
        let mut call = bench.call(if packing { "packed" } else { "padded" });
        let text = "3 plus one is 4 indeed\n4 plus one is 5 <|im_end|>";
        call["canary"] = json!(text);
        call["training"]["packing"] = json!(packing);
        let steps = bench.train_by(&worker, &call).await;
        let told: Vec<f32> = serde_json::from_value(steps[5]["canary"].clone()).unwrap();
        assert!(steps[4]["canary"].is_null(), "of the last step alone");
        let checkpoint = Path::new(call["out"].as_str().unwrap()).join("6/checkpoint");
        let worth = |adapter: Option<&Path>| {
            let loaded = engine::load_model(&bench.base, adapter, "cpu", engine::MatrixDtype::F32);
            let (model, tokenizer) = loaded.unwrap();
            let canary =
                engine::CanaryText::from_text(&tokenizer, model.model_config(), text, 32).unwrap();
            canary.score_tokens(&model).unwrap()
        };
        let apart = |a: &[f32], b: &[f32]| {
            assert_eq!(a.len(), b.len());
            a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f32>() / a.len() as f32
        };
        let (same, base) = (apart(&told, &worth(Some(&checkpoint))), apart(&told, &worth(None)));
        println!("packing {packing}: {same:.6} from the same weights, {base:.6} from the base");
        assert!(same < 0.001 && base > 10.0 * same, "{same} {base}");
    }
}

#[tokio::test]
async fn packed_or_padded_it_is_the_same_training() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    let worker = bench.start_many();
    let trained = async |out: &str, packing: bool, attention: &str| {
        let mut call = bench.call(out);
        call["training"]["packing"] = json!(packing);
        call["training"]["learningRate"] = json!(0.01);
        call["policy"]["attention"] = json!(attention);
        bench.train_by(&worker, &call).await
    };
    let padded = trained("padded", false, "sdpa").await;
    let filled = padded[5]["packing"].as_f64().unwrap();
    assert!((0.5..0.999).contains(&filled), "{filled}");
    for (out, attention) in [("packed", "sdpa"), ("eager", "eager")] {
        let packed = trained(out, true, attention).await;
        for (packed, padded) in packed.iter().zip(&padded) {
            assert_eq!(packed["packing"], 1.0);
            for same in ["tokens", "trained_tokens", "learning_rate"] {
                assert_eq!(packed[same], padded[same], "{same}");
            }
            for close in ["loss", "grad_norm", "grad_norm_max"] {
                let [packed, padded] = [packed, padded].map(|step| step[close].as_f64().unwrap());
                assert!((packed / padded - 1.0).abs() < 1e-4, "{close}: {packed} {padded}");
            }
        }
    }
}

#[tokio::test]
async fn one_step_trains_at_the_full_rate_and_overlong_examples_are_counted() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    let mut call = bench.call("out");
    for (name, value) in [("maxSteps", 1), ("maxTokens", 24), ("batchSize", 17)] {
        call["training"][name] = json!(value);
    }
    call["training"]["warmupRatio"] = json!(0.0);
    let worker = bench.start();
    let (answer, heard) = bench.ask(&worker, &call).await;
    answer.unwrap();
    let begun = heard.iter().find_map(|progress| progress.get("begun")).unwrap();
    // Two and three times "indeed " are too long.
    let skipped = begun["skipped"].as_u64().unwrap();
    assert!((4..12).contains(&skipped), "{skipped}");
    let steps = steps(&heard);
    assert_eq!((steps.len(), &steps[0]["learning_rate"]), (1, &json!(0.001)));
    assert!(steps[0]["grad_norm"].as_f64().unwrap() > 0.0);
    let [trained, tokens] = ["trained_tokens", "tokens"].map(|name| steps[0][name].as_u64());
    assert!(trained.unwrap() > 0 && trained < tokens, "{trained:?} {tokens:?}");
    assert!(bench.path("out/1/checkpoint/adapter_model.safetensors").exists());
}

#[tokio::test]
async fn a_resumed_training_ends_with_the_same_bytes() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    let mut call = bench.call("whole");
    call["training"]["saveEvery"] = json!(3);
    call["training"]["lora"]["dropout"] = json!(0.1);
    let whole = bench.train(&call).await;
    let saved = bench.path("whole/3");
    // As the store delivers them.
    for (tree, name) in [("checkpoint", "B3SUMS"), ("state", "B3SUMS"), ("state", "manifest.json")]
    {
        std::fs::write(saved.join(tree).join(name), "").unwrap();
    }
    let mut again = bench.call("rest");
    again["training"]["lora"]["dropout"] = json!(0.1);
    again["resume"] = json!({
        "checkpoint": saved.join("checkpoint"), "state": saved.join("state"),
        "step": 3, "tokens": whole[2]["tokens"],
        "trained_tokens": whole[2]["trained_tokens"], "wall_s": 1.0,
    });
    // Saving at other steps changes nothing.
    let rest = bench.train(&again).await;
    assert_eq!(rest.len(), 3, "{rest:?}");
    for same in ["tokens", "trained_tokens", "grad_norm", "packing"] {
        assert_eq!(rest[2][same], whole[5][same], "{same}");
    }
    assert_eq!(rest[2]["loss"], whole[5]["loss"]);
    for name in ["adapter_model.safetensors", "adapter_config.json"] {
        let file = |out: &str| std::fs::read(bench.path(out).join("6/checkpoint").join(name));
        assert!(file("whole").unwrap() == file("rest").unwrap(), "{name}");
    }
    assert!(!bench.path("rest/6/state").exists(), "nobody goes on from the last step");

    let mut other = bench.call("other");
    other["training"]["lora"] = again["training"]["lora"].clone();
    other["resume"] = again["resume"].clone();
    other["seed"] = json!(8);
    let worker = bench.start();
    let (_, heard) = bench.ask(&worker, &other).await;
    let begun = heard.iter().find_map(|progress| progress.get("begun")).unwrap();
    assert_eq!(begun["step"], 0);
    assert!(begun["refused"].as_str().unwrap().contains("`seed` is 7, expected 8"), "{begun}");
}

#[tokio::test]
async fn slices_one_after_the_other_end_with_the_bytes_of_the_whole_training() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    let with_dropout = |out: &str| {
        let mut call = bench.call(out);
        call["training"]["lora"]["dropout"] = json!(0.1);
        call
    };
    bench.train(&with_dropout("whole")).await;
    let train_slice = async |out: &str, slice: Value| {
        let mut call = with_dropout(out);
        call["slice"] = slice;
        let (answer, heard) = bench.ask(&bench.start(), &call).await;
        assert_eq!(answer.unwrap(), json!({ "stopped_at": null }));
        let begun = heard.iter().find_map(|progress| progress.get("begun")).unwrap();
        (begun.clone(), steps(&heard))
    };
    let (begun, none) = train_slice("new", json!({ "first": 0, "steps": 0 })).await;
    assert_eq!((&begun["steps"], none.len()), (&json!(6), 0));
    let new = bench.path("new/0/checkpoint");
    let (_, first) =
        train_slice("one", json!({ "first": 0, "steps": 4, "start": new, "state": null })).await;
    assert_eq!(first.len(), 4);
    let (start, state) = (bench.path("one/4/checkpoint"), bench.path("one/4/state"));
    let slice = |state: &Path| json!({ "first": 4, "steps": 4, "start": start, "state": state });
    let (begun, rest) = train_slice("two", slice(&state)).await;
    assert_eq!((&begun["refused"], rest.len()), (&Value::Null, 2), "the training ends");
    assert_eq!(rest[1]["step"], 6);
    let file = |out: &str| std::fs::read(bench.path(out).join("adapter_model.safetensors"));
    assert!(file("whole/6/checkpoint").unwrap() == file("two/6/checkpoint").unwrap());
    assert!(bench.path("two/6/state/optimizer.pt").exists(), "later steps may continue");

    let worker = bench.start();
    let slices = [json!({ "first": 0, "steps": 0 }), slice(&state), slice(&state)];
    for (number, slice) in slices.into_iter().enumerate() {
        let mut call = with_dropout(&format!("same-{number}"));
        call["slice"] = slice;
        let (answer, _) = bench.ask(&worker, &call).await;
        assert_eq!(answer.unwrap(), json!({ "stopped_at": null }));
    }
    for again in ["same-1/6/checkpoint", "same-2/6/checkpoint"] {
        assert!(file("two/6/checkpoint").unwrap() == file(again).unwrap(), "{again}: one process");
    }

    std::fs::write(state.join("training.json"), "{}").unwrap();
    let (begun, rest) = train_slice("three", slice(&state)).await;
    assert!(begun["refused"].as_str().unwrap().contains("training.json"), "{begun}");
    assert_eq!(rest.len(), 2, "with a new state");
    let (begun, none) = train_slice("four", json!({ "first": 9, "steps": 4, "start": new })).await;
    assert_eq!((&begun["steps"], none.len()), (&json!(6), 0), "past the end");
}

#[tokio::test]
async fn slices_of_both_engines_merge_and_either_continues() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    let train_slice = async |out: &str, slice: Value| {
        let mut call = bench.call(out);
        call["slice"] = slice;
        bench.train(&call).await
    };
    train_slice("new", json!({ "first": 0, "steps": 0 })).await;
    let new = bench.path("new/0/checkpoint");
    train_slice("torch", json!({ "first": 0, "steps": 2, "start": new })).await;
    let torch = bench.path("torch/2/checkpoint");

    let config = LanguageModel::load_f32(&bench.base, &Device::Cpu).unwrap().model_config().clone();
    let adapter = LoraAdapter::load_peft(&new, &config).unwrap();
    let method = TrainMethod::Continue(adapter);
    let mut trainer = candle_trainer(&bench.base, method, candle_spec(0.001, 6));
    trainer.start_slice(None, 2).unwrap();
    for _ in 0..2 {
        trainer.run_step().unwrap().unwrap();
    }
    let candle = bench.path("candle");
    trainer.save_directory(&candle, "b3:base").unwrap();

    let merge = AdapterMerge {
        start: new,
        velocity: None,
        trained: vec![(torch, 30), (candle, 10)],
        rule: MergeRule::Step(OuterOptimizer { rate: 0.7, momentum: 0.9 }),
    };
    let merged = bench.path("merged");
    let MergeErrors { drift, .. } = merge.write_merged(&merged, &bench.path("velocity")).unwrap();
    assert!(drift > 0.0 && drift < 1.0, "{drift}");
    let rest = train_slice("rest", json!({ "first": 4, "steps": 2, "start": merged })).await;
    assert_eq!(rest[1]["step"], 6);
    let own = json!({ "first": 4, "steps": 2, "start": merged, "own_schedule": true });
    let own = train_slice("own", own).await;
    assert_ne!(own[1]["learning_rate"], rest[1]["learning_rate"]);
    let mut call = bench.call("heldout");
    call["slice"] = json!({ "first": 0, "steps": 0, "start": merged, "heldout": call["dataset"] });
    let (_, heard) = bench.ask(&bench.start(), &call).await;
    let torch_nll = heard.iter().find_map(|progress| progress["heldout"].as_f64()).unwrap();
    let candle_nll = candle_nll(&bench.base, &merged);
    assert!((torch_nll - candle_nll).abs() < 1e-3, "{torch_nll} {candle_nll}");
    let mut call = bench.call("canary");
    let text = "3 plus one is 4 indeed";
    call["canary"] = json!(text);
    call["slice"] = json!({ "first": 0, "steps": 0, "start": merged, "canary": true });
    let (_, heard) = bench.ask(&bench.start(), &call).await;
    let canary = heard.iter().find_map(|progress| progress["canary"].as_array()).unwrap();
    let torch_canary: Vec<f64> = canary.iter().map(|value| value.as_f64().unwrap()).collect();
    let loaded =
        engine::load_model(&bench.base, Some(&merged), "cpu", engine::MatrixDtype::F32).unwrap();
    let (model, tokenizer) = loaded;
    let asked = engine::CanaryText::from_text(&tokenizer, model.model_config(), text, 32).unwrap();
    let candle_canary = asked.score_tokens(&model).unwrap();
    assert_eq!(torch_canary.len(), candle_canary.len());
    for (torch, candle) in torch_canary.iter().zip(candle_canary) {
        assert!((torch - f64::from(candle)).abs() < 0.01, "{torch} {candle}");
    }
    let adapter = LoraAdapter::load_peft(&merged, &config).unwrap();
    let method = TrainMethod::Continue(adapter);
    let mut trainer = candle_trainer(&bench.base, method, candle_spec(0.001, 6));
    trainer.start_slice(None, 4).unwrap();
    let loss = trainer.run_step().unwrap().unwrap().loss;
    let torch_loss = rest[0]["loss"].as_f64().unwrap();
    assert!((loss - torch_loss).abs() < 0.01 * loss, "{loss} {torch_loss}");
}

#[tokio::test]
async fn on_sigterm_it_saves_at_the_next_step_and_reports_the_step() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    let mut call = bench.call("out");
    call["training"]["maxSteps"] = json!(100_000);
    let worker = bench.start();
    let mut patience = AdaptiveTimeout::new(LIMIT, LIMIT);
    let (told, last) = (worker.clone(), Arc::new(Mutex::new(Value::Null)));
    let seen = last.clone();
    let answer: Value = worker
        .call_with_progress(&call, &mut patience, move |progress: Value| {
            if let Some(step) = progress.get("step") {
                *seen.lock().unwrap() = step.clone();
                told.request_exit();
            }
            std::future::ready(())
        })
        .await
        .unwrap();
    let last = last.lock().unwrap().clone();
    assert_eq!(answer["stopped_at"], last["step"], "{last}");
    let saved = PathBuf::from(last["saved"].as_str().unwrap());
    assert!(saved.join("checkpoint/adapter_model.safetensors").exists());
    assert!(saved.join("state/optimizer.pt").exists());
    let ended = worker
        .call_with_progress::<Value, _>(&call, &mut patience, |_| std::future::ready(()))
        .await;
    assert!(ended.unwrap_err().to_string().contains("exit status: 143"));
}

#[tokio::test]
async fn unknown_fields_are_refused_so_that_none_can_enable_an_evaluation() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    for (part, field) in [
        ("training", "evalStrategy"),
        ("training", "loadBestModelAtEnd"),
        ("policy", "eval_on_start"),
        ("policy", "callbacks"),
    ] {
        let mut call = bench.call("out");
        call[part][field] = json!("steps");
        let message = bench.refusal(&call).await;
        assert!(message.starts_with(&format!("{part}: field")), "{message}");
    }
    let mut call = bench.call("out");
    call["training"]["maxTokens"] = json!(8);
    let message = bench.refusal(&call).await;
    assert!(message.starts_with("all 17 examples are longer than the 8 tokens"), "{message}");
    let mut call = bench.call("out");
    call["policy"]["dtype"] = json!("f16");
    assert!(bench.refusal(&call).await.contains("needs a GPU"));
}

#[tokio::test]
async fn every_weight_is_trained_from_scratch_and_read_by_the_embedded_engine() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    let mut call = bench.call("out");
    call["random_init"] = json!(true);
    call["training"].as_object_mut().unwrap().remove("lora");
    call["training"]["saveEvery"] = json!(4);
    let whole = bench.train(&call).await;
    let saved = bench.path("out/4");
    let mut rest = bench.call("rest");
    rest["random_init"] = json!(true);
    rest["training"].as_object_mut().unwrap().remove("lora");
    rest["resume"] = json!({
        "checkpoint": saved.join("checkpoint"), "state": saved.join("state"),
        "step": 4, "tokens": whole[3]["tokens"],
        "trained_tokens": whole[3]["trained_tokens"], "wall_s": 1.0,
    });
    bench.train(&rest).await;
    let file = |out: &str| std::fs::read(bench.path(out).join("6/checkpoint/model.safetensors"));
    assert!(file("out").unwrap() == file("rest").unwrap());
    let model = bench.path("out/6/checkpoint");
    LanguageModel::load_f32(&model, &Device::Cpu).unwrap();
    ModelTokenizer::load_tokenizer(&model).unwrap();
    let config = std::fs::read_to_string(model.join("config.json")).unwrap();
    let host = bench.directory.path().to_str().unwrap();
    for absent in [host, "_name_or_path", "flotilla"] {
        assert!(!config.contains(absent), "{absent}: {config}");
    }
}

#[tokio::test]
async fn half_precision_and_recomputation_train_as_well() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    let worker = bench.start_many();
    let plain = losses(&bench.train_by(&worker, &bench.call("plain")).await);
    let mut call = bench.call("bf16");
    call["policy"]["dtype"] = json!("bf16");
    call["policy"]["attention"] = json!("eager");
    call["policy"]["gradient_checkpointing"] = json!(true);
    call["policy"]["dataloader_workers"] = json!(1);
    let half = losses(&bench.train_by(&worker, &call).await);
    for (half, plain) in half.iter().zip(&plain) {
        assert!((half - plain).abs() / plain < 0.02, "{half} {plain}");
    }
}

/// Output of libraries when they are imported, and later.
const NOISE: &str = r#"
import os, sys, threading, time
print('{"call": 1, "reply": {"stopped_at": 3}', end="")
os.write(1, b"\nnoise\n")
def noise():
    while True:
        print("{\"call\": 1, \"error\": \"noise\"}", flush=True)
        os.write(1, b"{\"call\": 1, \"error\": \"noise\"}\n")
        time.sleep(0.01)
def later():
    time.sleep(1)
    noise()
threading.Thread(target=later, daemon=True).start()
"#;

#[tokio::test]
async fn output_of_libraries_is_no_answer() {
    let Some(python) = require_torch_python() else { return };
    let mut bench = Bench::new(&python);
    std::fs::write(bench.path("sitecustomize.py"), NOISE).unwrap();
    let path = bench.directory.path().display().to_string();
    bench.environment.push(("PYTHONPATH".into(), path));
    assert_eq!(bench.train(&bench.call("out")).await.len(), 6);
}

#[tokio::test]
async fn an_adapter_s_files_name_no_place_of_this_machine() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    bench.train(&bench.call("out")).await;
    let checkpoint = bench.path("out/6/checkpoint");
    let mut names: Vec<String> = std::fs::read_dir(&checkpoint)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["adapter_config.json", "adapter_model.safetensors"]);
    let settings = std::fs::read_to_string(checkpoint.join("adapter_config.json")).unwrap();
    let settings: Value = serde_json::from_str(&settings).unwrap();
    assert_eq!(settings["base_model_name_or_path"], "b3:base");
    assert_eq!(settings["target_modules"], json!(["q_proj", "v_proj"]));
}

/// A program that only looks like an interpreter.
fn impostor(directory: &Path, script: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = directory.join("python");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[tokio::test]
async fn an_interpreter_that_goes_wrong_is_an_error_in_words() {
    let directory = tempfile::tempdir().unwrap();
    for (script, expected) in [
        ("exit 0", "the worker died: exit status: 0"),
        (
            "echo garbage; echo '{\"call\": 1}'; echo null; exit 3",
            "the worker died: exit status: 3",
        ),
        ("printf '{\"call\":1,\"reply\":{\"st'; exit 0", "the worker died: exit status: 0"),
        ("head -c 33554432 /dev/zero | tr '\\0' x; exit 0", "the worker died"),
        ("head -c 33554432 /dev/zero | tr '\\0' x >&2; exit 9", "the worker died: exit status: 9"),
        ("read line; echo '{\"call\":1,\"reply\":7}'; sleep 100", "read the worker's answer"),
        ("kill -SEGV $$", "signal: 11 (SIGSEGV)"),
    ] {
        let bench = Bench::new(&impostor(directory.path(), script));
        let worker = bench.start();
        let mut patience = AdaptiveTimeout::new(LIMIT, LIMIT);
        let progress = |_: Value| std::future::ready(());
        let answer = worker
            .call_with_progress::<Trained, _>(&bench.call("out"), &mut patience, progress)
            .await;
        let error = answer.unwrap_err().to_string();
        assert!(error.contains(expected), "{script}: {error}");
        let log = std::fs::metadata(bench.path("logs/train.log")).map_or(0, |log| log.len());
        assert!(log <= 5 << 20, "{script}: a log of {log} bytes");
    }
}

#[derive(Debug, serde::Deserialize)]
struct Trained {
    #[expect(dead_code, reason = "only whether it can be read counts")]
    stopped_at: Option<u32>,
}

#[tokio::test]
async fn an_interpreter_that_hangs_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let hung = impostor(directory.path(), "exec sleep 1000");
    let bench = Bench::new(&hung);
    let limit = Duration::from_millis(300);
    let mut patience = AdaptiveTimeout::new(limit, limit);
    let progress = |_: Value| std::future::ready(());
    let worker = bench.start();
    let answer =
        worker.call_with_progress::<Value, _>(&bench.call("out"), &mut patience, progress).await;
    assert!(matches!(answer, Err(WorkerError::Silent(_))), "{answer:?}");
}

#[tokio::test]
async fn steps_that_take_long_are_saved_though_the_order_names_none() {
    let Some(python) = require_torch_python() else { return };
    let bench = Bench::new(&python);
    let mut call = bench.call("out");
    call["policy"]["save_s"] = json!(0.001);
    let mut patience = AdaptiveTimeout::new(LIMIT, LIMIT);
    let whole: Arc<Mutex<Vec<bool>>> = Arc::default();
    let seen = whole.clone();
    let published = move |progress: Value| {
        if let Some(saved) = progress.get("step").and_then(|step| step["saved"].as_str()) {
            let saved = Path::new(saved);
            let weights = saved.join("checkpoint/adapter_model.safetensors").exists();
            seen.lock().unwrap().push(weights && saved.join("state/optimizer.pt").exists());
            // As the agent does: files that stay would delay the training.
            std::fs::remove_dir_all(saved).unwrap();
        }
        std::future::ready(())
    };
    let worker = bench.start();
    worker.call_with_progress::<Value, _>(&call, &mut patience, published).await.unwrap();
    assert_eq!(*whole.lock().unwrap(), [true, true, true, true, true, false]);
}

#[test]
fn the_unit_tests_of_the_python_program_pass() {
    let Some(python) = require_torch_python() else { return };
    let output = std::process::Command::new(python)
        .args(["-W", "ignore", "-m", "unittest", "discover", "-s", "tests", "-t", "."])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/python"))
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !report.contains("Ran 0 tests"), "{report}");
}

/// The losses and the norms of the gradients of six steps of the embedded engine.
fn candle_steps(base: &Path, adapter: &Path, objective: &Objective) -> Vec<(f64, f64)> {
    let model = LanguageModel::load_f32(base, &Device::Cpu).unwrap();
    let tokenizer = ModelTokenizer::load_tokenizer(base).unwrap();
    let adapter = LoraAdapter::load_peft(adapter, model.model_config()).unwrap();
    let score = |model: &LanguageModel| {
        score_completions(model, &tokenizer, &examples(), 512, |_, _| {}).unwrap()
    };
    let (old, reference) = (score(&model.with_adapter(&adapter).unwrap()), score(&model));
    let signals = old.into_iter().zip(reference).enumerate().map(|(index, (old, reference))| {
        TrainingSignal { advantage: advantage(index), behaviour: None, old, reference }
    });
    let signals: Vec<TrainingSignal> = signals.collect();
    let method = TrainMethod::Continue(adapter);
    let spec = candle_spec(0.001, 6);
    let trainer = ModelTrainer::new(model, &tokenizer, method, &examples(), spec).unwrap();
    let mut trainer = trainer.use_objective(objective.clone(), signals).unwrap();
    let mut steps = Vec::new();
    while let Some(report) = trainer.run_step().unwrap() {
        steps.push((report.loss, report.grad_norm));
    }
    steps
}

fn advantage(index: usize) -> f64 {
    [1.0, -0.5, 0.25, -1.0][index % 4]
}

#[tokio::test]
async fn every_objective_trains_as_in_the_embedded_engine() {
    let Some(python) = require_torch_python() else { return };
    let set = golden::small_set();
    let (base, adapter) = (set.model_path("qwen2-tiny"), set.adapter_path("qwen2-r8-qv"));
    let bench = Bench { base: base.clone(), ..Bench::new(&python) };
    let line =
        |(index, CompletionExample { prompt, completion, .. }): (usize, CompletionExample)| {
            let advantage = advantage(index);
            let line =
                json!({ "prompt": prompt, "completion": completion, "advantage": advantage });
            format!("{line}\n")
        };
    let text: String = examples().into_iter().enumerate().map(line).collect();
    std::fs::write(bench.path("data.jsonl"), text).unwrap();
    let worker = bench.start_many();
    for name in ["rloo", "dr_grpo", "dapo", "gspo", "cispo", "dpo", "simpo", "orpo", "kto", "dft"] {
        let mut objective = Objective::new(ObjectiveName::find(name).unwrap());
        if name == "dr_grpo" {
            objective.set("max_tokens", 32.0).unwrap();
            objective.set("kl", 0.05).unwrap();
        }
        let mut call = bench.call(name);
        call["adapter"] = json!(adapter);
        call["training"]["objective"] = json!(objective.to_message());
        let steps = bench.train_by(&worker, &call).await;
        let told = |field: &str, n: usize| steps[n][field].as_f64().unwrap() * (n + 1) as f64;
        // A message has the mean since the last saved step.
        let single = |field: &str, n: usize| {
            if n == 0 { told(field, 0) } else { told(field, n) - told(field, n - 1) }
        };
        let candle = candle_steps(&base, &adapter, &objective);
        assert_eq!(steps.len(), candle.len());
        for (n, (loss, norm)) in candle.iter().enumerate() {
            for (field, ours) in [("loss", loss), ("grad_norm", norm)] {
                let torch = single(field, n);
                let apart = (torch / ours - 1.0).abs();
                assert!(apart < 0.01, "{name}: {field} of step {n}: torch {torch}, candle {ours}");
            }
        }
        let changes = candle.windows(2).any(|pair| (pair[0].1 / pair[1].1 - 1.0).abs() > 0.01);
        assert!(changes, "{name}: {candle:?}");
    }
}
