//! The models of channels over OpenAI's HTTP API: `/v1/models`, `/v1/chat/completions` and
//! `/v1/completions`.
//!
//! A request goes to an agent that serves the channel, over the bus, and its answer comes back in
//! parts. Until the client has received a part of the answer, another agent can take over.

mod routing;

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    http::{HeaderValue, Response, StatusCode, header::CONTENT_TYPE},
    routing::{get, post},
};
use bus::{AnswerHead, AnswerPart, AnswerReceiver, Bus, ServingClient};
use control::{FleetControl, parse_channel_name};
use futures::stream;
use serde::Deserialize;
use serde_json::json;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout},
};
use wire::AgentId;

use self::routing::{AgentRequest, ServingAgents};

/// The prefix of all paths here.
pub(crate) const OPENAI_PATHS: &str = "/v1/";

/// A conversation, in bytes of JSON; fits into a message of the bus.
const BODY_BYTES_MAX: usize = 4 << 20;
/// An answer that is not streamed.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Requests that are answered or wait, in all.
const REQUESTS_MAX: usize = 1024;
/// An agent acknowledges a request at once.
const ACKNOWLEDGE_LIMIT: Duration = Duration::from_secs(3);
/// Agents send something each second while they work on a request.
const SILENCE_LIMIT: Duration = Duration::from_secs(5);
/// The longest wait for an agent that can answer: it may be loading the model.
const AGENT_WAIT_LIMIT: Duration = Duration::from_secs(120);
const AGENT_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Passes requests to agents that serve models.
#[derive(Clone)]
pub(crate) struct ModelProxy {
    control: FleetControl,
    client: ServingClient,
    agents: ServingAgents,
    permits: Arc<Semaphore>,
}

/// The fields of a request that the proxy reads; the rest is for the model.
#[derive(Debug, Deserialize)]
struct CompletionRequest {
    model: String,
    #[serde(default)]
    stream: bool,
}

/// A failure to answer, in OpenAI's form.
#[derive(Debug, thiserror::Error)]
enum CompletionError {
    #[error("read the body: {0} (G112)")]
    Body(String),
    #[error("the body must be a JSON object with the name of a model: {0} (G101)")]
    Json(#[from] serde_json::Error),
    #[error("there is no served model {0:?}; GET /v1/models lists them (R118)")]
    NoModel(String),
    #[error("{REQUESTS_MAX} requests are open already; try again later (G104)")]
    TooMany,
    #[error("no agent could answer within {AGENT_WAIT_LIMIT:?}: {0} (G105)")]
    NoAgent(String),
    #[error("the connection to the bus is closed (B102)")]
    Closed(#[from] bus::ServingClosed),
}

impl CompletionError {
    fn status(&self) -> (StatusCode, &'static str) {
        match self {
            Self::Body(_) => (StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error"),
            Self::Json(_) => (StatusCode::BAD_REQUEST, "invalid_request_error"),
            Self::NoModel(_) => (StatusCode::NOT_FOUND, "invalid_request_error"),
            Self::TooMany => (StatusCode::TOO_MANY_REQUESTS, "requests"),
            Self::NoAgent(_) | Self::Closed(_) => (StatusCode::SERVICE_UNAVAILABLE, "server_error"),
        }
    }

    fn code(&self) -> Option<&'static str> {
        matches!(self, Self::NoModel(_)).then_some("model_not_found")
    }

    fn into_response(self) -> Response<Body> {
        let (status, kind) = self.status();
        json_response(status, &error_json(&self.to_string(), kind, self.code()))
    }
}

/// A failure of one agent to answer. Another one may succeed.
struct AgentFailure {
    message: String,
    /// The agent said nothing at all.
    was_silent: bool,
}

/// An answer of which the client has received nothing yet.
struct BegunAnswer {
    head: AnswerHead,
    first: Bytes,
    /// `None` if the answer has ended.
    rest: Option<AnswerReceiver>,
    _request: AgentRequest,
}

impl ModelProxy {
    /// Starts to receive answers, under a name that no other gateway has.
    ///
    /// # Errors
    /// The connection to the bus is closed.
    pub(crate) async fn open(control: &FleetControl) -> Result<Self, bus::ServingClosed> {
        let now = wire::clock::unix_time();
        let name = format!("{:x}{:x}", now.as_nanos(), std::process::id());
        let client = control.bus().open_serving_client(&name).await?;
        let (agents, permits) = (ServingAgents::default(), Arc::new(Semaphore::new(REQUESTS_MAX)));
        Ok(Self { control: control.clone(), client, agents, permits })
    }

    pub(crate) fn build_routes(&self) -> Router {
        Router::new()
            .route("/v1/models", get(list_models))
            .route("/v1/chat/completions", post(answer_request))
            .route("/v1/completions", post(answer_request))
            .with_state(self.clone())
    }

    /// Follows which agents serve what, until dropped.
    pub(crate) async fn follow_agents(&self, bus: &Bus) -> std::convert::Infallible {
        self.agents.follow_statuses(bus).await
    }

    async fn complete(&self, request: Request) -> Result<Response<Body>, CompletionError> {
        let permit = self.permits.clone().try_acquire_owned();
        let permit = permit.map_err(|_| CompletionError::TooMany)?;
        let path = request.uri().path().to_owned();
        let body = to_bytes(request.into_body(), BODY_BYTES_MAX).await;
        let body = body.map_err(|error| CompletionError::Body(error.to_string()))?;
        let asked: CompletionRequest = serde_json::from_slice(&body)?;
        let deadline = Instant::now() + AGENT_WAIT_LIMIT;
        let (mut tried, mut is_known) = (Vec::new(), false);
        let mut last = "none serves it yet; `flotilla channel list` shows which do".to_owned();
        loop {
            let Some(request) = self.agents.choose_agent(&asked.model, &tried) else {
                if !is_known && !self.is_served(&asked.model).await {
                    return Err(CompletionError::NoModel(asked.model));
                }
                is_known = true;
                if Instant::now() > deadline {
                    return Err(CompletionError::NoAgent(last));
                }
                tried.clear();
                sleep(AGENT_POLL_INTERVAL).await;
                continue;
            };
            let agent = request.agent().clone();
            match self.ask_agent(request, &asked, &path, body.clone()).await? {
                Ok(begun) => return Ok(begun.into_response(permit)),
                Err(AgentFailure { message, was_silent }) => {
                    tracing::warn!(%agent, channel = asked.model, message, "asking another agent");
                    if was_silent {
                        self.agents.suspect_agent(&agent);
                    }
                    last = format!("{agent}: {message}");
                    tried.push(agent);
                }
            }
        }
    }

    /// Returns true if the log says that agents should serve a channel.
    async fn is_served(&self, channel: &str) -> bool {
        let Ok(name) = parse_channel_name(channel) else { return false };
        let moves = self.control.list_channel_moves(&name).await.unwrap_or_default();
        moves.last().and_then(|it| it.r#move.as_ref()).is_some_and(|it| it.serving.is_some())
    }

    /// Asks an agent, and waits for the first bytes of its answer, or for all of it if it is not
    /// streamed.
    async fn ask_agent(
        &self,
        request: AgentRequest,
        asked: &CompletionRequest,
        path: &str,
        body: Bytes,
    ) -> Result<Result<BegunAnswer, AgentFailure>, CompletionError> {
        let agent: &AgentId = request.agent();
        let mut parts = self.client.send_request(agent, &asked.model, path, body).await?;
        let failed = |message: &str, was_silent| {
            Ok(Err(AgentFailure { message: message.to_owned(), was_silent }))
        };
        let (mut head, mut first) = (None, Vec::new());
        let mut limit = ACKNOWLEDGE_LIMIT;
        loop {
            let Ok(part) = timeout(limit, parts.next_part()).await else {
                return failed("it does not answer", true);
            };
            limit = SILENCE_LIMIT;
            match part {
                None => return failed("a part of its answer was lost", false),
                Some(AnswerPart::Waiting) => {}
                Some(AnswerPart::Refused { message }) => return failed(&message, false),
                Some(AnswerPart::Begin(found)) => head = Some(found),
                Some(AnswerPart::Data(bytes)) => {
                    let streams = asked.stream && head.is_some();
                    first.extend_from_slice(&bytes);
                    if streams {
                        break;
                    }
                    if first.len() > ANSWER_BYTES_MAX {
                        return failed("its answer is too large", false);
                    }
                }
                Some(AnswerPart::End) => break,
            }
        }
        let Some(head) = head else { return failed("its answer has no beginning", false) };
        let rest = (!parts.has_ended()).then_some(parts);
        Ok(Ok(BegunAnswer { head, first: first.into(), rest, _request: request }))
    }
}

impl BegunAnswer {
    fn into_response(self, permit: OwnedSemaphorePermit) -> Response<Body> {
        let status = StatusCode::from_u16(self.head.status).unwrap_or(StatusCode::BAD_GATEWAY);
        let kind = HeaderValue::from_str(&self.head.content_type);
        let body = match self.rest {
            None => Body::from(self.first),
            Some(parts) => {
                let state = (Some(self.first), Some(parts), self._request, permit);
                Body::from_stream(stream::unfold(state, next_piece))
            }
        };
        let mut response = Response::new(body);
        *response.status_mut() = status;
        let kind = kind.unwrap_or(HeaderValue::from_static("application/json"));
        response.headers_mut().insert(CONTENT_TYPE, kind);
        response
    }
}

type StreamState = (Option<Bytes>, Option<AnswerReceiver>, AgentRequest, OwnedSemaphorePermit);

/// Returns the next bytes of a streamed answer. If the agent fails now, the client is told in the
/// stream, as it has a part of the answer.
async fn next_piece(
    (first, mut parts, request, permit): StreamState,
) -> Option<(Result<Bytes, std::convert::Infallible>, StreamState)> {
    if let Some(first) = first {
        return Some((Ok(first), (None, parts, request, permit)));
    }
    loop {
        let failure = match timeout(SILENCE_LIMIT, parts.as_mut()?.next_part()).await {
            Ok(Some(AnswerPart::Data(bytes))) => {
                return Some((Ok(bytes), (None, parts, request, permit)));
            }
            Ok(Some(AnswerPart::End)) => return None,
            Ok(Some(AnswerPart::Waiting | AnswerPart::Begin(_))) => continue,
            Ok(Some(AnswerPart::Refused { message })) => message,
            Ok(None) => "a part of the answer was lost".to_owned(),
            Err(_) => "the agent does not answer any more".to_owned(),
        };
        let message = format!("{}: {failure} (G105)", request.agent());
        let event = format!("data: {}\n\n", error_json(&message, "server_error", None));
        return Some((Ok(event.into()), (None, None, request, permit)));
    }
}

async fn answer_request(State(proxy): State<ModelProxy>, request: Request) -> Response<Body> {
    proxy.complete(request).await.unwrap_or_else(CompletionError::into_response)
}

async fn list_models(State(proxy): State<ModelProxy>) -> Response<Body> {
    let models: Vec<_> = proxy
        .agents
        .served_channels()
        .into_iter()
        .map(|channel| json!({ "id": channel, "object": "model", "created": 0, "owned_by": "flotilla" }))
        .collect();
    json_response(StatusCode::OK, &json!({ "object": "list", "data": models }))
}

fn error_json(message: &str, kind: &str, code: Option<&str>) -> serde_json::Value {
    json!({ "error": { "message": message, "type": kind, "param": null, "code": code } })
}

fn json_response(status: StatusCode, value: &serde_json::Value) -> Response<Body> {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
