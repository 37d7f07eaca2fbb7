//! A resumed training gives the same bits as an uninterrupted one.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use engine::{
    CompletionExample, Device, LanguageModel, LayerModule, LearningRateDecay, LoraAdapter,
    LoraSpec, ModelTokenizer, ModelTrainer, ResumeError, ScratchShape, TrainMethod, TrainSpec,
    write_scratch_model,
};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const STEPS: usize = 7;

fn spec() -> TrainSpec {
    TrainSpec {
        learning_rate: 3e-3,
        warmup_ratio: 0.3,
        decay: LearningRateDecay::Cosine,
        final_ratio: 0.1,
        betas: (0.9, 0.98),
        weight_decay: 0.01,
        dropout: 0.1,
        batch_size: 8,
        micro_batch_tokens: 100,
        // Into the third epoch of three steps, the last of which is short.
        max_steps: Some(STEPS),
        max_tokens: 64,
        seed: u64::MAX - 7,
        ..TrainSpec::default()
    }
}

fn lora() -> LoraSpec {
    let modules = [LayerModule::Query, LayerModule::Value, LayerModule::Down].into();
    LoraSpec { rank: 4, alpha: 9.3, modules, rslora: true }
}

fn examples() -> Vec<CompletionExample> {
    (0..20).map(|i| CompletionExample::new(format!("{i} then "), format!("{} é", i + 1))).collect()
}

/// A training whose every step is saved below a directory.
struct Training {
    root: tempfile::TempDir,
    method: TrainMethod,
}

impl Training {
    fn new(method: impl FnOnce(&LanguageModel) -> TrainMethod) -> Self {
        let root = tempfile::tempdir().unwrap();
        let base = root.path().join("base");
        let config = write_scratch_model(&base, &ScratchShape::default()).unwrap();
        let model = LanguageModel::init_random(config, 3, &Device::Cpu).unwrap();
        model.save_directory(&base).unwrap();
        Self { method: method(&model), root }
    }

    fn full() -> Self {
        Self::new(|_| TrainMethod::Full)
    }

    fn all() -> [Self; 3] {
        let earlier = |model: &LanguageModel| {
            TrainMethod::Continue(LoraAdapter::new(&lora(), model.model_config(), 5).unwrap())
        };
        [Self::full(), Self::new(|_| TrainMethod::Lora(lora())), Self::new(earlier)]
    }

    fn dir(&self, step: usize, what: &str) -> PathBuf {
        self.root.path().join(step.to_string()).join(what)
    }

    fn with(&self, weights: &Path, method: TrainMethod, spec: TrainSpec) -> ModelTrainer {
        let base = self.root.path().join("base");
        let tokenizer = ModelTokenizer::load_tokenizer(&base).unwrap();
        let model = LanguageModel::load_f32(weights, &Device::Cpu).unwrap();
        ModelTrainer::new(model, &tokenizer, method, &examples(), spec).unwrap()
    }

    fn start(&self) -> ModelTrainer {
        self.with(&self.root.path().join("base"), self.method.clone(), spec())
    }

    /// Creates a trainer with the weights of a saved step, and nothing else of it.
    fn reload(&self, step: usize, spec: TrainSpec) -> ModelTrainer {
        let weights = self.dir(step, "checkpoint");
        if let TrainMethod::Full = self.method {
            return self.with(&weights, TrainMethod::Full, spec);
        }
        let base = self.root.path().join("base");
        let config = LanguageModel::load_f32(&base, &Device::Cpu).unwrap().model_config().clone();
        let adapter = LoraAdapter::load_peft(&weights, &config).unwrap();
        self.with(&base, TrainMethod::Continue(adapter), spec)
    }

    fn resumed(&self, step: usize) -> ModelTrainer {
        let mut trainer = self.reload(step, spec());
        trainer.resume_from(&self.dir(step, "state"), step).unwrap();
        trainer
    }

    fn refusal(&self, step: usize, spec: TrainSpec) -> ResumeError {
        self.reload(step, spec).resume_from(&self.dir(step, "state"), step).unwrap_err()
    }

    /// Takes one step and returns its loss.
    fn step(&self, trainer: &mut ModelTrainer) -> Option<f64> {
        let report = trainer.run_step().unwrap()?;
        trainer.save_directory(&self.dir(report.step, "checkpoint"), "base").unwrap();
        trainer.save_state(&self.dir(report.step, "state")).unwrap();
        Some(report.loss)
    }

    /// Reads the files of a step's directories.
    fn files(&self, step: usize) -> BTreeMap<PathBuf, Vec<u8>> {
        let dirs = ["checkpoint", "state"].map(|what| fs::read_dir(self.dir(step, what)).unwrap());
        let paths = dirs.into_iter().flatten().map(|entry| entry.unwrap().path());
        paths.map(|path| (path.clone(), fs::read(path).unwrap())).collect()
    }
}

#[test]
fn resumed_at_any_step_it_has_the_same_losses_and_ends_in_the_same_bytes() {
    for training in Training::all() {
        let mut unbroken = training.start();
        let losses: Vec<f64> = std::iter::from_fn(|| training.step(&mut unbroken)).collect();
        assert_eq!(losses.len(), STEPS);
        let saved: Vec<_> = (1..=STEPS).map(|step| training.files(step)).collect();
        for stop in 1..=STEPS {
            let mut trainer = training.resumed(stop);
            let rest: Vec<f64> = std::iter::from_fn(|| training.step(&mut trainer)).collect();
            assert_eq!(rest, losses[stop..], "resumed at {stop}");
            for step in stop..=STEPS {
                assert!(saved[step - 1] == training.files(step), "step {step} after {stop}");
            }
        }
    }
}

#[test]
fn stopped_after_every_step_it_is_still_the_same_training() {
    for training in Training::all() {
        let mut unbroken = training.start();
        let losses: Vec<f64> = std::iter::from_fn(|| training.step(&mut unbroken)).collect();
        let end = training.files(STEPS);
        let first = training.step(&mut training.start()).unwrap();
        let rest = (1..STEPS).map(|step| training.step(&mut training.resumed(step)).unwrap());
        assert_eq!(std::iter::once(first).chain(rest).collect::<Vec<_>>(), losses);
        assert!(end == training.files(STEPS));
    }
}

#[test]
fn a_slice_continues_with_the_state_of_an_earlier_one_or_a_new_one() {
    for training in Training::all() {
        let mut unbroken = training.start();
        while training.step(&mut unbroken).is_some() {}
        let end = training.files(STEPS);
        let state = training.dir(3, "state");
        let mut next = training.reload(3, spec());
        next.start_slice(Some(&state), 3).unwrap();
        while training.step(&mut next).is_some() {}
        assert!(end == training.files(STEPS), "nothing was trained elsewhere");

        let counts = |state: Option<&Path>| {
            let mut later = training.reload(5, spec());
            later.start_slice(state, 5).unwrap();
            training.step(&mut later).unwrap();
            let text = fs::read_to_string(training.dir(6, "state").join("state.json")).unwrap();
            let state: serde_json::Value = serde_json::from_str(&text).unwrap();
            (state["step"].as_u64(), state["updates"].as_u64())
        };
        assert_eq!(
            counts(Some(&state)),
            (Some(6), Some(4)),
            "steps 4 and 5 were trained elsewhere"
        );
        assert_eq!(counts(None), (Some(6), Some(1)));
        let mut other = training.reload(3, TrainSpec { seed: 8, ..spec() });
        let refused = other.start_slice(Some(&state), 3).unwrap_err().to_string();
        assert!(refused.contains("`seed`"), "{refused}");
        let mut past = training.reload(3, spec());
        past.start_slice(None, STEPS + 9).unwrap();
        assert!(past.run_step().unwrap().is_none(), "past the end");
    }
}

/// The weights alone are not enough: without this the tests above would prove nothing.
#[test]
fn without_its_state_a_training_goes_on_otherwise() {
    let training = Training::full();
    let mut unbroken = training.start();
    while training.step(&mut unbroken).is_some() {}
    let end = training.files(STEPS);
    let mut forgetful = training.reload(3, spec());
    while training.step(&mut forgetful).is_some() {}
    assert!(end != training.files(STEPS));
}

/// Takes two steps and saves both.
fn begun() -> Training {
    let training = Training::full();
    let mut trainer = training.start();
    for _ in 0..2 {
        training.step(&mut trainer).unwrap();
    }
    training
}

#[test]
fn the_state_of_another_training_is_refused_by_the_name_of_the_field() {
    let training = begun();
    let refused = |step, spec, field: &str| {
        let error = training.refusal(step, spec).to_string();
        assert!(error.contains("state.json") && error.contains(&format!("`{field}`")), "{error}");
    };
    refused(2, TrainSpec { seed: 8, ..spec() }, "seed");
    refused(2, TrainSpec { learning_rate: 0.1, ..spec() }, "learning_rate");
    refused(2, TrainSpec { decay: LearningRateDecay::Linear, ..spec() }, "decay");
    refused(2, TrainSpec { micro_batch_tokens: 101, ..spec() }, "micro_batch_tokens");
    refused(2, TrainSpec { dropout: 0.2, ..spec() }, "dropout");
    refused(2, TrainSpec { max_steps: Some(1), ..spec() }, "steps");
    let state = |step| training.dir(step, "state").join("state.json");
    fs::copy(state(1), state(2)).unwrap();
    refused(2, spec(), "step");
    let text = fs::read_to_string(state(1)).unwrap();
    fs::write(state(2), text.replace("\"seed\"", "\"sea\"")).unwrap();
    refused(2, spec(), "seed");
    let late = text.replace("\"step\": 1", "\"step\": 8");
    fs::write(state(2), late).unwrap();
    let error = training.reload(2, spec()).resume_from(&training.dir(2, "state"), 8).unwrap_err();
    assert!(error.to_string().contains("at most 7"), "{error}");
}

#[test]
fn a_damaged_state_is_an_error_that_names_its_file() {
    let training = begun();
    let told = || {
        let error = training.refusal(2, spec());
        let source = std::error::Error::source(&error).map(ToString::to_string);
        format!("{error}: {}", source.unwrap_or_default())
    };
    let path = |name| training.dir(2, "state").join(name);
    let moments = fs::read(path("moments.safetensors")).unwrap();
    for length in [moments.len() - 1, 4, 0] {
        fs::write(path("moments.safetensors"), &moments[..length]).unwrap();
        let told = told();
        assert!(told.contains("moments.safetensors is not a valid"), "{told}");
    }
    fs::remove_file(path("moments.safetensors")).unwrap();
    assert!(told().contains("moments.safetensors"), "{}", told());
    fs::write(path("moments.safetensors"), &moments).unwrap();
    for text in ["", "[]", "{", "nan"] {
        fs::write(path("state.json"), text).unwrap();
        assert!(told().contains("state.json"), "{}", told());
    }
}

#[test]
fn moments_of_other_parameters_are_refused_by_name_and_shape() {
    let training = begun();
    let wide = Training::new(|_| TrainMethod::Lora(lora()));
    wide.step(&mut wide.start()).unwrap();
    let path = |training: &Training, step| training.dir(step, "state").join("moments.safetensors");
    fs::copy(path(&wide, 1), path(&training, 2)).unwrap();
    let error = training.refusal(2, spec());
    let ResumeError::Moments(source) = error else { panic!("{error}") };
    assert!(source.to_string().contains(".exp_avg` is missing"), "{source}");

    let other = Training::new(|_| TrainMethod::Lora(LoraSpec { rank: 3, ..lora() }));
    other.step(&mut other.start()).unwrap();
    fs::copy(path(&other, 1), path(&wide, 1)).unwrap();
    let error = wide.refusal(1, spec());
    let ResumeError::Moments(source) = error else { panic!("{error}") };
    assert!(source.to_string().contains("has shape [3, "), "{source}");
}

#[test]
fn a_state_too_large_to_be_one_is_not_read() {
    let training = begun();
    for name in ["state.json", "moments.safetensors"] {
        let path = training.dir(2, "state").join(name);
        let intact = fs::read(&path).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        let error = training.refusal(2, spec());
        assert!(matches!(&error, ResumeError::TooLarge { path: found, .. } if *found == path));
        fs::write(&path, intact).unwrap();
    }
}
