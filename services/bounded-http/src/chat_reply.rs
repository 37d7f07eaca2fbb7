//! The text in the answer of a chat model.

use serde::Deserialize;

/// Bytes of a token, for endpoints that do not count.
const TOKEN_BYTES: u64 = 4;

/// The text of a chat completion, or the reason why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatReply {
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
    pub fn refused_request(problem: String) -> Self {
        Self { text: Err(problem), is_cut: false, is_refused: true, tokens: 0 }
    }

    /// Parses the body of a chat completion.
    pub fn parse(body: &[u8]) -> Self {
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

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
}
