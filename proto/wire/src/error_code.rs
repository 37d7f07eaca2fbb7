//! What stays of an error when its words change: a code such as `B102`, a page of docs/ERRORS.md.
//!
//! A code stands in the words themselves, in parentheses. So it is in whatever carries words:
//! logs, facts, statuses of calls, what people send each other.

use std::{error::Error, fmt, io, str};

/// A capital letter, which says what it is about, and three digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ErrorCode([u8; 4]);

impl ErrorCode {
    /// Of a job that failed with words which have none.
    pub const JOB: Self = Self(*b"E100");
    /// Of an error that has none.
    pub const OTHER: Self = Self(*b"X100");

    pub fn parse(text: &str) -> Option<Self> {
        let code: [u8; 4] = text.as_bytes().try_into().ok()?;
        let [letter, digits @ ..] = code;
        let is_one = letter.is_ascii_uppercase() && digits.iter().all(u8::is_ascii_digit);
        is_one.then_some(Self(code))
    }

    /// The first: what stands further behind, or further down a chain, is why.
    pub fn in_text(text: &str) -> Option<Self> {
        let mut rest = text;
        while let Some((_, behind)) = rest.split_once('(') {
            let inside = behind.get(..4).and_then(Self::parse);
            if let Some(code) = inside.filter(|_| behind[4..].starts_with(')')) {
                return Some(code);
            }
            rest = behind;
        }
        None
    }

    /// In an error's words or those of its causes; else by what the operating system said.
    pub fn of(error: &(dyn Error + 'static)) -> Option<Self> {
        let chain = || std::iter::successors(Some(error), |&error| error.source());
        let told = chain().find_map(|error| Self::in_text(&error.to_string()));
        told.or_else(|| chain().find_map(|error| error.downcast_ref().map(Self::of_io)))
    }

    fn of_io(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Self(*b"F101"),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Self(*b"F102"),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self(*b"F103"),
            _ => Self(*b"F104"),
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // All of them are ASCII.
        f.write_str(str::from_utf8(&self.0).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Outer {
        #[error("read the log")]
        Plain(#[source] io::Error),
        #[error("the store is full (S103)")]
        Coded(#[source] io::Error),
    }

    fn code(text: &str) -> Option<String> {
        ErrorCode::in_text(text).map(|code| code.to_string())
    }

    #[test]
    fn a_code_stands_in_parentheses_and_the_first_counts() {
        assert_eq!(code("no answer (B104): because (X101)").as_deref(), Some("B104"));
        assert_eq!(code("((B104) 5 s)").as_deref(), Some("B104"));
        for none in ["", "B104", "(b104)", "(B1045)", "(B10)", "(B10ä)", "(ä", "(F16)", "(é104)"]
        {
            assert_eq!(code(none), None, "{none}");
        }
    }

    #[test]
    fn a_chain_has_the_code_of_its_outermost_words_or_of_the_system() {
        let code = |error: &Outer| ErrorCode::of(error).map(|code| code.to_string());
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        assert_eq!(code(&Outer::Plain(full())).as_deref(), Some("F103"));
        assert_eq!(code(&Outer::Coded(full())).as_deref(), Some("S103"));
        let within = Outer::Plain(io::Error::other("not there (S104)"));
        assert_eq!(code(&within).as_deref(), Some("S104"));
        assert_eq!(ErrorCode::of(&fmt::Error), None);
    }
}
