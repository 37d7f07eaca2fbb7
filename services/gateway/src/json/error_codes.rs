//! gRPC status codes in Connect's spelling, and the HTTP statuses that Connect assigns to them.

use data_encoding::BASE64_NOPAD;
use prost::Message;
use serde_json::{Value, json};
use tonic::{Code, Status, codegen::http::StatusCode};
use tonic_types::pb::ErrorInfo;
use wire::ErrorCode;

use crate::status::ERROR_DOMAIN;

/// Returns a failed call's status as Connect's error object.
pub(super) fn to_error_json(status: &Status) -> Value {
    let mut error = json!({ "code": connect_name(status.code()), "message": status.message() });
    if let Some(reason) = ErrorCode::find_in_text(status.message()) {
        let reason = reason.to_string();
        let info =
            ErrorInfo { reason: reason.clone(), domain: ERROR_DOMAIN.into(), ..Default::default() };
        error["details"] = json!([{
            "type": "google.rpc.ErrorInfo",
            "value": BASE64_NOPAD.encode(&info.encode_to_vec()),
            "debug": { "reason": reason, "domain": ERROR_DOMAIN },
        }]);
    }
    error
}

/// Returns Connect's name of a code.
pub(crate) fn connect_name(code: Code) -> &'static str {
    match code {
        // No error has the code `Ok`.
        Code::Ok | Code::Unknown => "unknown",
        Code::Cancelled => "canceled",
        Code::InvalidArgument => "invalid_argument",
        Code::DeadlineExceeded => "deadline_exceeded",
        Code::NotFound => "not_found",
        Code::AlreadyExists => "already_exists",
        Code::PermissionDenied => "permission_denied",
        Code::ResourceExhausted => "resource_exhausted",
        Code::FailedPrecondition => "failed_precondition",
        Code::Aborted => "aborted",
        Code::OutOfRange => "out_of_range",
        Code::Unimplemented => "unimplemented",
        Code::Internal => "internal",
        Code::Unavailable => "unavailable",
        Code::DataLoss => "data_loss",
        Code::Unauthenticated => "unauthenticated",
    }
}

/// Returns the HTTP status of a code.
pub(super) fn http_status(code: Code) -> StatusCode {
    match code {
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => {
            StatusCode::BAD_REQUEST
        }
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::AlreadyExists | Code::Aborted => StatusCode::CONFLICT,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        // 499 (client closed request) has no name in `StatusCode`.
        Code::Cancelled => StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::Ok | Code::Unknown | Code::Internal | Code::DataLoss => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }
}
