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

use std::{convert::Infallible, future::poll_fn, sync::Arc, time::Duration};

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
        BoxFuture,
        http::{HeaderMap, HeaderValue, Method, Request, Response, header, request::Parts},
    },
};

use self::grpc_messages::GrpcMessages;
use crate::{
    REQUEST_BYTES_MAX, SUBMIT_BYTES_MAX,
    access::requirements::has_secret,
    middleware::{InnerService, Middleware},
    openai::OPENAI_PATHS,
    status::build_status,
    submission_limit::{SUBMIT, SUBMIT_LIMIT, acquire_permit},
    submitted_files,
};

/// base64 adds a third, and names take some space.
const SUBMIT_JSON_BYTES_MAX: usize = SUBMIT_BYTES_MAX / 3 * 4 + REQUEST_BYTES_MAX;
/// The submissions in JSON that are received and answered at a time; further ones wait.
const SUBMISSIONS_MAX: usize = 2;
/// The limit to receive a request.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// Connect's deadline header, in milliseconds of at most ten digits.
const TIMEOUT_HEADER: &str = "connect-timeout-ms";

/// The middleware that accepts JSON in front of the gRPC services.
#[derive(Clone)]
pub(crate) struct JsonTranslator {
    services: DescriptorPool,
    submission_permits: Arc<Semaphore>,
}

impl JsonTranslator {
    /// Uses the embedded descriptors.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let services = DescriptorPool::decode(wire::FILE_DESCRIPTOR_SET);
        let services = services.context("describe the services")?;
        Ok(Self { services, submission_permits: Arc::new(Semaphore::new(SUBMISSIONS_MAX)) })
    }

    pub(crate) fn descriptor_pool(&self) -> &DescriptorPool {
        &self.services
    }

    fn find_method(&self, path: &str) -> Option<MethodDescriptor> {
        let (service, method) = path.strip_prefix('/')?.split_once('/')?;
        let service = self.services.get_service_by_name(service)?;
        service.methods().find(|found| found.name() == method)
    }
}

impl Middleware for JsonTranslator {
    fn handle_request<S: InnerService>(
        &self,
        inner: &mut S,
        request: Request<Body>,
    ) -> BoxFuture<Response<Body>, Infallible> {
        let form = JsonFormat::from_headers(request.headers())
            .filter(|_| request.method() == Method::POST);
        // The access layer adds the caller. No foreign page has a secret either.
        let is_known = request.extensions().get::<GatewayCaller>().is_some()
            || has_secret(request.uri().path());
        if let Err(status) = origin::check_origin(request.uri(), request.headers(), is_known) {
            let refused =
                form.map_or_else(|| plain_response(&status), |form| form.error_response(&status));
            return Box::pin(async move { Ok(refused) });
        }
        // These have their own JSON.
        let form = form.filter(|_| !request.uri().path().starts_with(OPENAI_PATHS));
        let Some(form) = form else { return Box::pin(inner.call(request)) };
        let (inner, json) = (inner.clone(), self.clone());
        Box::pin(async move {
            let answered = answer_call(inner, &json, form, request).await;
            Ok(answered.unwrap_or_else(|status| form.error_response(&status)))
        })
    }
}

/// Answers requests that are neither JSON nor gRPC in plain text.
pub(crate) fn plain_response(status: &Status) -> Response<Body> {
    let mut response = Response::new(Body::new(format!("{}\n", status.message())));
    *response.status_mut() = error_codes::http_status(status.code());
    response
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JsonFormat {
    /// `application/json`
    Plain,
    /// Messages in envelopes, as Connect's streaming clients send them: `application/connect+json`.
    Enveloped,
}

impl JsonFormat {
    /// Returns `None` if the content type is not JSON.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let kind = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
        let kind = kind.split(';').next()?.trim();
        match kind.to_ascii_lowercase().as_str() {
            "application/json" => Some(Self::Plain),
            "application/connect+json" => Some(Self::Enveloped),
            _ => None,
        }
    }

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

    fn stream_response(self, body: Body) -> Response<Body> {
        let kind = match self {
            Self::Plain => "application/x-ndjson",
            Self::Enveloped => "application/connect+json",
        };
        let mut response = Response::new(body);
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        response
    }

    fn encode_item(self, json: Vec<u8>) -> Bytes {
        match self {
            Self::Plain => [json, vec![b'\n']].concat().into(),
            Self::Enveloped => envelope::wrap_message(envelope::MESSAGE_FLAGS, &json),
        }
    }

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

async fn answer_call(
    mut inner: impl InnerService,
    json: &JsonTranslator,
    form: JsonFormat,
    request: Request<Body>,
) -> Result<Response<Body>, Status> {
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
    let large = head.uri.path() == SUBMIT;
    // Until the answer: the message is as large as its text.
    let _room = match large {
        true => Some(acquire_permit(&json.submission_permits, SUBMISSIONS_MAX).await?),
        false => None,
    };
    let message = {
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
        if large {
            submitted_files::check_json(&text)?;
        }
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

/// Parses JSON. An empty text is a message without fields; unknown fields are an error.
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

const GRPC_TIMEOUT_HEADER: header::HeaderName = header::HeaderName::from_static("grpc-timeout");

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

/// Returns canonical JSON, without fields of default value.
fn to_json_bytes(kind: MessageDescriptor, message: Bytes) -> Result<Vec<u8>, Status> {
    let unreadable = |error: &dyn std::fmt::Display| {
        let words = format!("the answer cannot be written as JSON (X101): {error}");
        build_status(Code::Internal, words)
    };
    let message = DynamicMessage::decode(kind, message).map_err(|error| unreadable(&error))?;
    serde_json::to_vec(&message).map_err(|error| unreadable(&error))
}

fn json_response(text: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::new(Full::new(text)));
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
