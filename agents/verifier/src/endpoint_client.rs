//! The requests of verifiers that ask a server or a model: they are repeated while the server is
//! away or busy.

use std::{
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bounded_http::BoundedResponse;
use reqwest::StatusCode;
use tokio::{
    runtime::{self, Runtime},
    time::Instant,
};

use crate::judge_result::JudgeResult;

const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

const EXCERPT_CHARS_MAX: usize = 200;

/// Shorter than the keep-alive of common servers: 5 s for uvicorn, which vLLM uses.
const IDLE_TIMEOUT: Duration = Duration::from_secs(2);

/// The pause before a request is repeated doubles up to the second one.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// A server, the time in which it must answer, and whether it does.
#[derive(Debug)]
pub(crate) struct Endpoint {
    url: String,
    key: Option<KeyVariable>,
    timeout: Duration,
    /// The largest answer.
    bytes_max: usize,
    client: EndpointClient,
    /// Requests that got any answer but that the server is busy.
    answers: AtomicU64,
    /// Why a whole time limit brought no answer. A request that meets the same outage again is not
    /// repeated.
    outage: Mutex<Option<Outage>>,
}

/// A reason to repeat a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outage {
    NoConnection,
    /// The server asks to come back.
    Busy,
}

/// The reason why one request got no successful answer.
struct FailedRequest {
    problem: String,
    outage: Option<Outage>,
    is_timeout: bool,
}

/// A client whose connections outlive a request. It is started by the first request.
#[derive(Debug, Default)]
struct EndpointClient {
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

/// Names the environment variable that contains the key; never the key itself.
#[derive(Debug)]
struct KeyVariable(String);

impl Endpoint {
    /// `key_env` names the variable with the key; empty if the server needs none.
    pub(crate) fn new(url: String, key_env: &str, timeout_s: f64, bytes_max: usize) -> Self {
        let limit = Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::ZERO);
        Self {
            url,
            key: KeyVariable::from_setting(key_env),
            timeout: limit.min(TIMEOUT_MAX),
            bytes_max,
            client: EndpointClient::default(),
            answers: AtomicU64::new(0),
            outage: Mutex::default(),
        }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Sends JSON and returns the body of a successful answer. Repeats the request while the server
    /// is away or busy.
    ///
    /// # Errors
    /// The time is over, or the server answers something else. It is unreachable if no other request
    /// was answered in the meantime either.
    pub(crate) fn post_json(&self, body: &str) -> Result<Vec<u8>, EndpointError> {
        self.client.block_on(|http| self.request_answer(http, body))
    }

    async fn request_answer(
        &self,
        http: reqwest::Client,
        body: &str,
    ) -> Result<Vec<u8>, EndpointError> {
        let began = Instant::now();
        let deadline = began + self.timeout;
        let answers = self.answers.load(Ordering::Relaxed);
        let (mut pause, mut requests) = (FIRST_PAUSE, 1);
        let mut last: Option<(String, Outage)> = None;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let sent = self.send_once(&http, body, left).await;
            let is_silent = |failed: &FailedRequest| failed.outage.is_some() || failed.is_timeout;
            if !sent.as_ref().is_err_and(is_silent) {
                self.note_answer();
            }
            let failed = match sent {
                Ok(answer) => return Ok(answer),
                Err(failed) => failed,
            };
            let (problem, outage) = match (last.take(), failed.outage) {
                // The last request may have had little time: the server's own words say more.
                (Some(last), _) if failed.is_timeout => last,
                (_, Some(outage)) => (failed.problem, outage),
                // A server that accepts a request may be silent to this one alone.
                _ => return Err(failed.problem.into()),
            };
            let is_over = failed.outage.is_none() || Instant::now() + pause >= deadline;
            if is_over || *lock_state(&self.outage) == Some(outage) {
                let is_unreachable = self.answers.load(Ordering::Relaxed) == answers;
                *lock_state(&self.outage) = is_unreachable.then_some(outage);
                let problem = match requests {
                    1 => problem,
                    more => format!("{problem}, after {more} requests"),
                };
                return Err(EndpointError { problem, is_unreachable });
            }
            last = Some((problem, outage));
            tokio::time::sleep(pause).await;
            requests += 1;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn note_answer(&self) {
        self.answers.fetch_add(1, Ordering::Relaxed);
        *lock_state(&self.outage) = None;
    }

    async fn send_once(
        &self,
        http: &reqwest::Client,
        body: &str,
        timeout: Duration,
    ) -> Result<Vec<u8>, FailedRequest> {
        let failed = |problem| FailedRequest { problem, outage: None, is_timeout: false };
        let mut request = http.post(&self.url).timeout(timeout);
        if let Some(key) = &self.key {
            request = key.add_key(request).map_err(failed)?;
        }
        let request = request.header("content-type", "application/json").body(body.to_owned());
        let response = bounded_http::send_request(request, |_| self.bytes_max).await;
        let BoundedResponse { status, body } = response.map_err(|error| FailedRequest {
            problem: wire::format_error_chain(&error),
            outage: error.is_connect().then_some(Outage::NoConnection),
            is_timeout: error.is_timeout(),
        })?;
        let body =
            body.ok_or_else(|| failed(format!("it answered more than {} bytes", self.bytes_max)))?;
        if status.is_success() {
            return Ok(body);
        }
        let excerpt: String =
            String::from_utf8_lossy(&body).trim().chars().take(EXCERPT_CHARS_MAX).collect();
        let outage = is_busy(status).then_some(Outage::Busy);
        Err(FailedRequest { outage, ..failed(format!("{status}: {excerpt}")) })
    }
}

/// Returns true for the status of a server that asks to come back.
fn is_busy(status: StatusCode) -> bool {
    [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&status)
}

fn lock_state<T>(state: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EndpointClient {
    /// Runs requests in this thread.
    fn block_on<T, F: Future<Output = Result<T, EndpointError>>>(
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
    fn from_setting(name: &str) -> Option<Self> {
        Some(Self(name.to_owned())).filter(|key| !key.0.is_empty())
    }

    /// Adds the key to a request as a bearer token. Fails if the variable is not set.
    fn add_key(&self, request: reqwest::RequestBuilder) -> Result<reqwest::RequestBuilder, String> {
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
