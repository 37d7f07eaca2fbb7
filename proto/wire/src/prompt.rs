//! Prompt files: one JSON object per line.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::json_lines::{
    EncodingError, JsonLine, JsonLineError, JsonMistake, RowPlace, parse_json_lines,
};

/// The limit of a prompt's text in bytes: an order has to carry it within the bus's payload limit.
/// A prompt of exactly this length is refused.
pub const PROMPT_BYTES_MAX: usize = 256 * 1024;

/// One entry of a prompts file: the prompt and the data its verifier needs.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptEntry {
    /// Unique in the file. If the field `id` is missing: the field `task_id` (HumanEval, MBPP and
    /// similar sets), otherwise the line number.
    pub id: String,
    /// Also read from the field `text`, as in MBPP.
    pub prompt: String,
    /// Numbers are kept as they were written.
    pub answer: Option<String>,
    /// All other fields; only verifiers use them.
    pub fields: Map<String, Value>,
}

/// Returns a text in lower case with single spaces: equal for two prompts that ask the same.
pub fn normalise_question(text: &str) -> String {
    let words: Vec<String> = text.split_whitespace().map(str::to_lowercase).collect();
    words.join(" ")
}

/// The first defect of a prompts file, with its place.
#[derive(Debug, thiserror::Error)]
pub enum PromptsError {
    #[error(
        "{place}: expected an object such as {{\"id\": \"p1\", \"prompt\": \"2+2=\", \"answer\": \"4\"}} (D101)"
    )]
    Json {
        place: RowPlace,
        #[source]
        source: JsonMistake,
    },
    #[error(
        "{place}: there is no field \"prompt\" with the text that a model continues; if it has \
         another name: `columns: {{ prompt: NAME }}` (D101)"
    )]
    NoPrompt { place: RowPlace },
    #[error("{place}: field {field:?} must be {expected} (D101)")]
    Field { place: RowPlace, field: &'static str, expected: &'static str },
    #[error("{place}: the prompt has {bytes} bytes, the limit is {PROMPT_BYTES_MAX} (D103)")]
    TooLong { place: RowPlace, bytes: usize },
    #[error("{place}: field \"prompt\" is empty (D102)")]
    Empty { place: RowPlace },
    #[error("{place}: id {id:?} was used in {first}; ids must be unique (D104)")]
    DuplicateId { place: RowPlace, first: RowPlace, id: String },
    #[error(transparent)]
    Encoding(#[from] EncodingError),
    #[error("no prompts in it; write one JSON object a line: {{\"prompt\": \"2 + 2 =\"}} (D102)")]
    None,
}

impl From<JsonLineError> for PromptsError {
    fn from(JsonLineError { place, source }: JsonLineError) -> Self {
        Self::Json { place, source }
    }
}

impl PromptEntry {
    /// Parses a prompts file. Blank lines are skipped but counted. Fails also for an id used twice,
    /// or a file without prompts.
    pub fn parse_all(text: &[u8]) -> Result<Vec<Self>, PromptsError> {
        let mut prompts = Vec::new();
        let mut ids = BTreeMap::new();
        for line in parse_json_lines(text)? {
            let line = line?;
            let place = line.place;
            let prompt = Self::from_line(line)?;
            if let Some(first) = ids.insert(prompt.id.clone(), place) {
                return Err(PromptsError::DuplicateId { place, first, id: prompt.id });
            }
            prompts.push(prompt);
        }
        if prompts.is_empty() {
            return Err(PromptsError::None);
        }
        Ok(prompts)
    }

    /// Builds a prompt from a parsed line.
    pub fn from_line(line: JsonLine<'_>) -> Result<Self, PromptsError> {
        let JsonLine { place, mut fields, .. } = line;
        let wrong = |field, expected| PromptsError::Field { place, field, expected };
        let given = fields.get("prompt").is_some_and(|value| !value.is_null());
        let named = if given || !fields.contains_key("text") { "prompt" } else { "text" };
        let prompt = match fields.remove(named) {
            Some(Value::String(text)) => text,
            Some(value) if !value.is_null() => return Err(wrong(named, "a text")),
            _ => return Err(PromptsError::NoPrompt { place }),
        };
        let id = match fields.remove("id") {
            None | Some(Value::Null) => None,
            Some(id) => Some(scalar_to_text(&id).ok_or_else(|| wrong("id", "a text or a number"))?),
        };
        let answer = match fields.remove("answer") {
            None | Some(Value::Null) => None,
            Some(answer) => {
                Some(scalar_to_text(&answer).ok_or_else(|| wrong("answer", "a text or a number"))?)
            }
        };
        let known = |id: &String| !id.is_empty();
        let id = id
            .filter(known)
            .or_else(|| fields.get("task_id").and_then(scalar_to_text).filter(known))
            .unwrap_or_else(|| place.number().to_string());
        match prompt.len() {
            0 => Err(PromptsError::Empty { place }),
            bytes @ PROMPT_BYTES_MAX.. => Err(PromptsError::TooLong { place, bytes }),
            _ => Ok(Self { id, prompt, answer, fields }),
        }
    }

    /// Returns a line of JSON, without its end, that parses to this prompt.
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

/// Returns the text of a string or number, which keeps its JSON notation.
fn scalar_to_text(value: &Value) -> Option<String> {
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
        let prompts = PromptEntry::parse_all(text).unwrap();
        let ids: Vec<&str> = prompts.iter().map(|p| p.id.as_str()).collect();
        assert_eq!(ids, ["1", "3"]);
        assert_eq!(prompts[0].answer.as_deref(), Some("2"));
        assert_eq!(prompts[0].fields["level"], 3);
    }

    #[test]
    fn lines_of_humaneval_and_mbpp_are_prompts() {
        let text = b"{\"task_id\":\"HumanEval/0\",\"prompt\":\"def f\"}\n{\"task_id\":11,\"text\":\"Write\"}\n";
        let prompts = PromptEntry::parse_all(text).unwrap();
        let read: Vec<_> = prompts.iter().map(|p| (p.id.as_str(), p.prompt.as_str())).collect();
        assert_eq!(read, [("HumanEval/0", "def f"), ("11", "Write")]);
    }

    #[test]
    fn a_line_with_prompt_and_text_keeps_the_text_as_a_field() {
        let text = b"{\"id\":7,\"prompt\":\"p\",\"text\":\"t\",\"answer\":1.5}";
        let prompts = PromptEntry::parse_all(text).unwrap();
        assert_eq!((&*prompts[0].id, &*prompts[0].prompt), ("7", "p"));
        assert_eq!(
            (&prompts[0].fields["text"], prompts[0].answer.as_deref()),
            (&"t".into(), Some("1.5"))
        );
        assert_eq!(PromptEntry::parse_all(prompts[0].to_line().as_bytes()).unwrap(), prompts);
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
            let error = PromptEntry::parse_all(text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
