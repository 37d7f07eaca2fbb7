//! `counts TASK`: deterministic, single-threaded work whose instructions a test counts.

use anyhow::{Context, bail};
use engine::{
    BatchGenerator, CompletionExample, Device, LanguageModel, LayerModule, LoraSpec, MatrixDtype,
    ModelTokenizer, ModelTrainer, PromptInput, PromptRequest, SamplingParameters, ScratchShape,
    TrainMethod, TrainSpec, TrainingSignal, write_scratch_model,
};
use objective::{Objective, ObjectiveName};

/// A small fleet with faults. Any seed would do.
const SEED: u64 = 7;

fn main() -> anyhow::Result<()> {
    let task = std::env::args()
        .nth(1)
        .context("name a task: cores, generate, prepare, train or train-weighted")?;
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global()?;
    match task.as_str() {
        "cores" => sim::try_seed(SEED).map(drop).map_err(anyhow::Error::msg),
        "generate" => generate(),
        "prepare" => prepare_training(None).map(drop),
        "train" => train(None),
        "train-weighted" => train(Some(ratio_objective()?)),
        other => bail!("no task {other:?}"),
    }
}

fn model() -> anyhow::Result<(LanguageModel, ModelTokenizer)> {
    let directory = tempfile::tempdir()?;
    let config = write_scratch_model(directory.path(), &ScratchShape::default())?;
    LanguageModel::init_random(config, 1, &Device::Cpu)?.save_directory(directory.path())?;
    let model = LanguageModel::load_with_dtype(directory.path(), &Device::Cpu, MatrixDtype::Bf16)?;
    Ok((model, ModelTokenizer::load_tokenizer(directory.path())?))
}

fn generate() -> anyhow::Result<()> {
    let (model, tokenizer) = model()?;
    let mut generator = BatchGenerator::new(model.into_packed()?, tokenizer, 8);
    let sampling =
        SamplingParameters { temperature: 0.8, top_k: 0, top_p: 1.0, max_new_tokens: 16 };
    let prompt = PromptInput::Text("what is counted here".into());
    generator.admit_request(PromptRequest {
        tag: (),
        prompt,
        seeds: (0..8).collect(),
        sampling,
    })?;
    while !generator.is_idle() {
        generator.generate_step()?;
    }
    Ok(())
}

/// Returns an objective that computes the ratio of each token in each step.
fn ratio_objective() -> anyhow::Result<Objective> {
    let mut objective = Objective::new(ObjectiveName::Dapo);
    objective.set("kl", 0.01)?;
    objective.set_off_policy(true);
    Ok(objective)
}

fn train(objective: Option<Objective>) -> anyhow::Result<()> {
    let mut trainer = prepare_training(objective)?;
    while trainer.run_step()?.is_some() {}
    Ok(())
}

fn prepare_training(objective: Option<Objective>) -> anyhow::Result<ModelTrainer> {
    let (model, tokenizer) = model()?;
    let modules = LayerModule::ALL.into_iter().collect();
    let method = TrainMethod::Lora(LoraSpec { rank: 8, alpha: 16.0, modules, rslora: false });
    let completion = "and what follows";
    let example = CompletionExample::new("one prompt", completion);
    let spec = TrainSpec { max_steps: Some(1), max_tokens: 64, ..TrainSpec::default() };
    let trainer = ModelTrainer::new(model, &tokenizer, method, &vec![example; 4], spec)?;
    let Some(objective) = objective else { return Ok(trainer) };
    // The completion and its end.
    let logprobs = vec![-1.0; tokenizer.encode_continuation(completion)?.len() + 1];
    let signal = TrainingSignal {
        advantage: 1.0,
        behaviour: Some(logprobs.clone()),
        reference: Some(logprobs),
        ..TrainingSignal::default()
    };
    Ok(trainer.use_objective(objective, vec![signal; 4])?)
}
