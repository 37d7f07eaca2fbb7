//! The HTTP client of verifiers that ask a server or a model.

use std::{sync::OnceLock, time::Duration};

use reqwest::StatusCode;
use tokio::runtime::{self, Runtime};

use crate::judge_result::JudgeResult;

/// Shorter than the keep-alive of common servers: 5 s for uvicorn, which vLLM uses.
const IDLE_TIMEOUT: Duration = Duration::from_secs(2);

/// The pause before a request is repeated doubles up to the second one.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(200);
pub(crate) const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Returns true for the status of a server that asks to come back.
pub(crate) fn is_busy(status: StatusCode) -> bool {
    [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&status)
}

/// A client whose connections outlive a request. It is started by the first request.
#[derive(Debug, Default)]
pub(crate) struct EndpointClient {
    started: OnceLock<StartedClient>,
}

/// The client, and the runtime that drives its connections.
#[derive(Debug)]
struct StartedClient {
    http: reqwest::Client,
    runtime: Runtime,
}

/// The reason why a request got no answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct EndpointError {
    pub problem: String,
    /// True if the server is not there, so that other requests would fail too.
    pub is_unreachable: bool,
}

impl EndpointError {
    /// Returns the result of a completion that was not judged because of this error. `asked` names
    /// the server.
    pub(crate) fn into_result(self, asked: &str) -> JudgeResult {
        let detail = format!("{asked}: {}", self.problem);
        match self.is_unreachable {
            true => JudgeResult::unreachable_error(detail),
            false => JudgeResult::host_error(detail),
        }
    }
}

impl From<String> for EndpointError {
    fn from(problem: String) -> Self {
        Self { problem, is_unreachable: false }
    }
}

impl From<reqwest::Error> for EndpointError {
    fn from(error: reqwest::Error) -> Self {
        Self { problem: wire::format_error_chain(&error), is_unreachable: error.is_connect() }
    }
}

/// Names the environment variable that contains the key; never the key itself.
#[derive(Debug)]
pub(crate) struct KeyVariable(String);

impl EndpointClient {
    /// Runs requests in this thread.
    pub(crate) fn block_on<T, F: Future<Output = Result<T, EndpointError>>>(
        &self,
        ask: impl FnOnce(reqwest::Client) -> F,
    ) -> Result<T, EndpointError> {
        let started = match self.started.get() {
            Some(started) => started,
            None => {
                let started = StartedClient::start()?;
                self.started.get_or_init(|| started)
            }
        };
        started.runtime.block_on(ask(started.http.clone()))
    }
}

impl Drop for EndpointClient {
    fn drop(&mut self) {
        if let Some(started) = self.started.take() {
            // Waiting for the end of its tasks would panic in the thread of another runtime.
            started.runtime.shutdown_background();
        }
    }
}

impl StartedClient {
    fn start() -> Result<Self, String> {
        // Between requests nobody sees that the server closes a connection, so one that it may have
        // closed is not used again.
        let http =
            bounded_http::client_builder().no_proxy().pool_idle_timeout(IDLE_TIMEOUT).build();
        let http = http.map_err(|error| wire::format_error_chain(&error))?;
        let runtime = runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| format!("start a runtime: {error}"))?;
        Ok(Self { http, runtime })
    }
}

impl KeyVariable {
    /// Returns `None` for an empty name.
    pub(crate) fn from_setting(name: &str) -> Option<Self> {
        Some(Self(name.to_owned())).filter(|key| !key.0.is_empty())
    }

    /// Adds the key to a request as a bearer token. Fails if the variable is not set.
    pub(crate) fn add_key(
        &self,
        request: reqwest::RequestBuilder,
    ) -> Result<reqwest::RequestBuilder, String> {
        let key = std::env::var(&self.0).map_err(|_| format!("{} is not set here", self.0))?;
        Ok(request.bearer_auth(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_started_client_may_be_dropped_in_another_runtime() {
        let client = EndpointClient::default();
        assert_eq!(client.block_on(|_| async { Ok(7) }), Ok(7));
        let other = runtime::Builder::new_current_thread().build().unwrap();
        other.block_on(async move { drop(client) });
    }
}
