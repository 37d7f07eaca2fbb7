//! Perplexities, greedy generations and training losses of transformers and PEFT, on models they
//! wrote: `tests/torch/references.py`. Needs a Python with both: `make test-torch`.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use engine::{
    CompletionExample, LanguageModel, LoraAdapter, MatrixDtype, ModelTokenizer, ModelTrainer,
    PromptInput, PromptRequest, SamplingParameters, TrainMethod, TrainSpec, generate_all,
    score_chunks,
};
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The script needs a minute on an idle machine.
const SCRIPT_MAX: Duration = Duration::from_secs(900);

/// The largest difference of a perplexity in bf16, relative. Sums in another order are 3e-7 apart, and
/// those between two bf16 numbers then round the other way. In torch this alone moves a perplexity
/// by 1e-4 (standard deviation of the worst case); computing in f32 moves the largest ones by 1e-3.
const BF16_DIFFERENCE_MAX: f64 = 6e-4;

fn run_script(python: &OsString, arguments: &[&OsStr]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/torch/references.py");
    let mut command = Command::new(python);
    command.arg(script).args(arguments).env("HF_HUB_OFFLINE", "1").stdin(Stdio::null());
    let mut child = command.spawn().unwrap();
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > SCRIPT_MAX {
            child.kill().unwrap();
            panic!("the script took longer than {SCRIPT_MAX:?}");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(child.wait().unwrap().success(), "the script failed");
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

fn size(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

struct References {
    python: OsString,
    dir: tempfile::TempDir,
    all: Value,
}

impl References {
    fn load(&self, case: &Value, dtype: MatrixDtype) -> (LanguageModel, ModelTokenizer) {
        let path = |field: &str| case[field].as_str().map(|name| self.dir.path().join(name));
        let adapter = path("adapter");
        engine::load_model(&path("model").unwrap(), adapter.as_deref(), "cpu", dtype).unwrap()
    }

    fn perplexity(&self, (model, tokenizer): &(LanguageModel, ModelTokenizer)) -> f64 {
        let unseen = std::fs::read_to_string(self.dir.path().join("eval.txt")).unwrap();
        let (context, limit) = (size(&self.all["context"]), size(&self.all["chunks"]));
        score_chunks(model, tokenizer, &unseen, context, Some(limit), |_, _| {}).unwrap().perplexity
    }

    fn greedy(
        &self,
        (model, tokenizer): &(LanguageModel, ModelTokenizer),
        expected: &Value,
    ) -> Vec<Vec<u32>> {
        let request = |one: &Value| PromptRequest {
            tag: (),
            prompt: PromptInput::Text(text(&one["prompt"])),
            seeds: vec![0],
            sampling: SamplingParameters {
                temperature: 0.0,
                top_k: 0,
                top_p: 1.0,
                max_new_tokens: size(&self.all["new_tokens"]),
            },
        };
        let requests = list(expected).iter().map(request).collect();
        let answers = generate_all(model, tokenizer, 4, requests, |_, _| {}).unwrap();
        answers.into_iter().map(|answer| answer.unwrap().remove(0).tokens).collect()
    }

    fn trainer(&self, training: &Value) -> ModelTrainer {
        let dtype = MatrixDtype::from_name(training["dtype"].as_str().unwrap()).unwrap();
        let base = serde_json::json!({ "model": training["model"] });
        let (model, tokenizer) = self.load(&base, dtype);
        let adapter = self.dir.path().join(text(&training["adapter"]));
        let adapter = LoraAdapter::load_peft(&adapter, model.model_config()).unwrap();
        let example =
            |one: &Value| CompletionExample::new(text(&one["prompt"]), text(&one["completion"]));
        let examples: Vec<CompletionExample> =
            list(&self.all["examples"]).iter().map(example).collect();
        let settings = &self.all["training"];
        let spec = TrainSpec {
            learning_rate: number(&settings["learning_rate"]),
            betas: (number(&settings["betas"][0]), number(&settings["betas"][1])),
            epsilon: number(&settings["epsilon"]),
            weight_decay: number(&settings["weight_decay"]),
            clip_norm: number(&settings["clip_norm"]),
            batch_size: examples.len(),
            micro_batch_tokens: 300,
            max_steps: Some(size(&settings["steps"])),
            ..TrainSpec::default()
        };
        let method = TrainMethod::Continue(adapter);
        ModelTrainer::new(model, &tokenizer, method, &examples, spec).unwrap()
    }

    /// Checks that PEFT reads a trainer's output.
    fn check_saved(&self, trainer: &ModelTrainer, training: &Value) {
        let (model, adapter) = (text(&training["model"]), "saved");
        trainer.save_directory(&self.dir.path().join(adapter), &model).unwrap();
        let out = self.dir.path().as_os_str();
        run_script(&self.python, &[out, model.as_ref(), adapter.as_ref()]);
        let theirs = number(&read_json(&self.dir.path().join("perplexity.json")));
        let case = serde_json::json!({ "model": model, "adapter": adapter });
        let ours = self.perplexity(&self.load(&case, MatrixDtype::F32));
        println!("{} written: perplexity {ours:.6}, torch {theirs:.6}", training["adapter"]);
        assert!((ours / theirs - 1.0).abs() < 1e-5, "PEFT reads {theirs}, we {ours}");
    }

    fn check_case(&self, case: &Value) {
        let name = format!("{} {}", case["model"], case["adapter"]);
        let exact = self.load(case, MatrixDtype::F32);
        let (ours, theirs) = (self.perplexity(&exact), number(&case["perplexity"]));
        println!("{name}: perplexity {ours:.6}, torch {theirs:.6}");
        assert!((ours - theirs).abs() < 5e-5, "{name}: perplexity {ours}, torch {theirs}");
        let tokens = self.greedy(&exact, &case["greedy"]);
        for (ours, theirs) in tokens.iter().zip(list(&case["greedy"])) {
            assert_eq!(&serde_json::json!(ours), &theirs["tokens"], "{name}: {}", theirs["prompt"]);
        }
        let narrow = self.load(case, MatrixDtype::Bf16);
        let (ours, theirs) = (self.perplexity(&narrow), number(&case["perplexity_bf16"]));
        println!("{name} in bf16: perplexity {ours:.6}, torch {theirs:.6}");
        let off = (ours / theirs - 1.0).abs();
        assert!(off < BF16_DIFFERENCE_MAX, "{name} in bf16: {ours}, torch {theirs}");
    }

    fn check_training(&self, training: &Value) {
        let name = format!("{} {}", training["adapter"], training["dtype"]);
        let mut trainer = self.trainer(training);
        let steps = std::iter::from_fn(|| trainer.run_step().unwrap());
        let ours: Vec<f64> = steps.map(|report| report.loss).collect();
        let theirs = list(&training["losses"]);
        assert_eq!(ours.len(), theirs.len(), "{name}");
        let off = |(ours, theirs): (&f64, &Value)| (ours / number(theirs) - 1.0).abs();
        let worst = ours.iter().zip(theirs).map(off).fold(0.0, f64::max);
        println!("{name}: losses at most {worst:.2e} apart");
        assert!(worst < 0.01, "{name}: {ours:?}, torch {theirs:?}");
        assert!(ours.last() < ours.first(), "{name} learns: {ours:?}");
        if text(&training["adapter"]).contains("patterns") && training["dtype"] == "f32" {
            self.check_saved(&trainer, training);
        }
    }
}

#[test]
fn figures_generations_and_losses_are_those_of_torch() {
    let Some(python) = requirements::require_torch_python() else { return };
    let python = python.into_os_string();
    let dir = tempfile::tempdir().unwrap();
    run_script(&python, &[dir.path().as_os_str()]);
    let all = read_json(&dir.path().join("references.json"));
    let references = References { python, dir, all };
    list(&references.all["cases"]).iter().for_each(|case| references.check_case(case));
    list(&references.all["trainings"]).iter().for_each(|one| references.check_training(one));
}
