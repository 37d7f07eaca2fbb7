//! How [`chunks`](crate::chunks) cuts a text, for a program that is given text and not tokens.

use crate::perplexity::{PerplexityError, bytes_of};
use crate::sequence::check_vocabulary;
use crate::tokenizer::{Encoded, Tokenizer};
use formats::Config;

/// Chunks of a text, and the text they are read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    pub chunks: usize,
    /// Scored ones.
    pub tokens: usize,
    /// That the scored tokens stand for.
    pub bytes: usize,
    pub text: String,
    /// The text has one chunk more than counts, and half of another: a tokenizer that yields
    /// some hundred tokens more or less than ours shows by the number of chunks.
    pub has_one_more: bool,
}

/// What may stand between a text and words of no meaning without changing the text's last tokens.
const SEPARATORS: [&str; 5] = ["\n", " ", "\n\n", " 0", "x"];

/// The chunks of `context` tokens that count, at most `limit`, and the text cut or lengthened so
/// that it has just one more. Where tokens do not allow that, the text is as it was.
pub fn layout(
    tokenizer: &Tokenizer,
    config: &Config,
    text: &str,
    context: usize,
    limit: Option<usize>,
) -> Result<Layout, PerplexityError> {
    let most = config.max_positions;
    if !(4..=most).contains(&context) {
        return Err(PerplexityError::Context { context, least: 4, most });
    }
    let text = text.strip_suffix('\n').unwrap_or(text);
    let encoded = tokenizer.encode_plain(text)?;
    check_vocabulary(&encoded.tokens, config)?;
    let (tokens, needed) = (encoded.tokens.len(), 2 * context);
    if tokens < needed {
        return Err(PerplexityError::TooShort { tokens, context, needed });
    }
    let chunks = (tokens / context).min(limit.unwrap_or(usize::MAX)).max(1);
    let scored = |chunk: usize| chunk * context + context / 2 + 1..(chunk + 1) * context;
    let layout = |text: String, has_one_more| Layout {
        chunks,
        tokens: chunks * scored(0).len(),
        bytes: (0..chunks).map(|chunk| bytes_of(&encoded.spans, scored(chunk))).sum(),
        text: text + "\n",
        has_one_more,
    };
    for separator in SEPARATORS {
        let fitted = fitted(tokenizer, text, &encoded, separator, chunks, context)?;
        if let Some(fitted) = fitted {
            return Ok(layout(fitted, true));
        }
    }
    Ok(layout(text.to_owned(), false))
}

/// The text with one chunk more than counts. `None` when the chunks that count would change, or
/// the number of tokens comes out wrong.
fn fitted(
    tokenizer: &Tokenizer,
    text: &str,
    encoded: &Encoded,
    separator: &str,
    chunks: usize,
    context: usize,
) -> Result<Option<String>, PerplexityError> {
    let (counted, wanted) = (chunks * context, (chunks + 1) * context + context / 2);
    let mut longer = text.to_owned();
    if let Some(missing) = wanted.checked_sub(encoded.tokens.len()) {
        longer.push_str(separator);
        // Each is at least a token.
        longer.push_str(&" x".repeat(missing + 1));
    }
    let Encoded { spans, .. } = tokenizer.encode_plain(&longer)?;
    let mut starts = spans.iter().take(wanted + 1).skip(counted).map(|span| span.start);
    let Some(cut) = starts.rfind(|start| longer.is_char_boundary(*start)) else {
        return Ok(None);
    };
    longer.truncate(cut);
    let Encoded { tokens, .. } = tokenizer.encode_plain(&longer)?;
    let is_same = tokens.get(..counted) == Some(&encoded.tokens[..counted]);
    Ok((is_same && tokens.len() / context == chunks + 1).then_some(longer))
}
