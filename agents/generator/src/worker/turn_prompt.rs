//! The prompts of an episode's turns. The tokens of earlier turns stay as they were drawn; only the
//! text behind them is tokenized.

use engine::{ModelTokenizer, TokenizerError};

/// The prompt of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TurnPrompt {
    /// Tokens of the whole prompt, including earlier turns.
    pub tokens: Vec<u32>,
    /// The largest number of tokens that the turn may draw.
    pub max_new_tokens: u32,
}

/// The limits of a turn.
#[derive(Debug, Clone, Copy)]
pub(super) struct TurnLimits {
    /// Maximum tokens of a turn, including the text before it. The text before the first turn is the
    /// prompt, which does not count.
    pub max_new_tokens: u32,
    /// Positions of the model's context.
    pub positions: usize,
}

impl TurnPrompt {
    /// Encodes the text before a turn, after the tokens of earlier turns. Without earlier turns, the
    /// text is the prompt. Returns `None` if a later turn has no room for a token.
    pub(super) fn encode_turn(
        tokenizer: &ModelTokenizer,
        context: &[u32],
        text: &str,
        limits: TurnLimits,
    ) -> Result<Option<Self>, TokenizerError> {
        let TurnLimits { max_new_tokens, positions } = limits;
        if context.is_empty() {
            return Ok(Some(Self { tokens: tokenizer.encode_prompt(text)?, max_new_tokens }));
        }
        let text = tokenizer.encode_continuation(text)?;
        let used = u32::try_from(text.len()).unwrap_or(u32::MAX);
        let max_new_tokens = max_new_tokens.saturating_sub(used);
        let tokens = [context, &text].concat();
        let has_room = max_new_tokens > 0 && tokens.len() < positions;
        Ok(has_room.then_some(Self { tokens, max_new_tokens }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tokens_of_earlier_turns_stay_and_the_rest_is_the_turn_s() {
        let base = golden::small_set().model_path("qwen2-tiny");
        let tokenizer = ModelTokenizer::load_tokenizer(&base).unwrap();
        let encode = |context: &[u32], text: &str, max_new_tokens, positions| {
            let limits = TurnLimits { max_new_tokens, positions };
            TurnPrompt::encode_turn(&tokenizer, context, text, limits).unwrap()
        };
        let first = encode(&[], "def main", 5, 3).unwrap();
        assert_eq!(first.tokens, tokenizer.encode_prompt("def main").unwrap());
        assert_eq!(first.max_new_tokens, 5);
        let text = tokenizer.encode_continuation("files").unwrap();
        let used = u32::try_from(text.len()).unwrap();
        // These are not the tokens of any text.
        let context = [9, 9, 9];
        let next = encode(&context, "files", used + 2, 100).unwrap();
        assert_eq!(next.tokens, [&context[..], &text].concat());
        assert_eq!(next.max_new_tokens, 2);
        assert_eq!(encode(&context, "files", used, 100), None);
        assert_eq!(encode(&context, "files", 100, 3 + text.len()), None);
        assert_eq!(encode(&context, "", 4, 100).unwrap().tokens, context);
    }
}
