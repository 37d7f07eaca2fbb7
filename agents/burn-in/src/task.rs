//! The texts and settings of a burn-in. Any model can read sums in words.

use std::{fmt::Write as _, ops::Range};

use serde_json::json;
use wire::{derive_seed, v1};

pub(crate) const SEED: u64 = 31;

/// Steps of the training that is measured.
pub(crate) const TRAIN_STEPS: u32 = 20;
/// Steps by which the small model learns the text before, from random weights.
const BASE_STEPS: u32 = 60;

/// Longer examples are left out; none is as long in any tokenizer.
const EXAMPLE_TOKENS_MAX: u32 = 128;

/// Examples of the measured training.
pub(crate) const EXAMPLES: usize = 512;
const EXAMPLE_LINES: usize = 4;
/// Lines of the text that is evaluated, none of which is trained on.
const TEXT_LINES: usize = 256;
/// Lines whose log-probabilities are compared.
const CANARY_LINES: usize = 4;

/// Tokens of a chunk that is evaluated, and the number of chunks.
pub(crate) const CHUNK_TOKENS: usize = 128;
pub(crate) const CHUNKS: usize = 4;

/// Samples that are drawn at once, and the tokens of each.
pub(crate) const SAMPLES: u32 = 8;
pub(crate) const SAMPLE_TOKENS: u32 = 48;

const MODULES: [&str; 7] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Returns the summands of a line; `kind` separates lines of training and evaluation.
fn draw_summands(kind: &str, line: usize) -> [u64; 2] {
    ["a", "b"].map(|which| derive_seed(SEED, &[kind, which, &line.to_string()]) % 100)
}

fn prompt_text([a, b]: [u64; 2]) -> String {
    format!("The sum of {a} and {b} is")
}

/// Returns training examples, one JSON object a line. Each is a piece of text such as the evaluated
/// one, all of which is learned.
pub(crate) fn training_lines() -> String {
    let mut lines = String::new();
    for example in 0..EXAMPLES {
        let text = text_lines("train", example * EXAMPLE_LINES..(example + 1) * EXAMPLE_LINES);
        // Writing to a string cannot fail.
        let _ = writeln!(lines, "{}", json!({ "completion": text }));
    }
    lines
}

/// Returns the text that is evaluated.
pub(crate) fn evaluated_text() -> String {
    text_lines("text", 0..TEXT_LINES)
}

/// Returns the text whose log-probabilities engines and devices compute.
pub(crate) fn canary_text() -> String {
    text_lines("text", 0..CANARY_LINES)
}

/// Returns the prompt of the samples.
pub(crate) fn sample_prompt() -> String {
    prompt_text(draw_summands("sample", 0))
}

fn text_lines(kind: &str, lines: Range<usize>) -> String {
    let line = |line| {
        let [a, b] = draw_summands(kind, line);
        format!("{} {}.\n", prompt_text([a, b]), a + b)
    };
    lines.map(line).collect()
}

/// Returns the settings of the training that makes the small model.
pub(crate) fn base_training() -> v1::Training {
    v1::Training {
        max_steps: BASE_STEPS,
        batch_size: 8,
        learning_rate: 3e-3,
        ..common_training(BASE_STEPS)
    }
}

/// Returns the settings of the measured training of an adapter.
pub(crate) fn adapter_training() -> v1::Training {
    let lora = v1::Lora {
        r: 8,
        alpha: 16.0,
        target_modules: MODULES.map(str::to_owned).into(),
        ..v1::Lora::default()
    };
    v1::Training {
        max_steps: TRAIN_STEPS,
        batch_size: 8,
        learning_rate: 1e-3,
        lora: Some(lora),
        ..common_training(TRAIN_STEPS)
    }
}

fn common_training(steps: u32) -> v1::Training {
    v1::Training {
        schedule: v1::Schedule::Cosine.into(),
        warmup_ratio: 0.1,
        weight_decay: 0.01,
        beta1: 0.9,
        beta2: 0.98,
        max_grad_norm: 1.0,
        max_tokens: EXAMPLE_TOKENS_MAX,
        // Only the last step is saved.
        save_every: steps,
        ..v1::Training::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_an_example_and_fits() {
        let lines = training_lines();
        let examples = wire::TrainingExample::parse_all(lines.as_bytes()).unwrap();
        assert_eq!(examples.len(), EXAMPLES);
        let longest = examples.iter().map(|it| it.prompt.len() + it.completion.len()).max();
        assert!(longest.unwrap() < EXAMPLE_TOKENS_MAX as usize, "even with a token a byte");
    }

    #[test]
    fn the_text_is_long_enough_for_a_tokenizer_of_whole_words() {
        let words = evaluated_text().split_whitespace().count();
        assert!(words >= 2 * CHUNK_TOKENS + CHUNKS * CHUNK_TOKENS, "{words} words");
        assert!(evaluated_text().starts_with(&canary_text()));
    }

    #[test]
    fn the_texts_are_the_same_each_time() {
        assert_eq!(training_lines(), training_lines());
        assert_ne!(draw_summands("train", 0), draw_summands("text", 0));
    }
}
