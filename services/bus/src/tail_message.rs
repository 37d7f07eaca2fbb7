//! A message of a stream, as its readers yield it.

use bytes::Bytes;

#[derive(Debug)]
pub(crate) struct TailMessage {
    pub(crate) sequence: u64,
    pub(crate) time_ms: u64,
    pub(crate) subject: String,
    pub(crate) payload: Bytes,
}
