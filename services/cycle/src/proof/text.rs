//! The text whose tokens are compared. One that the policy was trained on shows best whether it
//! is that policy; of a base, that is unknown, and the prompts must do.

use serde::Deserialize;
use wire::Prompt;

/// Of the text, so that orders stay small.
const BYTES_MAX: usize = 512;

/// Stands before all else, so that there is something to predict however little follows.
pub(super) const BEFORE: &str = "The 3 boxes did 12 + 30 = 42 jobs: fn main() { run(42); }\n";

#[derive(Deserialize)]
struct Line {
    prompt: String,
    completion: String,
}

/// Of a selection's dataset; empty when it is none.
pub(crate) fn of_dataset(dataset: &[u8]) -> String {
    let lines = dataset.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let lines = lines.map_while(|line| serde_json::from_slice(line).ok());
    let examples = lines.map(|Line { prompt, completion }| prompt + &completion);
    let mut examples = examples.filter(|example| !example.is_empty()).peekable();
    if examples.peek().is_none() { String::new() } else { joined(examples) }
}

/// For a policy that was not trained here.
pub(crate) fn of_prompts(prompts: &[Prompt]) -> String {
    joined(prompts.iter().map(|prompt| prompt.prompt.clone()))
}

/// As many as fit, and the end of the first where that does not.
fn joined(parts: impl Iterator<Item = String>) -> String {
    let (mut text, mut empty) = (BEFORE.to_owned(), true);
    for part in parts.filter(|part| !part.is_empty()) {
        if text.len() + part.len() < BYTES_MAX {
            text.push_str(if empty { "" } else { "\n" });
            text.push_str(&part);
        } else if empty {
            let from = (part.len() + BEFORE.len()).saturating_sub(BYTES_MAX);
            text.push_str(&part[part.ceil_char_boundary(from)..]);
            break;
        } else {
            break;
        }
        empty = false;
    }
    text
}
