//! Files of the demo task: run specs and the data they name. Users may copy and change them.

use std::{fmt::Write, path::Path};

use engine::{ScratchShape, write_scratch_model};
use serde_json::Value;
use wire::RunId;

use crate::run_submission::write_spec;

use super::sums::{DigitCount, SumTask};

const BASE_STEPS: usize = 400;
const BASE_BATCH_SIZE: usize = 64;

/// The files of a run that trains the base model from scratch.
#[derive(Debug, Clone, Copy)]
pub struct BaseRunFiles {
    pub seed: u64,
    pub digits: DigitCount,
}

/// The spec of a run of reward-ranked fine-tuning (RAFT) on the base.
#[derive(Debug, Clone)]
pub struct RaftRunFiles<'a> {
    pub seed: u64,
    pub base: &'a RunId,
    pub cycles: u32,
    /// The selection settings, as YAML in braces.
    pub selection: &'a str,
    /// Further YAML lines of the `raft` section.
    pub extra_lines: &'a str,
}

impl BaseRunFiles {
    /// Writes `base.yaml` and all files that it and the RAFT spec name.
    pub fn write_files(&self, directory: &Path) -> anyhow::Result<()> {
        let Self { seed, digits } = *self;
        let task = SumTask::new(seed, digits);
        write_scratch_model(&directory.join("model"), &ScratchShape::default())?;
        write_json_lines(
            &directory.join("base.jsonl"),
            &task.base_documents(BASE_STEPS * BASE_BATCH_SIZE),
        )?;
        write_json_lines(&directory.join("prompts.jsonl"), &task.raft_prompts())?;
        write_json_lines(&directory.join("heldout.jsonl"), &task.heldout_prompts())?;
        write_json_lines(&directory.join("worked.jsonl"), &task.heldout_documents())?;
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
    max_steps: {BASE_STEPS}
    batch_size: {BASE_BATCH_SIZE}
    learning_rate: 0.003
    schedule: cosine
    warmup_ratio: 0.125
    weight_decay: 0.01
    beta2: 0.98
    max_tokens: 64
    save_every: 40
"
        );
        write_spec(&directory.join("base.yaml"), &spec::add_schema_line(&spec))
    }
}

impl BaseRunFiles {
    /// Writes `teacher.yaml`, the spec of the base trained on correct sums, beside the base's files.
    pub fn write_teacher(&self, directory: &Path) -> anyhow::Result<()> {
        let task = SumTask::new(self.seed, self.digits);
        let documents = task.correct_documents(BASE_STEPS * BASE_BATCH_SIZE);
        write_json_lines(&directory.join("teacher.jsonl"), &documents)?;
        let spec = std::fs::read_to_string(directory.join("base.yaml"))?;
        let spec =
            spec.replace("name: base", "name: teacher").replace("base.jsonl", "teacher.jsonl");
        write_spec(&directory.join("teacher.yaml"), &spec)
    }
}

impl RaftRunFiles<'_> {
    /// Writes `raft.yaml` beside the base's files.
    pub fn write_spec(&self, directory: &Path) -> anyhow::Result<()> {
        let Self { seed, base, cycles, selection, extra_lines: more } = self;
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
        write_spec(&directory.join("raft.yaml"), &spec::add_schema_line(&spec))
    }
}

fn write_json_lines(path: &Path, lines: &[Value]) -> anyhow::Result<()> {
    let mut text = String::new();
    for line in lines {
        writeln!(text, "{line}")?;
    }
    std::fs::write(path, text)?;
    Ok(())
}
