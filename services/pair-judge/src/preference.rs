//! Reads the replies of a judge. Only three words are preferences.

use serde_json::{Map, Value};

/// The field with the preference.
const BETTER_FIELD: &str = "better";

/// Characters of a reply that an error quotes.
const EXCERPT_CHARS_MAX: usize = 200;

/// The better one of two answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Preference {
    First,
    Second,
    Tie,
}

/// Reads `{"better": "first"}`, `"second"` or `"tie"`. Other fields are ignored.
pub(crate) fn parse_object(reply: &Map<String, Value>) -> Result<Preference, String> {
    match reply.get(BETTER_FIELD).and_then(Value::as_str) {
        Some("first") => Ok(Preference::First),
        Some("second") => Ok(Preference::Second),
        Some("tie") => Ok(Preference::Tie),
        _ => Err(describe_reply(&Value::Object(reply.clone()).to_string())),
    }
}

/// Reads a text that consists of such an object, alone or in one code block.
pub(crate) fn parse_text(text: &str) -> Result<Preference, String> {
    let parsed: Option<Map<String, Value>> = serde_json::from_str(strip_fence(text)).ok();
    parsed.and_then(|reply| parse_object(&reply).ok()).ok_or_else(|| describe_reply(text))
}

/// Removes the fence of a code block that is the whole text.
fn strip_fence(text: &str) -> &str {
    let text = text.trim();
    let inner = text.strip_prefix("```").and_then(|rest| rest.strip_suffix("```"));
    inner.map_or(text, |inner| inner.strip_prefix("json").unwrap_or(inner).trim())
}

fn describe_reply(reply: &str) -> String {
    let excerpt: String = reply.trim().chars().take(EXCERPT_CHARS_MAX).collect();
    format!("its reply has no \"better\" that is first, second or tie: {excerpt}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preference_is_one_of_three_words_in_an_object() {
        for (text, expected) in [
            (r#"{"better": "first"}"#, Preference::First),
            (r#" {"reason": "shorter", "better": "second"} "#, Preference::Second),
            ("```json\n{\"better\": \"tie\"}\n```", Preference::Tie),
            ("```\n{\"better\": \"tie\"}\n```\n", Preference::Tie),
        ] {
            assert_eq!(parse_text(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn every_other_reply_is_unreadable() {
        for text in [
            "",
            "first",
            "The first one. {\"better\": \"first\"}",
            "{\"better\": \"first\"} {\"better\": \"second\"}",
            r#"{"better": "First"}"#,
            r#"{"better": "first or second"}"#,
            r#"{"better": 1}"#,
            r#"{"better": ["first"]}"#,
            r#"["first"]"#,
            r#"{"best": "first"}"#,
            "```json\n{\"better\": \"tie\"}",
            "``````",
        ] {
            let problem = parse_text(text).unwrap_err();
            assert!(problem.contains("no \"better\""), "{text}: {problem}");
        }
        assert!(parse_text(&"x".repeat(9999)).unwrap_err().len() < 300);
    }
}
