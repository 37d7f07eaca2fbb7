//! The messages of a gRPC answer, one after the other, and the status behind them.

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use tonic::{Code, Status, body::Body, codegen::http::HeaderMap};

use super::envelope;

pub(super) struct Messages {
    body: Body,
    read: BytesMut,
}

/// What headers or trailers say that went wrong.
pub(super) fn failure(headers: &HeaderMap) -> Option<Status> {
    Status::from_header_map(headers).filter(|status| status.code() != Code::Ok)
}

impl Messages {
    pub(super) fn of(body: Body) -> Self {
        Self { body, read: BytesMut::new() }
    }

    /// The next; `None` behind the last of a call that went well.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(message) = self.take() {
                return Ok(Some(message));
            }
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            match frame?.into_data() {
                Ok(data) => self.read.extend_from_slice(&data),
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    return failure(&trailers).map_or(Ok(None), Err);
                }
            }
        }
    }

    fn take(&mut self) -> Option<Bytes> {
        let (_, length) = envelope::head(&self.read)?;
        if self.read.len() < envelope::HEAD + length {
            return None;
        }
        self.read.advance(envelope::HEAD);
        Some(self.read.split_to(length).freeze())
    }
}
