//! The tokens of a drawn sample with their log-probabilities, as training objectives need them.

use engine::ModelTokenizer;
use wire::v1::samples::Finish;

/// The tokens of a sample with their log-probabilities, including the end token.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct TokenRecord {
    /// The log-probability of each token, in nats.
    pub(super) logprobs: Vec<f64>,
    /// Empty if tokenizing the text again gives the same tokens.
    pub(super) ids: Vec<u32>,
}

impl TokenRecord {
    /// Compares the drawn tokens with those that a training computes from the text. `end` is the
    /// token that a training adds to a finished text.
    pub(super) fn new(
        tokenizer: &ModelTokenizer,
        end: Option<u32>,
        (text, finish): (&str, Finish),
        drawn: &[u32],
        logprobs: Vec<f64>,
    ) -> Self {
        // A text that cannot be tokenized again has other tokens.
        let mut again = tokenizer.encode_continuation(text).unwrap_or_default();
        again.extend(end.filter(|_| finish == Finish::Stop));
        let ids = if again == drawn { Vec::new() } else { drawn.to_vec() };
        Self { logprobs, ids }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_kept_where_the_text_has_others() {
        let base = golden::small_set().model_path("qwen2-tiny");
        let tokenizer = ModelTokenizer::load_tokenizer(&base).unwrap();
        let end = 151_643;
        let text = "def main";
        let tokens = tokenizer.encode_continuation(text).unwrap();
        let record = |finish, drawn: &[u32]| {
            TokenRecord::new(&tokenizer, Some(end), (text, finish), drawn, Vec::new()).ids
        };
        let ended = [&tokens[..], &[end]].concat();
        assert!(record(Finish::Stop, &ended).is_empty());
        assert!(record(Finish::Length, &tokens).is_empty());
        assert_eq!(record(Finish::Length, &ended), ended);
        let letters: Vec<u32> = text
            .chars()
            .flat_map(|letter| tokenizer.encode_continuation(&letter.to_string()).unwrap())
            .collect();
        assert_ne!(letters, tokens);
        assert_eq!(record(Finish::Length, &letters), letters);
    }
}
