//! Connect's error objects, and the HTTP statuses that Connect assigns to gRPC's codes.

use data_encoding::BASE64_NOPAD;
use prost::Message;
use serde_json::{Value, json};
use tonic::{Code, Status, codegen::http::StatusCode};
use tonic_types::pb::ErrorInfo;
use wire::ErrorCode;

use crate::status::{ERROR_DOMAIN, code_name};

/// Returns Connect's error object.
pub(super) fn to_error_json(status: &Status) -> Value {
    let mut error = json!({ "code": code_name(status.code()), "message": status.message() });
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
