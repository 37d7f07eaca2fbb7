//! Prompt files: one JSON object a line.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::{Map, Value};

/// Longest prompt text: an order has to carry it within the bus's payload limit.
pub const PROMPT_BYTES_MAX: usize = 256 * 1024;

/// One prompt and what its verifier needs to know.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Prompt {
    /// Unique in its file; without one, the field "task_id" of HumanEval, MBPP and their like, or
    /// the line's number.
    #[serde(default)]
    pub id: String,
    /// MBPP calls it "text".
    #[serde(alias = "text")]
    pub prompt: String,
    #[serde(default)]
    pub answer: Option<String>,
    /// Fields of no meaning to the fleet, for verifiers.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

/// What is wrong with a prompts file, and in which line (counted from 1).
#[derive(Debug, thiserror::Error)]
pub enum PromptsError {
    #[error(
        "line {line}: expected an object such as {{\"id\": \"p1\", \"prompt\": \"2+2=\", \"answer\": \"4\"}}"
    )]
    Json {
        line: usize,
        #[source]
        source: serde_json::Error,
    },
    #[error("line {line}: the prompt has {bytes} bytes, the limit is {PROMPT_BYTES_MAX}")]
    TooLong { line: usize, bytes: usize },
    #[error("line {line}: field \"prompt\" is empty")]
    Empty { line: usize },
    #[error("line {line}: id {id:?} was used before; ids must be unique")]
    DuplicateId { line: usize, id: String },
    #[error("not UTF-8 text")]
    Encoding(#[from] std::str::Utf8Error),
    #[error("no prompts in it")]
    None,
}

impl Prompt {
    /// Reads a prompts file. Blank lines are skipped but counted.
    ///
    /// # Errors
    /// The first thing wrong with it.
    pub fn parse_all(text: &[u8]) -> Result<Vec<Self>, PromptsError> {
        let mut prompts = Vec::new();
        let mut ids = BTreeSet::new();
        for (index, text) in std::str::from_utf8(text)?.lines().enumerate() {
            if text.trim().is_empty() {
                continue;
            }
            let prompt = Self::parse(index + 1, text)?;
            if !ids.insert(prompt.id.clone()) {
                return Err(PromptsError::DuplicateId { line: index + 1, id: prompt.id });
            }
            prompts.push(prompt);
        }
        if prompts.is_empty() {
            return Err(PromptsError::None);
        }
        Ok(prompts)
    }

    fn parse(line: usize, text: &str) -> Result<Self, PromptsError> {
        let mut prompt: Self =
            serde_json::from_str(text).map_err(|source| PromptsError::Json { line, source })?;
        if prompt.id.is_empty() {
            prompt.id = match prompt.fields.get("task_id") {
                Some(Value::String(id)) if !id.is_empty() => id.clone(),
                Some(Value::Number(id)) => id.to_string(),
                _ => line.to_string(),
            };
        }
        let bytes = prompt.prompt.len();
        match bytes {
            0 => Err(PromptsError::Empty { line }),
            PROMPT_BYTES_MAX.. => Err(PromptsError::TooLong { line, bytes }),
            _ => Ok(prompt),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_without_an_id_is_known_by_its_line() {
        let text = b"{\"prompt\":\"1+1=\",\"answer\":\"2\",\"level\":3}\n\n{\"prompt\":\"x\"}\n";
        let prompts = Prompt::parse_all(text).unwrap();
        let ids: Vec<&str> = prompts.iter().map(|p| p.id.as_str()).collect();
        assert_eq!(ids, ["1", "3"]);
        assert_eq!(prompts[0].answer.as_deref(), Some("2"));
        assert_eq!(prompts[0].fields["level"], 3);
    }

    #[test]
    fn lines_of_humaneval_and_mbpp_are_prompts() {
        let text = b"{\"task_id\":\"HumanEval/0\",\"prompt\":\"def f\"}\n{\"task_id\":11,\"text\":\"Write\"}\n";
        let prompts = Prompt::parse_all(text).unwrap();
        let read: Vec<_> = prompts.iter().map(|p| (p.id.as_str(), p.prompt.as_str())).collect();
        assert_eq!(read, [("HumanEval/0", "def f"), ("11", "Write")]);
    }

    #[test]
    fn each_mistake_names_its_line() {
        let cases: [(&[u8], &str); 5] = [
            (b"{\"prompt\":\"a\"}\n{", "line 2: expected an object"),
            (b"{\"answer\":\"a\"}", "line 1: expected an object"),
            (b"{\"prompt\":\"\"}", "line 1: field \"prompt\" is empty"),
            (
                b"{\"id\":\"a\",\"prompt\":\"x\"}\n{\"id\":\"a\",\"prompt\":\"y\"}",
                "line 2: id \"a\"",
            ),
            (b"\n\n", "no prompts"),
        ];
        for (text, expected) in cases {
            let error = Prompt::parse_all(text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
