//! Reads the messages of a gRPC response in sequence, and the status after them.

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use tonic::{Code, Status, body::Body, codegen::http::HeaderMap};

use super::envelope;

pub(super) struct GrpcMessages {
    body: Body,
    buffer: BytesMut,
}

/// Returns the status if it is not `Ok`.
pub(super) fn failed_status(headers: &HeaderMap) -> Option<Status> {
    Status::from_header_map(headers).filter(|status| status.code() != Code::Ok)
}

impl GrpcMessages {
    pub(super) fn from_body(body: Body) -> Self {
        Self { body, buffer: BytesMut::new() }
    }

    /// Returns `None` after the last message of a successful call.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(message) = self.take_message() {
                return Ok(Some(message));
            }
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            match frame?.into_data() {
                Ok(data) => self.buffer.extend_from_slice(&data),
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    return failed_status(&trailers).map_or(Ok(None), Err);
                }
            }
        }
    }

    fn take_message(&mut self) -> Option<Bytes> {
        let (_, length) = envelope::parse_header(&self.buffer)?;
        if self.buffer.len() < envelope::HEADER_BYTES + length {
            return None;
        }
        self.buffer.advance(envelope::HEADER_BYTES);
        Some(self.buffer.split_to(length).freeze())
    }
}
