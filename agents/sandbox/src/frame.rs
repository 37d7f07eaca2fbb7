//! What a cell and the process that holds it say to each other: a head in JSON, then bytes.

use std::{
    io::{self, Read, Write},
    path::PathBuf,
    time::Duration,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{How, Layer, Limits, Policy, Program};

/// Of a head and of a body: files of a room, an input, an output.
const BYTES_MAX: usize = 256 << 20;

/// What a cell must know to contain itself.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub policy: Policy,
    /// The control group to enter.
    pub group: Option<PathBuf>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// First, and once.
    Setup(Setup),
    /// Paths below the work directory and lengths; the contents are the body.
    Room { files: Vec<(String, usize)>, disk_bytes: u64 },
    /// Its input is the body.
    Run { program: Program, limits: Limits },
    /// Examines the containment from where a program would be.
    Probe { canary: PathBuf, limits: Limits },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    Done,
    Unfit {
        layer: Layer,
        problem: String,
        /// Whether the kernel refused it, rather than something being missing.
        refused: bool,
    },
    Broken(String),
    /// The body is stdout, of this length, and stderr.
    Ended {
        how: How,
        wall: Duration,
        stdout: usize,
    },
}

pub(crate) fn write(to: &mut impl Write, head: &impl Serialize, body: &[&[u8]]) -> io::Result<()> {
    let head = serde_json::to_vec(head)?;
    let length = body.iter().map(|part| part.len()).sum();
    let mut frame = Vec::with_capacity(head.len() + length + 2 * size_of::<u32>());
    frame.extend(bounded(head.len())?.to_le_bytes());
    frame.extend(bounded(length)?.to_le_bytes());
    frame.extend(head);
    frame.extend(body.iter().copied().flatten());
    to.write_all(&frame)?;
    to.flush()
}

/// A head and its body; `None` at the end of the stream.
pub(crate) fn read<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<(T, Vec<u8>)>> {
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
    let mut bytes = vec![0; bounded(length as usize)? as usize];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn bounded(length: usize) -> io::Result<u32> {
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
        let head = Request::Room { files: vec![("a".into(), 2)], disk_bytes: 7 };
        write(&mut bytes, &head, &[b"x", b"yz"]).unwrap();
        let (read, body) = read::<Request>(&mut &bytes[..]).unwrap().unwrap();
        assert!(matches!(read, Request::Room { disk_bytes: 7, .. }));
        assert_eq!(body, b"xyz");
    }

    #[test]
    fn the_end_of_the_stream_is_no_error_but_half_a_frame_is() {
        assert!(read::<Reply>(&mut &[][..]).unwrap().is_none());
        let mut bytes = Vec::new();
        write(&mut bytes, &Reply::Done, &[b"body"]).unwrap();
        assert!(read::<Reply>(&mut &bytes[..bytes.len() - 1]).is_err());
    }

    #[test]
    fn lengths_that_nobody_would_write_are_refused_before_memory_is_taken() {
        let error = read::<Reply>(&mut &[0xff; 8][..]).unwrap_err();
        assert!(error.to_string().contains("more than"), "{error}");
    }
}
