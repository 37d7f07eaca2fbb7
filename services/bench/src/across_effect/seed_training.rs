//! The trainings of one seed: a base, and adapters of it on one and on several boxes.

use std::path::Path;

use anyhow::Context;
use cli::demo_task::{BaseRunFiles, DigitCount};
use engine::{
    CompletionExample, Device, LanguageModel, LearningRateDecay, ModelTokenizer, ModelTrainer,
    TrainMethod, TrainSpec,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    cases::{GOAL_CASES, ONE_BOX, REPLAYED, STEPS, SharingCase, method_cases},
    shared_training::{SharedTraining, TrainedShare},
    virtual_fleet::VirtualTraining,
};

/// Steps of the base, as in the demo.
const BASE_STEPS: u32 = 400;

pub(super) const BATCH_SIZE: usize = 16;
const EPOCHS: usize = 4;

/// Examples to train on.
const EXAMPLES: usize = STEPS as usize * BATCH_SIZE / EPOCHS;

/// Held-out examples that are measured, and others by which a soup is chosen.
const HELDOUT: usize = 400;
const CHOSEN_BY: usize = 200;

/// The trainings of a seed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SeedResult {
    pub seed: u64,
    pub one_box: TrainedShare,
    /// In the order of [`GOAL_CASES`].
    pub shared: Vec<TrainedShare>,
    /// In the order of [`method_cases`]; empty without a comparison of methods.
    pub compared: Vec<TrainedShare>,
    pub replay: ReplayResult,
}

/// A training of which boxes were cut off, and its repetition without them.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReplayResult {
    /// Slices that were begun and trained again by others.
    pub cut_off: usize,
    /// The digest of the weights at the end.
    pub digest: String,
    /// The same of the repetition.
    pub replayed: String,
}

impl SeedResult {
    /// Returns true if there is a result of each training.
    pub(super) fn is_complete(&self, compares: bool) -> bool {
        let compared = if compares { method_cases().len() } else { 0 };
        (self.shared.len(), self.compared.len()) == (GOAL_CASES.len(), compared)
    }
}

/// Returns what the trainings of a seed depend on.
pub(super) fn list_settings(seed: u64, compares: bool) -> Value {
    let compared = if compares { method_cases() } else { Vec::new() };
    let describe =
        |cases: &[SharingCase]| -> Vec<Value> { cases.iter().map(|case| case.to_json()).collect() };
    json!({
        "seed": seed,
        "base_steps": BASE_STEPS,
        "batch_size": BATCH_SIZE,
        "epochs": EPOCHS,
        "heldout": HELDOUT,
        "chosen_by": CHOSEN_BY,
        "one_box": ONE_BOX.to_json(),
        "shared": describe(&GOAL_CASES),
        "compared": describe(&compared),
        "replayed": REPLAYED.to_json(),
    })
}

/// Trains a base and its adapters in a directory.
pub(super) fn train_seed(
    directory: &Path,
    seed: u64,
    compares: bool,
) -> anyhow::Result<SeedResult> {
    let files = BaseRunFiles { seed, digits: DigitCount::Two };
    files.write_files(directory).context("write the task's files")?;
    files.write_teacher(directory)?;
    let base = directory.join("base");
    train_base(directory, &base, seed)?;
    let mut examples = mix_examples(directory)?;
    let chosen_by = examples.split_off(EXAMPLES + HELDOUT);
    let data = SharedTraining {
        base: &base,
        heldout: examples.split_off(EXAMPLES),
        chosen_by,
        examples,
        spec: adapter_spec(seed, STEPS),
    };
    let train_all = |name: &str, cases: &[SharingCase]| -> anyhow::Result<Vec<TrainedShare>> {
        let numbered = (0..).zip(cases);
        let train = |(number, case): (u32, &SharingCase)| {
            case.train_case(&data, &directory.join(format!("{name}-{number}")))
        };
        numbered.map(train).collect()
    };
    let compared = if compares { method_cases() } else { Vec::new() };
    Ok(SeedResult {
        seed,
        one_box: ONE_BOX.train_case(&data, &directory.join("one"))?,
        shared: train_all("shared", &GOAL_CASES)?,
        compared: train_all("compared", &compared)?,
        replay: replay_training(&data, directory, seed)?,
    })
}

/// Trains while boxes are cut off, then repeats the slices that count.
fn replay_training(
    data: &SharedTraining<'_>,
    directory: &Path,
    seed: u64,
) -> anyhow::Result<ReplayResult> {
    let training = VirtualTraining { deaths: Some(seed), ..REPLAYED.virtual_training(0.0) };
    let schedule = training.split_steps()?;
    let data = SharedTraining { heldout: Vec::new(), ..REPLAYED.adapt_data(data) };
    let method = REPLAYED.method;
    let first = data.train_schedule(&directory.join("cut-off"), &schedule, method)?;
    let counted = schedule.without_cut_off();
    let again = data.train_schedule(&directory.join("replay"), &counted, method)?;
    Ok(ReplayResult {
        cut_off: schedule.cut_off_count(),
        digest: first.digest,
        replayed: again.digest,
    })
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

fn adapter_spec(seed: u64, steps: u32) -> TrainSpec {
    TrainSpec {
        learning_rate: 0.002,
        warmup_ratio: 0.1,
        decay: LearningRateDecay::Cosine,
        final_ratio: 0.1,
        batch_size: BATCH_SIZE,
        micro_batch_tokens: 4096,
        max_steps: Some(steps as usize),
        max_tokens: 64,
        seed,
        ..TrainSpec::default()
    }
}

/// Returns examples to train on and the held-out ones after them: half are worked correctly, half are
/// as the base's. So the likelihood has a limit that the base is far from.
fn mix_examples(directory: &Path) -> anyhow::Result<Vec<CompletionExample>> {
    let each = (EXAMPLES + HELDOUT + CHOSEN_BY) / 2;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::across_effect::virtual_fleet::SplitSchedule;

    #[test]
    fn slices_that_were_cut_off_leave_no_trace_in_the_weights() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        BaseRunFiles { seed: 1, digits: DigitCount::Two }.write_files(at).unwrap();
        let (scratch, base) = (at.join("model"), at.join("base"));
        let model = LanguageModel::init_from_directory(&scratch, 1, &Device::Cpu).unwrap();
        model.save_directory(&base).unwrap();
        std::fs::copy(scratch.join("tokenizer.json"), base.join("tokenizer.json")).unwrap();
        let mut examples = read_examples(&at.join("base.jsonl"), 40).unwrap();
        let heldout = examples.split_off(32);
        let spec = TrainSpec { batch_size: 4, ..adapter_spec(1, 16) };
        let data = SharedTraining { base: &base, examples, heldout, chosen_by: Vec::new(), spec };
        let case = SharingCase { steps: 16, ..REPLAYED };
        let training = VirtualTraining { deaths: Some(1), ..case.virtual_training(0.0) };
        let schedule = training.split_steps().unwrap();
        let train = |name: &str, schedule: &SplitSchedule| {
            data.train_schedule(&at.join(name), schedule, case.method).unwrap()
        };
        let first = train("cut-off", &schedule);
        let again = train("replay", &schedule.without_cut_off());
        assert!(schedule.cut_off_count() > 0, "{schedule:?}");
        assert_eq!((&first.digest, &first.nlls), (&again.digest, &again.nlls));
        assert_eq!(first.nlls.len(), schedule.outer_steps.len());
        assert_ne!(first.nlls[0], first.final_nll(), "the adapter has changed");
    }

    #[test]
    fn a_result_without_all_trainings_is_incomplete() {
        let trained = |count| vec![TrainedShare::default(); count];
        let result = |compared| SeedResult {
            seed: 1,
            one_box: TrainedShare::default(),
            shared: trained(GOAL_CASES.len()),
            compared: trained(compared),
            replay: ReplayResult { cut_off: 0, digest: String::new(), replayed: String::new() },
        };
        let all = method_cases().len();
        assert!(result(all).is_complete(true) && result(0).is_complete(false));
        assert!(!result(all - 1).is_complete(true) && !result(all).is_complete(false));
    }
}
