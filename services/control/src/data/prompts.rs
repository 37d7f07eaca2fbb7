//! A file of prompts: conversations are rendered, and missing ids are filled in.

use bytes::Bytes;
use chat_template::{
    ChatError, ChatMessage, ChatTemplate, TurnTexts, last_user_text, list_messages, question_text,
    wrap_prompt,
};
use data_files::JsonRows;
use serde::Deserialize;
use serde_json::Value;
use wire::{JsonLine, PromptEntry, PromptsError, RowPlace, normalise_question};

/// Field with the last user message of a rendered conversation, for verifiers.
pub(crate) const PLAIN_PROMPT: &str = "plain_prompt";

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ChatFormat<'a> {
    pub template: Option<&'a ChatTemplate>,
    /// Plain texts are wrapped as user messages.
    pub wrap_texts: bool,
    /// Set before wrapped texts.
    pub system: Option<&'a str>,
}

/// A prompt with its place in its file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NumberedPrompt {
    pub place: RowPlace,
    pub prompt: PromptEntry,
    /// Normalised, independent of the template: equal for prompts that ask the same.
    pub question: String,
    pub is_rendered: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PromptFile {
    pub prompts: Vec<NumberedPrompt>,
    /// Set if no prompt was rendered or removed.
    original: Option<Bytes>,
    /// Around the observations of an environment; empty without one.
    pub turn_texts: TurnTexts,
}

/// The reason why a line of a prompts file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PromptLineError {
    #[error(transparent)]
    Prompts(#[from] PromptsError),
    #[error("{place}: field \"messages\"")]
    Chat {
        place: RowPlace,
        #[source]
        source: ChatError,
    },
}

#[derive(Deserialize)]
struct PromptLine {
    messages: Option<ChatMessage>,
    prompt: Option<ChatMessage>,
}

impl PromptFile {
    /// Returns the first line that cannot be used as an error. A conversation needs a chat template
    /// in `manner`.
    pub(crate) fn read(rows: &JsonRows, manner: ChatFormat<'_>) -> Result<Self, PromptLineError> {
        let mut seen = std::collections::BTreeMap::new();
        let mut prompts: Vec<NumberedPrompt> = Vec::new();
        for line in rows.parse_rows().map_err(PromptsError::from)? {
            let mut line = line.map_err(PromptsError::from)?;
            let place = line.place;
            let wrong = |source| PromptLineError::Chat { place, source };
            let mut same = None;
            if let Some(messages) = line_messages(&line, manner).map_err(wrong)? {
                same = Some(question_text(&messages));
                let template = manner.template.ok_or_else(|| wrong(ChatError::NoTemplate))?;
                let prompt = template.render_prompt(&messages).map_err(wrong)?;
                line.fields.insert("prompt".into(), prompt.into());
                if let Some(asked) = last_user_text(&messages) {
                    line.fields.insert(PLAIN_PROMPT.into(), asked.into());
                }
            }
            let prompt = PromptEntry::from_line(line)?;
            if let Some(first) = seen.insert(prompt.id.clone(), place) {
                let id = prompt.id;
                return Err(PromptsError::DuplicateId { place, first, id }.into());
            }
            let rendered = same.is_some();
            let asked = normalise_question(same.as_ref().unwrap_or(&prompt.prompt));
            prompts.push(NumberedPrompt { place, prompt, question: asked, is_rendered: rendered });
        }
        if prompts.is_empty() {
            return Err(PromptsError::None.into());
        }
        let original =
            (!prompts.iter().any(|prompt| prompt.is_rendered)).then(|| rows.lines.clone());
        Ok(Self { prompts, original, turn_texts: TurnTexts::default() })
    }

    pub(crate) fn from_prompts(prompts: Vec<NumberedPrompt>) -> Self {
        Self { prompts, original: None, turn_texts: TurnTexts::default() }
    }

    /// Returns one JSON object a line, as agents read it.
    pub(crate) fn to_bytes(&self) -> Bytes {
        if let Some(original) = &self.original {
            return original.clone();
        }
        let lines =
            self.prompts.iter().flat_map(|numbered| [numbered.prompt.to_line(), "\n".into()]);
        lines.collect::<String>().into()
    }

    pub(crate) fn rendered_count(&self) -> usize {
        self.prompts.iter().filter(|prompt| prompt.is_rendered).count()
    }

    pub(crate) fn prompt_count(&self) -> u32 {
        u32::try_from(self.prompts.len()).unwrap_or(u32::MAX)
    }
}

pub(crate) fn has_conversations(rows: &JsonRows) -> bool {
    any_row(rows, |is| {
        let text = is("prompt", Value::is_string) || is("text", Value::is_string);
        is("prompt", Value::is_array) || (is("messages", Value::is_array) && !text)
    })
}

/// Returns true if `such` accepts a row. `such` receives a function that tests whether a field
/// exists and its value passes a test.
pub(super) fn any_row(
    rows: &JsonRows,
    such: impl Fn(&dyn Fn(&str, fn(&Value) -> bool) -> bool) -> bool,
) -> bool {
    let lines = rows.parse_rows().into_iter().flatten().flatten();
    lines.into_iter().any(|line| {
        such(&|name: &str, is: fn(&Value) -> bool| line.fields.get(name).is_some_and(is))
    })
}

/// Returns `None` if the prompt is a plain text. The field `prompt` takes precedence over
/// `messages`.
fn line_messages(
    line: &JsonLine<'_>,
    manner: ChatFormat<'_>,
) -> Result<Option<Vec<ChatMessage>>, ChatError> {
    let given = |name: &str| line.fields.get(name).filter(|value| !value.is_null());
    if let Some(Value::String(text)) = given("prompt").or_else(|| given("text")) {
        return Ok(manner.wrap_texts.then(|| wrap_prompt(manner.system, text)));
    }
    if given("prompt").or_else(|| given("messages")).is_none() {
        return Ok(None);
    }
    let read: PromptLine = serde_json::from_str(line.text).map_err(|_| ChatError::Shape)?;
    let messages = read.prompt.filter(|prompt| !prompt.is_none()).or(read.messages);
    messages.and_then(list_messages).ok_or(ChatError::Shape).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::chatml;

    fn read(lines: &str, manner: ChatFormat<'_>) -> Result<PromptFile, String> {
        let read = PromptFile::read(&Bytes::from(lines.to_owned()).into(), manner);
        read.map_err(|error| match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        })
    }

    fn rows(lines: &'static [u8]) -> JsonRows {
        Bytes::from_static(lines).into()
    }

    const ASKED: &str = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n";

    #[test]
    fn a_conversation_becomes_text_and_all_its_fields_stay() {
        let template = chatml();
        let manner = ChatFormat { template: Some(&template), ..ChatFormat::default() };
        let messages = r#"[{"role": "user", "content": "2+2="}]"#;
        let lines = format!(
            "\n{{\"messages\": {messages}, \"tier\": 1}}\n{{\"prompt\": {messages}, \"id\": \"b\"}}\n{{\"prompt\": \"plain\", \"messages\": 7}}\n"
        );
        let prompts = read(&lines, manner).unwrap();
        assert_eq!((prompts.rendered_count(), prompts.prompt_count()), (2, 3));
        let again = PromptEntry::parse_all(&prompts.to_bytes()).unwrap();
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
        let plain = read(lines, ChatFormat::default()).unwrap();
        assert_eq!(plain.to_bytes(), lines.as_bytes());
        let wrap =
            ChatFormat { template: Some(&template), wrap_texts: true, system: Some("Short.") };
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
        let manner =
            |wrap, system| ChatFormat { template: Some(&template), wrap_texts: wrap, system };
        let asked = |line: &str, manner: ChatFormat<'_>| {
            read(line, manner).unwrap().prompts.remove(0).question
        };
        let text = r#"{"prompt": "How  Many?"}"#;
        let user = r#"{"role": "user", "content": "how many?"}"#;
        let alone = format!(r#"{{"messages": [{user}]}}"#);
        let system = format!(r#"{{"messages": [{{"role": "system", "content": "s"}}, {user}]}}"#);
        for asked in [
            asked(text, ChatFormat::default()),
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
        assert!(!has_conversations(&rows(br#"{"text": "a", "messages": [{"role": "user"}]}"#)));
        assert!(has_conversations(&rows(br#"{"messages": [{"role": "user"}]}"#)));
    }

    #[test]
    fn each_mistake_names_its_line() {
        let template = chatml();
        let chat = ChatFormat { template: Some(&template), ..ChatFormat::default() };
        let answered =
            r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}"#;
        for (lines, manner, words) in [
            (
                r#"{"messages":[{"role":"user","content":"a"}]}"#,
                ChatFormat::default(),
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
        assert!(has_conversations(&Bytes::from(answered.to_owned()).into()));
        assert!(!has_conversations(&rows(b"{\"prompt\":\"a\",\"messages\":[]}\n{")));
    }
}
