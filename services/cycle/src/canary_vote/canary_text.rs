//! Builds the canary text. A text that the policy was trained on distinguishes it best; for a base
//! model, the run's prompts are used.

use serde::Deserialize;
use wire::PromptEntry;

/// Keeps orders small.
const TEXT_BYTES_MAX: usize = 512;

/// Ensures that there are enough tokens to predict even if little follows.
pub(super) const TEXT_PREFIX: &str = "The 3 boxes did 12 + 30 = 42 jobs: fn main() { run(42); }\n";

#[derive(Deserialize)]
struct CanaryExample {
    prompt: String,
    completion: String,
}

pub(crate) fn text_from_dataset(dataset: &[u8]) -> String {
    let lines = dataset.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let lines = lines.map_while(|line| serde_json::from_slice(line).ok());
    let examples = lines.map(|CanaryExample { prompt, completion }| prompt + &completion);
    let mut examples = examples.filter(|example| !example.is_empty()).peekable();
    if examples.peek().is_none() { String::new() } else { join_parts(examples) }
}

/// Builds the text for a policy that this run has not trained.
pub(crate) fn text_from_prompts(prompts: &[PromptEntry]) -> String {
    join_parts(prompts.iter().map(|prompt| prompt.prompt.clone()))
}

/// Joins as many parts as fit. If the first one does not fit, uses its end.
fn join_parts(parts: impl Iterator<Item = String>) -> String {
    let (mut text, mut empty) = (TEXT_PREFIX.to_owned(), true);
    for part in parts.filter(|part| !part.is_empty()) {
        if text.len() + part.len() < TEXT_BYTES_MAX {
            text.push_str(if empty { "" } else { "\n" });
            text.push_str(&part);
        } else if empty {
            let from = (part.len() + TEXT_PREFIX.len()).saturating_sub(TEXT_BYTES_MAX);
            text.push_str(&part[part.ceil_char_boundary(from)..]);
            break;
        } else {
            break;
        }
        empty = false;
    }
    text
}
