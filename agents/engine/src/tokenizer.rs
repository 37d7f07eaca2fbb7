//! The `tokenizer.json` of a model directory. It reads text in two ways: as a prompt, in which
//! special tokens are recognised, and as plain text, in which they are only characters.

use formats::{GgufModel, GgufModelError, ModelConfig};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// The tokenizer of a model. A clone is cheap enough for each job, but not for each request.
#[derive(Clone)]
pub struct ModelTokenizer {
    /// Recognises special tokens.
    prompts: tokenizers::Tokenizer,
    /// Reads special tokens as characters.
    plain: tokenizers::Tokenizer,
    bos: Option<u32>,
}

/// Tokens, and the bytes of text that each stands for. A token that is part of a character has the
/// range of the whole character.
pub(crate) struct EncodedText {
    pub(crate) tokens: Vec<u32>,
    pub(crate) spans: Vec<Range<usize>>,
}

/// The reason why a tokenizer cannot be loaded or used.
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

impl ModelTokenizer {
    /// Loads the tokenizer of a model directory or a GGUF file.
    pub fn load_tokenizer(dir: &Path) -> Result<Self, TokenizerError> {
        let mut prompts = if dir.is_file() { read_gguf(dir)? } else { read_directory(dir)? };
        prompts.with_padding(None);
        let prompts = remove_truncation(prompts)?;
        let mut plain = prompts.clone();
        plain.set_encode_special_tokens(true);
        let mut tokenizer = Self { prompts, plain, bos: None };
        tokenizer.bos = tokenizer.encode_prompt("")?.first().copied();
        Ok(tokenizer)
    }

    /// Checks that every token is in the model's vocabulary. A model may have more tokens; many pad
    /// their vocabulary for speed.
    pub fn check_fits(&self, config: &ModelConfig) -> Result<(), TokenizerError> {
        let vocab_size = config.vocab_size;
        let last = self.prompts.get_vocab(true).into_iter().max_by_key(|(_, id)| *id);
        match last {
            Some((token, id)) if id as usize >= vocab_size => {
                Err(TokenizerError::Mismatch { token, id, vocab_size })
            }
            _ => Ok(()),
        }
    }

    /// Returns the token that the tokenizer puts before every text, if any.
    pub fn bos_token(&self) -> Option<u32> {
        self.bos
    }

    /// Encodes a prompt as transformers does, with the beginning token if the tokenizer adds one.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        Ok(encode_text(&self.prompts, text, true)?.tokens)
    }

    /// Encodes the text after a prompt; no token is added.
    pub fn encode_continuation(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        Ok(encode_text(&self.prompts, text, false)?.tokens)
    }

    /// Reads special tokens as characters.
    pub(crate) fn encode_plain(&self, text: &str) -> Result<EncodedText, TokenizerError> {
        encode_text(&self.plain, text, true)
    }

    /// Decodes one token, which may be a special one; a part of a character becomes U+FFFD.
    pub fn decode_token(&self, token: u32) -> Result<String, TokenizerError> {
        catch_panics(|| self.prompts.decode(&[token], false))
            .map_err(|source| TokenizerError::Decode { tokens: 1, source })
    }

    /// Decodes tokens without the special ones; invalid UTF-8 becomes U+FFFD.
    pub fn decode_tokens(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        catch_panics(|| self.prompts.decode(tokens, true))
            .map_err(|source| TokenizerError::Decode { tokens: tokens.len(), source })
    }
}

fn read_directory(dir: &Path) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let path = dir.join("tokenizer.json");
    catch_panics(|| tokenizers::Tokenizer::from_file(&path))
        .map_err(|source| TokenizerError::Load { path, source })
}

fn read_gguf(path: &Path) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let json = GgufModel::open(path).and_then(|model| model.tokenizer_json())?;
    catch_panics(|| tokenizers::Tokenizer::from_bytes(&json))
        .map_err(|source| TokenizerError::Load { path: path.into(), source })
}

/// Converts a panic to an error: the library panics on some damaged files when it reads or first
/// uses them.
fn catch_panics<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("`tokenizers` panicked".into()))
}

fn remove_truncation(
    mut tokenizer: tokenizers::Tokenizer,
) -> Result<tokenizers::Tokenizer, TokenizerError> {
    tokenizer
        .with_truncation(None)
        .map_err(|source| TokenizerError::Encode { characters: 0, source })?;
    Ok(tokenizer)
}

fn encode_text(
    tokenizer: &tokenizers::Tokenizer,
    text: &str,
    add_special_tokens: bool,
) -> Result<EncodedText, TokenizerError> {
    let encoding = catch_panics(|| tokenizer.encode(text, add_special_tokens))
        .map_err(|source| TokenizerError::Encode { characters: text.chars().count(), source })?;
    let spans = encoding.get_offsets().iter().map(|(start, end)| *start..*end).collect();
    Ok(EncodedText { tokens: encoding.get_ids().to_vec(), spans })
}
