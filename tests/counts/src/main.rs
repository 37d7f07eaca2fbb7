//! `counts TASK`: work whose instructions a test counts, the same each time and on one thread.

use anyhow::{Context, bail};
use engine::{
    Decay, Device, Dtype, Example, Generator, LoraSpec, Method, Model, Module, Prompt, Request,
    Sampling, Shape, Tokenizer, TrainSpec, Trainer, write_scratch,
};

/// A small fleet in trouble; any seed that holds would do.
const SEED: u64 = 7;

fn main() -> anyhow::Result<()> {
    let task = std::env::args().nth(1).context("name a task: cores, generate or train")?;
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global()?;
    match task.as_str() {
        "cores" => sim::try_seed(SEED).map(drop).map_err(anyhow::Error::msg),
        "generate" => generate(),
        "train" => train(),
        other => bail!("no task {other:?}"),
    }
}

fn model() -> anyhow::Result<(Model, Tokenizer)> {
    let directory = tempfile::tempdir()?;
    let config = write_scratch(directory.path(), &Shape::default())?;
    Model::init(config, 1, &Device::Cpu)?.save(directory.path())?;
    let model = Model::load_as(directory.path(), &Device::Cpu, Dtype::Bf16)?;
    Ok((model, Tokenizer::load(directory.path())?))
}

fn generate() -> anyhow::Result<()> {
    let (model, tokenizer) = model()?;
    let mut generator = Generator::new(model, tokenizer, 8);
    let sampling = Sampling { temperature: 0.8, top_k: 0, top_p: 1.0, max_new_tokens: 16 };
    let prompt = Prompt::Text("what is counted here".into());
    generator.admit(Request { tag: (), prompt, seeds: (0..8).collect(), sampling })?;
    while !generator.is_idle() {
        generator.step()?;
    }
    Ok(())
}

fn train() -> anyhow::Result<()> {
    let (model, tokenizer) = model()?;
    let modules = Module::ALL.into_iter().collect();
    let method = Method::Lora(LoraSpec { rank: 8, alpha: 16.0, modules, rslora: false });
    let example = Example { prompt: "one prompt".into(), completion: "and what follows".into() };
    let spec = TrainSpec {
        learning_rate: 1e-3,
        warmup_ratio: 0.0,
        decay: Decay::Constant,
        final_ratio: 1.0,
        betas: (0.9, 0.999),
        epsilon: 1e-8,
        weight_decay: 0.0,
        dropout: 0.0,
        clip_norm: 1.0,
        batch_size: 4,
        micro_batch_tokens: 512,
        gradient_checkpointing: false,
        epochs: 1,
        max_steps: Some(2),
        max_tokens: 64,
        seed: 1,
    };
    let mut trainer = Trainer::new(model, &tokenizer, method, &vec![example; 4], spec)?;
    while trainer.step()?.is_some() {}
    Ok(())
}
