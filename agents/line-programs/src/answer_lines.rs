//! Bytes cut into lines, within a bound, and lines parsed as answers.

use serde_json::{Map, Value};

/// The field that requests and answers have in common.
pub(crate) const ID_FIELD: &str = "id";

/// Collects what a program writes and returns its complete lines.
#[derive(Debug)]
pub(crate) struct AnswerLines {
    bytes: Vec<u8>,
    /// The start of the bytes that are known to have no line end.
    searched: usize,
    line_bytes_max: usize,
}

/// A line is longer than the bound, with or without an end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LineTooLong;

impl AnswerLines {
    pub(crate) fn new(line_bytes_max: usize) -> Self {
        Self { bytes: Vec::new(), searched: 0, line_bytes_max }
    }

    /// Appends bytes. Take all lines before more are appended, so that no more than one line and
    /// these bytes are kept.
    pub(crate) fn push_bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Removes the first complete line and returns it without its end; `None` if there is none yet.
    pub(crate) fn take_line(&mut self) -> Result<Option<Vec<u8>>, LineTooLong> {
        let end = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n');
        let Some(end) = end.map(|end| self.searched + end) else {
            self.searched = self.bytes.len();
            return if self.bytes.len() > self.line_bytes_max {
                Err(LineTooLong)
            } else {
                Ok(None)
            };
        };
        if end > self.line_bytes_max {
            return Err(LineTooLong);
        }
        let rest = self.bytes.split_off(end + 1);
        let mut line = std::mem::replace(&mut self.bytes, rest);
        line.truncate(end);
        self.searched = 0;
        Ok(Some(line))
    }
}

/// Parses an answer and removes its id. The error describes the problem of the line.
pub(crate) fn parse_answer(line: &[u8]) -> Result<(u64, Map<String, Value>), String> {
    let mut answer: Map<String, Value> =
        serde_json::from_slice(line).map_err(|error| format!("not a JSON object: {error}"))?;
    match answer.remove(ID_FIELD).as_ref().and_then(Value::as_u64) {
        Some(id) => Ok((id, answer)),
        None => Err("no \"id\" that is a number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(lines: &mut AnswerLines) -> Result<Vec<String>, LineTooLong> {
        let mut all = Vec::new();
        while let Some(line) = lines.take_line()? {
            all.push(String::from_utf8(line).unwrap());
        }
        Ok(all)
    }

    #[test]
    fn lines_are_found_however_the_bytes_arrive() {
        let text = b"{\"id\":1}\n\nabc\nrest";
        for size in 1..=text.len() {
            let mut lines = AnswerLines::new(8);
            let mut all = Vec::new();
            for part in text.chunks(size) {
                lines.push_bytes(part);
                all.extend(take_all(&mut lines).unwrap());
            }
            assert_eq!(all, ["{\"id\":1}", "", "abc"], "in parts of {size}");
            lines.push_bytes(b"\n");
            assert_eq!(take_all(&mut lines).unwrap(), ["rest"]);
        }
    }

    #[test]
    fn a_line_above_the_bound_is_refused_with_and_without_an_end() {
        for (text, fits) in [("abcd", true), ("abcd\n", true), ("abcde", false), ("abcde\n", false)]
        {
            let mut lines = AnswerLines::new(4);
            lines.push_bytes(text.as_bytes());
            assert_eq!(take_all(&mut lines).is_ok(), fits, "{text:?}");
        }
    }

    #[test]
    fn an_answer_is_an_object_with_a_number() {
        let (id, answer) = parse_answer(br#"{"id": 7, "outcome": "pass"}"#).unwrap();
        assert_eq!((id, answer.len()), (7, 1));
        for wrong in ["", "7", "[]", "{}", r#"{"id": "7"}"#, r#"{"id": -1}"#, r#"{"id": 7"#] {
            assert!(parse_answer(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
