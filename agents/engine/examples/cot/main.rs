//! Trains a 0.77 M parameter model from scratch on the demo's task, then improves it by RAFT: it
//! answers, correct answers are kept, and a LoRA adapter is trained on them.
//!
//! `cargo run --release -p engine --example cot -- [SEED] [CYCLES]`

mod task;

use anyhow::{Context, Result};
use engine::{
    Adapter, Decay, Device, Example, LoraSpec, Method, Model, Module, Prompt, Request, Sampling,
    Shape, Tokenizer, TrainSpec, Trainer, generate_all, write_scratch,
};
use std::path::Path;
use std::time::Instant;
use task::{Problem, Problems};

const SLOTS: usize = 128;
const PROMPTS: usize = 256;
const SAMPLES: u64 = 8;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let seed = arguments.next().map_or(Ok(1), |seed| seed.parse()).context("SEED is a number")?;
    let cycles = arguments.next().map_or(Ok(3), |n| n.parse()).context("CYCLES is a number")?;
    let scratch = tempfile::tempdir()?;
    let problems = Problems::new(seed);
    let (model, tokenizer) = pretrain(scratch.path(), &problems, seed)?;
    let mut bench = Bench { tokenizer, problems, seed };
    println!("base: held-out pass rate {}", bench.held_out(&model)?);
    let mut adapter = None;
    for cycle in 1..=cycles {
        adapter = Some(bench.cycle(&model, adapter, cycle)?);
        let tuned = adapter.as_ref().map_or(Ok(model.clone()), |a| model.with_adapter(a))?;
        println!("cycle {cycle}: held-out pass rate {}", bench.held_out(&tuned)?);
    }
    Ok(())
}

fn pretrain(dir: &Path, problems: &Problems, seed: u64) -> Result<(Model, Tokenizer)> {
    let config = write_scratch(dir, &Shape::default())?;
    Model::init(config, seed, &Device::Cpu)?.save(dir)?;
    let model = Model::load(dir, &Device::Cpu)?;
    let tokenizer = Tokenizer::load(dir)?;
    let corpus = problems.corpus(seed, 400 * 64);
    let spec = TrainSpec {
        learning_rate: 3e-3,
        warmup_ratio: 50.0 / 400.0,
        decay: Decay::Cosine,
        batch_size: 64,
        epochs: 1,
        ..common(seed)
    };
    let trainer = train(Trainer::new(model, &tokenizer, Method::Full, &corpus, spec)?, "base")?;
    Ok((trainer.model().clone(), tokenizer))
}

fn common(seed: u64) -> TrainSpec {
    TrainSpec {
        learning_rate: 2e-3,
        warmup_ratio: 0.0,
        decay: Decay::Linear,
        final_ratio: 0.1,
        betas: (0.9, 0.98),
        epsilon: 1e-8,
        weight_decay: 0.01,
        clip_norm: 1.0,
        batch_size: 32,
        micro_batch_tokens: 4096,
        epochs: 3,
        max_steps: None,
        max_tokens: 64,
        seed,
    }
}

fn train(mut trainer: Trainer, name: &str) -> Result<Trainer> {
    let start = Instant::now();
    let mut tokens = 0;
    let mut last = None;
    while let Some(report) = trainer.step()? {
        tokens += report.tokens;
        if report.step % 100 == 0 {
            println!("  {name} step {}/{} loss {:.4}", report.step, report.steps, report.loss);
        }
        last = Some(report.loss);
    }
    let seconds = start.elapsed().as_secs_f64();
    let rate = tokens as f64 / seconds;
    println!(
        "  {name}: {} steps, {tokens} tokens in {seconds:.1} s, {rate:.0} tok/s, loss {:.4}",
        trainer.steps(),
        last.unwrap_or(f64::NAN)
    );
    Ok(trainer)
}

struct Bench {
    tokenizer: Tokenizer,
    problems: Problems,
    seed: u64,
}

impl Bench {
    fn held_out(&mut self, model: &Model) -> Result<String> {
        let problems = self.problems.held_out.clone();
        let mut rates = Vec::new();
        for temperature in [0.8, 0.0] {
            let answers = self.answer(model, &problems, 1, temperature, 0)?;
            let passed = answers.iter().filter(|(problem, text)| problem.passes(text)).count();
            rates.push(passed as f64 / problems.len() as f64);
        }
        Ok(format!("{:.3} sampled, {:.3} greedy", rates[0], rates[1]))
    }

    fn answer(
        &self,
        model: &Model,
        problems: &[Problem],
        samples: u64,
        temperature: f64,
        round: u64,
    ) -> Result<Vec<(Problem, String)>> {
        let sampling = Sampling { temperature, top_k: 0, top_p: 1.0, max_new_tokens: 36 };
        let request = |(problem, number): (&Problem, u64)| Request {
            tag: *problem,
            prompt: Prompt::Text(problem.prompt()),
            seeds: (0..samples)
                .map(|sample| (self.seed << 48) + (round << 40) + (number << 8) + sample)
                .collect(),
            sampling,
        };
        let requests = problems.iter().zip(0..).map(request).collect();
        let start = Instant::now();
        let results = generate_all(model, &self.tokenizer, SLOTS, requests, |_, _| {})?;
        let mut answers = Vec::new();
        let mut tokens = 0;
        for completion in results.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().flatten()
        {
            tokens += completion.tokens.len();
            answers.push((completion.tag, completion.text));
        }
        let rate = tokens as f64 / start.elapsed().as_secs_f64();
        println!("  generated {tokens} tokens, {rate:.0} tok/s");
        Ok(answers)
    }

    fn cycle(&mut self, model: &Model, before: Option<Adapter>, cycle: usize) -> Result<Adapter> {
        let policy = before.as_ref().map_or(Ok(model.clone()), |a| model.with_adapter(a))?;
        let prompts: Vec<Problem> = self
            .problems
            .training
            .iter()
            .skip((cycle - 1) * PROMPTS)
            .take(PROMPTS)
            .copied()
            .collect();
        let answers = self.answer(&policy, &prompts, SAMPLES, 0.8, cycle as u64)?;
        let mut kept: Vec<Example> = Vec::new();
        for samples in answers.chunks(SAMPLES as usize) {
            if let Some((problem, text)) =
                samples.iter().find(|(problem, text)| problem.passes(text))
            {
                kept.push(Example { prompt: problem.prompt(), completion: text.clone() });
            }
        }
        println!("  cycle {cycle}: kept {} of {} prompts", kept.len(), prompts.len());
        let lora = LoraSpec { rank: 16, alpha: 32.0, modules: Module::ALL.into(), rslora: false };
        let method = before.map_or(Method::Lora(lora), Method::Continue);
        let mut spec = common(self.seed + cycle as u64);
        let steps = kept.len().div_ceil(spec.batch_size) * spec.epochs;
        spec.warmup_ratio = (5.0 / steps as f64).min(1.0);
        let trainer = Trainer::new(model.clone(), &self.tokenizer, method, &kept, spec)?;
        let trainer = train(trainer, "raft")?;
        trainer.adapter().cloned().context("the trainer had no adapter")
    }
}
