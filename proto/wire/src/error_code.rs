//! Stable error codes such as `B102`, each documented in docs/ERRORS.md.
//!
//! An error message contains its code in parentheses. The code therefore travels with the message
//! through logs, facts and RPC statuses, and stays valid when the wording changes.

use std::{error::Error, fmt, io, str};

/// An error code: one capital letter for the subject area and three digits, for example `S103`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ErrorCode([u8; 4]);

impl ErrorCode {
    /// The code of a failed job whose message contains no code.
    pub const UNCODED_JOB_FAILURE: Self = Self(*b"E100");
    /// The code of any other error whose message contains no code.
    pub const UNCODED_ERROR: Self = Self(*b"X100");

    /// Parses a bare code without parentheses.
    pub fn parse(text: &str) -> Option<Self> {
        let code: [u8; 4] = text.as_bytes().try_into().ok()?;
        let [letter, digits @ ..] = code;
        let is_one = letter.is_ascii_uppercase() && digits.iter().all(u8::is_ascii_digit);
        is_one.then_some(Self(code))
    }

    /// Finds the first code in parentheses, such as `(B104)`; codes further to the right belong to
    /// the causes.
    pub fn find_in_text(text: &str) -> Option<Self> {
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

    /// Finds the first code in the messages of the error and its sources; otherwise one derived
    /// from the kind of an [`io::Error`] in the chain.
    pub fn from_error(error: &(dyn Error + 'static)) -> Option<Self> {
        let chain = || std::iter::successors(Some(error), |&error| error.source());
        let code = chain().find_map(|error| Self::find_in_text(&error.to_string()));
        code.or_else(|| chain().find_map(|error| error.downcast_ref().map(Self::from_io_error)))
    }

    /// Maps an I/O error: `F101` not found, `F102` no permission, `F103` disk full, `F104` all
    /// others.
    fn from_io_error(error: &io::Error) -> Self {
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
        // A code contains only ASCII bytes.
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
        ErrorCode::find_in_text(text).map(|code| code.to_string())
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
        let code = |error: &Outer| ErrorCode::from_error(error).map(|code| code.to_string());
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        assert_eq!(code(&Outer::Plain(full())).as_deref(), Some("F103"));
        assert_eq!(code(&Outer::Coded(full())).as_deref(), Some("S103"));
        let within = Outer::Plain(io::Error::other("not there (S104)"));
        assert_eq!(code(&within).as_deref(), Some("S104"));
        assert_eq!(ErrorCode::from_error(&fmt::Error), None);
    }
}
