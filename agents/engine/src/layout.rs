//! The split of a text into chunks as `score_chunks` makes it, for a program that gets text instead
//! of tokens.

use crate::perplexity::{PerplexityError, count_bytes};
use crate::sequence::check_vocabulary;
use crate::tokenizer::{EncodedText, ModelTokenizer};
use formats::TokenLimits;

/// The chunks of a text, and the text that they are read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkLayout {
    pub chunks: usize,
    pub tokens: usize,
    /// The bytes of text that the scored tokens stand for.
    pub bytes: usize,
    /// The text to pass to the program.
    pub text: String,
    /// True if the text has one chunk more than are scored, plus half of another. A tokenizer with
    /// some hundred tokens more or fewer then yields another number of chunks.
    pub has_extra_chunk: bool,
}

/// The texts to try before filler words: after one of them the text's last tokens do not change.
const SEPARATORS: [&str; 5] = ["\n", " ", "\n\n", " 0", "x"];

/// Returns the layout of at most `limit` chunks of `context` tokens. The text is cut or lengthened
/// so that it has exactly one chunk more; if its tokens do not allow that, it is unchanged.
pub fn layout_chunks<'a>(
    tokenizer: &ModelTokenizer,
    limits: impl Into<TokenLimits<'a>>,
    text: &str,
    context: usize,
    limit: Option<usize>,
) -> Result<ChunkLayout, PerplexityError> {
    let limits = limits.into();
    let most = limits.max_positions;
    if !(4..=most).contains(&context) {
        return Err(PerplexityError::Context { context, least: 4, most });
    }
    let text = text.strip_suffix('\n').unwrap_or(text);
    let encoded = tokenizer.encode_plain(text)?;
    check_vocabulary(&encoded.tokens, limits)?;
    let (tokens, needed) = (encoded.tokens.len(), 2 * context);
    if tokens < needed {
        return Err(PerplexityError::TooShort { tokens, context, needed });
    }
    let chunks = (tokens / context).min(limit.unwrap_or(usize::MAX)).max(1);
    let scored = |chunk: usize| chunk * context + context / 2 + 1..(chunk + 1) * context;
    let layout = |text: String, has_one_more| ChunkLayout {
        chunks,
        tokens: chunks * scored(0).len(),
        bytes: (0..chunks).map(|chunk| count_bytes(&encoded.spans, scored(chunk))).sum(),
        text: text + "\n",
        has_extra_chunk: has_one_more,
    };
    for separator in SEPARATORS {
        let fitted = fit_text(tokenizer, text, &encoded, separator, chunks, context)?;
        if let Some(fitted) = fitted {
            return Ok(layout(fitted, true));
        }
    }
    Ok(layout(text.to_owned(), false))
}

/// Returns `None` if the scored chunks would change, or the number of chunks would be wrong.
fn fit_text(
    tokenizer: &ModelTokenizer,
    text: &str,
    encoded: &EncodedText,
    separator: &str,
    chunks: usize,
    context: usize,
) -> Result<Option<String>, PerplexityError> {
    let (counted, wanted) = (chunks * context, (chunks + 1) * context + context / 2);
    let mut longer = text.to_owned();
    if let Some(missing) = wanted.checked_sub(encoded.tokens.len()) {
        longer.push_str(separator);
        // Each filler word is at least one token.
        longer.push_str(&" x".repeat(missing + 1));
    }
    let EncodedText { spans, .. } = tokenizer.encode_plain(&longer)?;
    let mut starts = spans.iter().take(wanted + 1).skip(counted).map(|span| span.start);
    let Some(cut) = starts.rfind(|start| longer.is_char_boundary(*start)) else {
        return Ok(None);
    };
    longer.truncate(cut);
    let EncodedText { tokens, .. } = tokenizer.encode_plain(&longer)?;
    let is_same = tokens.get(..counted) == Some(&encoded.tokens[..counted]);
    Ok((is_same && tokens.len() / context == chunks + 1).then_some(longer))
}
