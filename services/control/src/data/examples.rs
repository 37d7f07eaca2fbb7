//! A file of training examples, or of documents to be scored, as a run is given it.

use std::collections::BTreeSet;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value};
use wire::{ExamplesError, Line, lines};

use super::{
    chat::{ChatError, Message, Pair, wrapped},
    prompts::{Manner, listed, some_line},
};

/// What was read of a file of examples.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Examples {
    pub examples: Vec<Example>,
    /// How many the chat template wrote.
    pub rendered: usize,
    /// Of all lines, by name.
    pub fields: std::collections::BTreeMap<String, u32>,
    bytes: Bytes,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Example {
    pub line: usize,
    pub prompt: String,
    pub completion: String,
}

/// What is wrong with a line of examples.
#[derive(Debug, thiserror::Error)]
pub enum ExampleError {
    #[error(transparent)]
    Examples(#[from] ExamplesError),
    #[error(
        "line {line}: expected \"completion\" (or \"response\") with the text to be learned, \
         \"text\" alone, or \"messages\" that end with an assistant's (D101)"
    )]
    Nothing { line: usize },
    #[error("line {line}: field {field:?} must be a text (D101)")]
    Field { line: usize, field: &'static str },
    #[error("line {line}: field \"messages\"")]
    Chat {
        line: usize,
        #[source]
        source: ChatError,
    },
}

#[derive(Deserialize)]
struct Conversation {
    messages: Option<Message>,
    prompt: Option<Message>,
    completion: Option<Message>,
}

/// Whether some example cannot be read without a chat template.
pub(super) fn have_conversations(bytes: &[u8]) -> bool {
    some_line(bytes, |is| {
        let messages = is("messages", Value::is_array) && !is("prompt", Value::is_string);
        is("prompt", Value::is_array) || is("completion", Value::is_array) || messages
    })
}

/// How a line says its example.
enum Said {
    Texts(String, String, Written),
    Messages,
}

/// Whether trainers can read the line as it is.
#[derive(PartialEq, Eq)]
enum Written {
    Plainly,
    Otherwise,
}

impl Examples {
    /// A conversation without a template is an error.
    ///
    /// # Errors
    /// The first line that cannot be used: none is left out.
    pub(crate) fn read(bytes: &Bytes, manner: Manner<'_>) -> Result<Self, ExampleError> {
        let (mut examples, mut written) = (Vec::new(), String::new());
        let (mut rendered, mut as_it_is) = (0, true);
        let mut fields = std::collections::BTreeMap::new();
        for line in lines(bytes).map_err(ExamplesError::from)? {
            let line = line.map_err(ExamplesError::from)?;
            let Line { number, text, fields: mut values } = line;
            values.keys().for_each(|name| *fields.entry(name.clone()).or_default() += 1);
            let (prompt, completion) = match said(number, &values)? {
                Said::Texts(prompt, completion, how) if !manner.wrap => {
                    as_it_is &= how == Written::Plainly;
                    (prompt, completion)
                }
                said => {
                    let wrong = |source| ExampleError::Chat { line: number, source };
                    let messages = conversation(said, text, manner).map_err(wrong)?;
                    let template = manner.template.ok_or_else(|| wrong(ChatError::NoTemplate))?;
                    let Pair { prompt, completion } = template.pair(&messages).map_err(wrong)?;
                    rendered += 1;
                    (prompt, completion)
                }
            };
            if completion.is_empty() {
                return Err(ExamplesError::Empty { line: number }.into());
            }
            values.insert("prompt".into(), prompt.as_str().into());
            values.insert("completion".into(), completion.as_str().into());
            written.push_str(&Value::Object(values).to_string());
            written.push('\n');
            examples.push(Example { line: number, prompt, completion });
        }
        if examples.is_empty() {
            return Err(ExamplesError::None.into());
        }
        let bytes = if as_it_is && rendered == 0 { bytes.clone() } else { written.into() };
        Ok(Self { examples, rendered, fields, bytes })
    }

    /// The file agents read.
    pub(crate) fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }

    /// Lines whose example stands in an earlier one.
    pub(crate) fn duplicates(&self) -> usize {
        let pairs = self.examples.iter().map(|example| (&example.prompt, &example.completion));
        self.examples.len() - pairs.collect::<BTreeSet<_>>().len()
    }
}

fn said(line: usize, values: &Map<String, Value>) -> Result<Said, ExampleError> {
    let given = |name: &str| values.get(name).filter(|value| !value.is_null());
    let text = |field: &'static str| match given(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(ExampleError::Field { line, field }),
    };
    let list = |name: &str| given(name).is_some_and(Value::is_array);
    if list("completion") || (list("messages") && given("completion").is_none()) {
        return Ok(Said::Messages);
    }
    if ["completion", "response", "text"].iter().all(|name| given(name).is_none()) {
        return Err(ExampleError::Nothing { line });
    }
    let prompt = text("prompt")?;
    if let Some(completion) = text("completion")? {
        let plainly = prompt.is_some() || !values.contains_key("prompt");
        let how = if plainly { Written::Plainly } else { Written::Otherwise };
        return Ok(Said::Texts(prompt.unwrap_or_default(), completion, how));
    }
    match (prompt, text("response")?, text("text")?) {
        (Some(prompt), Some(response), _) => Ok(Said::Texts(prompt, response, Written::Otherwise)),
        (None, None, Some(text)) => Ok(Said::Texts(String::new(), text, Written::Otherwise)),
        _ => Err(ExampleError::Nothing { line }),
    }
}

fn conversation(said: Said, whole: &str, manner: Manner<'_>) -> Result<Vec<Message>, ChatError> {
    match said {
        Said::Texts(prompt, completion, _) => {
            let mut messages = wrapped(manner.system, &prompt);
            messages.push(super::chat::answer(&completion));
            Ok(messages)
        }
        Said::Messages => {
            let read: Conversation = serde_json::from_str(whole).map_err(|_| ChatError::Shape)?;
            let list = |part: Option<Message>| part.filter(|part| !part.is_none()).map(listed);
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
    use crate::data::chat::tests::chatml;

    fn read(lines: &str, manner: Manner<'_>) -> Result<Examples, String> {
        let read = Examples::read(&Bytes::from(lines.to_owned()), manner);
        read.map_err(|error| error.to_string())
    }

    fn stored(examples: &Examples) -> Vec<(String, String)> {
        let read = wire::Example::parse_all(&examples.bytes()).unwrap();
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
        let examples = read(lines, Manner::default()).unwrap();
        let expected = [pair("a", "b"), pair("c", "d"), pair("", "e"), pair("", "f")];
        assert_eq!(stored(&examples), expected);
        assert_eq!((examples.fields["prompt"], examples.fields["title"]), (3, 1));
        let plain = "{\"completion\":\"a\"}\n\n{\"prompt\":\"b\",  \"completion\":\"a\"}";
        assert_eq!(read(plain, Manner::default()).unwrap().bytes(), plain.as_bytes());
    }

    #[test]
    fn the_last_turn_of_a_conversation_is_learned() {
        let template = chatml();
        let manner = Manner { template: Some(&template), ..Manner::default() };
        let user = r#"{"role":"user","content":"2+2="}"#;
        let assistant = r#"{"role":"assistant","content":"4"}"#;
        let lines = format!(
            "{{\"messages\":[{user},{assistant}]}}\n{{\"prompt\":[{user}],\"completion\":[{assistant}]}}\n"
        );
        let examples = read(&lines, manner).unwrap();
        assert_eq!((examples.rendered, examples.duplicates()), (2, 1));
        let [first, second] = &stored(&examples)[..] else { panic!("two") };
        assert_eq!((&first.1, first), (&"4".to_owned(), second));
        assert!(first.0.ends_with("2+2=<|im_end|>\n<|im_start|>assistant\n"), "{}", first.0);
        let wrap = Manner { wrap: true, ..manner };
        let wrapped = read(r#"{"prompt":"2+2=","response":"4"}"#, wrap).unwrap();
        assert_eq!(stored(&wrapped), std::slice::from_ref(first));
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
            let error = read(lines, Manner::default()).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
