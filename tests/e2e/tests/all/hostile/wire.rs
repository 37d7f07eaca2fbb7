//! A minimal gRPC client: protobuf fields, and calls over HTTP/2.

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use h2::{RecvStream, SendStream, client::ResponseFuture, client::SendRequest};
use http::{HeaderMap, Request};
use tokio::{net::TcpStream, time::timeout};

/// The limit for one reply on a busy machine.
const REPLY_LIMIT: Duration = Duration::from_secs(60);

/// Encodes a string, bytes or message field.
pub(crate) fn text_field(field: u8, value: impl AsRef<[u8]>) -> Vec<u8> {
    let value = value.as_ref();
    [vec![field << 3 | 2], varint(value.len() as u64), value.to_vec()].concat()
}

/// Encodes an integer field.
pub(crate) fn number_field(field: u8, value: u64) -> Vec<u8> {
    [vec![field << 3], varint(value)].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// The status of a finished call.
#[derive(Debug)]
pub(crate) struct Answer {
    #[expect(dead_code, reason = "a failing test shows it")]
    call: String,
    code: u32,
    message: String,
}

impl Answer {
    #[track_caller]
    pub(crate) fn assert_code(&self, code: u32) {
        assert_eq!(self.code, code, "{self:?}");
    }

    /// Checks that the call has one of these status codes and that the message contains all words.
    #[track_caller]
    pub(crate) fn assert_refused(&self, codes: &[u32], words: &[&str]) {
        assert!(codes.contains(&self.code), "{self:?}");
        for word in words {
            assert!(self.message.contains(word), "no {word:?} in {self:?}");
        }
        assert!(self.message.len() < 4096, "{} bytes of message", self.message.len());
    }
}

/// Makes a call on a new connection.
pub(crate) async fn call(address: SocketAddr, method: &str, message: &[u8]) -> Answer {
    Client::connect(address).await.call(method, message).await
}

pub(crate) struct Client {
    requests: SendRequest<Bytes>,
}

impl Client {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        let connect = async {
            let socket = TcpStream::connect(address).await.expect("the gateway listens");
            let (requests, connection) = h2::client::handshake(socket).await.expect("HTTP/2");
            // The task ends with the last stream, or when the gateway closes the connection.
            tokio::spawn(connection);
            requests.ready().await.expect("room for a call")
        };
        let requests = timeout(REPLY_LIMIT, connect).await.expect("the gateway takes connections");
        Self { requests }
    }

    pub(crate) async fn submit(&mut self, spec: &str) -> Answer {
        self.call("Runs/Submit", &text_field(1, spec)).await
    }

    /// Makes a call with one message.
    pub(crate) async fn call(&mut self, method: &str, message: &[u8]) -> Answer {
        let length = u32::try_from(message.len()).expect("below 4 GiB");
        let framed = [&[0], &length.to_be_bytes()[..], message].concat();
        self.call_raw(method, &framed).await
    }

    /// Makes a call with this body.
    pub(crate) async fn call_raw(&mut self, method: &str, body: &[u8]) -> Answer {
        let (response, mut sending) = self.open(method).await;
        let sent = send(&mut sending, Bytes::copy_from_slice(body));
        let answered = async {
            let (head, body) = response.await.expect("an answer").into_parts();
            read_status(&head.headers, body).await
        };
        let both = async { tokio::join!(answered, sent) };
        let ((code, message), ()) = timeout(REPLY_LIMIT, both).await.expect(method);
        Answer { call: method.to_owned(), code, message }
    }

    /// Starts a call and sends only this part of the body.
    pub(crate) async fn begin_call(&mut self, method: &str, body: &[u8]) -> OpenCall {
        let (response, mut sending) = self.open(method).await;
        sending.send_data(Bytes::copy_from_slice(body), false).expect("a stream that is open");
        OpenCall { _response: response, _sending: sending }
    }

    async fn open(&mut self, method: &str) -> (ResponseFuture, SendStream<Bytes>) {
        let request = Request::post(format!("http://gateway/flotilla.v1.{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .expect("a request");
        let ready = self.requests.clone().ready();
        self.requests =
            timeout(REPLY_LIMIT, ready).await.expect(method).expect("an open connection");
        self.requests.send_request(request, false).expect("a request")
    }
}

/// An unfinished call.
pub(crate) struct OpenCall {
    _response: ResponseFuture,
    _sending: SendStream<Bytes>,
}

/// Sends as fast as the server reads. The server may reply and stop reading before the end.
async fn send(sending: &mut SendStream<Bytes>, mut body: Bytes) {
    while !body.is_empty() {
        sending.reserve_capacity(body.len().min(1 << 16));
        let room = std::future::poll_fn(|cx| sending.poll_capacity(cx)).await;
        let Some(Ok(room)) = room else { return };
        let part = body.split_to(room.min(body.len()));
        if sending.send_data(part, false).is_err() {
            return;
        }
    }
    let _ = sending.send_data(Bytes::new(), true);
}

/// Reads the status from the trailers, or from the headers if there is no body.
async fn read_status(headers: &HeaderMap, mut body: RecvStream) -> (u32, String) {
    while let Some(Ok(part)) = body.data().await {
        let _ = body.flow_control().release_capacity(part.len());
    }
    let trailers = body.trailers().await.ok().flatten();
    let status = |map: &HeaderMap| {
        let code = map.get("grpc-status")?.to_str().ok()?.parse().ok()?;
        let message = map.get("grpc-message").map_or(&b""[..], |message| message.as_bytes());
        Some((code, percent_decode(message)))
    };
    let found = trailers.as_ref().and_then(status).or_else(|| status(headers));
    found.unwrap_or_else(|| panic!("an answer without a status: {headers:?} {trailers:?}"))
}

/// Decodes percent-encoded text.
fn percent_decode(text: &[u8]) -> String {
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some((&byte, tail)) = rest.split_first() {
        let hex = tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()).filter(|_| byte == b'%') {
            Some(value) => {
                bytes.push(value);
                rest = &tail[2..];
            }
            None => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
