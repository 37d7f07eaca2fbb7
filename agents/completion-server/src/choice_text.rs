//! The text of a choice while its tokens are drawn: characters are released once they are complete,
//! and no part of a stop text is. Pure.

/// Tokens that wait for a complete character, which has at most 4 bytes. More of them are no valid
/// text, and are released as they are.
const PARTIAL_TOKENS_MAX: usize = 16;

/// Decodes tokens into text.
pub(crate) trait DecodeTokens {
    type Error;

    fn decode(&self, tokens: &[u32]) -> Result<String, Self::Error>;
}

impl DecodeTokens for engine::ModelTokenizer {
    type Error = engine::TokenizerError;

    fn decode(&self, tokens: &[u32]) -> Result<String, Self::Error> {
        self.decode_tokens(tokens)
    }
}

/// The text of one choice.
#[derive(Debug, Default)]
pub(crate) struct ChoiceText {
    tokens: Vec<u32>,
    /// The token at which decoding starts: the text of a token depends on the tokens before it.
    prefix: usize,
    /// The number of tokens whose text was read.
    read: usize,
    /// Text that was read and may be the beginning of a stop text.
    held: String,
    is_stopped: bool,
}

impl ChoiceText {
    /// Returns true once the text contained a stop text. Nothing is released after that.
    pub(crate) fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Adds a token, and returns the text that can be shown now.
    pub(crate) fn push_token<D: DecodeTokens>(
        &mut self,
        decoder: &D,
        token: u32,
        stops: &[String],
    ) -> Result<String, D::Error> {
        self.tokens.push(token);
        let new = self.read_new_text(decoder, false)?;
        Ok(self.release_text(&new, stops, false))
    }

    /// Returns the rest of the text after the last token.
    pub(crate) fn finish_text<D: DecodeTokens>(
        &mut self,
        decoder: &D,
        stops: &[String],
    ) -> Result<String, D::Error> {
        let new = self.read_new_text(decoder, true)?;
        Ok(self.release_text(&new, stops, true))
    }

    /// Decodes the tokens that were not read yet; empty if their last character is incomplete.
    fn read_new_text<D: DecodeTokens>(
        &mut self,
        decoder: &D,
        is_last: bool,
    ) -> Result<String, D::Error> {
        if self.read == self.tokens.len() {
            return Ok(String::new());
        }
        let known = decoder.decode(&self.tokens[self.prefix..self.read])?;
        let all = decoder.decode(&self.tokens[self.prefix..])?;
        let is_partial = all.ends_with(char::REPLACEMENT_CHARACTER)
            && self.tokens.len() - self.read < PARTIAL_TOKENS_MAX;
        if is_partial && !is_last {
            return Ok(String::new());
        }
        (self.prefix, self.read) = (self.read, self.tokens.len());
        Ok(all.get(known.len()..).unwrap_or_default().to_owned())
    }

    /// Returns the text up to a stop text, and holds back an end that may begin one.
    fn release_text(&mut self, new: &str, stops: &[String], is_last: bool) -> String {
        if self.is_stopped {
            return String::new();
        }
        let mut text = std::mem::take(&mut self.held);
        text.push_str(new);
        if let Some(at) = stops.iter().filter_map(|stop| text.find(stop.as_str())).min() {
            self.is_stopped = true;
            text.truncate(at);
        } else if !is_last {
            self.held = text.split_off(text.len() - held_bytes(&text, stops));
        }
        text
    }
}

/// Returns the length of a text's longest suffix that is the beginning of a stop text.
fn held_bytes(text: &str, stops: &[String]) -> usize {
    let longest = stops.iter().map(String::len).max().unwrap_or(0).saturating_sub(1);
    let begins_stop = |length: &usize| {
        let at = text.len() - length;
        text.is_char_boundary(at) && stops.iter().any(|stop| stop.starts_with(&text[at..]))
    };
    (1..=longest.min(text.len())).rev().find(begins_stop).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// Each token is a byte.
    struct Bytes;

    impl DecodeTokens for Bytes {
        type Error = Infallible;

        fn decode(&self, tokens: &[u32]) -> Result<String, Infallible> {
            let bytes: Vec<u8> = tokens.iter().map(|token| *token as u8).collect();
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        }
    }

    fn pieces(text: &[u8], stops: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut choice = ChoiceText::default();
        let push = |byte: &u8| choice.push_token(&Bytes, u32::from(*byte), &stops).unwrap();
        let mut pieces: Vec<String> = text.iter().map(push).collect();
        pieces.push(choice.finish_text(&Bytes, &stops).unwrap());
        pieces.retain(|piece| !piece.is_empty());
        (pieces, choice.is_stopped())
    }

    #[test]
    fn characters_are_released_whole() {
        assert_eq!(pieces("aü€b".as_bytes(), &[]).0, ["a", "ü", "€", "b"]);
        assert_eq!(pieces(b"a\xe2\x82", &[]).0, ["a", "\u{fffd}"]);
        let broken = pieces(&[0xff; 40], &[]).0.concat();
        assert_eq!(broken.chars().count(), 40);
    }

    #[test]
    fn a_stop_text_and_what_follows_are_not_shown() {
        let (found, stopped) = pieces(b"1+1=2\n\nQ", &["\n\n"]);
        assert_eq!((found.concat().as_str(), stopped), ("1+1=2", true));
        let (found, stopped) = pieces(b"a\nb", &["\n\n", "\nQ"]);
        assert_eq!((found.concat().as_str(), stopped), ("a\nb", false));
        let (found, stopped) = pieces(b"a\n", &["\n\n"]);
        assert_eq!((found.concat().as_str(), stopped), ("a\n", false));
    }
}
