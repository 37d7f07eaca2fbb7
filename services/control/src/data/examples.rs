//! A file of training examples, or of documents to be scored.

use std::collections::BTreeSet;

use bytes::Bytes;
use chat_template::{
    ChatError, ChatMessage, PromptCompletion, assistant_message, list_messages, wrap_prompt,
};
use data_files::JsonRows;
use serde::Deserialize;
use serde_json::{Map, Value};
use wire::{ExamplesError, JsonLine, RowPlace};

use super::prompts::{ChatFormat, any_row};

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ExampleFile {
    pub examples: Vec<NumberedExample>,
    /// Examples that the chat template rendered.
    pub rendered_count: usize,
    /// Number of lines that have each field.
    pub field_counts: std::collections::BTreeMap<String, u32>,
    /// The file as agents read it.
    file_bytes: Bytes,
}

/// An example with its place in its file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NumberedExample {
    pub place: RowPlace,
    pub prompt: String,
    pub completion: String,
}

/// The reason why a line of an examples file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ExampleError {
    #[error(transparent)]
    Examples(#[from] ExamplesError),
    #[error(
        "{place}: expected \"completion\" (or \"response\") with the text to be learned, \
         \"text\" alone, or \"messages\" that end with an assistant's; if it has another name: \
         `columns: {{ completion: NAME }}` (D101)"
    )]
    Nothing { place: RowPlace },
    #[error("{place}: field {field:?} must be a text (D101)")]
    Field { place: RowPlace, field: &'static str },
    #[error("{place}: field \"messages\"")]
    Chat {
        place: RowPlace,
        #[source]
        source: ChatError,
    },
}

#[derive(Deserialize)]
struct ExampleLine {
    messages: Option<ChatMessage>,
    prompt: Option<ChatMessage>,
    completion: Option<ChatMessage>,
}

pub(super) fn needs_template(rows: &JsonRows) -> bool {
    any_row(rows, |is| {
        let messages = is("messages", Value::is_array) && !is("prompt", Value::is_string);
        is("prompt", Value::is_array) || is("completion", Value::is_array) || messages
    })
}

/// The form in which a line contains its example.
enum ExampleContent {
    Texts(String, String, LineForm),
    Messages,
}

#[derive(PartialEq, Eq)]
enum LineForm {
    /// Trainers can read the line unchanged.
    Canonical,
    /// Must be rewritten with `prompt` and `completion`.
    Converted,
}

impl ExampleFile {
    /// Returns the first line that cannot be used as an error; skips none. A conversation needs a
    /// chat template in `manner`.
    pub(crate) fn read(rows: &JsonRows, manner: ChatFormat<'_>) -> Result<Self, ExampleError> {
        let (mut examples, mut written) = (Vec::new(), String::new());
        let (mut rendered, mut as_it_is) = (0, true);
        let mut fields = std::collections::BTreeMap::new();
        for line in rows.parse_rows().map_err(ExamplesError::from)? {
            let line = line.map_err(ExamplesError::from)?;
            let JsonLine { place, text, fields: mut values } = line;
            values.keys().for_each(|name| *fields.entry(name.clone()).or_default() += 1);
            let content = parse_content(place, &values)?;
            // A template would add the end of the turn, and the model would learn to say nothing.
            if matches!(&content, ExampleContent::Texts(_, completion, _) if completion.is_empty())
            {
                return Err(ExamplesError::Empty { place }.into());
            }
            let (prompt, completion) = match content {
                ExampleContent::Texts(prompt, completion, how) if !manner.wrap_texts => {
                    as_it_is &= how == LineForm::Canonical;
                    (prompt, completion)
                }
                said => {
                    let wrong = |source| ExampleError::Chat { place, source };
                    let messages = build_conversation(said, text, manner).map_err(wrong)?;
                    let template = manner.template.ok_or_else(|| wrong(ChatError::NoTemplate))?;
                    let PromptCompletion { prompt, completion } =
                        template.render_pair(&messages).map_err(wrong)?;
                    rendered += 1;
                    (prompt, completion)
                }
            };
            if completion.is_empty() {
                return Err(ExamplesError::Empty { place }.into());
            }
            values.insert("prompt".into(), prompt.as_str().into());
            values.insert("completion".into(), completion.as_str().into());
            written.push_str(&Value::Object(values).to_string());
            written.push('\n');
            examples.push(NumberedExample { place, prompt, completion });
        }
        if examples.is_empty() {
            return Err(ExamplesError::None.into());
        }
        let bytes = if as_it_is && rendered == 0 { rows.lines.clone() } else { written.into() };
        Ok(Self { examples, rendered_count: rendered, field_counts: fields, file_bytes: bytes })
    }

    pub(crate) fn to_bytes(&self) -> Bytes {
        self.file_bytes.clone()
    }

    pub(crate) fn duplicate_count(&self) -> usize {
        let pairs = self.examples.iter().map(|example| (&example.prompt, &example.completion));
        self.examples.len() - pairs.collect::<BTreeSet<_>>().len()
    }
}

fn parse_content(
    place: RowPlace,
    values: &Map<String, Value>,
) -> Result<ExampleContent, ExampleError> {
    let given = |name: &str| values.get(name).filter(|value| !value.is_null());
    let text = |field: &'static str| match given(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(ExampleError::Field { place, field }),
    };
    let list = |name: &str| given(name).is_some_and(Value::is_array);
    if list("completion") || (list("messages") && given("completion").is_none()) {
        return Ok(ExampleContent::Messages);
    }
    if ["completion", "response", "text"].iter().all(|name| given(name).is_none()) {
        return Err(ExampleError::Nothing { place });
    }
    let prompt = text("prompt")?;
    if let Some(completion) = text("completion")? {
        let plainly = prompt.is_some() || !values.contains_key("prompt");
        let how = if plainly { LineForm::Canonical } else { LineForm::Converted };
        return Ok(ExampleContent::Texts(prompt.unwrap_or_default(), completion, how));
    }
    match (prompt, text("response")?, text("text")?) {
        (Some(prompt), Some(response), _) => {
            Ok(ExampleContent::Texts(prompt, response, LineForm::Converted))
        }
        (None, None, Some(text)) => {
            Ok(ExampleContent::Texts(String::new(), text, LineForm::Converted))
        }
        _ => Err(ExampleError::Nothing { place }),
    }
}

/// Returns messages that end with the completion as the assistant's message.
fn build_conversation(
    said: ExampleContent,
    whole: &str,
    manner: ChatFormat<'_>,
) -> Result<Vec<ChatMessage>, ChatError> {
    match said {
        ExampleContent::Texts(prompt, completion, _) => {
            let mut messages = wrap_prompt(manner.system, &prompt);
            messages.push(assistant_message(&completion));
            Ok(messages)
        }
        ExampleContent::Messages => {
            let read: ExampleLine = serde_json::from_str(whole).map_err(|_| ChatError::Shape)?;
            let list =
                |part: Option<ChatMessage>| part.filter(|part| !part.is_none()).map(list_messages);
            match (list(read.prompt), list(read.completion), list(read.messages)) {
                (prompt, Some(Some(completion)), _) => {
                    let prompt = prompt.map_or(Some(Vec::new()), |prompt| prompt);
                    Ok([prompt.ok_or(ChatError::Shape)?, completion].concat())
                }
                (_, None, Some(Some(messages))) => Ok(messages),
                _ => Err(ChatError::Shape),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::chatml;

    fn read(lines: &str, manner: ChatFormat<'_>) -> Result<ExampleFile, String> {
        let read = ExampleFile::read(&Bytes::from(lines.to_owned()).into(), manner);
        read.map_err(|error| error.to_string())
    }

    fn stored(examples: &ExampleFile) -> Vec<(String, String)> {
        let read = wire::TrainingExample::parse_all(&examples.to_bytes()).unwrap();
        read.into_iter().map(|example| (example.prompt, example.completion)).collect()
    }

    fn pair(prompt: &str, completion: &str) -> (String, String) {
        (prompt.into(), completion.into())
    }

    #[test]
    fn examples_are_read_in_each_way_they_are_written() {
        let lines = r#"{"prompt":"a","completion":"b","text":"not this"}
{"prompt":"c","response":"d","title":"t"}
{"text":"e"}
{"completion":"f","prompt":null}
"#;
        let examples = read(lines, ChatFormat::default()).unwrap();
        let expected = [pair("a", "b"), pair("c", "d"), pair("", "e"), pair("", "f")];
        assert_eq!(stored(&examples), expected);
        assert_eq!((examples.field_counts["prompt"], examples.field_counts["title"]), (3, 1));
        let plain = "{\"completion\":\"a\"}\n\n{\"prompt\":\"b\",  \"completion\":\"a\"}";
        assert_eq!(read(plain, ChatFormat::default()).unwrap().to_bytes(), plain.as_bytes());
    }

    #[test]
    fn the_last_turn_of_a_conversation_is_learned() {
        let template = chatml();
        let manner = ChatFormat { template: Some(&template), ..ChatFormat::default() };
        let user = r#"{"role":"user","content":"2+2="}"#;
        let assistant = r#"{"role":"assistant","content":"4"}"#;
        let lines = format!(
            "{{\"messages\":[{user},{assistant}]}}\n{{\"prompt\":[{user}],\"completion\":[{assistant}]}}\n"
        );
        let examples = read(&lines, manner).unwrap();
        assert_eq!((examples.rendered_count, examples.duplicate_count()), (2, 1));
        let [first, second] = &stored(&examples)[..] else { panic!("two") };
        assert_eq!((&first.1, first), (&"4".to_owned(), second));
        assert!(first.0.ends_with("2+2=<|im_end|>\n<|im_start|>assistant\n"), "{}", first.0);
        let wrap = ChatFormat { wrap_texts: true, ..manner };
        let wrapped = read(r#"{"prompt":"2+2=","response":"4"}"#, wrap).unwrap();
        assert_eq!(stored(&wrapped), std::slice::from_ref(first));
        let nothing = read(r#"{"prompt":"2+2=","response":""}"#, wrap).unwrap_err();
        assert!(nothing.contains("\"completion\" is empty"), "{nothing}");
    }

    #[test]
    fn no_line_is_left_out_in_silence() {
        for (lines, expected) in [
            (r#"{"prompt":"a"}"#, "line 1: expected \"completion\""),
            (
                "{\"text\":\"a\"}\n{\"prompt\":\"a\",\"text\":\"b\"}",
                "line 2: expected \"completion\"",
            ),
            (r#"{"prompt":1,"completion":"a"}"#, "line 1: field \"prompt\" must be a text"),
            (r#"{"text":""}"#, "line 1: field \"completion\" is empty"),
            (r#"{"messages":[]}"#, "line 1: field \"messages\""),
            ("[]", "line 1: expected an object"),
            ("\n", "no examples"),
        ] {
            let error = read(lines, ChatFormat::default()).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
