//! Asking a tracker over HTTP.

use std::time::Duration;

use reqwest::{Client, RequestBuilder, StatusCode, Url, redirect::Policy};
use serde_json::Value;

use crate::SinkError;

const CONNECT_LIMIT: Duration = Duration::from_secs(10);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Of what a tracker says when it refuses.
const WORDS_MAX: usize = 500;

/// # Errors
/// When this machine cannot speak TLS.
pub(crate) fn client() -> Result<Client, SinkError> {
    // One that is sent on would arrive as another request, without what it brought.
    let client = Client::builder().redirect(Policy::none());
    let client = client.connect_timeout(CONNECT_LIMIT).timeout(ANSWER_LIMIT).build();
    client.map_err(|error| SinkError::Never { what: "speak HTTP".into(), why: wire::chain(&error) })
}

/// A place below the address that somebody gave.
pub(crate) fn below(url: &Url, path: &str) -> Url {
    let mut place = url.clone();
    place.set_path(&format!("{}/{path}", url.path().trim_end_matches('/')));
    place
}

/// With a token, where there is one.
pub(crate) fn bearing(request: RequestBuilder, token: Option<&str>) -> RequestBuilder {
    match token {
        Some(token) => request.bearer_auth(token),
        None => request,
    }
}

/// The answer's JSON.
pub(crate) async fn json(what: &str, request: RequestBuilder) -> Result<Value, SinkError> {
    let text = answer(what, request).await?;
    serde_json::from_str(&text).map_err(|_| SinkError::Never {
        what: what.to_owned(),
        why: "its answer is no JSON; is that the right address?".into(),
    })
}

/// What it is answered with, where that went well.
pub(crate) async fn answer(what: &str, request: RequestBuilder) -> Result<String, SinkError> {
    let later = |error: reqwest::Error| SinkError::Later {
        what: what.to_owned(),
        why: wire::chain(&error.without_url()),
    };
    let answer = request.send().await.map_err(later)?;
    let status = answer.status();
    let text = answer.text().await.map_err(later)?;
    if status.is_success() {
        return Ok(text);
    }
    let mut why = format!("it answered {status}: {}", text.trim());
    why.truncate(why.floor_char_boundary(WORDS_MAX));
    let what = what.to_owned();
    Err(if may_pass(status) {
        SinkError::Later { what, why }
    } else {
        SinkError::Never { what, why }
    })
}

fn may_pass(status: StatusCode) -> bool {
    status.is_server_error()
        || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
}
