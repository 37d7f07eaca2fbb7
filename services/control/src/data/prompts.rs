//! A file of prompts, as a run is given it: conversations written out, ids said.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;
use wire::{Line, Prompt, PromptsError, lines};

use super::{
    chat::{ChatError, Message, Template, asked, said, wrapped},
    split::normalised,
};

/// What the user said, where the prompt is a whole conversation: for verifiers.
pub(crate) const PLAIN_PROMPT: &str = "plain_prompt";

/// How a file's lines become prompts.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Manner<'a> {
    pub template: Option<&'a Template>,
    /// Texts are what a user says.
    pub wrap: bool,
    /// Said before such texts.
    pub system: Option<&'a str>,
}

/// A prompt and the line it stands in, counted from 1.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Numbered {
    pub line: usize,
    pub prompt: Prompt,
    /// What it asks, however it is written out: two that ask the same have the same.
    pub asked: String,
    /// Whether the chat template wrote it.
    pub rendered: bool,
}

/// What was read of a file of prompts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Prompts {
    pub prompts: Vec<Numbered>,
    /// The file as it was, while it says the same.
    original: Option<Bytes>,
}

/// What is wrong with a line that a chat template writes.
#[derive(Debug, thiserror::Error)]
pub enum LinesError {
    #[error(transparent)]
    Prompts(#[from] PromptsError),
    #[error("line {line}: field \"messages\"")]
    Chat {
        line: usize,
        #[source]
        source: ChatError,
    },
}

/// The conversation of a line, in one of the ways these are written.
#[derive(Deserialize)]
struct Conversation {
    messages: Option<Message>,
    prompt: Option<Message>,
}

impl Prompts {
    /// A conversation without a template is an error.
    ///
    /// # Errors
    /// The first line that cannot be used.
    pub(crate) fn read(bytes: &Bytes, manner: Manner<'_>) -> Result<Self, LinesError> {
        let mut seen = std::collections::BTreeSet::new();
        let mut prompts: Vec<Numbered> = Vec::new();
        for line in lines(bytes).map_err(PromptsError::from)? {
            let mut line = line.map_err(PromptsError::from)?;
            let number = line.number;
            let wrong = |source| LinesError::Chat { line: number, source };
            let mut same = None;
            if let Some(messages) = conversation(&line, manner).map_err(wrong)? {
                same = Some(said(&messages));
                let template = manner.template.ok_or_else(|| wrong(ChatError::NoTemplate))?;
                let prompt = template.prompt(&messages).map_err(wrong)?;
                line.fields.insert("prompt".into(), prompt.into());
                if let Some(asked) = asked(&messages) {
                    line.fields.insert(PLAIN_PROMPT.into(), asked.into());
                }
            }
            let prompt = Prompt::of_line(line)?;
            if !seen.insert(prompt.id.clone()) {
                return Err(PromptsError::DuplicateId { line: number, id: prompt.id }.into());
            }
            let rendered = same.is_some();
            let asked = normalised(same.as_ref().unwrap_or(&prompt.prompt));
            prompts.push(Numbered { line: number, prompt, asked, rendered });
        }
        if prompts.is_empty() {
            return Err(PromptsError::None.into());
        }
        let original = (!prompts.iter().any(|prompt| prompt.rendered)).then(|| bytes.clone());
        Ok(Self { prompts, original })
    }

    /// Some of a file's.
    pub(crate) fn part(prompts: Vec<Numbered>) -> Self {
        Self { prompts, original: None }
    }

    /// The file agents read.
    pub(crate) fn bytes(&self) -> Bytes {
        if let Some(original) = &self.original {
            return original.clone();
        }
        let lines =
            self.prompts.iter().flat_map(|numbered| [numbered.prompt.to_line(), "\n".into()]);
        lines.collect::<String>().into()
    }

    /// How many the chat template wrote.
    pub(crate) fn rendered(&self) -> usize {
        self.prompts.iter().filter(|prompt| prompt.rendered).count()
    }

    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.prompts.len()).unwrap_or(u32::MAX)
    }
}

/// Whether some prompt cannot be read without a chat template.
pub(crate) fn has_conversations(bytes: &[u8]) -> bool {
    some_line(bytes, |is| {
        let text = is("prompt", Value::is_string) || is("text", Value::is_string);
        is("prompt", Value::is_array) || (is("messages", Value::is_array) && !text)
    })
}

/// Asked of each line: whether a field is there, and is such a value.
pub(super) fn some_line(
    bytes: &[u8],
    such: impl Fn(&dyn Fn(&str, fn(&Value) -> bool) -> bool) -> bool,
) -> bool {
    let lines = lines(bytes).into_iter().flatten().flatten();
    lines.into_iter().any(|line| {
        such(&|name: &str, is: fn(&Value) -> bool| line.fields.get(name).is_some_and(is))
    })
}

/// `prompt` wins over `messages`, which is a field like others then.
fn conversation(line: &Line<'_>, manner: Manner<'_>) -> Result<Option<Vec<Message>>, ChatError> {
    let given = |name: &str| line.fields.get(name).filter(|value| !value.is_null());
    if let Some(Value::String(text)) = given("prompt").or_else(|| given("text")) {
        return Ok(manner.wrap.then(|| wrapped(manner.system, text)));
    }
    if given("prompt").or_else(|| given("messages")).is_none() {
        return Ok(None);
    }
    let read: Conversation = serde_json::from_str(line.text).map_err(|_| ChatError::Shape)?;
    let messages = read.prompt.filter(|prompt| !prompt.is_none()).or(read.messages);
    messages.and_then(listed).ok_or(ChatError::Shape).map(Some)
}

pub(super) fn listed(messages: Message) -> Option<Vec<Message>> {
    use minijinja::value::ValueKind;
    (messages.kind() == ValueKind::Seq).then(|| messages.try_iter().into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::chat::tests::chatml;

    fn read(lines: &str, manner: Manner<'_>) -> Result<Prompts, String> {
        let read = Prompts::read(&Bytes::from(lines.to_owned()), manner);
        read.map_err(|error| match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        })
    }

    const ASKED: &str = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n";

    #[test]
    fn a_conversation_becomes_text_and_all_its_fields_stay() {
        let template = chatml();
        let manner = Manner { template: Some(&template), ..Manner::default() };
        let messages = r#"[{"role": "user", "content": "2+2="}]"#;
        let lines = format!(
            "\n{{\"messages\": {messages}, \"tier\": 1}}\n{{\"prompt\": {messages}, \"id\": \"b\"}}\n{{\"prompt\": \"plain\", \"messages\": 7}}\n"
        );
        let prompts = read(&lines, manner).unwrap();
        assert_eq!((prompts.rendered(), prompts.count()), (2, 3));
        let again = Prompt::parse_all(&prompts.bytes()).unwrap();
        let ids: Vec<&str> = again.iter().map(|prompt| prompt.id.as_str()).collect();
        assert_eq!(ids, ["2", "b", "4"], "ids are those of the lines as they were");
        for prompt in &again[..2] {
            assert!(prompt.prompt.ends_with(ASKED), "{}", prompt.prompt);
            assert_eq!(prompt.fields[PLAIN_PROMPT], "2+2=");
        }
        assert_eq!(
            (&again[0].fields["tier"], &again[0].fields["messages"][0]["role"]),
            (&1.into(), &"user".into())
        );
        assert_eq!(again[2].prompt, "plain", "a prompt is a prompt, whatever stands beside it");
    }

    #[test]
    fn texts_are_wrapped_when_asked_and_files_without_conversations_stay_what_they_are() {
        let template = chatml();
        let lines = "{\"task_id\":\"HumanEval/0\",\"prompt\":\"def f\"}\n\n{ \"text\": \"b\" }\n";
        let plain = read(lines, Manner::default()).unwrap();
        assert_eq!(plain.bytes(), lines.as_bytes());
        let wrap = Manner { template: Some(&template), wrap: true, system: Some("Short.") };
        let wrapped = read(lines, wrap).unwrap();
        let first = &wrapped.prompts[0].prompt;
        assert_eq!(
            first.prompt,
            "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\ndef f<|im_end|>\n\
             <|im_start|>assistant\n"
        );
        assert_eq!(
            (first.id.as_str(), &first.fields[PLAIN_PROMPT]),
            ("HumanEval/0", &"def f".into())
        );
    }

    #[test]
    fn what_a_prompt_asks_does_not_depend_on_how_it_is_written_out() {
        let template = chatml();
        let manner = |wrap, system| Manner { template: Some(&template), wrap, system };
        let asked =
            |line: &str, manner: Manner<'_>| read(line, manner).unwrap().prompts.remove(0).asked;
        let text = r#"{"prompt": "How  Many?"}"#;
        let user = r#"{"role": "user", "content": "how many?"}"#;
        let alone = format!(r#"{{"messages": [{user}]}}"#);
        let system = format!(r#"{{"messages": [{{"role": "system", "content": "s"}}, {user}]}}"#);
        for asked in [
            asked(text, Manner::default()),
            asked(text, manner(true, None)),
            asked(text, manner(true, Some("Short."))),
            asked(&alone, manner(false, None)),
            asked(&system, manner(false, None)),
        ] {
            assert_eq!(asked, "how many?");
        }
        let longer =
            format!(r#"{{"messages": [{user}, {{"role": "assistant", "content": "2"}}, {user}]}}"#);
        assert!(asked(&longer, manner(false, None)).contains("assistant"));
    }

    #[test]
    fn a_text_beside_messages_needs_no_template() {
        assert!(!has_conversations(br#"{"text": "a", "messages": [{"role": "user"}]}"#));
        assert!(has_conversations(br#"{"messages": [{"role": "user"}]}"#));
    }

    #[test]
    fn each_mistake_names_its_line() {
        let template = chatml();
        let chat = Manner { template: Some(&template), ..Manner::default() };
        let answered =
            r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}"#;
        for (lines, manner, words) in [
            (
                r#"{"messages":[{"role":"user","content":"a"}]}"#,
                Manner::default(),
                ["line 1", "chat template"],
            ),
            (&*format!("\n{answered}"), chat, ["line 2", "nothing to answer"]),
            (r#"{"messages":"a"}"#, chat, ["line 1", "list of messages"]),
            (r#"{"messages":[]}"#, chat, ["line 1", "list of messages"]),
            (r#"{"answer":"a"}"#, chat, ["line 1", "no field \"prompt\""]),
            (
                "{\"prompt\":\"a\",\"id\":\"x\"}\n{\"prompt\":\"b\",\"id\":\"x\"}",
                chat,
                ["line 2", "unique"],
            ),
        ] {
            let error = read(lines, manner).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        assert!(has_conversations(answered.as_bytes()));
        assert!(!has_conversations(b"{\"prompt\":\"a\",\"messages\":[]}\n{"));
    }
}
