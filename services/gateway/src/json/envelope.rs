//! What a message of a stream is put into: a byte of flags, the length, and the message. gRPC's
//! frames are the same.

use bytes::{BufMut, Bytes, BytesMut};
use tonic::{Code, Status};

use crate::status::refused;

pub(super) const HEAD: usize = 5;
pub(super) const MESSAGE: u8 = 0;
/// Of Connect: what ends a stream, an error where there is one.
pub(super) const END: u8 = 2;

pub(super) fn seal(flags: u8, message: &[u8]) -> Bytes {
    let mut sealed = BytesMut::with_capacity(HEAD + message.len());
    sealed.put_u8(flags);
    // Messages are bounded far below.
    sealed.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    sealed.put_slice(message);
    sealed.freeze()
}

/// The length of the message behind the head, and its flags.
pub(super) fn head(bytes: &[u8]) -> Option<(u8, usize)> {
    let [flags, length @ ..] = bytes.first_chunk::<HEAD>()?;
    Some((*flags, usize::try_from(u32::from_be_bytes(*length)).ok()?))
}

/// The one message of a request.
pub(super) fn open(sealed: Bytes) -> Result<Bytes, Status> {
    match head(&sealed) {
        Some((MESSAGE, length)) if length == sealed.len() - HEAD => Ok(sealed.slice(HEAD..)),
        Some((MESSAGE, length)) => Err(wrong(format!(
            "the envelope names {length} bytes, and {} are there (G101)",
            sealed.len() - HEAD
        ))),
        Some((flags, _)) => Err(wrong(format!(
            "the envelope has flags {flags:#04x}: compressed messages are not taken (G101)"
        ))),
        None => Err(wrong("the request has no envelope around its message (G101)".into())),
    }
}

fn wrong(words: String) -> Status {
    refused(Code::InvalidArgument, words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_is_opened_and_nothing_else_is() {
        for message in [&b""[..], b"{}", &[7; 300]] {
            assert_eq!(open(seal(MESSAGE, message)).unwrap(), message);
        }
        let wrong =
            [&b""[..], &[0, 0, 0, 0], &[0, 0, 0, 0, 2, 1], &[0, 0, 0, 0, 0, 1], &[1, 0, 0, 0, 0]];
        for sealed in wrong {
            let refused = open(Bytes::copy_from_slice(sealed)).unwrap_err();
            assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{sealed:?}");
        }
    }
}
