//! Listens on a unix socket, or on a port of the loopback interface.

use std::{convert::Infallible, io, net::Ipv4Addr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Context;
use futures::stream;
use http_body_util::{BodyExt, Full, Limited, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Frame, Incoming},
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::{OwnedSemaphorePermit, Semaphore},
};

use crate::{
    api::{BODY_BYTES_MAX, CompletionApi, CompletionApiError},
    request::ApiKind,
};

/// Maximum number of connections; further ones wait. Each has one request at a time.
const CONNECTIONS_MAX: usize = 2048;
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failure to accept a connection, likely for lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    Socket(PathBuf),
    /// A port of the loopback interface.
    Port(u16),
}

type AnswerBody = UnsyncBoxBody<Bytes, Infallible>;

/// Serves requests that carry a key, for as long as this is polled.
///
/// # Errors
/// The address cannot be used.
pub(crate) async fn serve_requests(
    api: Arc<CompletionApi>,
    address: &ListenAddress,
    key: &str,
) -> anyhow::Result<()> {
    let expected: Arc<str> = format!("Bearer {key}").into();
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let serve = |permit| ConnectionServer { api: api.clone(), expected: expected.clone(), permit };
    match address {
        ListenAddress::Socket(path) => {
            let listener = UnixListener::bind(path)
                .with_context(|| format!("listen at {}", path.display()))?;
            accept_connections(async || Ok(listener.accept().await?.0), &room, serve).await
        }
        ListenAddress::Port(port) => {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).await;
            let listener = listener.with_context(|| format!("listen at port {port}"))?;
            accept_connections(async || Ok(listener.accept().await?.0), &room, serve).await
        }
    }
}

/// Serves the connections of a listener, as many at once as there is room for.
async fn accept_connections<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    accept: impl AsyncFn() -> io::Result<S>,
    room: &Arc<Semaphore>,
    serve: impl Fn(OwnedSemaphorePermit) -> ConnectionServer,
) -> anyhow::Result<()> {
    loop {
        let permit = room.clone().acquire_owned().await?;
        match accept().await {
            Ok(stream) => serve(permit).spawn(stream),
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// Serves one connection.
struct ConnectionServer {
    api: Arc<CompletionApi>,
    /// The value of the header `authorization` that requests must have.
    expected: Arc<str>,
    permit: OwnedSemaphorePermit,
}

impl ConnectionServer {
    fn spawn(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let Self { api, expected, permit } = self;
        tokio::spawn(async move {
            let _permit = permit;
            let answer = service_fn(|request| {
                let (api, expected) = (api.clone(), expected.clone());
                async move { Ok::<_, Infallible>(answer_request(&api, request, &expected).await) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .serve_connection(TokioIo::new(stream), answer);
            // A client may leave at any time, which drops its request.
            let _ = connection.await;
        });
    }
}

/// Answers a request, or returns the error as JSON.
async fn answer_request(
    api: &Arc<CompletionApi>,
    request: Request<Incoming>,
    expected: &str,
) -> Response<AnswerBody> {
    let answered = match (request.method(), request.uri().path()) {
        (&Method::GET, "/health") => Ok(json_response(StatusCode::OK, &json!({ "status": "ok" }))),
        (&Method::GET, "/slots") => report_step(api, request, expected).await,
        (&Method::POST, "/v1/completions") => complete(api, ApiKind::Text, request, expected).await,
        (&Method::POST, "/v1/chat/completions") => {
            complete(api, ApiKind::Chat, request, expected).await
        }
        _ => Err(CompletionApiError::Path),
    };
    answered.unwrap_or_else(|error| json_response(error.status(), &error.to_json()))
}

/// Answers a request to a model: as JSON, or as server-sent events if the request asks for a
/// stream.
async fn complete(
    api: &Arc<CompletionApi>,
    kind: ApiKind,
    request: Request<Incoming>,
    expected: &str,
) -> Result<Response<AnswerBody>, CompletionApiError> {
    check_key(&request, expected)?;
    let body = Limited::new(request.into_body(), BODY_BYTES_MAX).collect().await;
    let body = body.map_err(|_| CompletionApiError::Body)?.to_bytes();
    let answer = api.start_answer(kind, body).await?;
    if !answer.stream {
        return Ok(json_response(StatusCode::OK, &answer.collect_answer().await?));
    }
    let events = stream::unfold(answer.into_events(), async |mut events| {
        let next = events.next_events().await?;
        Some((Ok(Frame::data(next)), events))
    });
    let mut response = Response::new(StreamBody::new(events).boxed_unsync());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    Ok(response)
}

/// Answers between two steps of the engine, as llama-server does: one that hangs gives no answer.
/// llama-server describes its slots here.
async fn report_step(
    api: &CompletionApi,
    request: Request<Incoming>,
    expected: &str,
) -> Result<Response<AnswerBody>, CompletionApiError> {
    check_key(&request, expected)?;
    api.await_step().await;
    Ok(json_response(StatusCode::OK, &json!([])))
}

fn check_key(request: &Request<Incoming>, expected: &str) -> Result<(), CompletionApiError> {
    let key = request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes);
    if key == Some(expected.as_bytes()) { Ok(()) } else { Err(CompletionApiError::Key) }
}

fn json_response(status: StatusCode, value: &Value) -> Response<AnswerBody> {
    let mut response = Response::new(Full::new(Bytes::from(value.to_string())).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests;
