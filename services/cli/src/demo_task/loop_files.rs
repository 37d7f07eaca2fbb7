//! Questions of users, and the spec of a run that learns from their feedback.

use std::path::PathBuf;

use serde_json::Value;

use super::sums::{DigitCount, SumTask};

/// Questions by which the model is measured before and after, in none of the training data.
const EXAM_QUESTIONS: usize = 150;

/// The files of a model that learns from feedback, beside those of the base.
#[derive(Debug, Clone)]
pub struct LoopFiles {
    pub directory: PathBuf,
    pub seed: u64,
    pub cycles: u32,
}

impl LoopFiles {
    /// Returns what users ask: `prompt`, the right `answer`, and `worked`, the answer with its steps.
    pub fn questions(&self) -> Vec<Value> {
        SumTask::new(self.seed, DigitCount::Two).asked_questions()
    }

    /// Returns questions that are never trained on.
    pub fn exam(&self) -> Vec<Value> {
        let mut exam = SumTask::new(self.seed, DigitCount::Two).heldout_prompts();
        exam.truncate(EXAM_QUESTIONS);
        exam
    }

    /// Returns the spec of the run that learns from the feedback on a channel and moves it.
    pub fn spec_yaml(&self, channel: &str) -> String {
        let Self { seed, cycles, .. } = self;
        format!(
            "\
# Starts from the channel's model, learns from what users said, and moves the channel if that is
# better.
name: learn
seed: {seed}
base: {{ channel: {channel} }}
promote: {{ channel: {channel} }}
raft:
  prompts: feedback:{channel}
  heldout: {{ share: 0.4 }}
  cycles: {cycles}
  samples_per_prompt: 8
  heldout_samples_per_prompt: 2
  sampling: {{ temperature: 0.8, max_new_tokens: 36 }}
  verifier: {{ exact: {{ extract: '#(\\d+)$' }} }}
  selection: {{ keep_per_prompt: 1, min_reward: 1.0 }}
  training:
    epochs: 3
    batch_size: 32
    learning_rate: 0.002
    schedule: linear
    warmup_ratio: 0.2
    max_tokens: 64
  lora: {{ r: 16, alpha: 32 }}
"
        )
    }
}
