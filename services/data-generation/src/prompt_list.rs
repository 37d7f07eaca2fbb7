//! Reads lists of prompts that a chat model wrote. Their text is hostile: anything may be in it, of
//! any length.

use serde_json::Value;

/// A longer prompt is dropped.
const PROMPT_BYTES_MAX: usize = 16 * 1024;

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

/// Maximum number of brackets that are tried as the beginning of a list.
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
