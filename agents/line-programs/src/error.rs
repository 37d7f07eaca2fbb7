//! The reasons why a program gave no answer.

/// The kind of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineFailure {
    /// The request itself cannot be sent, to any process.
    Request,
    /// No process could be started, or it is too early to start one again.
    NotStarted,
    /// The answer did not come in time. The process was ended.
    TimedOut,
    /// The process ended, or wrote something that is not an answer and was ended.
    Broken,
    /// The process ended because of another request, or before it got this one. The same request
    /// may succeed in another process.
    Interrupted,
}

/// The reason why a request has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}{}", quote_stderr(stderr))]
pub struct LineProgramError {
    pub failure: LineFailure,
    /// A description, such as "it did not answer within 5s".
    pub problem: String,
    /// The end of what the process wrote to stderr.
    pub stderr: String,
}

impl LineProgramError {
    pub(crate) fn new(failure: LineFailure, problem: impl Into<String>) -> Self {
        Self { failure, problem: problem.into(), stderr: String::new() }
    }

    pub(crate) fn interrupted() -> Self {
        Self::new(LineFailure::Interrupted, "its process was ended because of another request")
    }
}

fn quote_stderr(stderr: &str) -> String {
    match stderr.trim() {
        "" => String::new(),
        stderr => format!(": {stderr}"),
    }
}
