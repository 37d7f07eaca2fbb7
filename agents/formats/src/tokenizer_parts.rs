//! The parts of a `tokenizer.json` that concern special tokens. The vocabulary, which is nearly all
//! of the file, is not kept in memory.

use serde::{Deserialize, de::Error as _};
use serde_json::{Value, value::RawValue};

/// Bytes of one part. Models of speech add up to 65 000 tokens, in 13 MB.
const PART_BYTES_MAX: usize = 32 << 20;

/// The parts of a `tokenizer.json`; absent ones are null.
#[derive(Debug, Clone, Default)]
pub struct TokenizerParts {
    pub added_tokens: Value,
    pub post_processor: Value,
}

impl TokenizerParts {
    /// Parses the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// It is no JSON object, or one of the parts is too long.
    pub fn parse(text: &str) -> serde_json::Result<Self> {
        #[derive(Deserialize)]
        struct RawParts<'a> {
            #[serde(borrow)]
            added_tokens: Option<&'a RawValue>,
            #[serde(borrow)]
            post_processor: Option<&'a RawValue>,
        }
        // Structures are read from lists as well.
        if !text.trim_start().starts_with('{') {
            return Err(serde_json::Error::custom("it is no object"));
        }
        let RawParts { added_tokens, post_processor } = serde_json::from_str(text)?;
        Ok(Self {
            added_tokens: parse_part(added_tokens)?,
            post_processor: parse_part(post_processor)?,
        })
    }
}

fn parse_part(part: Option<&RawValue>) -> serde_json::Result<Value> {
    match part.map(RawValue::get) {
        None => Ok(Value::Null),
        Some(part) if part.len() > PART_BYTES_MAX => {
            let problem = format!("a part of it has more than {PART_BYTES_MAX} bytes");
            Err(serde_json::Error::custom(problem))
        }
        Some(part) => serde_json::from_str(part),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_read_and_those_that_would_take_much_memory_refused() {
        let text = r#"{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "b"}]}"#;
        let parts = TokenizerParts::parse(text).unwrap();
        assert_eq!(parts.added_tokens[0]["content"], "b");
        assert!(parts.post_processor.is_null());
        let long = format!("{{\"added_tokens\": [{}0]}}", "[0],".repeat(PART_BYTES_MAX / 4));
        for (text, words) in
            [(long.as_str(), "more than 33554432 bytes"), ("[[], {}]", "no object"), ("{", "EOF")]
        {
            let error = TokenizerParts::parse(text).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let vocabulary = format!("{{\"model\": [{}0]}}", "[0],".repeat(PART_BYTES_MAX / 4));
        assert!(TokenizerParts::parse(&vocabulary).is_ok());
    }
}
