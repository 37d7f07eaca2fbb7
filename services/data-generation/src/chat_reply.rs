//! Reads the answers of a chat model. Their text is hostile: anything may be in it, of any length.

use serde::Deserialize;
use serde_json::Value;

/// A longer prompt is dropped.
const PROMPT_BYTES_MAX: usize = 16 * 1024;

/// Bytes of a token, for endpoints that do not count.
const TOKEN_BYTES: u64 = 4;

/// The text of a chat completion, or the reason why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChatReply {
    /// Without the thoughts of a reasoning model.
    pub text: Result<String, String>,
    /// True if the model was stopped before it had finished.
    pub is_cut: bool,
    /// True if the endpoint refused the request itself.
    pub is_refused: bool,
    /// Tokens of the request and the answer.
    pub tokens: u64,
}

#[derive(Deserialize)]
struct ChatCompletion {
    choices: Vec<ReplyChoice>,
    usage: Option<TokenUsage>,
}

#[derive(Deserialize)]
struct ReplyChoice {
    message: ReplyMessage,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct ReplyMessage {
    content: Option<String>,
    refusal: Option<String>,
}

#[derive(Deserialize)]
struct TokenUsage {
    #[serde(default)]
    total_tokens: u64,
}

impl ChatReply {
    /// Returns the reply to a request that the endpoint refused.
    pub(crate) fn refused_request(problem: String) -> Self {
        Self { text: Err(problem), is_cut: false, is_refused: true, tokens: 0 }
    }

    /// Parses the body of a chat completion.
    pub(crate) fn parse(body: &[u8]) -> Self {
        let estimate = body.len() as u64 / TOKEN_BYTES + 1;
        let unusable = |why: &str, tokens| {
            let text = Err(why.to_owned());
            Self { text, is_cut: false, is_refused: false, tokens }
        };
        let Ok(ChatCompletion { choices, usage }) = serde_json::from_slice(body) else {
            return unusable("not a chat completion", estimate);
        };
        let tokens = usage.map_or(0, |usage| usage.total_tokens);
        let tokens = if tokens == 0 { estimate } else { tokens };
        let Some(ReplyChoice { message, finish_reason }) = choices.into_iter().next() else {
            return unusable("no choices", tokens);
        };
        let finish = finish_reason.as_deref().unwrap_or("stop");
        match message {
            ReplyMessage { refusal: Some(why), .. } if !why.is_empty() => {
                unusable("refused", tokens)
            }
            _ if finish == "content_filter" => unusable("filtered", tokens),
            ReplyMessage { content: None, .. } => unusable("no text", tokens),
            ReplyMessage { content: Some(text), .. } => Self {
                text: Ok(strip_thoughts(&text).to_owned()),
                is_cut: finish == "length",
                is_refused: false,
                tokens,
            },
        }
    }
}

/// Removes a block `<think>…</think>` at the beginning. An open block is all of the text.
fn strip_thoughts(text: &str) -> &str {
    let text = text.trim();
    match text.strip_prefix("<think>") {
        None => text,
        Some(rest) => rest.split_once("</think>").map_or("", |(_, rest)| rest.trim()),
    }
}

/// Finds at most `max` prompts in a text: the elements of a JSON list, also of one that is cut off,
/// or else the entries of a numbered or bulleted list.
pub(crate) fn parse_prompt_list(text: &str, max: usize) -> Vec<String> {
    let mut prompts = list_positions(text)
        .map(|start| parse_json_texts(&text[start + 1..], max))
        .find(|found| !found.is_empty())
        .unwrap_or_else(|| parse_numbered_texts(text));
    prompts.iter_mut().for_each(|prompt| *prompt = prompt.trim().to_owned());
    prompts.retain(|prompt| !prompt.is_empty() && prompt.len() <= PROMPT_BYTES_MAX);
    prompts.truncate(max);
    prompts
}

/// Most brackets that are tried as the beginning of a list.
const LISTS_MAX: usize = 16;

/// Returns the places of `[` that begin a line or the value of a key: not those within a sentence.
fn list_positions(text: &str) -> impl Iterator<Item = usize> {
    let begins_list = move |(place, _): &(usize, &str)| {
        let before = text[..*place].trim_end_matches([' ', '\t']);
        before.is_empty() || before.ends_with(['\n', ':'])
    };
    text.match_indices('[').filter(begins_list).map(|(place, _)| place).take(LISTS_MAX)
}

/// Reads the texts behind the `[` of a JSON list, up to its end or the first defect.
fn parse_json_texts(list: &str, max: usize) -> Vec<String> {
    let (mut texts, mut rest) = (Vec::new(), list);
    while texts.len() < max {
        rest = rest.trim_start_matches(|sign: char| sign.is_whitespace() || sign == ',');
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        let Some(Ok(value)) = values.next() else { break };
        rest = &rest[values.byte_offset()..];
        let text = match value {
            Value::String(text) => Some(text),
            Value::Object(mut fields) => ["prompt", "question", "text"]
                .into_iter()
                .find_map(|name| Some(fields.remove(name)?.as_str()?.to_owned())),
            _ => None,
        };
        texts.extend(text);
    }
    texts
}

/// Reads entries such as `3. text`, `3) text` or `- text`. An entry ends at an empty line; other
/// lines are dropped.
fn parse_numbered_texts(text: &str) -> Vec<String> {
    let (mut entries, mut is_open): (Vec<String>, bool) = (Vec::new(), false);
    let is_numbered = text.lines().any(|line| strip_number(line).is_some());
    for line in text.lines().filter(|line| !line.trim_start().starts_with("```")) {
        let entry = if is_numbered { strip_number(line) } else { strip_bullet(line) };
        is_open = entry.is_some() || is_open && !line.trim().is_empty();
        match (entry, entries.last_mut()) {
            (Some(entry), _) => entries.push(entry.trim().to_owned()),
            (None, Some(last)) if is_open => {
                last.push('\n');
                last.push_str(line);
            }
            (None, _) => {}
        }
    }
    entries.iter().map(|entry| strip_quotes(entry.trim()).to_owned()).collect()
}

fn strip_number(line: &str) -> Option<&str> {
    let line = line.trim_start().trim_start_matches("**");
    let rest = line.trim_start_matches(|sign: char| sign.is_ascii_digit());
    let has_number = (1..=4).contains(&(line.len() - rest.len()));
    let rest = rest.strip_prefix(['.', ')', ':']).filter(|_| has_number)?;
    Some(rest.trim_start_matches("**")).filter(|rest| rest.starts_with(char::is_whitespace))
}

fn strip_bullet(line: &str) -> Option<&str> {
    ["- ", "* ", "• "].into_iter().find_map(|bullet| line.strip_prefix(bullet))
}

/// Removes quotes around the whole text.
fn strip_quotes(text: &str) -> &str {
    let inner = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    inner.filter(|inner| !inner.contains('"')).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn reply(choice: Value) -> ChatReply {
        let body = json!({ "choices": [choice], "usage": { "total_tokens": 9 } });
        ChatReply::parse(body.to_string().as_bytes())
    }

    #[test]
    fn an_answer_is_its_text_without_thoughts_or_the_reason_why_there_is_none() {
        let text = |content: &str| reply(json!({ "message": { "content": content } })).text;
        assert_eq!(text(" yes "), Ok("yes".to_owned()));
        assert_eq!(text("<think>well…</think>\nyes"), Ok("yes".to_owned()));
        assert_eq!(text("<think>well…"), Ok(String::new()));
        let cut = reply(json!({ "message": { "content": "y" }, "finish_reason": "length" }));
        assert!(cut.is_cut && cut.tokens == 9);
        for (choice, why) in [
            (json!({ "message": { "content": null } }), "no text"),
            (json!({ "message": { "refusal": "no", "content": null } }), "refused"),
            (
                json!({ "message": { "content": "x" }, "finish_reason": "content_filter" }),
                "filtered",
            ),
            (json!({ "message": { "content": [1] } }), "not a chat completion"),
        ] {
            assert_eq!(reply(choice).text, Err(why.to_owned()));
        }
        assert_eq!(ChatReply::parse(b"<html>").text, Err("not a chat completion".to_owned()));
        assert_eq!(ChatReply::parse(b"{\"choices\":[]}").text, Err("no choices".to_owned()));
        assert_eq!(ChatReply::parse(&[b'['; 4000]).tokens, 1001, "estimated");
    }

    #[test]
    fn prompts_are_found_in_every_usual_form_of_a_list() {
        for text in [
            r#"["one", "two?"]"#,
            "Here are [2] prompts:\n```json\n[\n  \"one\",\n  \"two?\"\n]\n```\nEnjoy!",
            r#"{"prompts": ["one", "two?"]}"#,
            r#"[{"prompt": "one", "n": 1}, {"question": "two?"}, 7, null, ""]"#,
            r#"["one", "two?", "cut of"#,
            r#"["one", "two?" oops]"#,
            "Sure:\n\n1. one\n\n2. \"two?\"\n\nTell me if you want more.",
            "1) one\n2) two?",
            "**1.** one\n**2.** two?",
            "- one\n- two?",
        ] {
            assert_eq!(parse_prompt_list(text, 10), ["one", "two?"], "{text}");
        }
        let continued = "1. Explain:\n   a [list](x) of 3\n2. two?";
        assert_eq!(parse_prompt_list(continued, 10)[0], "Explain:\n   a [list](x) of 3");
        for text in ["", "I cannot do that.", "[", "[]", "{\"a\": [1, 2]}", "3.14 is pi"] {
            assert_eq!(parse_prompt_list(text, 10), [""; 0], "{text}");
        }
    }

    #[test]
    fn long_answers_are_bounded() {
        let many = json!(vec!["x"; 1000]).to_string();
        assert_eq!(parse_prompt_list(&many, 10).len(), 10);
        let long = json!(["y".repeat(PROMPT_BYTES_MAX + 1), "z"]).to_string();
        assert_eq!(parse_prompt_list(&long, 10), ["z"]);
        assert_eq!(parse_prompt_list(&"[".repeat(100_000), 10), [""; 0]);
        assert_eq!(parse_prompt_list(&"\n[".repeat(100_000), 10), [""; 0]);
    }
}
