//! How many tokens prompts have, and which leave no room for what is made of them.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use tokenizers::Tokenizer;

use super::prompts::Prompts;

/// Prompts that are counted; of larger files the first so many.
const COUNTED_MAX: usize = 20_000;

/// Tokens of each prompt. `None` where the tokenizer cannot be used: agents will say why.
pub(super) fn tokens(dir: &Path, prompts: &Prompts) -> Option<Vec<usize>> {
    // The library panics on some files that make no sense.
    catch_unwind(AssertUnwindSafe(|| count(dir, prompts))).ok().flatten()
}

fn count(dir: &Path, prompts: &Prompts) -> Option<Vec<usize>> {
    let mut tokenizer = Tokenizer::from_file(dir.join("tokenizer.json")).ok()?;
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).ok()?;
    let texts = prompts.prompts.iter().take(COUNTED_MAX).map(|numbered| &*numbered.prompt.prompt);
    texts.map(|text| tokenizer.encode(text, true).ok().map(|encoding| encoding.len())).collect()
}

/// Prompts that with what is made of them are longer than what is trained on.
/// Tokens are those of the first prompts, of so many in all.
pub(super) fn crowded(
    file: &str,
    (tokens, all): (&[usize], usize),
    max: u32,
    made: u32,
) -> Option<String> {
    let room = max.saturating_sub(made) as usize;
    let long = tokens.iter().filter(|tokens| **tokens > room).count();
    (long > 0).then(|| {
        format!(
            "{file}: {long} of {}{} prompts have more than {room} tokens; with the \
             {made} of sampling.max_new_tokens they would be longer than training.max_tokens \
             ({max}), and what is longer is not trained on",
            if tokens.len() < all { "the first " } else { "" },
            tokens.len(),
        )
    })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::data::prompts::Manner;

    #[test]
    fn prompts_without_room_are_counted_and_a_tokenizer_that_is_none_is_nobody_s_fault() {
        let dir = tempfile::tempdir().unwrap();
        let lines = Bytes::from("{\"prompt\":\"a b c\"}\n{\"prompt\":\"a\"}\n");
        let prompts = Prompts::read(&lines, Manner::default()).unwrap();
        assert_eq!(tokens(dir.path(), &prompts), None);
        let tokenizer = serde_json::json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"},
        });
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let counted = tokens(dir.path(), &prompts).unwrap();
        assert_eq!(counted, [3, 1]);
        assert_eq!(crowded("p", (&counted, 2), 10, 7), None);
        let said = crowded("p", (&counted, 3), 10, 8).unwrap();
        assert!(said.starts_with("p: 1 of the first 2 prompts have"), "{said}");
        let said = crowded("p", (&counted, 2), 10, 8).unwrap();
        assert!(said.starts_with("p: 1 of 2 prompts have more than 2 tokens"), "{said}");
    }
}
