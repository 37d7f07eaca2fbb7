//! gRPC's codes as Connect names them, and the HTTP statuses that it gives them.

use data_encoding::BASE64_NOPAD;
use prost::Message;
use serde_json::{Value, json};
use tonic::{Code, Status, codegen::http::StatusCode};
use tonic_types::pb::ErrorInfo;
use wire::ErrorCode;

use crate::status::DOMAIN;

/// What a call that failed is answered with.
pub(super) fn error(status: &Status) -> Value {
    let mut error = json!({ "code": name(status.code()), "message": status.message() });
    if let Some(reason) = ErrorCode::in_text(status.message()) {
        let reason = reason.to_string();
        let info =
            ErrorInfo { reason: reason.clone(), domain: DOMAIN.into(), ..Default::default() };
        error["details"] = json!([{
            "type": "google.rpc.ErrorInfo",
            "value": BASE64_NOPAD.encode(&info.encode_to_vec()),
            "debug": { "reason": reason, "domain": DOMAIN },
        }]);
    }
    error
}

pub(crate) fn name(code: Code) -> &'static str {
    match code {
        // No error has it.
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

pub(super) fn http(code: Code) -> StatusCode {
    match code {
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => {
            StatusCode::BAD_REQUEST
        }
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::AlreadyExists | Code::Aborted => StatusCode::CONFLICT,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        // Of a client that closed its request; it has no name here.
        Code::Cancelled => StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::Ok | Code::Unknown | Code::Internal | Code::DataLoss => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }
}
