//! The reasons why the hub did not deliver or accept a file.

use std::{fmt, io, time::Duration};

use reqwest::StatusCode;

/// The longest time without data.
pub(crate) const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) type BoxedError = Box<dyn std::error::Error + Send + Sync>;

/// The reason why the hub did not deliver or accept a file.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("HF_HUB_OFFLINE is set, so the hub is not asked (H101)")]
    Offline,
    #[error("set up the hub's client; check HF_ENDPOINT, HF_TOKEN and HF_HOME (H102)")]
    Settings(#[source] BoxedError),
    /// Or hidden from this token.
    #[error("the hub has no {what} (or HF_TOKEN may not see it) (H103)")]
    Missing {
        what: String,
        #[source]
        source: HubAnswerError,
    },
    #[error(
        "the hub refuses {what}: accept the model's licence on its page, and set HF_TOKEN (H104)"
    )]
    Refused {
        what: String,
        #[source]
        source: HubAnswerError,
    },
    #[error("the hub sent nothing of {what} for {} s (H105)", SILENCE_TIMEOUT.as_secs())]
    Silent { what: String },
    #[error("fetch {what} from the hub (H105)")]
    Failed {
        what: String,
        #[source]
        source: BoxedError,
    },
    #[error("upload {what} to the hub; HF_TOKEN needs the right to write there (H107)")]
    Upload {
        what: String,
        #[source]
        source: BoxedError,
    },
}

impl HubError {
    /// Returns true if the same call may succeed later without a change by the user.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Silent { .. } => true,
            Self::Failed { source, .. } | Self::Upload { source, .. } => {
                !source.downcast_ref::<HubAnswerError>().is_some_and(HubAnswerError::is_final)
            }
            _ => false,
        }
    }

    pub(crate) fn for_download(what: &str, error: RequestError) -> Self {
        let what = what.to_owned();
        match error {
            RequestError::Silent => Self::Silent { what },
            RequestError::Answer(source) if source.is_missing() => Self::Missing { what, source },
            RequestError::Answer(source) if source.is_refusal() => Self::Refused { what, source },
            error => Self::Failed { what, source: error.into_source() },
        }
    }

    pub(crate) fn for_upload(what: &str, error: RequestError) -> Self {
        Self::Upload { what: what.to_owned(), source: error.into_source() }
    }
}

/// An answer of the hub that is not a success. It is the cause of a [`HubError`], which has a code.
#[derive(Debug)]
pub struct HubAnswerError {
    pub status: u16,
    /// The header `X-Error-Code`, such as `EntryNotFound`; empty if absent.
    pub code: String,
    /// The hub's explanation; empty if it gave none.
    pub message: String,
}

impl fmt::Display for HubAnswerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { status, code, message } = self;
        write!(f, "the hub answered {status}")?;
        let mut details = [code, message].into_iter().filter(|text| !text.is_empty());
        details.try_for_each(|text| write!(f, ": {text}"))
    }
}

impl std::error::Error for HubAnswerError {}

impl HubAnswerError {
    fn is_missing(&self) -> bool {
        match self.code.as_str() {
            "RepoNotFound" | "RevisionNotFound" | "EntryNotFound" => true,
            "GatedRepo" => false,
            // The hub also answers 401 for a repository that does not exist.
            _ => match self.status {
                401 => self.message != "Invalid credentials in Authorization header",
                status => status == 404,
            },
        }
    }

    fn is_refusal(&self) -> bool {
        self.code == "GatedRepo" || [401, 403].contains(&self.status)
    }

    fn is_final(&self) -> bool {
        StatusCode::from_u16(self.status).is_ok_and(|status| {
            status.is_client_error()
                && ![StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&status)
        })
    }
}

/// The reason why one request to the hub failed.
#[derive(Debug)]
pub(crate) enum RequestError {
    Answer(HubAnswerError),
    Silent,
    Other(BoxedError),
}

impl RequestError {
    pub(crate) fn is_transient(&self) -> bool {
        !matches!(self, Self::Answer(answer) if answer.is_final())
    }

    fn into_source(self) -> BoxedError {
        match self {
            Self::Answer(answer) => answer.into(),
            Self::Silent => {
                format!("the hub did nothing for {} s", SILENCE_TIMEOUT.as_secs()).into()
            }
            Self::Other(source) => source,
        }
    }
}

impl From<reqwest::Error> for RequestError {
    fn from(error: reqwest::Error) -> Self {
        // An address may be signed, and its signature is a secret.
        Self::Other(error.without_url().into())
    }
}

impl From<io::Error> for RequestError {
    fn from(error: io::Error) -> Self {
        Self::Other(error.into())
    }
}

impl From<&str> for RequestError {
    fn from(text: &str) -> Self {
        Self::Other(text.into())
    }
}

impl From<String> for RequestError {
    fn from(text: String) -> Self {
        Self::Other(text.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_says_whether_a_file_is_missing_or_refused() {
        let invalid = "Invalid credentials in Authorization header";
        for (status, code, message, kind) in [
            (404, "EntryNotFound", "", "missing"),
            (404, "RevisionNotFound", "", "missing"),
            (401, "RepoNotFound", "", "missing"),
            (401, "", "", "missing"),
            (404, "", "", "missing"),
            (401, "GatedRepo", "", "refused"),
            (403, "GatedRepo", "", "refused"),
            (403, "", "", "refused"),
            (401, "", invalid, "refused"),
            (400, "", "", "final"),
            (408, "", "", "transient"),
            (429, "", "", "transient"),
            (503, "", "", "transient"),
        ] {
            let answer = HubAnswerError { status, code: code.into(), message: message.into() };
            let error = HubError::for_download("it", RequestError::Answer(answer));
            let found = match &error {
                HubError::Missing { .. } => "missing",
                HubError::Refused { .. } => "refused",
                error if error.is_transient() => "transient",
                _ => "final",
            };
            assert_eq!(found, kind, "{status} {code} {message}");
        }
    }
}
