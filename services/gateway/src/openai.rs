//! The models of channels over OpenAI's HTTP API: `/v1/models`, `/v1/chat/completions` and
//! `/v1/completions`; and `/v1/feedback` on their answers.
//!
//! A request goes to an agent that serves the channel, over the bus, and its answer comes back in
//! parts. Until the client has received a part of the answer, another agent can take over.

mod channel_moves;
mod completion_request;
mod feedback;
mod keeping;
mod request_limit;
mod routing;

use std::{convert::Infallible, io, path::PathBuf, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    http::{
        HeaderValue, Response, StatusCode,
        header::{CONTENT_LENGTH, CONTENT_TYPE},
    },
    routing::{any, get, post},
};
use bus::{AnswerHead, AnswerPart, AnswerReceiver, Bus, EXCHANGE_BYTES_MAX, ServingClient};
use control::{ChannelError, FeedbackError, FleetControl, MembershipView, parse_channel_name};
use futures::stream;
use identity::GatewayCaller;
use serde_json::json;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};
use wire::AgentId;

use self::{
    channel_moves::ChannelMoves,
    completion_request::CompletionRequest,
    keeping::{AnswerRecorder, ExchangeKeeper, RedactionError},
    request_limit::{RequestLimit, RequestPermit},
    routing::{AgentRequest, ServingAgents},
};
use crate::{member_limit::LimitReached, transfer_limit::transfer_limit};

/// The prefix of all paths here.
pub(crate) const OPENAI_PATHS: &str = "/v1/";

/// A conversation, in bytes of JSON; fits into a message of the bus.
const BODY_BYTES_MAX: usize = 4 << 20;
/// Feedback with an edit, in bytes of JSON.
const FEEDBACK_BYTES_MAX: usize = 2 * EXCHANGE_BYTES_MAX;
/// An answer that is not streamed.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// An agent acknowledges a request at once.
const ACKNOWLEDGE_LIMIT: Duration = Duration::from_secs(3);
/// Agents send something each second while they work on a request.
const SILENCE_LIMIT: Duration = Duration::from_secs(5);
/// An agent that sends nothing of an answer for this long does not work on it, whatever it says. An
/// answer that is not streamed comes as a whole.
const FIRST_PART_LIMIT: Duration = Duration::from_secs(3600);
/// The longest wait for an agent that can answer: it may be loading the model.
const AGENT_WAIT_LIMIT: Duration = Duration::from_secs(120);
/// Agents that fail after they passed a request to their model; the request may be the cause.
const FAILURES_MAX: u32 = 4;
/// A client that takes nothing for this long is gone.
const CLIENT_WAIT_LIMIT: Duration = Duration::from_secs(60);
/// Pieces of an answer that wait for the client.
const PIECES_WAITING_MAX: usize = 64;
/// The same of an answer that is not streamed, and the bytes of each.
const WHOLE_PIECES_WAITING_MAX: usize = 2;
const WHOLE_PIECE_BYTES: usize = 64 << 10;
const AGENT_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Tells clients for how many days the request and its answer are kept.
const KEPT_HEADER: &str = "flotilla-kept-days";

/// Passes requests to agents that serve models.
#[derive(Clone)]
pub(crate) struct ModelProxy {
    control: FleetControl,
    client: ServingClient,
    moves: ChannelMoves,
    agents: ServingAgents,
    limit: RequestLimit,
    keeper: ExchangeKeeper,
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
    #[error(
        "there is no {0}; POST to /v1/completions or /v1/chat/completions, GET /v1/models (G108)"
    )]
    NoPath(String),
    #[error(transparent)]
    TooMany(#[from] LimitReached),
    #[error("no agent could answer: {0} (G105)")]
    NoAgent(String),
    #[error("the connection to the bus is closed (B102)")]
    Closed(#[from] bus::ServingClosed),
    #[error("the body must be a JSON object with model, id and rating, reward or edit: {0} (G101)")]
    Feedback(serde_json::Error),
    #[error("write rating or reward, not both (G101)")]
    TwoRatings,
    #[error("{}", wire::format_error_chain(.0))]
    NotKept(FeedbackError),
    #[error(transparent)]
    Redaction(#[from] RedactionError),
    #[error("the redaction program keeps nothing of this feedback; send only a rating (G101)")]
    NotAllowed,
}

impl CompletionError {
    fn status(&self) -> (StatusCode, &'static str) {
        match self {
            Self::Body(_) => (StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error"),
            Self::Json(_) | Self::Feedback(_) | Self::TwoRatings => {
                (StatusCode::BAD_REQUEST, "invalid_request_error")
            }
            Self::NotAllowed => (StatusCode::UNPROCESSABLE_ENTITY, "invalid_request_error"),
            Self::NotKept(FeedbackError::Field { .. }) => {
                (StatusCode::BAD_REQUEST, "invalid_request_error")
            }
            Self::NoModel(_)
            | Self::NoPath(_)
            | Self::NotKept(
                FeedbackError::Unknown { .. } | FeedbackError::Channel(ChannelError::Unknown(_)),
            ) => (StatusCode::NOT_FOUND, "invalid_request_error"),
            Self::TooMany(_) => (StatusCode::TOO_MANY_REQUESTS, "requests"),
            Self::NoAgent(_) | Self::Closed(_) | Self::NotKept(_) | Self::Redaction(_) => {
                (StatusCode::SERVICE_UNAVAILABLE, "server_error")
            }
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
    /// The agent did not acknowledge the request, or went silent.
    was_silent: bool,
    /// The agent had passed the request to its model.
    had_begun: bool,
}

/// An answer of which the client has received nothing yet.
struct BegunAnswer {
    head: AnswerHead,
    first: Bytes,
    /// `None` if the answer has ended.
    rest: Option<AnswerReceiver>,
    request: AgentRequest,
}

impl ModelProxy {
    /// Starts to receive answers, under a name that no other gateway has.
    ///
    /// # Errors
    /// The connection to the bus is closed.
    pub(crate) async fn open(
        control: &FleetControl,
        redaction: Option<PathBuf>,
    ) -> Result<Self, bus::ServingClosed> {
        let now = wire::clock::unix_time();
        let name = format!("{:x}{:x}", now.as_nanos(), std::process::id());
        let client = control.bus().open_serving_client(&name).await?;
        let moves = ChannelMoves::default();
        let agents = ServingAgents::new(moves.clone());
        let limit = RequestLimit::default();
        let keeper = ExchangeKeeper::new(control, moves.clone(), redaction);
        Ok(Self { control: control.clone(), client, moves, agents, limit, keeper })
    }

    pub(crate) fn build_routes(&self) -> Router {
        Router::new()
            .route("/v1/models", get(list_models))
            .route("/v1/chat/completions", post(answer_request))
            .route("/v1/completions", post(answer_request))
            .route("/v1/feedback", post(answer_feedback))
            .route("/v1/{*rest}", any(refuse_path))
            .with_state(self.clone())
    }

    /// Follows channels and which agents serve them, and keeps requests, until dropped.
    pub(crate) async fn run(
        &self,
        bus: &Bus,
        members: &watch::Receiver<MembershipView>,
    ) -> Infallible {
        let statuses = self.agents.follow_statuses(bus, members);
        let moves = self.moves.follow_log(bus);
        let (never, _, _) = tokio::join!(statuses, moves, self.keeper.write_exchanges());
        never
    }

    async fn complete(&self, request: Request) -> Result<Response<Body>, CompletionError> {
        let mut permit = self.limit.open_request(caller_name(&request))?;
        let path = request.uri().path().to_owned();
        let body = to_bytes(request.into_body(), BODY_BYTES_MAX).await;
        let body = body.map_err(|error| CompletionError::Body(error.to_string()))?;
        let asked = CompletionRequest::parse_body(&body)?;
        if parse_channel_name(&asked.model).is_err() {
            return Err(CompletionError::NoModel(asked.model));
        }
        let mut deadline = Instant::now() + AGENT_WAIT_LIMIT;
        let (mut tried, mut is_known, mut failures) = (Vec::new(), false, 0);
        let mut last = "none serves it yet; `flotilla channel list` shows which do".to_owned();
        loop {
            if Instant::now() > deadline || failures >= FAILURES_MAX {
                return Err(CompletionError::NoAgent(last));
            }
            let Some(request) = self.agents.choose_agent(&asked.model, &tried) else {
                if !is_known && !self.is_served(&asked.model).await {
                    return Err(CompletionError::NoModel(asked.model));
                }
                is_known = true;
                tried.clear();
                sleep(AGENT_POLL_INTERVAL).await;
                continue;
            };
            let (agent, number) = (request.agent().clone(), request.number());
            match self.ask_agent(request, &asked, (&path, body.clone()), &mut permit).await? {
                Ok(begun) => {
                    let streams = asked.stream == Some(true);
                    let recorder = self.keeper.record_request(&asked.model, number, &body, streams);
                    let recorder = recorder.filter(|_| begun.head.status == 200);
                    return Ok(begun.into_response(permit, recorder));
                }
                Err(AgentFailure { message, was_silent, had_begun }) => {
                    if had_begun {
                        failures += 1;
                        // The time of its work is none in which there was no agent.
                        deadline = Instant::now() + AGENT_WAIT_LIMIT;
                    }
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

    /// Returns true if the log says that agents should serve a channel, or cannot be read.
    async fn is_served(&self, channel: &str) -> bool {
        let Ok(name) = parse_channel_name(channel) else { return false };
        match self.control.list_channel_moves(&name).await {
            Ok(moves) => {
                let last = moves.last().and_then(|it| it.r#move.as_ref());
                last.is_some_and(|it| it.serving.is_some())
            }
            Err(ChannelError::Unknown(_)) => false,
            Err(_) => true,
        }
    }

    /// Asks an agent, and waits for the first bytes of its answer, or for all of it if it is not
    /// streamed.
    async fn ask_agent(
        &self,
        request: AgentRequest,
        asked: &CompletionRequest,
        (path, body): (&str, Bytes),
        permit: &mut RequestPermit,
    ) -> Result<Result<BegunAnswer, AgentFailure>, CompletionError> {
        let agent: &AgentId = request.agent();
        let mut parts = self.client.send_request(agent, &asked.model, path, body).await?;
        let failed = |message: &str, was_silent, had_begun| {
            let message = message.to_owned();
            Ok(Err(AgentFailure { message, was_silent, had_begun }))
        };
        let (mut head, mut first, mut had_begun) = (None, Vec::new(), false);
        let (mut limit, until) = (ACKNOWLEDGE_LIMIT, Instant::now() + FIRST_PART_LIMIT);
        loop {
            if Instant::now() > until {
                return failed("it only says that it works on it", false, had_begun);
            }
            let Ok(part) = timeout(limit, parts.next_part()).await else {
                return failed("it does not answer", true, had_begun);
            };
            limit = SILENCE_LIMIT;
            match part {
                None => return failed("a part of its answer was lost", false, had_begun),
                Some(AnswerPart::Waiting) => had_begun = true,
                Some(AnswerPart::Refused { message }) => {
                    return failed(&message, false, had_begun);
                }
                Some(AnswerPart::Begin(found)) => head = Some(found),
                Some(AnswerPart::Data(bytes)) => {
                    let streams = asked.stream == Some(true) && head.is_some();
                    first.extend_from_slice(&bytes);
                    if streams {
                        break;
                    }
                    if first.len() > ANSWER_BYTES_MAX {
                        let message = format!("its answer exceeds {ANSWER_BYTES_MAX} bytes");
                        return Err(CompletionError::NoAgent(message));
                    }
                    permit.hold_bytes(first.len())?;
                }
                Some(AnswerPart::End) => break,
            }
        }
        let Some(head) = head else {
            return failed("its answer has no beginning", false, had_begun);
        };
        let rest = (!parts.has_ended()).then_some(parts);
        Ok(Ok(BegunAnswer { head, first: first.into(), rest, request }))
    }
}

impl BegunAnswer {
    fn into_response(
        self,
        permit: RequestPermit,
        mut recorder: Option<AnswerRecorder>,
    ) -> Response<Body> {
        let kept_days = recorder.as_ref().map(AnswerRecorder::days);
        if let Some(recorder) = &mut recorder {
            recorder.record_bytes(&self.first);
        }
        let status = StatusCode::from_u16(self.head.status).unwrap_or(StatusCode::BAD_GATEWAY);
        let kind = HeaderValue::from_str(&self.head.content_type);
        let whole_bytes = self.rest.is_none().then_some(self.first.len());
        let body = match self.rest {
            None => {
                if let Some(recorder) = recorder {
                    recorder.finish();
                }
                send_whole(self.first, permit)
            }
            Some(parts) => {
                let (pieces, waiting) = mpsc::channel(PIECES_WAITING_MAX);
                let pumped =
                    PumpedAnswer { parts, request: self.request, recorder, _permit: permit };
                tokio::spawn(pumped.pump(self.first, pieces));
                let next = async |mut waiting: mpsc::Receiver<Bytes>| {
                    let piece = waiting.recv().await?;
                    Some((Ok::<Bytes, Infallible>(piece), waiting))
                };
                Body::from_stream(stream::unfold(waiting, next))
            }
        };
        let mut response = Response::new(body);
        *response.status_mut() = status;
        let kind = kind.unwrap_or(HeaderValue::from_static("application/json"));
        response.headers_mut().insert(CONTENT_TYPE, kind);
        if let Some(bytes) = whole_bytes {
            response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(bytes));
        }
        if let Some(days) = kept_days {
            response.headers_mut().insert(KEPT_HEADER, HeaderValue::from(days));
        }
        response
    }
}

/// Returns a body with a whole answer. The answer and its permit stay until the client has taken it,
/// or takes it too slowly: a body that is not read would keep them.
fn send_whole(answer: Bytes, permit: RequestPermit) -> Body {
    let (pieces, waiting) = mpsc::channel(WHOLE_PIECES_WAITING_MAX);
    let bytes = answer.len();
    tokio::spawn(async move {
        let _permit = permit;
        let send = async {
            for piece in answer.chunks(WHOLE_PIECE_BYTES) {
                // A slice of the answer would keep all of it.
                if pieces.send(Bytes::copy_from_slice(piece)).await.is_err() {
                    return;
                }
            }
        };
        if timeout(transfer_limit(bytes as u64), send).await.is_err() {
            tracing::info!("a client took an answer too slowly; it was cut");
        }
    });
    let next =
        async |(mut waiting, left): (mpsc::Receiver<Bytes>, usize)| match waiting.recv().await {
            Some(piece) => {
                let left = left - piece.len();
                Some((Ok(piece), (waiting, left)))
            }
            None if left > 0 => Some((Err(io::Error::other("the answer was cut")), (waiting, 0))),
            None => None,
        };
    Body::from_stream(stream::unfold((waiting, bytes), next))
}

/// A streamed answer of which the client has received a part.
struct PumpedAnswer {
    parts: AnswerReceiver,
    request: AgentRequest,
    recorder: Option<AnswerRecorder>,
    _permit: RequestPermit,
}

impl PumpedAnswer {
    /// Passes the answer to the client as it arrives. If the agent fails now, the client is told in
    /// the stream. Ends, and tells the agent to stop, when the client is gone or takes nothing.
    async fn pump(mut self, first: Bytes, pieces: mpsc::Sender<Bytes>) {
        let mut next = Some(first);
        loop {
            if let Some(piece) = next.take()
                && pieces.send_timeout(piece, CLIENT_WAIT_LIMIT).await.is_err()
            {
                return;
            }
            let part = tokio::select! {
                () = pieces.closed() => return,
                part = timeout(SILENCE_LIMIT, self.parts.next_part()) => part,
            };
            let failure = match part {
                Ok(Some(AnswerPart::Data(bytes))) => {
                    if let Some(recorder) = &mut self.recorder {
                        recorder.record_bytes(&bytes);
                    }
                    next = Some(bytes);
                    continue;
                }
                Ok(Some(AnswerPart::End)) => {
                    if let Some(recorder) = self.recorder {
                        recorder.finish();
                    }
                    return;
                }
                Ok(Some(AnswerPart::Waiting | AnswerPart::Begin(_))) => continue,
                Ok(Some(AnswerPart::Refused { message })) => message,
                Ok(None) => "a part of the answer was lost".to_owned(),
                Err(_) => "the agent does not answer any more".to_owned(),
            };
            let message = format!("{}: {failure} (G105)", self.request.agent());
            let event = format!("data: {}\n\n", error_json(&message, "server_error", None));
            // The client may be gone too.
            let _ = pieces.send_timeout(event.into(), CLIENT_WAIT_LIMIT).await;
            return;
        }
    }
}

/// Returns the name of the member that the access layer has let in; `None` in an open fleet.
fn caller_name(request: &Request) -> Option<String> {
    request.extensions().get::<GatewayCaller>().map(|caller| caller.name.to_string())
}

async fn answer_request(State(proxy): State<ModelProxy>, request: Request) -> Response<Body> {
    proxy.complete(request).await.unwrap_or_else(CompletionError::into_response)
}

async fn answer_feedback(State(proxy): State<ModelProxy>, request: Request) -> Response<Body> {
    let answer = async {
        let _permit = proxy.limit.open_request(caller_name(&request))?;
        let body = to_bytes(request.into_body(), FEEDBACK_BYTES_MAX).await;
        let body = body.map_err(|error| CompletionError::Body(error.to_string()))?;
        proxy.accept_feedback(&body).await
    };
    match answer.await {
        Ok(answer) => json_response(StatusCode::OK, &answer),
        Err(error) => error.into_response(),
    }
}

/// Without it, gRPC would answer with the status 200.
async fn refuse_path(request: Request) -> Response<Body> {
    let path = request.uri().path().chars().take(100).collect();
    CompletionError::NoPath(path).into_response()
}

async fn list_models(State(proxy): State<ModelProxy>) -> Response<Body> {
    let models: Vec<_> = proxy
        .agents
        .served_channels()
        .into_iter()
        .map(|channel| {
            let kept = proxy.keeper.keeps(&channel);
            json!({
                "id": channel, "object": "model", "created": 0, "owned_by": "flotilla",
                "kept": kept,
            })
        })
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

#[cfg(test)]
mod tests {
    use wire::RunId;

    use super::{request_limit::ANSWERS_MIB_MAX, *};

    #[test]
    fn feedback_for_a_forgotten_channel_is_not_found() {
        let forgotten = ChannelError::Unknown(RunId::new("stable").unwrap());
        let error = CompletionError::NotKept(FeedbackError::Channel(forgotten));
        assert_eq!(error.status().0, StatusCode::NOT_FOUND);
        let busy = ChannelError::Busy(RunId::new("stable").unwrap());
        let error = CompletionError::NotKept(FeedbackError::Channel(busy));
        assert_eq!(error.status().0, StatusCode::SERVICE_UNAVAILABLE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_whole_answer_takes_memory_until_its_client_has_read_it_or_is_too_slow() {
        const BYTES: usize = 3 << 20;
        let limit = RequestLimit::default();
        let send = || {
            let mut permit = limit.open_request(None).unwrap();
            permit.hold_bytes(BYTES).unwrap();
            send_whole(vec![7; BYTES].into(), permit)
        };
        let has_all_room =
            || limit.open_request(None).unwrap().hold_bytes(ANSWERS_MIB_MAX << 20).is_ok();
        let (read, left) = (send(), send());
        assert!(!has_all_room());
        assert_eq!(to_bytes(read, BYTES).await.unwrap(), vec![7; BYTES]);
        assert!(!has_all_room(), "the other one is not read");
        sleep(transfer_limit(BYTES as u64) + Duration::from_secs(1)).await;
        assert!(has_all_room(), "its client takes nothing");
        assert!(to_bytes(left, BYTES).await.is_err(), "it is cut");
    }
}
