//! The services as JSON, by the Connect protocol (connectrpc.com/docs/protocol), for what speaks no
//! gRPC: browsers, curl, scripts. Each request becomes the gRPC call it stands for, so that checks,
//! limits and errors are the same. A stream that is asked for as plain JSON is answered by a line
//! for each message, which Connect has no word for.

mod code;
mod envelope;
mod messages;
mod origin;

use std::{
    convert::Infallible,
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::Context as _;
use authority::Caller;
use bytes::Bytes;
use futures::{StreamExt, stream};
use http_body::Frame;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited, StreamBody};
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

pub(crate) use self::code::name as code_name;
use self::messages::Messages;
use crate::{REQUEST_BYTES_MAX, SUBMIT_BYTES_MAX, status::refused};

/// Bytes take a third more as base64, and names take some.
const SUBMIT_JSON_BYTES_MAX: usize = SUBMIT_BYTES_MAX / 3 * 4 + REQUEST_BYTES_MAX;
/// Submissions that are read at once; more wait.
const SUBMISSIONS_MAX: usize = 2;
/// What a request may take to come.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
const SUBMIT_LIMIT: Duration = Duration::from_secs(150);
const SUBMIT: &str = "/flotilla.v1.Runs/Submit";

/// A deadline, in milliseconds; of at most ten digits.
const TIMEOUT: &str = "connect-timeout-ms";

/// Puts the services' JSON in front of them.
#[derive(Clone)]
pub(crate) struct Json {
    services: DescriptorPool,
    submissions: Arc<Semaphore>,
}

impl Json {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let services = DescriptorPool::decode(wire::FILE_DESCRIPTOR_SET);
        let services = services.context("describe the services")?;
        Ok(Self { services, submissions: Arc::new(Semaphore::new(SUBMISSIONS_MAX)) })
    }

    pub(crate) fn services(&self) -> &DescriptorPool {
        &self.services
    }

    fn method(&self, path: &str) -> Option<MethodDescriptor> {
        let (service, method) = path.strip_prefix('/')?.split_once('/')?;
        let service = self.services.get_service_by_name(service)?;
        service.methods().find(|found| found.name() == method)
    }
}

impl<S> Layer<S> for Json {
    type Service = Spoken<S>;

    fn layer(&self, inner: S) -> Spoken<S> {
        Spoken { inner, json: self.clone() }
    }
}

/// The services, in both languages.
#[derive(Clone)]
pub(crate) struct Spoken<S> {
    inner: S,
    json: Json,
}

impl<S> Service<Request<Body>> for Spoken<S>
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
        let form = Form::of(request.headers()).filter(|_| request.method() == Method::POST);
        // Put there by what lets callers in.
        let is_known = request.extensions().get::<Caller>().is_some();
        if let Err(status) = origin::check(request.uri(), request.headers(), is_known) {
            let refused = form.map_or_else(|| plain(&status), |form| form.refusal(&status));
            return Box::pin(async move { Ok(refused) });
        }
        let Some(form) = form else { return Box::pin(self.inner.call(request)) };
        let (inner, json) = (self.inner.clone(), self.json.clone());
        Box::pin(async move {
            let answered = answer(inner, &json, form, request).await;
            Ok(answered.unwrap_or_else(|status| form.refusal(&status)))
        })
    }
}

/// To whoever asked for something else than JSON or gRPC.
pub(crate) fn plain(status: &Status) -> Response<Body> {
    let mut response = Response::new(Body::new(format!("{}\n", status.message())));
    *response.status_mut() = code::http(status.code());
    response
}

/// How a request is written, and is to be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// A message as it is.
    Plain,
    /// In envelopes, as streams of Connect's clients are.
    Enveloped,
}

impl Form {
    /// `None`: it is none of ours.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let kind = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
        let kind = kind.split(';').next()?.trim();
        match kind.to_ascii_lowercase().as_str() {
            "application/json" => Some(Self::Plain),
            "application/connect+json" => Some(Self::Enveloped),
            _ => None,
        }
    }

    /// What was asked for is not done.
    pub(crate) fn refusal(self, status: &Status) -> Response<Body> {
        match self {
            Self::Plain => {
                let mut response = json(code::error(status).to_string().into());
                *response.status_mut() = code::http(status.code());
                response
            }
            // The call is answered, and the answer is that it failed.
            Self::Enveloped => self.streamed(Body::new(Full::new(self.last(Some(status))))),
        }
    }

    fn streamed(self, body: Body) -> Response<Body> {
        let kind = match self {
            Self::Plain => "application/x-ndjson",
            Self::Enveloped => "application/connect+json",
        };
        let mut response = Response::new(body);
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        response
    }

    /// One of many.
    fn item(self, json: Vec<u8>) -> Bytes {
        match self {
            Self::Plain => [json, vec![b'\n']].concat().into(),
            Self::Enveloped => envelope::seal(envelope::MESSAGE, &json),
        }
    }

    /// What ends a stream.
    fn last(self, failed: Option<&Status>) -> Bytes {
        let error = failed.map(code::error);
        let ended = match &error {
            Some(error) => serde_json::json!({ "error": error }),
            None => serde_json::json!({}),
        };
        match (self, failed) {
            (Self::Plain, None) => Bytes::new(),
            (Self::Plain, Some(_)) => format!("{ended}\n").into(),
            (Self::Enveloped, _) => envelope::seal(envelope::END, ended.to_string().as_bytes()),
        }
    }
}

async fn answer<S>(
    mut inner: S,
    json: &Json,
    form: Form,
    request: Request<Body>,
) -> Result<Response<Body>, Status>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    let (head, body) = request.into_parts();
    let method = json.method(head.uri.path()).ok_or_else(|| {
        let path: String = head.uri.path().chars().take(100).collect();
        let words = format!("there is no {path}; is this flotilla older than yours? (G108)");
        refused(Code::Unimplemented, words)
    })?;
    let streams = method.is_server_streaming();
    if form == Form::Enveloped && !streams {
        let name = method.full_name();
        let words = format!("{name} has one answer: ask for it as application/json (G111)");
        return Err(refused(Code::InvalidArgument, words));
    }
    let message = {
        let large = head.uri.path() == SUBMIT;
        let _room = match large {
            true => json.submissions.acquire().await.ok(),
            false => None,
        };
        let (limit, within) = match large {
            true => (SUBMIT_JSON_BYTES_MAX, SUBMIT_LIMIT),
            false => (REQUEST_BYTES_MAX, REQUEST_LIMIT),
        };
        let text = timeout(within, read(body, limit)).await.map_err(|_| {
            let words = format!("the request did not come whole within {within:?} (G102)");
            refused(Code::DeadlineExceeded, words)
        })??;
        let text = if form == Form::Enveloped { envelope::open(text)? } else { text };
        parse(method.input(), &text)?
    };
    let request = call(head, &message);
    drop(message);
    let Ok(()) = poll_fn(|cx| inner.poll_ready(cx)).await;
    let Ok(response) = inner.call(request).await;
    let (head, body) = response.into_parts();
    // Where there is no body, or one that says nothing.
    messages::failure(&head.headers).map_or(Ok(()), Err)?;
    let messages = Messages::of(body);
    if streams { Ok(stream(form, messages, method.output())) } else { one(messages, &method).await }
}

async fn read(body: Body, limit: usize) -> Result<Bytes, Status> {
    match Limited::new(body, limit).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(refused(
            Code::ResourceExhausted,
            format!("the request has more than {limit} bytes, which is the limit (G112)"),
        )),
        Err(error) => {
            Err(refused(Code::Cancelled, format!("the request broke off (S112): {error}")))
        }
    }
}

/// Nothing at all stands for a message without fields.
fn parse(kind: MessageDescriptor, text: &[u8]) -> Result<DynamicMessage, Status> {
    if text.trim_ascii().is_empty() {
        return Ok(DynamicMessage::new(kind));
    }
    let name = kind.name().to_owned();
    let wrong =
        |error| refused(Code::InvalidArgument, format!("the request is no {name} (G101): {error}"));
    let options = DeserializeOptions::new().deny_unknown_fields(true);
    let mut reader = serde_json::Deserializer::from_slice(text);
    let message = DynamicMessage::deserialize_with_options(kind, &mut reader, &options);
    let message = message.map_err(wrong)?;
    reader.end().map_err(wrong)?;
    Ok(message)
}

/// The gRPC call that a request stands for.
fn call(mut head: Parts, message: &DynamicMessage) -> Request<Body> {
    let body = envelope::seal(envelope::MESSAGE, &message.encode_to_vec());
    let timeout = head.headers.remove(TIMEOUT);
    let timeout = timeout.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    for name in [header::CONTENT_LENGTH, header::CONTENT_ENCODING, header::ACCEPT_ENCODING] {
        head.headers.remove(name);
    }
    let grpc = HeaderValue::from_static("application/grpc");
    head.headers.insert(header::CONTENT_TYPE, grpc);
    head.headers.insert(header::TE, HeaderValue::from_static("trailers"));
    if let Some(ms) = timeout {
        // At most eight digits.
        let value = if ms < 100_000_000 { format!("{ms}m") } else { format!("{}S", ms / 1000) };
        head.headers.extend(value.parse().ok().map(|value| (GRPC_TIMEOUT, value)));
    }
    Request::from_parts(head, Body::new(Full::new(body)))
}

const GRPC_TIMEOUT: header::HeaderName = header::HeaderName::from_static("grpc-timeout");

async fn one(mut messages: Messages, method: &MethodDescriptor) -> Result<Response<Body>, Status> {
    let message = messages.next().await?;
    let message =
        message.ok_or_else(|| refused(Code::Internal, "the call has no answer (X101)"))?;
    // The status comes behind it.
    messages.next().await?;
    Ok(json(text(method.output(), message)?.into()))
}

fn stream(form: Form, messages: Messages, kind: MessageDescriptor) -> Response<Body> {
    let items = stream::unfold(Some((messages, kind)), move |state| async move {
        let (mut messages, kind) = state?;
        let item = match messages.next().await {
            Ok(Some(message)) => text(kind.clone(), message).map(Some),
            Ok(None) => Ok(None),
            Err(status) => Err(status),
        };
        Some(match item {
            Ok(Some(json)) => (form.item(json), Some((messages, kind))),
            Ok(None) => (form.last(None), None),
            Err(status) => (form.last(Some(&status)), None),
        })
    });
    let frames = items.map(|bytes| Ok::<_, Infallible>(Frame::data(bytes)));
    form.streamed(Body::new(StreamBody::new(frames)))
}

/// As the canonical JSON of its kind, without fields that say nothing.
fn text(kind: MessageDescriptor, message: Bytes) -> Result<Vec<u8>, Status> {
    let unreadable = |error: &dyn std::fmt::Display| {
        let words = format!("the answer cannot be written as JSON (X101): {error}");
        refused(Code::Internal, words)
    };
    let message = DynamicMessage::decode(kind, message).map_err(|error| unreadable(&error))?;
    serde_json::to_vec(&message).map_err(|error| unreadable(&error))
}

fn json(text: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::new(Full::new(text)));
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
