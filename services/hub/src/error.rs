//! The reasons why the hub did not deliver or accept a file.

use std::{fmt, io, time::Duration};

use bounded_http::{PACE_BYTES_MIN, PACE_INTERVAL};
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
    #[error("{what} was renamed to {name}; push to that name (H103)")]
    Renamed { what: String, name: String },
    #[error("{what} has {bytes} bytes, the limit is {limit} (D105)")]
    TooLarge { what: String, bytes: u64, limit: u64 },
    /// Or hidden from this token.
    #[error("the hub has no {what} (or HF_TOKEN may not see it) (H103)")]
    Missing {
        what: String,
        #[source]
        source: HubAnswerError,
    },
    #[error("the hub refuses {what}: accept its licence on its page, and set HF_TOKEN (H104)")]
    Refused {
        what: String,
        #[source]
        source: HubAnswerError,
    },
    #[error("the hub sent nothing of {what} for {} s (H105)", SILENCE_TIMEOUT.as_secs())]
    Silent { what: String },
    #[error(
        "the hub sent less than {PACE_BYTES_MIN} bytes of {what} in {} s (H105)",
        PACE_INTERVAL.as_secs()
    )]
    Slow { what: String },
    #[error("fetch {what} from the hub (H105)")]
    Failed {
        what: String,
        #[source]
        source: BoxedError,
    },
    #[error("upload {what} to the hub; try again: what it has is not sent again (H107)")]
    Upload {
        what: String,
        #[source]
        source: BoxedError,
    },
    #[error(
        "there is no token for the hub; make one with the right to write, and set HF_TOKEN or run \
         `hf auth login` (H108)"
    )]
    NoToken,
    #[error(
        "the hub does not know the token that would write {what}; set HF_TOKEN to a valid one (H108)"
    )]
    UnknownToken {
        what: String,
        #[source]
        source: HubAnswerError,
    },
    #[error(
        "the token may not write {what}; use one with the right to write to this namespace (H109)"
    )]
    NotPermitted {
        what: String,
        #[source]
        source: HubAnswerError,
    },
    #[error(
        "the hub has no room for {what}; remove files or old revisions there, or buy storage (H110)"
    )]
    NoRoom {
        what: String,
        #[source]
        source: HubAnswerError,
    },
    #[error(
        "{what} got another commit meanwhile, and was left as it is; look at it, and push again \
         (H111)"
    )]
    Conflict { what: String },
    #[error("{what} is public; make it private on the hub, or push without --private (H112)")]
    Public { what: String },
}

impl HubError {
    /// Returns true if the same call may succeed later without a change by the user.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Silent { .. } | Self::Slow { .. } => true,
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
            RequestError::Slow => Self::Slow { what },
            RequestError::Answer(source) if source.is_missing() => Self::Missing { what, source },
            RequestError::Answer(source) if source.is_refusal() => Self::Refused { what, source },
            error => Self::Failed { what, source: error.into_source() },
        }
    }

    pub(crate) fn for_upload(what: &str, error: RequestError) -> Self {
        let what = what.to_owned();
        match error {
            RequestError::Conflict => Self::Conflict { what },
            RequestError::Public => Self::Public { what },
            RequestError::Answer(source) if source.is_out_of_room() => {
                Self::NoRoom { what, source }
            }
            RequestError::Answer(source) => match source.status {
                401 => Self::UnknownToken { what, source },
                403 => Self::NotPermitted { what, source },
                300..=399 | 404 => Self::Missing { what, source },
                _ => Self::Upload { what, source: source.into() },
            },
            error => Self::Upload { what, source: error.into_source() },
        }
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
    pub(crate) fn is_missing(&self) -> bool {
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

    /// Returns true if a quota of storage is used up. The hub has no code for it.
    fn is_out_of_room(&self) -> bool {
        let message = self.message.to_lowercase();
        let names_quota = ["storage", "quota", "limit"].iter().any(|word| message.contains(word));
        match self.status {
            402 | 507 => true,
            403 | 413 => names_quota,
            _ => false,
        }
    }

    fn is_final(&self) -> bool {
        StatusCode::from_u16(self.status).is_ok_and(|status| {
            let is_busy =
                [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&status);
            status.is_redirection() || (status.is_client_error() && !is_busy)
        })
    }
}

/// The reason why one request to the hub failed.
#[derive(Debug)]
pub(crate) enum RequestError {
    Answer(HubAnswerError),
    Silent,
    /// Its answer came too slowly.
    Slow,
    /// The innermost cause of a failed connection.
    Network(String),
    /// The branch has another commit than the one that a push follows.
    Conflict,
    /// The repository is public and should be private.
    Public,
    Other(BoxedError),
}

impl RequestError {
    pub(crate) fn is_transient(&self) -> bool {
        !matches!(self, Self::Answer(answer) if answer.is_final())
    }

    /// Returns true if the network or the hub failed, rather than this machine or the request.
    pub(crate) fn is_worth_retrying(&self) -> bool {
        match self {
            Self::Answer(answer) => !answer.is_final(),
            Self::Silent | Self::Slow | Self::Network(_) => true,
            Self::Conflict | Self::Public | Self::Other(_) => false,
        }
    }

    fn into_source(self) -> BoxedError {
        match self {
            Self::Answer(answer) => answer.into(),
            Self::Conflict => "the branch has another commit".into(),
            Self::Public => "the repository is public".into(),
            Self::Silent => {
                format!("the hub did nothing for {} s", SILENCE_TIMEOUT.as_secs()).into()
            }
            Self::Slow => "the hub's answer came too slowly".into(),
            Self::Network(cause) => cause.into(),
            Self::Other(source) => source,
        }
    }
}

impl From<reqwest::Error> for RequestError {
    fn from(error: reqwest::Error) -> Self {
        // An address may be signed, and its signature is a secret.
        let error = error.without_url();
        let mut cause: &dyn std::error::Error = &error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        Self::Network(cause.to_string())
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
            (307, "", "", "final"),
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

    #[test]
    fn a_refused_upload_names_its_remedy() {
        for (status, message, code) in [
            (401, "Invalid credentials in Authorization header", "(H108)"),
            (403, "You don't have the rights to create a model under the namespace", "(H109)"),
            (403, "Private repository storage limit reached", "(H110)"),
            (402, "", "(H110)"),
            (404, "", "(H103)"),
            (307, "it is at /org/newer now", "(H103)"),
            (429, "", "(H107)"),
            (503, "", "(H107)"),
        ] {
            let answer = HubAnswerError { status, code: String::new(), message: message.into() };
            let error = HubError::for_upload("org/new", RequestError::Answer(answer));
            let text = error.to_string();
            assert!(text.contains(code) && text.contains("org/new"), "{status}: {text}");
            assert_eq!(error.is_transient(), status == 429 || status == 503, "{status}");
        }
    }
}
