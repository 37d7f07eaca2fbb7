//! Bounds the number of files in a submission while it is received: an empty one takes nine bytes
//! of a request, and a hundred in memory. Refuses what follows the message: tonic would decode it too.

use std::{pin::Pin, task::Poll};

use http_body::Body as _;
use tonic::{Code, Status, body::Body};

use crate::{polled_body::wrap_body, status::build_status};

const FILES_MAX: usize = 1000;
/// The field `files` of `SubmitRequest`.
const FILES_FIELD: u64 = 2;
/// The members of a submission in JSON beside its files.
const OTHER_MEMBERS_MAX: usize = 24;
/// In front of a message: a flag, and its length.
const GRPC_PREFIX_BYTES: usize = 5;

fn refuse_files() -> Status {
    let words =
        format!("the request has more than {FILES_MAX} files; use fewer, larger ones (G112)");
    build_status(Code::ResourceExhausted, words)
}

fn refuse_second_message() -> Status {
    let words = "a submission is one message; more bytes follow it (G101)".to_owned();
    build_status(Code::InvalidArgument, words)
}

/// Checks a submission in JSON before it is parsed. The call that it becomes is counted exactly.
pub(crate) fn check_json(text: &[u8]) -> Result<(), Status> {
    match wire::exceeds_json_count(text, b':', FILES_MAX + OTHER_MEMBERS_MAX) {
        true => Err(refuse_files()),
        false => Ok(()),
    }
}

/// Returns the same body of a gRPC call, which fails at the first file beyond the limit, and at a
/// second message.
pub(crate) fn limit_files(body: Body) -> Body {
    let mut counter = FileCounter::new();
    wrap_body(body, move |body, cx| {
        let polled = Pin::new(body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(bytes) = frame.data_ref()
        {
            counter.add_bytes(bytes);
            if counter.files > FILES_MAX {
                return Poll::Ready(Some(Err(refuse_files())));
            }
            if counter.has_second_message {
                return Poll::Ready(Some(Err(refuse_second_message())));
            }
        }
        polled
    })
}

/// Counts the files of a message as its bytes arrive, by the tags of its fields.
struct FileCounter {
    files: usize,
    has_second_message: bool,
    prefix: Vec<u8>,
    /// Bytes of the message that have not arrived.
    left: usize,
    next: MessagePart,
    /// What has arrived of a varint, and its bits.
    varint: u64,
    bits: u32,
}

#[derive(Clone, Copy)]
enum MessagePart {
    /// Bytes of no interest.
    Skip(u64),
    /// A varint: the number and type of a field.
    Tag,
    /// A varint: the length of a field.
    Length,
    /// A varint: the value of a field.
    Value,
}

impl FileCounter {
    fn new() -> Self {
        Self {
            files: 0,
            has_second_message: false,
            prefix: Vec::with_capacity(GRPC_PREFIX_BYTES),
            left: 0,
            next: MessagePart::Tag,
            varint: 0,
            bits: 0,
        }
    }

    fn add_bytes(&mut self, bytes: &[u8]) {
        let missing = (GRPC_PREFIX_BYTES - self.prefix.len()).min(bytes.len());
        let (prefix, bytes) = bytes.split_at(missing);
        self.prefix.extend_from_slice(prefix);
        if missing > 0
            && let Some([_, length @ ..]) = self.prefix.first_chunk::<GRPC_PREFIX_BYTES>()
        {
            self.left = u32::from_be_bytes(*length) as usize;
        }
        let (of_message, behind) = bytes.split_at(self.left.min(bytes.len()));
        self.left -= of_message.len();
        self.has_second_message |= !behind.is_empty();
        self.count_files(of_message);
    }

    fn count_files(&mut self, mut bytes: &[u8]) {
        while let Some((first, rest)) = bytes.split_first() {
            if let MessagePart::Skip(left) = self.next {
                let skipped = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                bytes = &bytes[skipped..];
                self.next = match left - skipped as u64 {
                    0 => MessagePart::Tag,
                    left => MessagePart::Skip(left),
                };
                continue;
            }
            bytes = rest;
            self.varint |= u64::from(first & 0x7f).checked_shl(self.bits).unwrap_or(0);
            self.bits += 7;
            // One that does not end is refused by the decoder.
            if first & 0x80 == 0 || self.bits > u64::BITS {
                self.end_varint();
            }
        }
    }

    fn end_varint(&mut self) {
        let value = std::mem::take(&mut self.varint);
        self.bits = 0;
        self.next = match self.next {
            MessagePart::Length | MessagePart::Skip(_) => MessagePart::Skip(value),
            MessagePart::Value => MessagePart::Tag,
            MessagePart::Tag => match value & 7 {
                0 => MessagePart::Value,
                1 => MessagePart::Skip(8),
                2 => {
                    self.files += usize::from(value >> 3 == FILES_FIELD);
                    MessagePart::Length
                }
                5 => MessagePart::Skip(4),
                // The marks of a group, or no type.
                _ => MessagePart::Tag,
            },
        };
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use futures::stream;
    use http_body::Frame;
    use http_body_util::{BodyExt, StreamBody};
    use prost::Message;
    use wire::v1;

    use super::*;

    fn call(files: usize) -> Vec<u8> {
        let name = |number: usize| (format!("file-{number}"), vec![0x12; number % 300]);
        let message = v1::SubmitRequest {
            spec_yaml: "name: x\n".repeat(100),
            files: (0..files).map(name).collect(),
            check_only: true,
            forecast: Some(v1::ForecastRequest { by: None, price_per_kwh: Some(0.3) }),
        };
        let message = message.encode_to_vec();
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0][..], &length, &message].concat()
    }

    #[test]
    fn files_are_counted_however_the_bytes_arrive() {
        let bytes = call(50);
        for piece in [1, 2, 7, 1000, bytes.len()] {
            let mut counter = FileCounter::new();
            bytes.chunks(piece).for_each(|piece| counter.add_bytes(piece));
            assert_eq!(counter.files, 50, "in pieces of {piece}");
        }
        // A group of an unknown field, then a file.
        let mut counter = FileCounter::new();
        counter.add_bytes(&[0, 0, 0, 0, 6, 0x7b, 0x7c, 0x12, 0x00, 0x12, 0x00]);
        assert_eq!((counter.files, counter.has_second_message), (2, false));
    }

    #[tokio::test]
    async fn a_submission_with_countless_files_is_refused() {
        let receive = async |bytes: Vec<u8>| {
            let frames: Vec<_> = bytes
                .chunks(1 << 10)
                .map(|piece| Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(piece))))
                .collect();
            let body = Body::new(StreamBody::new(stream::iter(frames)));
            limit_files(body).collect().await.map(|body| body.to_bytes().len())
        };
        let most = call(FILES_MAX);
        assert_eq!(receive(most.clone()).await.unwrap(), most.len());
        let status = receive(call(FILES_MAX + 1)).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.message().contains("more than 1000 files"), "{status}");
        let two = [call(1), call(FILES_MAX + 1)].concat();
        let status = receive(two).await.unwrap_err();
        assert!(status.message().contains("one message"), "{status}");
    }

    #[test]
    fn countless_files_in_json_are_refused_before_they_are_parsed() {
        let json = |files: usize| {
            let files: serde_json::Map<String, serde_json::Value> =
                (0..files).map(|number| (format!("{number}::::"), "".into())).collect();
            serde_json::json!({ "specYaml": "a: 1\n".repeat(5000), "files": files }).to_string()
        };
        assert!(check_json(json(FILES_MAX).as_bytes()).is_ok());
        assert!(check_json(json(FILES_MAX + OTHER_MEMBERS_MAX).as_bytes()).is_err());
    }
}
