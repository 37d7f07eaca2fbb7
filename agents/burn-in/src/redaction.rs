//! Removes the names of a box and its owner from a report.

use serde_json::Value;

/// Shorter names occur in other words.
const NAME_CHARS_MIN: usize = 3;

/// Names that reveal whose box it is. An empty name is not replaced.
#[derive(Debug, Clone, Default)]
pub struct PrivateNames {
    pub host: String,
    pub user: String,
    /// The home directory.
    pub home: String,
}

impl PrivateNames {
    /// Replaces the names in all strings of a document: the home directory by `~`, the others by
    /// `<host>` and `<user>`. Keys are left as they are. The user `root` is on every box.
    pub(crate) fn redact_document(&self, document: &mut Value) {
        match document {
            Value::String(text) => *text = self.redact_text(text),
            Value::Array(values) => values.iter_mut().for_each(|it| self.redact_document(it)),
            Value::Object(fields) => fields.values_mut().for_each(|it| self.redact_document(it)),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn redact_text(&self, text: &str) -> String {
        let home = self.home.trim_end_matches('/');
        let text = replace_name(text, home, "~");
        let text = replace_name(&text, &self.host, "<host>");
        if self.user == "root" { text } else { replace_name(&text, &self.user, "<user>") }
    }
}

/// Replaces a name where it is not a part of a longer word.
fn replace_name(text: &str, name: &str, by: &str) -> String {
    if name.chars().count() < NAME_CHARS_MIN {
        return text.to_owned();
    }
    let is_word = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == '-';
    let (mut replaced, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(name) {
        let (before, found) = rest.split_at(at);
        let after = &found[name.len()..];
        let joined = before.chars().next_back().or(replaced.chars().next_back());
        let begins_word = name.starts_with('/') || !joined.is_some_and(is_word);
        let is_whole = begins_word && !after.chars().next().is_some_and(is_word);
        replaced.push_str(before);
        replaced.push_str(if is_whole { by } else { name });
        rest = after;
    }
    replaced + rest
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_replaced_as_words_in_every_string() {
        let names =
            PrivateNames { host: "halo".into(), user: "anna".into(), home: "/home/anna/".into() };
        let mut document = json!({
            "python": "/home/anna/venv/bin/python",
            "stages": [{ "reason": "halo: anna may not; /home/annabel/x, annas and halo-forge" }],
            "seconds": 3.5,
        });
        names.redact_document(&mut document);
        let expected = json!({
            "python": "~/venv/bin/python",
            "stages": [{
                "reason": "<host>: <user> may not; /home/annabel/x, annas and halo-forge",
            }],
            "seconds": 3.5,
        });
        assert_eq!(document, expected);
    }

    #[test]
    fn short_and_common_names_are_kept() {
        let names = PrivateNames { host: "ai".into(), user: "root".into(), home: String::new() };
        let mut document = json!("ai said that root may");
        names.redact_document(&mut document);
        assert_eq!(document, json!("ai said that root may"));
    }
}
