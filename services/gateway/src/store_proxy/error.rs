//! The errors of the store proxy: each has a status that shows whether to retry, and a message for
//! the user.

use axum::{
    body::Body,
    http::{
        HeaderValue, Response, StatusCode,
        header::{CONTENT_TYPE, RETRY_AFTER},
    },
};
use store::{ReceiveError, StorageError};
use wire::format_error_chain;

use super::{permissions::StoreAccessDenied, request::StoreRequestError};

#[derive(Debug, thiserror::Error)]
pub(super) enum StoreProxyError {
    #[error(transparent)]
    Request(#[from] StoreRequestError),
    #[error("no bearer: send `authorization: Bearer …` from credentials of this fleet (K101)")]
    Unauthenticated,
    #[error(transparent)]
    Denied(#[from] StoreAccessDenied),
    #[error("{key} is already committed and cannot change (G110)")]
    Committed { key: String },
    #[error("{key} is a manifest: send it in one piece (G110)")]
    ManifestInParts { key: String },
    #[error("{key} is a manifest or named by its digest: send its bytes (G110)")]
    Copy { key: String },
    #[error("range not satisfiable: the object has {size} bytes (G110)")]
    Range { size: u64 },
    #[error(
        "too many transfers: the limit is {transfers}, and {own} of one member; try again later \
         (G104)"
    )]
    Busy { transfers: usize, own: usize },
    #[error("the store did not answer in {seconds} s (S105)")]
    TimedOut { seconds: u64 },
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    #[error("invalid store request: {0} (G110)")]
    InvalidBody(String),
}

impl StoreProxyError {
    fn status_code(&self) -> StatusCode {
        match self {
            Self::Request(StoreRequestError::NoLength) => StatusCode::LENGTH_REQUIRED,
            Self::Request(StoreRequestError::Invalid(_)) | Self::InvalidBody(_) => {
                StatusCode::BAD_REQUEST
            }
            Self::ManifestInParts { .. } | Self::Copy { .. } => StatusCode::BAD_REQUEST,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
            Self::Denied(_) => StatusCode::FORBIDDEN,
            Self::Committed { .. } => StatusCode::CONFLICT,
            Self::Range { .. } => StatusCode::RANGE_NOT_SATISFIABLE,
            Self::Busy { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::TimedOut { .. } => StatusCode::GATEWAY_TIMEOUT,
            Self::Storage(fault) | Self::Receive(ReceiveError::Storage(fault)) => {
                storage_status(fault)
            }
            Self::Receive(error) => receive_status(error),
        }
    }

    /// Omits details of a failed store, as its address is not for clients; the log has them.
    fn user_message(&self) -> String {
        match self {
            Self::Storage(fault) | Self::Receive(ReceiveError::Storage(fault)) => match fault {
                StorageError::Missing { .. } => "no such object".to_owned(),
                StorageError::Full { .. } => "the store has no space left".to_owned(),
                StorageError::Denied { .. } => {
                    "the store denies the gateway access: see the gateway's log".to_owned()
                }
                StorageError::Refused { .. } | StorageError::Failed { .. } => {
                    "the gateway cannot reach the store, or the store failed: see the gateway's log"
                        .to_owned()
                }
            },
            other => other.to_string(),
        }
    }

    /// Logs the error and answers in plain text.
    pub(super) fn into_response(self) -> Response<Body> {
        let status = self.status_code();
        if status.is_server_error() {
            tracing::warn!(%status, error = format_error_chain(&self), "store request refused");
        } else {
            tracing::debug!(%status, error = %self, "store request refused");
        }
        let mut response = Response::new(Body::from(self.user_message()));
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

fn storage_status(fault: &StorageError) -> StatusCode {
    match fault {
        StorageError::Missing { .. } => StatusCode::NOT_FOUND,
        StorageError::Full { .. } => StatusCode::INSUFFICIENT_STORAGE,
        // The store denies the gateway, not the caller.
        StorageError::Denied { .. } | StorageError::Refused { .. } => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
        StorageError::Failed { .. } => StatusCode::BAD_GATEWAY,
    }
}

fn receive_status(error: &ReceiveError) -> StatusCode {
    match error {
        ReceiveError::Storage(fault) => storage_status(fault),
        ReceiveError::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
        ReceiveError::Size { .. } | ReceiveError::Differs { .. } => StatusCode::BAD_REQUEST,
        ReceiveError::NoUpload | ReceiveError::Completing => StatusCode::CONFLICT,
        ReceiveError::TooManyUploads | ReceiveError::TooManyBytes { .. } => {
            StatusCode::TOO_MANY_REQUESTS
        }
        ReceiveError::Busy => StatusCode::SERVICE_UNAVAILABLE,
        ReceiveError::Broken(_) => StatusCode::REQUEST_TIMEOUT,
        ReceiveError::Io(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
