//! Counts the tokens of prompts, and warns about prompts that leave no room for a completion.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use tokenizers::Tokenizer;

use super::prompts::PromptFile;

/// In a larger file, only the first prompts are counted.
const COUNTED_PROMPTS_MAX: usize = 20_000;

/// Returns `None` if the tokenizer cannot be used; agents report the reason later.
pub(super) fn count_tokens(dir: &Path, prompts: &PromptFile) -> Option<Vec<usize>> {
    // The library panics on some invalid files.
    catch_unwind(AssertUnwindSafe(|| encode_prompts(dir, prompts))).ok().flatten()
}

fn encode_prompts(dir: &Path, prompts: &PromptFile) -> Option<Vec<usize>> {
    let mut tokenizer = Tokenizer::from_file(dir.join("tokenizer.json")).ok()?;
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).ok()?;
    let texts =
        prompts.prompts.iter().take(COUNTED_PROMPTS_MAX).map(|numbered| &*numbered.prompt.prompt);
    texts.map(|text| tokenizer.encode(text, true).ok().map(|encoding| encoding.len())).collect()
}

/// Warns if prompts plus `made` new tokens are longer than `max`, the limit of training. `tokens`
/// holds the counts of the first prompts, and `all` is the number of prompts in the file.
pub(super) fn long_prompts_warning(
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
    use crate::data::prompts::ChatFormat;

    #[test]
    fn prompts_without_room_are_counted_and_a_tokenizer_that_is_none_is_nobody_s_fault() {
        let dir = tempfile::tempdir().unwrap();
        let lines = Bytes::from("{\"prompt\":\"a b c\"}\n{\"prompt\":\"a\"}\n");
        let prompts = PromptFile::read(&lines.into(), ChatFormat::default()).unwrap();
        assert_eq!(count_tokens(dir.path(), &prompts), None);
        let tokenizer = serde_json::json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"},
        });
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let counted = count_tokens(dir.path(), &prompts).unwrap();
        assert_eq!(counted, [3, 1]);
        assert_eq!(long_prompts_warning("p", (&counted, 2), 10, 7), None);
        let said = long_prompts_warning("p", (&counted, 3), 10, 8).unwrap();
        assert!(said.starts_with("p: 1 of the first 2 prompts have"), "{said}");
        let said = long_prompts_warning("p", (&counted, 2), 10, 8).unwrap();
        assert!(said.starts_with("p: 1 of 2 prompts have more than 2 tokens"), "{said}");
    }
}
