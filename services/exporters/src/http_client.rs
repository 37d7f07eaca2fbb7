//! HTTP requests to a tool.

use std::time::Duration;

use reqwest::{Client, RequestBuilder, StatusCode, Url, redirect::Policy};
use serde_json::Value;

use crate::ExporterError;

/// Longest time to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time for a request with its answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Largest size in bytes of an error message with the tool's answer.
const MESSAGE_BYTES_MAX: usize = 500;

/// Creates a client that follows no redirects.
///
/// # Errors
/// When TLS is unavailable on this machine.
pub(crate) fn build_client() -> Result<Client, ExporterError> {
    // A redirected POST would arrive as another method without its body.
    let client = Client::builder().redirect(Policy::none());
    let client = client.connect_timeout(CONNECT_TIMEOUT).timeout(REQUEST_TIMEOUT).build();
    client.map_err(|error| ExporterError::Permanent {
        what: "speak HTTP".into(),
        why: wire::format_error_chain(&error),
    })
}

/// Appends a path to the configured address.
pub(crate) fn append_path(url: &Url, path: &str) -> Url {
    let mut place = url.clone();
    place.set_path(&format!("{}/{path}", url.path().trim_end_matches('/')));
    place
}

/// Adds the bearer token to a request, if there is one.
pub(crate) fn with_bearer(request: RequestBuilder, token: Option<&str>) -> RequestBuilder {
    match token {
        Some(token) => request.bearer_auth(token),
        None => request,
    }
}

/// Sends a request and parses the answer as JSON.
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

/// Sends a request and returns the body of a successful answer. `what` names the request in errors.
pub(crate) async fn request_text(
    what: &str,
    request: RequestBuilder,
) -> Result<String, ExporterError> {
    let later = |error: reqwest::Error| ExporterError::Transient {
        what: what.to_owned(),
        why: wire::format_error_chain(&error.without_url()),
    };
    let answer = request.send().await.map_err(later)?;
    let status = answer.status();
    let text = answer.text().await.map_err(later)?;
    if status.is_success() {
        return Ok(text);
    }
    let mut why = format!("it answered {status}: {}", text.trim());
    why.truncate(why.floor_char_boundary(MESSAGE_BYTES_MAX));
    let what = what.to_owned();
    Err(if is_transient(status) {
        ExporterError::Transient { what, why }
    } else {
        ExporterError::Permanent { what, why }
    })
}

/// Returns true if a request with this status may succeed later.
fn is_transient(status: StatusCode) -> bool {
    status.is_server_error()
        || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
}
