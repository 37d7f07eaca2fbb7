//! The services as JSON by the Connect protocol (connectrpc.com/docs/protocol), for clients without
//! gRPC: browsers, curl, scripts.
//!
//! Each request is converted to the equivalent gRPC call, so that checks, limits and errors are the
//! same. A streaming call that is requested as plain JSON is answered with one line per message
//! (NDJSON), which Connect does not define.

mod envelope;
mod error_codes;
mod grpc_messages;
mod origin;

use std::{
    convert::Infallible,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::Context as _;
use bytes::Bytes;
use futures::{StreamExt, stream};
use http_body::Frame;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited, StreamBody};
use identity::GatewayCaller;
use prost::Message;
use prost_reflect::{
    DescriptorPool, DeserializeOptions, DynamicMessage, MessageDescriptor, MethodDescriptor,
};
use tokio::{sync::Semaphore, time::timeout};
use tonic::{
    Code, Status,
    body::Body,
    codegen::{
        BoxFuture, Service,
        http::{HeaderMap, HeaderValue, Method, Request, Response, header, request::Parts},
    },
};
use tower_layer::Layer;

pub(crate) use self::error_codes::connect_name as code_name;
use self::grpc_messages::GrpcMessages;
use crate::{
    REQUEST_BYTES_MAX, SUBMIT_BYTES_MAX,
    status::build_status,
    submission_limit::{SUBMIT, SUBMIT_LIMIT},
};

/// Largest submission as JSON in bytes: base64 adds a third, and names take some space.
const SUBMIT_JSON_BYTES_MAX: usize = SUBMIT_BYTES_MAX / 3 * 4 + REQUEST_BYTES_MAX;
/// Most submissions that are read at a time; further ones wait.
const SUBMISSIONS_MAX: usize = 2;
/// Time limit to receive a request.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// Connect's deadline header, in milliseconds, of at most ten digits.
const TIMEOUT_HEADER: &str = "connect-timeout-ms";

/// The tower layer that accepts JSON in front of the gRPC services.
#[derive(Clone)]
pub(crate) struct JsonLayer {
    services: DescriptorPool,
    submission_permits: Arc<Semaphore>,
}

impl JsonLayer {
    /// Creates the layer from the embedded descriptors.
    ///
    /// # Errors
    /// If the descriptors are invalid.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let services = DescriptorPool::decode(wire::FILE_DESCRIPTOR_SET);
        let services = services.context("describe the services")?;
        Ok(Self { services, submission_permits: Arc::new(Semaphore::new(SUBMISSIONS_MAX)) })
    }

    /// Returns the descriptors of all services.
    pub(crate) fn descriptor_pool(&self) -> &DescriptorPool {
        &self.services
    }

    /// Finds the method of a path `/SERVICE/METHOD`.
    fn find_method(&self, path: &str) -> Option<MethodDescriptor> {
        let (service, method) = path.strip_prefix('/')?.split_once('/')?;
        let service = self.services.get_service_by_name(service)?;
        service.methods().find(|found| found.name() == method)
    }
}

impl<S> Layer<S> for JsonLayer {
    type Service = JsonService<S>;

    fn layer(&self, inner: S) -> JsonService<S> {
        JsonService { inner, json: self.clone() }
    }
}

/// The inner service with gRPC and JSON.
#[derive(Clone)]
pub(crate) struct JsonService<S> {
    inner: S,
    json: JsonLayer,
}

impl<S> Service<Request<Body>> for JsonService<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let form = JsonFormat::from_headers(request.headers())
            .filter(|_| request.method() == Method::POST);
        // The access layer adds the caller.
        let is_known = request.extensions().get::<GatewayCaller>().is_some();
        if let Err(status) = origin::check_origin(request.uri(), request.headers(), is_known) {
            let refused =
                form.map_or_else(|| plain_response(&status), |form| form.error_response(&status));
            return Box::pin(async move { Ok(refused) });
        }
        let Some(form) = form else { return Box::pin(self.inner.call(request)) };
        let (inner, json) = (self.inner.clone(), self.json.clone());
        Box::pin(async move {
            let answered = answer_call(inner, &json, form, request).await;
            Ok(answered.unwrap_or_else(|status| form.error_response(&status)))
        })
    }
}

/// Returns a status as plain text, for requests that are neither JSON nor gRPC.
pub(crate) fn plain_response(status: &Status) -> Response<Body> {
    let mut response = Response::new(Body::new(format!("{}\n", status.message())));
    *response.status_mut() = error_codes::http_status(status.code());
    response
}

/// The format of a request and of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JsonFormat {
    /// A message as plain JSON (`application/json`).
    Plain,
    /// Messages in envelopes, as Connect's streaming clients send them
    /// (`application/connect+json`).
    Enveloped,
}

impl JsonFormat {
    /// Returns the format of a request from its content type, or `None` if it is not JSON.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let kind = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
        let kind = kind.split(';').next()?.trim();
        match kind.to_ascii_lowercase().as_str() {
            "application/json" => Some(Self::Plain),
            "application/connect+json" => Some(Self::Enveloped),
            _ => None,
        }
    }

    /// Returns a failed call's response.
    pub(crate) fn error_response(self, status: &Status) -> Response<Body> {
        match self {
            Self::Plain => {
                let mut response =
                    json_response(error_codes::to_error_json(status).to_string().into());
                *response.status_mut() = error_codes::http_status(status.code());
                response
            }
            // In this format the HTTP status is 200, and the end message contains the error.
            Self::Enveloped => {
                self.stream_response(Body::new(Full::new(self.encode_end(Some(status)))))
            }
        }
    }

    /// Returns a response with the content type of a stream.
    fn stream_response(self, body: Body) -> Response<Body> {
        let kind = match self {
            Self::Plain => "application/x-ndjson",
            Self::Enveloped => "application/connect+json",
        };
        let mut response = Response::new(body);
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        response
    }

    /// Encodes one message of a stream.
    fn encode_item(self, json: Vec<u8>) -> Bytes {
        match self {
            Self::Plain => [json, vec![b'\n']].concat().into(),
            Self::Enveloped => envelope::wrap_message(envelope::MESSAGE_FLAGS, &json),
        }
    }

    /// Encodes the end of a stream, with the error if it failed.
    fn encode_end(self, failed: Option<&Status>) -> Bytes {
        let error = failed.map(error_codes::to_error_json);
        let ended = match &error {
            Some(error) => serde_json::json!({ "error": error }),
            None => serde_json::json!({}),
        };
        match (self, failed) {
            (Self::Plain, None) => Bytes::new(),
            (Self::Plain, Some(_)) => format!("{ended}\n").into(),
            (Self::Enveloped, _) => {
                envelope::wrap_message(envelope::END_FLAGS, ended.to_string().as_bytes())
            }
        }
    }
}

/// Reads a JSON request, makes the gRPC call and converts its answer.
async fn answer_call<S>(
    mut inner: S,
    json: &JsonLayer,
    form: JsonFormat,
    request: Request<Body>,
) -> Result<Response<Body>, Status>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    let (head, body) = request.into_parts();
    let method = json.find_method(head.uri.path()).ok_or_else(|| {
        let path: String = head.uri.path().chars().take(100).collect();
        let words = format!("unknown path {path}; the gateway may be older than the client (G108)");
        build_status(Code::Unimplemented, words)
    })?;
    let streams = method.is_server_streaming();
    if form == JsonFormat::Enveloped && !streams {
        let name = method.full_name();
        let words = format!("{name} is not a stream: request it as application/json (G111)");
        return Err(build_status(Code::InvalidArgument, words));
    }
    let message = {
        let large = head.uri.path() == SUBMIT;
        let _room = match large {
            true => json.submission_permits.acquire().await.ok(),
            false => None,
        };
        let (limit, within) = match large {
            true => (SUBMIT_JSON_BYTES_MAX, SUBMIT_LIMIT),
            false => (REQUEST_BYTES_MAX, REQUEST_LIMIT),
        };
        let text = timeout(within, read_body(body, limit)).await.map_err(|_| {
            let words = format!("the request did not arrive within {within:?} (G102)");
            build_status(Code::DeadlineExceeded, words)
        })??;
        let text =
            if form == JsonFormat::Enveloped { envelope::unwrap_request(text)? } else { text };
        parse_message(method.input(), &text)?
    };
    let request = to_grpc_request(head, &message);
    drop(message);
    let Ok(()) = poll_fn(|cx| inner.poll_ready(cx)).await;
    let Ok(response) = inner.call(request).await;
    let (head, body) = response.into_parts();
    // The status is in the headers if the answer has no body, or an empty one.
    grpc_messages::failed_status(&head.headers).map_or(Ok(()), Err)?;
    let messages = GrpcMessages::from_body(body);
    if streams {
        Ok(streaming_response(form, messages, method.output()))
    } else {
        unary_response(messages, &method).await
    }
}

/// Reads a body of at most `limit` bytes.
async fn read_body(body: Body, limit: usize) -> Result<Bytes, Status> {
    match Limited::new(body, limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(build_status(
            Code::ResourceExhausted,
            format!("the request exceeds the limit of {limit} bytes (G112)"),
        )),
        Err(error) => {
            Err(build_status(Code::Cancelled, format!("the request broke off (S112): {error}")))
        }
    }
}

/// Parses JSON to a message. An empty text is a message without fields; unknown fields are an
/// error.
fn parse_message(kind: MessageDescriptor, text: &[u8]) -> Result<DynamicMessage, Status> {
    if text.trim_ascii().is_empty() {
        return Ok(DynamicMessage::new(kind));
    }
    let name = kind.name().to_owned();
    let wrong = |error| {
        build_status(
            Code::InvalidArgument,
            format!("the request is not a valid {name} (G101): {error}"),
        )
    };
    let options = DeserializeOptions::new().deny_unknown_fields(true);
    let mut reader = serde_json::Deserializer::from_slice(text);
    let message = DynamicMessage::deserialize_with_options(kind, &mut reader, &options);
    let message = message.map_err(wrong)?;
    reader.end().map_err(wrong)?;
    Ok(message)
}

/// Builds the gRPC request from the HTTP head and the message.
fn to_grpc_request(mut head: Parts, message: &DynamicMessage) -> Request<Body> {
    let body = envelope::wrap_message(envelope::MESSAGE_FLAGS, &message.encode_to_vec());
    let timeout = head.headers.remove(TIMEOUT_HEADER);
    let timeout = timeout.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    for name in [header::CONTENT_LENGTH, header::CONTENT_ENCODING, header::ACCEPT_ENCODING] {
        head.headers.remove(name);
    }
    let grpc = HeaderValue::from_static("application/grpc");
    head.headers.insert(header::CONTENT_TYPE, grpc);
    head.headers.insert(header::TE, HeaderValue::from_static("trailers"));
    if let Some(ms) = timeout {
        // gRPC allows at most eight digits.
        let value = if ms < 100_000_000 { format!("{ms}m") } else { format!("{}S", ms / 1000) };
        head.headers.extend(value.parse().ok().map(|value| (GRPC_TIMEOUT_HEADER, value)));
    }
    Request::from_parts(head, Body::new(Full::new(body)))
}

/// gRPC's deadline header.
const GRPC_TIMEOUT_HEADER: header::HeaderName = header::HeaderName::from_static("grpc-timeout");

/// Converts the answer of a unary call.
async fn unary_response(
    mut messages: GrpcMessages,
    method: &MethodDescriptor,
) -> Result<Response<Body>, Status> {
    let message = messages.next().await?;
    let message =
        message.ok_or_else(|| build_status(Code::Internal, "the call has no answer (X101)"))?;
    // The status follows the message.
    messages.next().await?;
    Ok(json_response(to_json_bytes(method.output(), message)?.into()))
}

/// Converts the messages of a streaming call, one by one.
fn streaming_response(
    form: JsonFormat,
    messages: GrpcMessages,
    kind: MessageDescriptor,
) -> Response<Body> {
    let items = stream::unfold(Some((messages, kind)), move |state| async move {
        let (mut messages, kind) = state?;
        let item = match messages.next().await {
            Ok(Some(message)) => to_json_bytes(kind.clone(), message).map(Some),
            Ok(None) => Ok(None),
            Err(status) => Err(status),
        };
        Some(match item {
            Ok(Some(json)) => (form.encode_item(json), Some((messages, kind))),
            Ok(None) => (form.encode_end(None), None),
            Err(status) => (form.encode_end(Some(&status)), None),
        })
    });
    let frames = items.map(|bytes| Ok::<_, Infallible>(Frame::data(bytes)));
    form.stream_response(Body::new(StreamBody::new(frames)))
}

/// Converts an encoded message to canonical JSON, without fields of default value.
fn to_json_bytes(kind: MessageDescriptor, message: Bytes) -> Result<Vec<u8>, Status> {
    let unreadable = |error: &dyn std::fmt::Display| {
        let words = format!("the answer cannot be written as JSON (X101): {error}");
        build_status(Code::Internal, words)
    };
    let message = DynamicMessage::decode(kind, message).map_err(|error| unreadable(&error))?;
    serde_json::to_vec(&message).map_err(|error| unreadable(&error))
}

/// Returns a JSON response.
fn json_response(text: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::new(Full::new(text)));
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
