//! The messages between a cell and its holder: a JSON header followed by a body of bytes.

use std::{
    io::{self, Read, Write},
    path::PathBuf,
    time::Duration,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{PathVisibility, ProgramEnd, ProgramLimits, SandboxLayer, SandboxProgram};

/// The limit of a header and of a body (files of a room, an input, an output).
const BYTES_MAX: usize = 256 << 20;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CellSetup {
    pub policy: PathVisibility,
    pub group: Option<PathBuf>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum CellRequest {
    /// Sent once, first.
    Setup(CellSetup),
    /// Paths relative to the work directory and lengths; the body contains the contents.
    Room { files: Vec<(String, usize)>, disk_bytes: u64 },
    /// The body is the program's input.
    Run { program: SandboxProgram, limits: ProgramLimits },
    /// The last request: after the reply the pipes are the program's stdin and stdout, and the cell
    /// ends with it.
    Connect { program: SandboxProgram, limits: ProgramLimits },
    /// Tests the containment from the place of a program.
    Probe { canary: PathBuf, limits: ProgramLimits },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum CellReply {
    Done,
    Unfit {
        layer: SandboxLayer,
        problem: String,
        /// True if the kernel refused it, rather than something being missing.
        refused: bool,
    },
    Broken(String),
    /// The body is stdout, of the given length, followed by stderr.
    Ended {
        how: ProgramEnd,
        wall: Duration,
        stdout: usize,
    },
}

/// Fails if header or body is larger than `BYTES_MAX`.
pub(crate) fn write_message(
    to: &mut impl Write,
    head: &impl Serialize,
    body: &[&[u8]],
) -> io::Result<()> {
    let head = serde_json::to_vec(head)?;
    let length = body.iter().map(|part| part.len()).sum();
    let mut frame = Vec::with_capacity(head.len() + length + 2 * size_of::<u32>());
    frame.extend(checked_length(head.len())?.to_le_bytes());
    frame.extend(checked_length(length)?.to_le_bytes());
    frame.extend(head);
    frame.extend(body.iter().copied().flatten());
    to.write_all(&frame)?;
    to.flush()
}

/// Returns `None` at the end of the stream.
pub(crate) fn read_message<T: DeserializeOwned>(
    from: &mut impl Read,
) -> io::Result<Option<(T, Vec<u8>)>> {
    let mut lengths = [0; 2 * size_of::<u32>()];
    match from.read_exact(&mut lengths) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let [a, b, c, d, e, f, g, h] = lengths;
    let head = read_bytes(from, u32::from_le_bytes([a, b, c, d]))?;
    let body = read_bytes(from, u32::from_le_bytes([e, f, g, h]))?;
    Ok(Some((serde_json::from_slice(&head)?, body)))
}

fn read_bytes(from: &mut impl Read, length: u32) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; checked_length(length as usize)? as usize];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn checked_length(length: usize) -> io::Result<u32> {
    match u32::try_from(length) {
        Ok(length) if length as usize <= BYTES_MAX => Ok(length),
        _ => {
            let problem = format!("{length} bytes are more than {BYTES_MAX}");
            Err(io::Error::new(io::ErrorKind::InvalidData, problem))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_reads_back_as_it_was_written() {
        let mut bytes = Vec::new();
        let head = CellRequest::Room { files: vec![("a".into(), 2)], disk_bytes: 7 };
        write_message(&mut bytes, &head, &[b"x", b"yz"]).unwrap();
        let (read, body) = read_message::<CellRequest>(&mut &bytes[..]).unwrap().unwrap();
        assert!(matches!(read, CellRequest::Room { disk_bytes: 7, .. }));
        assert_eq!(body, b"xyz");
    }

    #[test]
    fn the_end_of_the_stream_is_no_error_but_half_a_frame_is() {
        assert!(read_message::<CellReply>(&mut &[][..]).unwrap().is_none());
        let mut bytes = Vec::new();
        write_message(&mut bytes, &CellReply::Done, &[b"body"]).unwrap();
        assert!(read_message::<CellReply>(&mut &bytes[..bytes.len() - 1]).is_err());
    }

    #[test]
    fn lengths_that_nobody_would_write_are_refused_before_memory_is_taken() {
        let error = read_message::<CellReply>(&mut &[0xff; 8][..]).unwrap_err();
        assert!(error.to_string().contains("more than"), "{error}");
    }
}
