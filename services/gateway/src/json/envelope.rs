//! The envelope around each message of a stream: one byte of flags, the length in 4 bytes (big
//! endian), and the message. gRPC's frames have the same format.

use bytes::{BufMut, Bytes, BytesMut};
use tonic::{Code, Status};

use crate::status::build_status;

pub(super) const HEADER_BYTES: usize = 5;
pub(super) const MESSAGE_FLAGS: u8 = 0;
/// The flags of the message that ends a stream, with the error if it failed.
pub(super) const END_FLAGS: u8 = 2;

pub(super) fn wrap_message(flags: u8, message: &[u8]) -> Bytes {
    let mut sealed = BytesMut::with_capacity(HEADER_BYTES + message.len());
    sealed.put_u8(flags);
    // Messages are bounded far below 4 GiB.
    sealed.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    sealed.put_slice(message);
    sealed.freeze()
}

/// Returns `None` with fewer than 5 bytes.
pub(super) fn parse_header(bytes: &[u8]) -> Option<(u8, usize)> {
    let [flags, length @ ..] = bytes.first_chunk::<HEADER_BYTES>()?;
    Some((*flags, usize::try_from(u32::from_be_bytes(*length)).ok()?))
}

/// Returns the only message of a request. Fails if the envelope is missing, has another length, or
/// is compressed.
pub(super) fn unwrap_request(sealed: Bytes) -> Result<Bytes, Status> {
    match parse_header(&sealed) {
        Some((MESSAGE_FLAGS, length)) if length == sealed.len() - HEADER_BYTES => {
            Ok(sealed.slice(HEADER_BYTES..))
        }
        Some((MESSAGE_FLAGS, length)) => Err(invalid_envelope(format!(
            "the envelope declares {length} bytes but has {} (G101)",
            sealed.len() - HEADER_BYTES
        ))),
        Some((flags, _)) => Err(invalid_envelope(format!(
            "the envelope has flags {flags:#04x}: compressed messages are not supported (G101)"
        ))),
        None => Err(invalid_envelope("the request message has no envelope (G101)".into())),
    }
}

fn invalid_envelope(words: String) -> Status {
    build_status(Code::InvalidArgument, words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_is_opened_and_nothing_else_is() {
        for message in [&b""[..], b"{}", &[7; 300]] {
            assert_eq!(unwrap_request(wrap_message(MESSAGE_FLAGS, message)).unwrap(), message);
        }
        let wrong =
            [&b""[..], &[0, 0, 0, 0], &[0, 0, 0, 0, 2, 1], &[0, 0, 0, 0, 0, 1], &[1, 0, 0, 0, 0]];
        for sealed in wrong {
            let refused = unwrap_request(Bytes::copy_from_slice(sealed)).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{sealed:?}");
        }
    }
}
