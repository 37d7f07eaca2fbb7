//! Files of a task: run specs and what they name. A user may copy and change them.

use std::{fmt::Write, path::Path};

use engine::{Shape, write_scratch};
use serde_json::Value;
use wire::RunId;

use super::task::{Digits, Task};

/// Steps and batch of the base's training.
const STEPS: usize = 400;
const BATCH: usize = 64;

/// A model from scratch, to begin with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Base {
    pub seed: u64,
    pub digits: Digits,
}

/// Reward-ranked fine-tuning of a base.
#[derive(Debug, Clone)]
pub(crate) struct Raft<'a> {
    pub seed: u64,
    pub base: &'a RunId,
    pub cycles: u32,
    /// As YAML, in braces.
    pub selection: &'a str,
    /// Further lines of the section.
    pub more: &'a str,
}

impl Base {
    /// Writes `base.yaml` and what it and RAFT's spec name.
    pub(crate) fn write(&self, directory: &Path) -> anyhow::Result<()> {
        let Self { seed, digits } = *self;
        let task = Task::new(seed, digits);
        write_scratch(&directory.join("model"), &Shape::default())?;
        write_lines(&directory.join("base.jsonl"), &task.documents(STEPS * BATCH))?;
        write_lines(&directory.join("prompts.jsonl"), &task.prompts())?;
        write_lines(&directory.join("heldout.jsonl"), &task.heldout_prompts())?;
        write_lines(&directory.join("worked.jsonl"), &task.heldout_documents())?;
        let spec = format!(
            "\
# A tiny model from scratch, on the work of people who often forget the carry.
name: base
seed: {seed}
base:
  init: {{ config: model/config.json, tokenizer: model/tokenizer.json }}
evals:
  - {{ name: worked, text: worked.jsonl }}
sft:
  data: base.jsonl
  training:
    max_steps: {STEPS}
    batch_size: {BATCH}
    learning_rate: 0.003
    schedule: cosine
    warmup_ratio: 0.125
    weight_decay: 0.01
    beta2: 0.98
    max_tokens: 64
    save_every: 40
"
        );
        std::fs::write(directory.join("base.yaml"), spec)?;
        Ok(())
    }
}

impl Raft<'_> {
    /// Writes `raft.yaml`, beside the base's files.
    pub(crate) fn write(&self, directory: &Path) -> anyhow::Result<()> {
        let Self { seed, base, cycles, selection, more } = self;
        let more: String = more.lines().map(|line| format!("  {line}\n")).collect();
        let spec = format!(
            "\
# Reward-ranked fine-tuning: sample, keep what the verifier passes, train on it, again.
name: raft
seed: {seed}
base: {{ checkpoint: {base} }}
evals:
  - {{ name: worked, text: worked.jsonl }}
raft:
  prompts: prompts.jsonl
  heldout: heldout.jsonl
  cycles: {cycles}
  samples_per_prompt: 8
  heldout_samples_per_prompt: 2
  sampling: {{ temperature: 0.8, max_new_tokens: 36 }}
  verifier: {{ exact: {{ extract: '#(\\d+)$' }} }}
  selection: {selection}
  training:
    epochs: 3
    batch_size: 32
    learning_rate: 0.002
    schedule: linear
    warmup_ratio: 0.2
    max_tokens: 64
  lora: {{ r: 16, alpha: 32 }}
{more}"
        );
        std::fs::write(directory.join("raft.yaml"), spec)?;
        Ok(())
    }
}

fn write_lines(path: &Path, lines: &[Value]) -> anyhow::Result<()> {
    let mut text = String::new();
    for line in lines {
        writeln!(text, "{line}")?;
    }
    std::fs::write(path, text)?;
    Ok(())
}
