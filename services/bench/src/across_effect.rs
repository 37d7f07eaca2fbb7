//! Measures `flotilla-bench across`: how well an adapter learns if several boxes train it, and how
//! busy the planner keeps them.
//!
//! The trainings are real, one after the other on this machine: the demo's base learns more
//! correct sums. Times are those of boxes that take as long for a step as others and merge in no time. Figures
//! depend only on the seeds.

mod markdown;
mod shared_training;
mod split_efficiency;

use std::{path::Path, process::ExitCode};

use anyhow::Context;
use cli::{
    demo_task::{BaseRunFiles, DigitCount},
    output,
    work_directory::WorkDirectory,
};
use engine::{
    CompletionExample, Device, LanguageModel, LearningRateDecay, ModelTokenizer, ModelTrainer,
    TrainMethod, TrainSpec,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use self::shared_training::{SharedTraining, SharingMethod, TrainedShare};
use self::split_efficiency::{SlowLink, SlowShare};
use crate::{
    args::BenchArgs,
    conditions::{Conditions, ConditionsMeter},
};

/// Steps of the base, as in the demo.
const BASE_STEPS: usize = 400;

/// Steps of an adapter on one box; boxes together take as many.
const STEPS: usize = 400;
const BATCH_SIZE: usize = 16;
const EPOCHS: usize = 4;

/// Held-out examples that are measured, and others by which a soup is chosen.
const HELDOUT: usize = 400;
const CHOSEN_BY: usize = 200;

/// Steps of a box between two merges.
const INTERVAL: usize = 20;

/// Those of `average` and `stack`.
const INTERVALS: [usize; 3] = [5, INTERVAL, 100];

const BOXES: [usize; 2] = [2, 4];

/// Four boxes take this share more steps to reach the likelihood of one.
const MORE_STEPS: f64 = 1.25;

const AVERAGE: SharingMethod = SharingMethod::AVERAGE;

/// The trainings of a seed.
#[derive(Debug, Serialize, Deserialize)]
struct SeedResult {
    seed: u64,
    one_box: TrainedShare,
    /// Trainings with as many tokens as on one box.
    shared: Vec<SharedResult>,
    /// Four boxes with more tokens.
    longer: SharedResult,
}

#[derive(Debug, Serialize, Deserialize)]
struct SharedResult {
    boxes: usize,
    every: usize,
    merge: String,
    result: TrainedShare,
}

#[derive(Debug, Serialize)]
struct AcrossReport {
    #[serde(flatten)]
    conditions: Conditions,
    seeds: Vec<SeedResult>,
    /// Relative speeds of boxes, and the share of the sum of their speeds that is used.
    efficiency: Vec<(Vec<f64>, f64)>,
    slow: SlowReport,
}

/// An adapter of a 7B model between boxes behind a slow link.
#[derive(Debug, Serialize)]
struct SlowReport {
    weight_bytes: u64,
    change_bytes: u64,
    shares: Vec<SlowShare>,
}

pub(super) fn bench_across(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    let directory = WorkDirectory::open_or_create(args.dir.as_deref(), "bench-across")?;
    let meter = ConditionsMeter::start();
    let mut seeds = Vec::new();
    for seed in 1..=u64::from(args.seeds) {
        seeds.push(read_or_train(&directory.as_path().join(seed.to_string()), seed)?);
        output::print_message(&format!("seed {seed} of {}", args.seeds));
    }
    let efficiency = split_efficiency::measure_efficiency();
    let slow = measure_slow_link(&directory.as_path().join("large"))?;
    let report = AcrossReport { conditions: meter.finish(), seeds, efficiency, slow };
    if args.json {
        output::print_json(&json!(report))?;
    } else {
        output::print_text(&markdown::write_markdown(&report));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the result of a seed, from its file if an earlier benchmark wrote it.
fn read_or_train(directory: &Path, seed: u64) -> anyhow::Result<SeedResult> {
    let file = directory.with_extension("json");
    if let Ok(bytes) = std::fs::read(&file) {
        return serde_json::from_slice(&bytes).with_context(|| format!("read {}", file.display()));
    }
    let result = train_seed(directory, seed)?;
    std::fs::write(&file, serde_json::to_vec(&result)?)
        .with_context(|| format!("write {}", file.display()))?;
    Ok(result)
}

fn train_seed(directory: &Path, seed: u64) -> anyhow::Result<SeedResult> {
    let files = BaseRunFiles { seed, digits: DigitCount::Two };
    files.write_files(directory).context("write the task's files")?;
    files.write_teacher(directory)?;
    let base = directory.join("base");
    train_base(directory, &base, seed)?;
    let mut examples = mix_examples(directory)?;
    let chosen_by = examples.split_off(STEPS * BATCH_SIZE / EPOCHS + HELDOUT);
    let training = SharedTraining {
        base: &base,
        heldout: examples.split_off(STEPS * BATCH_SIZE / EPOCHS),
        chosen_by,
        examples,
        spec: adapter_spec(seed, STEPS),
    };
    let one_box = training.train_boxes(&directory.join("one"), 1, STEPS, AVERAGE)?;
    let mut shared = Vec::new();
    for (number, (method, boxes, every)) in list_cases().into_iter().enumerate() {
        let spec = TrainSpec { freezes_a: method.freezes_a, ..adapter_spec(seed, STEPS) };
        let training = SharedTraining { spec, ..training.clone() };
        let scratch = directory.join(number.to_string());
        let result = training.train_boxes(&scratch, boxes, every, method)?;
        std::fs::remove_dir_all(&scratch)?;
        shared.push(SharedResult { boxes, every, merge: method.name.into(), result });
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "hundreds")]
    let more = (STEPS as f64 * MORE_STEPS) as usize;
    let longer = SharedTraining { spec: adapter_spec(seed, more), ..training.clone() };
    let (boxes, every) = (4, INTERVAL);
    let result = longer.train_boxes(&directory.join("longer"), boxes, every, AVERAGE)?;
    let longer = SharedResult { boxes, every, merge: AVERAGE.name.into(), result };
    Ok(SeedResult { seed, one_box, shared, longer })
}

/// Returns the trainings that are compared with one box: the method, the number of boxes and the
/// steps between two merges.
fn list_cases() -> Vec<(SharingMethod, usize, usize)> {
    let all = [AVERAGE, SharingMethod::STACK].into_iter().flat_map(|method| {
        BOXES.into_iter().flat_map(move |boxes| INTERVALS.map(|every| (method, boxes, every)))
    });
    let others = [SharingMethod::NESTEROV, SharingMethod::FROZEN_A].into_iter();
    let others =
        others.flat_map(|method| BOXES.into_iter().map(move |boxes| (method, boxes, INTERVAL)));
    let changes = SharingMethod::CHANGES.map(|method| (method, 4, INTERVAL));
    let soups = BOXES.map(|boxes| (SharingMethod::SOUP, boxes, STEPS / boxes));
    all.chain(others).chain(changes).chain(soups).collect()
}

/// The link of the bench, such as a box behind bad Wi-Fi.
const SLOW_LINK: SlowLink = SlowLink { bits_s: 20e6, round_trip_s: 0.1, loss: 0.02 };

/// The share of changed values that is sent over it.
const SENT: f64 = 0.01;

/// Shape of Qwen2.5-7B.
const LARGE_CONFIG: &str = r#"{
  "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
  "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
  "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
  "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": false
}"#;

/// Two new adapters of 36 ranks differ in as many values, those of A, as all of an adapter of 16
/// ranks.
fn measure_slow_link(directory: &Path) -> anyhow::Result<SlowReport> {
    std::fs::create_dir_all(directory)?;
    std::fs::write(directory.join("config.json"), LARGE_CONFIG)?;
    let config = engine::ModelConfig::from_dir(directory)?;
    let write = |name: &str, rank: usize, seed: u64| {
        let modules = engine::LayerModule::ALL.into_iter().collect();
        let lora = engine::LoraSpec { rank, alpha: 32.0, rslora: false, modules };
        let path = directory.join(name);
        engine::LoraAdapter::new(&lora, &config, seed)?.save_peft(&path, "base")?;
        anyhow::Ok(path)
    };
    let (usual, start, trained) = (write("usual", 16, 1)?, write("a", 36, 1)?, write("b", 36, 2)?);
    let change = engine::WeightChange { start, trained, left_out: None, keep: SENT };
    change.write_change(&directory.join("change"), &directory.join("left"))?;
    let weight_bytes = shared_training::count_bytes(&usual)?;
    let change_bytes = shared_training::count_bytes(&directory.join("change"))?;
    #[expect(clippy::cast_precision_loss, reason = "megabytes")]
    let shares = SLOW_LINK.measure_shares(weight_bytes as f64, change_bytes as f64);
    Ok(SlowReport { weight_bytes, change_bytes, shares })
}

/// Trains the demo's base from random weights.
fn train_base(directory: &Path, base: &Path, seed: u64) -> anyhow::Result<()> {
    let scratch = directory.join("model");
    let examples = read_examples(&directory.join("base.jsonl"), usize::MAX)?;
    let model = LanguageModel::init_from_directory(&scratch, seed, &Device::Cpu)?;
    let tokenizer = ModelTokenizer::load_tokenizer(&scratch)?;
    let spec = TrainSpec {
        learning_rate: 0.003,
        warmup_ratio: 0.125,
        decay: LearningRateDecay::Cosine,
        betas: (0.9, 0.98),
        weight_decay: 0.01,
        batch_size: 64,
        ..adapter_spec(seed, BASE_STEPS)
    };
    let mut trainer = ModelTrainer::new(model, &tokenizer, TrainMethod::Full, &examples, spec)?;
    while trainer.run_step()?.is_some() {}
    trainer.save_directory(base, "base")?;
    let tokenizer = "tokenizer.json";
    std::fs::copy(scratch.join(tokenizer), base.join(tokenizer)).context("copy the tokenizer")?;
    Ok(())
}

fn adapter_spec(seed: u64, steps: usize) -> TrainSpec {
    TrainSpec {
        learning_rate: 0.002,
        warmup_ratio: 0.1,
        decay: LearningRateDecay::Cosine,
        final_ratio: 0.1,
        batch_size: BATCH_SIZE,
        micro_batch_tokens: 4096,
        max_steps: Some(steps),
        max_tokens: 64,
        seed,
        ..TrainSpec::default()
    }
}

/// Returns examples to train on and the held-out ones after them: half are worked correctly, half are
/// as the base's. So the likelihood has a limit that the base is far from.
fn mix_examples(directory: &Path) -> anyhow::Result<Vec<CompletionExample>> {
    let each = (STEPS * BATCH_SIZE / EPOCHS + HELDOUT + CHOSEN_BY) / 2;
    let correct = read_examples(&directory.join("teacher.jsonl"), each)?;
    let others = read_examples(&directory.join("base.jsonl"), each)?;
    Ok(correct.into_iter().zip(others).flat_map(|(correct, other)| [correct, other]).collect())
}

/// Reads at most `most` examples of a file of JSON lines.
fn read_examples(path: &Path, most: usize) -> anyhow::Result<Vec<CompletionExample>> {
    let text = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let examples = wire::TrainingExample::parse_all(&text)
        .with_context(|| format!("read {}", path.display()))?;
    let examples = examples.into_iter().take(most);
    Ok(examples.map(|it| CompletionExample::new(it.prompt, it.completion)).collect())
}
