//! Training examples and scored documents, stored as JSON lines.

use serde::Deserialize;

use crate::json_lines::{EncodingError, JsonLineError, JsonMistake, RowPlace, deserialize_lines};

/// A prompt and the completion to learn after it. Unknown fields are ignored; a missing prompt is
/// empty.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct TrainingExample {
    /// The text before the completion; may be empty.
    #[serde(default)]
    pub prompt: String,
    /// The text to learn; never empty.
    pub completion: String,
    /// The advantage that an objective gives it.
    pub advantage: Option<f64>,
    /// True if the completion was cut before its end, so that no end follows it.
    #[serde(default)]
    pub unfinished: bool,
    /// The log-probability of each of its tokens when it was drawn, in nats.
    pub behaviour: Option<Vec<f64>>,
    /// The log-probability of each of its tokens by a teacher, in nats.
    pub teacher: Option<Vec<f64>>,
    /// Its tokens, if they are not those of the text.
    pub token_ids: Option<Vec<u32>>,
    /// Ranges `[start, end)` of these tokens that are not learned, ascending and without overlap.
    #[serde(default)]
    pub masked: Vec<[u32; 2]>,
}

/// The first defect of an examples file, with its place.
#[derive(Debug, thiserror::Error)]
pub enum ExamplesError {
    #[error(
        "{place}: expected an object such as {{\"prompt\": \"2+2=\", \"completion\": \"4\"}} (D101)"
    )]
    Json {
        place: RowPlace,
        #[source]
        source: JsonMistake,
    },
    #[error("{place}: field \"completion\" is empty (D102)")]
    Empty { place: RowPlace },
    #[error(transparent)]
    Encoding(#[from] EncodingError),
    #[error("no examples in it (D102)")]
    None,
}

impl From<JsonLineError> for ExamplesError {
    fn from(JsonLineError { place, source }: JsonLineError) -> Self {
        Self::Json { place, source }
    }
}

impl TrainingExample {
    /// Parses an examples file. Blank lines are skipped but counted.
    ///
    /// # Errors
    /// Returns the first defect: text that is not UTF-8, a line that is not an example, an empty
    /// completion, or a file without examples.
    pub fn parse_all(text: &[u8]) -> Result<Vec<Self>, ExamplesError> {
        let mut examples = Vec::new();
        for line in deserialize_lines::<Self>(text, RowPlace::Line)? {
            let (place, _, example) = line?;
            if example.completion.is_empty() {
                return Err(ExamplesError::Empty { place });
            }
            examples.push(example);
        }
        if examples.is_empty() {
            return Err(ExamplesError::None);
        }
        Ok(examples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mistake_names_its_line() {
        let cases: [(&[u8], &str); 4] = [
            (b"{\"completion\":\"a\"}\n[]", "line 2: expected an object"),
            (b"{\"prompt\":\"a\"}", "line 1: expected an object"),
            (b"{\"prompt\":\"a\",\"completion\":\"\"}", "line 1: field \"completion\""),
            (b"\n", "no examples"),
        ];
        for (text, expected) in cases {
            let error = TrainingExample::parse_all(text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn other_fields_are_ignored_so_that_a_selection_is_a_dataset() {
        let line = br#"{"prompt":"a","completion":"b","prompt_id":"p1","index":0,"reward":1.0}"#;
        let examples = TrainingExample::parse_all(line).unwrap();
        assert_eq!((&*examples[0].prompt, &*examples[0].completion), ("a", "b"));
    }
}
