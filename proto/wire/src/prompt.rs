//! Prompt files: one JSON object a line.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::line::{BadLine, Line, lines};

/// Longest prompt text: an order has to carry it within the bus's payload limit.
pub const PROMPT_BYTES_MAX: usize = 256 * 1024;

/// One prompt and what its verifier needs to know.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// Unique in its file; without one, the field "task_id" of HumanEval, MBPP and their like, or
    /// the line's number.
    pub id: String,
    /// MBPP calls it "text".
    pub prompt: String,
    pub answer: Option<String>,
    /// Fields of no meaning to the fleet, for verifiers.
    pub fields: Map<String, Value>,
}

/// What is wrong with a prompts file, and in which line (counted from 1).
#[derive(Debug, thiserror::Error)]
pub enum PromptsError {
    #[error(
        "line {line}: expected an object such as {{\"id\": \"p1\", \"prompt\": \"2+2=\", \"answer\": \"4\"}} (D101)"
    )]
    Json {
        line: usize,
        #[source]
        source: serde_json::Error,
    },
    #[error(
        "line {line}: there is no field \"prompt\" with the text a model is to go on with (D101)"
    )]
    NoPrompt { line: usize },
    #[error("line {line}: field {field:?} must be {expected} (D101)")]
    Field { line: usize, field: &'static str, expected: &'static str },
    #[error("line {line}: the prompt has {bytes} bytes, the limit is {PROMPT_BYTES_MAX} (D103)")]
    TooLong { line: usize, bytes: usize },
    #[error("line {line}: field \"prompt\" is empty (D102)")]
    Empty { line: usize },
    #[error("line {line}: id {id:?} was used before; ids must be unique (D104)")]
    DuplicateId { line: usize, id: String },
    #[error("not UTF-8 text (D102)")]
    Encoding(#[from] std::str::Utf8Error),
    #[error("no prompts in it (D102)")]
    None,
}

impl From<BadLine> for PromptsError {
    fn from(BadLine { number: line, source }: BadLine) -> Self {
        Self::Json { line, source }
    }
}

impl Prompt {
    /// Reads a prompts file. Blank lines are skipped but counted.
    ///
    /// # Errors
    /// The first thing wrong with it.
    pub fn parse_all(text: &[u8]) -> Result<Vec<Self>, PromptsError> {
        let mut prompts = Vec::new();
        let mut ids = BTreeSet::new();
        for line in lines(text)? {
            let line = line?;
            let number = line.number;
            let prompt = Self::of_line(line)?;
            if !ids.insert(prompt.id.clone()) {
                return Err(PromptsError::DuplicateId { line: number, id: prompt.id });
            }
            prompts.push(prompt);
        }
        if prompts.is_empty() {
            return Err(PromptsError::None);
        }
        Ok(prompts)
    }

    /// # Errors
    /// The first field that cannot be used.
    pub fn of_line(line: Line<'_>) -> Result<Self, PromptsError> {
        let Line { number: line, mut fields, .. } = line;
        let wrong = |field, expected| PromptsError::Field { line, field, expected };
        let given = fields.get("prompt").is_some_and(|value| !value.is_null());
        let named = if given || !fields.contains_key("text") { "prompt" } else { "text" };
        let prompt = match fields.remove(named) {
            Some(Value::String(text)) => text,
            Some(value) if !value.is_null() => return Err(wrong(named, "a text")),
            _ => return Err(PromptsError::NoPrompt { line }),
        };
        let id = match fields.remove("id") {
            None | Some(Value::Null) => None,
            Some(id) => Some(scalar(&id).ok_or_else(|| wrong("id", "a text or a number"))?),
        };
        let answer = match fields.remove("answer") {
            None | Some(Value::Null) => None,
            Some(answer) => {
                Some(scalar(&answer).ok_or_else(|| wrong("answer", "a text or a number"))?)
            }
        };
        let known = |id: &String| !id.is_empty();
        let id = id
            .filter(known)
            .or_else(|| fields.get("task_id").and_then(scalar).filter(known))
            .unwrap_or_else(|| line.to_string());
        match prompt.len() {
            0 => Err(PromptsError::Empty { line }),
            bytes @ PROMPT_BYTES_MAX.. => Err(PromptsError::TooLong { line, bytes }),
            _ => Ok(Self { id, prompt, answer, fields }),
        }
    }

    /// The line that reads as this prompt, without its end.
    pub fn to_line(&self) -> String {
        let Self { id, prompt, answer, fields } = self;
        let mut fields = fields.clone();
        fields.insert("id".into(), id.as_str().into());
        fields.insert("prompt".into(), prompt.as_str().into());
        if let Some(answer) = answer {
            fields.insert("answer".into(), answer.as_str().into());
        }
        Value::Object(fields).to_string()
    }
}

/// A number is known by how it is written.
fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
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
    fn a_line_with_prompt_and_text_keeps_the_text_as_a_field() {
        let text = b"{\"id\":7,\"prompt\":\"p\",\"text\":\"t\",\"answer\":1.5}";
        let prompts = Prompt::parse_all(text).unwrap();
        assert_eq!((&*prompts[0].id, &*prompts[0].prompt), ("7", "p"));
        assert_eq!(
            (&prompts[0].fields["text"], prompts[0].answer.as_deref()),
            (&"t".into(), Some("1.5"))
        );
        assert_eq!(Prompt::parse_all(prompts[0].to_line().as_bytes()).unwrap(), prompts);
    }

    #[test]
    fn each_mistake_names_its_line() {
        let cases: [(&[u8], &str); 7] = [
            (b"{\"prompt\":\"a\"}\n{", "line 2: expected an object"),
            (b"{\"answer\":\"a\"}", "line 1: there is no field \"prompt\""),
            (b"{\"prompt\":[]}", "line 1: field \"prompt\" must be a text"),
            (b"{\"prompt\":\"a\",\"id\":[]}", "line 1: field \"id\" must be"),
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
