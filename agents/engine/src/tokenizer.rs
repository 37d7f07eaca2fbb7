//! A model directory's `tokenizer.json`. Two ways of reading text: as a prompt, where special
//! tokens written in it count as such, and as plain text, where they are only characters.

use formats::{Config, GgufModel, GgufModelError};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Cheap enough to clone once per job, not per request.
#[derive(Clone)]
pub struct Tokenizer {
    prompts: tokenizers::Tokenizer,
    plain: tokenizers::Tokenizer,
    bos: Option<u32>,
}

/// Tokens with the bytes of the text each stands for; a token that is part of a character has the
/// whole character's bytes.
pub(crate) struct Encoded {
    pub(crate) tokens: Vec<u32>,
    pub(crate) spans: Vec<Range<usize>>,
}

#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error(
        "could not load {path}; the directory needs a `tokenizer.json` of the tokenizers library (M110)"
    )]
    Load { path: PathBuf, source: tokenizers::Error },
    #[error(
        "tokenizer mismatch: its token {token:?} has the number {id}, but config.json says vocab_size {vocab_size}; the two files do not belong together (M110)"
    )]
    Mismatch { token: String, id: u32, vocab_size: usize },
    #[error("could not use the tokenizer of a GGUF file")]
    Gguf(#[from] GgufModelError),
    #[error("could not tokenize {characters} characters of text (M110)")]
    Encode { characters: usize, source: tokenizers::Error },
    #[error("could not turn {tokens} tokens into text (M110)")]
    Decode { tokens: usize, source: tokenizers::Error },
}

impl Tokenizer {
    pub fn load(dir: &Path) -> Result<Self, TokenizerError> {
        let mut prompts = if dir.is_file() { from_gguf(dir)? } else { from_directory(dir)? };
        prompts.with_padding(None);
        let prompts = without_truncation(prompts)?;
        let mut plain = prompts.clone();
        plain.set_encode_special_tokens(true);
        let mut tokenizer = Self { prompts, plain, bos: None };
        tokenizer.bos = tokenizer.encode("")?.first().copied();
        Ok(tokenizer)
    }

    /// Every token must be one of the model's. A model may have more, which many pad for speed.
    pub fn check_fits(&self, config: &Config) -> Result<(), TokenizerError> {
        let vocab_size = config.vocab_size;
        let last = self.prompts.get_vocab(true).into_iter().max_by_key(|(_, id)| *id);
        match last {
            Some((token, id)) if id as usize >= vocab_size => {
                Err(TokenizerError::Mismatch { token, id, vocab_size })
            }
            _ => Ok(()),
        }
    }

    /// The token the tokenizer puts before every text, if it does.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// A prompt, as transformers would: with the beginning token if the tokenizer adds one.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        Ok(encode(&self.prompts, text, true)?.tokens)
    }

    /// What follows a prompt: nothing is added.
    pub fn encode_continuation(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        Ok(encode(&self.prompts, text, false)?.tokens)
    }

    /// Text to be scored: `<|im_end|>` and the like are read letter by letter.
    pub(crate) fn encode_plain(&self, text: &str) -> Result<Encoded, TokenizerError> {
        encode(&self.plain, text, true)
    }

    /// Without special tokens; bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        caught(|| self.prompts.decode(tokens, true))
            .map_err(|source| TokenizerError::Decode { tokens: tokens.len(), source })
    }
}

fn from_directory(dir: &Path) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let path = dir.join("tokenizer.json");
    caught(|| tokenizers::Tokenizer::from_file(&path))
        .map_err(|source| TokenizerError::Load { path, source })
}

fn from_gguf(path: &Path) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let json = GgufModel::open(path).and_then(|model| model.tokenizer_json())?;
    caught(|| tokenizers::Tokenizer::from_bytes(&json))
        .map_err(|source| TokenizerError::Load { path: path.into(), source })
}

/// The library panics on some files that are damaged or make no sense, when it reads them or
/// when it first uses them.
fn caught<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("`tokenizers` panicked".into()))
}

fn without_truncation(
    mut tokenizer: tokenizers::Tokenizer,
) -> Result<tokenizers::Tokenizer, TokenizerError> {
    tokenizer
        .with_truncation(None)
        .map_err(|source| TokenizerError::Encode { characters: 0, source })?;
    Ok(tokenizer)
}

fn encode(
    tokenizer: &tokenizers::Tokenizer,
    text: &str,
    add_special_tokens: bool,
) -> Result<Encoded, TokenizerError> {
    let encoding = caught(|| tokenizer.encode(text, add_special_tokens))
        .map_err(|source| TokenizerError::Encode { characters: text.chars().count(), source })?;
    let spans = encoding.get_offsets().iter().map(|(start, end)| *start..*end).collect();
    Ok(Encoded { tokens: encoding.get_ids().to_vec(), spans })
}
