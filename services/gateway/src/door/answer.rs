//! What is answered when something is not done: a status that says whether to come again, and a
//! sentence for the person who reads it.

use axum::{
    body::Body,
    http::{
        HeaderValue, Response, StatusCode,
        header::{CONTENT_TYPE, RETRY_AFTER},
    },
};
use store::{Fault, ReceiveError};
use wire::chain;

use super::{ask::AskError, rights::Denied};

#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error("show who you are: `authorization: Bearer …`, from a kit of this fleet (K101)")]
    Stranger,
    #[error(transparent)]
    Denied(#[from] Denied),
    #[error("{key} is committed and stays as it is (G110)")]
    Committed { key: String },
    #[error("{key} is a manifest: send it in one piece (G110)")]
    Parts { key: String },
    #[error("the object has {size} bytes, and none of those asked for (G110)")]
    Range { size: u64 },
    #[error("{transfers} transfers are under way, which is the most; try again (G104)")]
    Busy { transfers: usize },
    #[error("the store did not answer in {seconds} s (S105)")]
    Slow { seconds: u64 },
    #[error(transparent)]
    Fault(#[from] Fault),
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    #[error("what was sent is not what the store's protocol has: {0} (G110)")]
    Body(String),
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::Ask(AskError::Length) => StatusCode::LENGTH_REQUIRED,
            Self::Ask(AskError::Wrong(_)) | Self::Body(_) | Self::Parts { .. } => {
                StatusCode::BAD_REQUEST
            }
            Self::Stranger => StatusCode::UNAUTHORIZED,
            Self::Denied(_) => StatusCode::FORBIDDEN,
            Self::Committed { .. } => StatusCode::CONFLICT,
            Self::Range { .. } => StatusCode::RANGE_NOT_SATISFIABLE,
            Self::Busy { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Slow { .. } => StatusCode::GATEWAY_TIMEOUT,
            Self::Fault(fault) | Self::Receive(ReceiveError::Fault(fault)) => of_fault(fault),
            Self::Receive(error) => of_receive(error),
        }
    }

    /// The whole chain where the store itself is at fault; its address is ours to know.
    fn sentence(&self) -> String {
        match self {
            Self::Fault(fault) | Self::Receive(ReceiveError::Fault(fault)) => match fault {
                Fault::Missing { .. } => "there is no such object".to_owned(),
                Fault::Full { .. } => "the store has no space left".to_owned(),
                Fault::Denied { .. } => {
                    "the store refuses the gateway: its log says more".to_owned()
                }
                Fault::Refused { .. } | Fault::Failed { .. } => {
                    "the gateway cannot reach the store, or it failed: its log says more".to_owned()
                }
            },
            other => other.to_string(),
        }
    }

    pub(super) fn into_response(self) -> Response<Body> {
        let status = self.status();
        if status.is_server_error() {
            tracing::warn!(%status, error = chain(&self), "the store's door refused");
        } else {
            tracing::debug!(%status, error = %self, "the store's door refused");
        }
        let mut response = Response::new(Body::from(self.sentence()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if let Self::Range { size } = self
            && let Ok(value) = HeaderValue::from_str(&format!("bytes */{size}"))
        {
            headers.insert(axum::http::header::CONTENT_RANGE, value);
        }
        response
    }
}

fn of_fault(fault: &Fault) -> StatusCode {
    match fault {
        Fault::Missing { .. } => StatusCode::NOT_FOUND,
        Fault::Full { .. } => StatusCode::INSUFFICIENT_STORAGE,
        // Of the gateway, not of the caller.
        Fault::Denied { .. } | Fault::Refused { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        Fault::Failed { .. } => StatusCode::BAD_GATEWAY,
    }
}

fn of_receive(error: &ReceiveError) -> StatusCode {
    match error {
        ReceiveError::Fault(fault) => of_fault(fault),
        ReceiveError::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
        ReceiveError::Size { .. } | ReceiveError::Differs { .. } => StatusCode::BAD_REQUEST,
        ReceiveError::NoUpload => StatusCode::CONFLICT,
        ReceiveError::Busy => StatusCode::SERVICE_UNAVAILABLE,
        ReceiveError::Broken(_) => StatusCode::REQUEST_TIMEOUT,
        ReceiveError::Io(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
