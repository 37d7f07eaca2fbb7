//! HTTP requests to a tool.

use std::time::Duration;

use bounded_http::BoundedResponse;
use reqwest::{Client, RequestBuilder, StatusCode, Url};
use serde_json::Value;

use crate::ExporterError;

const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const MESSAGE_BYTES_MAX: usize = 500;
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Creates a client that follows no redirects.
pub(crate) fn build_client() -> Result<Client, ExporterError> {
    bounded_http::client_builder().timeout(REQUEST_TIMEOUT).build().map_err(|error| {
        ExporterError::Permanent {
            what: "speak HTTP".into(),
            why: wire::format_error_chain(&error),
        }
    })
}

pub(crate) fn append_path(url: &Url, path: &str) -> Url {
    let mut place = url.clone();
    place.set_path(&format!("{}/{path}", url.path().trim_end_matches('/')));
    place
}

pub(crate) fn with_bearer(request: RequestBuilder, token: Option<&str>) -> RequestBuilder {
    match token {
        Some(token) => request.bearer_auth(token),
        None => request,
    }
}

pub(crate) async fn request_json(
    what: &str,
    request: RequestBuilder,
) -> Result<Value, ExporterError> {
    let text = request_text(what, request).await?;
    serde_json::from_str(&text).map_err(|_| ExporterError::Permanent {
        what: what.to_owned(),
        why: "its answer is not JSON; check the address".into(),
    })
}

/// Returns the body of a successful answer. `what` names the request in errors.
pub(crate) async fn request_text(
    what: &str,
    request: RequestBuilder,
) -> Result<String, ExporterError> {
    let later = |error: reqwest::Error| ExporterError::Transient {
        what: what.to_owned(),
        why: wire::format_error_chain(&error),
    };
    let answer = bounded_http::send_request(request, |_| ANSWER_BYTES_MAX).await;
    let BoundedResponse { status, body } = answer.map_err(later)?;
    let too_long = || ExporterError::Permanent {
        what: what.to_owned(),
        why: format!("it answered more than {ANSWER_BYTES_MAX} bytes"),
    };
    if status.is_success() {
        return Ok(String::from_utf8_lossy(&body.ok_or_else(too_long)?).into_owned());
    }
    let text = body.unwrap_or_default();
    let mut why = format!("it answered {status}: {}", String::from_utf8_lossy(&text).trim());
    why.truncate(why.floor_char_boundary(MESSAGE_BYTES_MAX));
    let what = what.to_owned();
    Err(if is_transient(status) {
        ExporterError::Transient { what, why }
    } else {
        ExporterError::Permanent { what, why }
    })
}

fn is_transient(status: StatusCode) -> bool {
    status.is_server_error()
        || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
}
