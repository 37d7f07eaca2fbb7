//! The reasons why a judge gives no scores.

use bounded_http::CompletionHttpError;

/// The reason why no pair is judged, or not enough of them.
#[derive(Debug, thiserror::Error)]
pub enum JudgeError {
    /// The variable with the key of an endpoint.
    #[error("{variable} is not set; export it, or remove endpoint.key_env from the judge (R122)")]
    NoKey { variable: String },
    #[error("the judge does not answer")]
    Endpoint(#[from] CompletionHttpError),
    #[error("the judge does not run: {problem}; try command.argv with a line of JSON (R122)")]
    Command { problem: String },
    #[error("the judge has no readable preference for {pairs} pairs in a row: {problem} (R122)")]
    NoPreference { pairs: u32, problem: String },
}

/// The reason why a judge has no preference for a pair.
#[derive(Debug)]
pub(crate) enum AskError {
    /// Another try, or another pair, may succeed. A busy endpoint needs a pause before it.
    NoPreference { problem: String, is_busy: bool },
    /// The judge cannot be used for any pair.
    Unavailable(JudgeError),
}

impl AskError {
    pub(crate) fn unreadable(problem: String) -> Self {
        Self::NoPreference { problem, is_busy: false }
    }
}
