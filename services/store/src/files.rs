//! Reading a file of this machine from end to end, once: hashed, and copied on the way. Blocking.
//!
//! Of a large file that is only hashed, several threads take a part each. Of one that is copied, one
//! reads and hashes while another writes, which take about as long; more would only wait for each
//! other, for a file is written by one at a time.

use std::{
    fs::File,
    io::{self, Write},
    ops::Range,
    os::unix::fs::FileExt,
    panic,
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
};

use blake3::hazmat::{ChainingValue, HasherExt};
use wire::Digest;

use crate::{
    examine::Seen,
    parts::{PartHasher, Parts},
};

/// More would wait for the memory.
const THREADS_MAX: usize = 4;
/// Small enough to be in a core's cache still when it is hashed and written.
const PIECE_BYTES: usize = 256 << 10;
/// Of a copy, between reading and writing.
const PIECES: usize = 8;

/// The digest of what was read, how much it was, and its parts if there are any.
pub(crate) type Found = (Digest, u64, Option<Parts>);

/// Into an empty file, sharing its blocks where the file system can.
pub(crate) fn copy(from: &File, mut to: &File) -> io::Result<Found> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return hash(to, &|_| ());
    }
    let (filled, to_write) = mpsc::sync_channel(PIECES);
    // Buffers go round.
    let (written, free) = mpsc::sync_channel(PIECES);
    (0..PIECES).try_for_each(|_| written.send(Vec::new())).map_err(io::Error::other)?;
    thread::scope(|scope| {
        let reading = scope.spawn(move || read_ahead(from, &filled, free));
        let wrote = to_write.into_iter().try_for_each(move |piece| {
            to.write_all(&piece)?;
            // The reading may be over.
            let _ = written.send(piece);
            Ok(())
        });
        let found = reading.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
        wrote.and(found)
    })
}

/// Ends early when nobody writes any more.
fn read_ahead(
    file: &File,
    filled: &mpsc::SyncSender<Vec<u8>>,
    free: mpsc::Receiver<Vec<u8>>,
) -> io::Result<Found> {
    let (mut hasher, mut at) = (PartHasher::new(file.metadata()?.len()), 0);
    for mut piece in free {
        piece.resize(PIECE_BYTES, 0);
        let n = read_at(file, &mut piece, at)?;
        piece.truncate(n);
        hasher.update(&piece);
        at += n as u64;
        if n == 0 || filled.send(piece).is_err() {
            break;
        }
    }
    Ok(hasher.finish())
}

pub(crate) fn hash(file: &File, seen: Seen<'_>) -> io::Result<Found> {
    let bytes = file.metadata()?.len();
    let Some(part_bytes) = Parts::part_bytes(bytes) else { return in_order(file, bytes, seen) };
    let mut values = by_all(&Reading { file, bytes, part_bytes, begun: AtomicU64::new(0), seen })?;
    if values.len() as u64 != bytes.div_ceil(part_bytes) {
        // It became shorter.
        return in_order(file, bytes, seen);
    }
    values.sort_unstable_by_key(|(start, _)| *start);
    let values = values.into_iter().map(|(_, value)| value).collect();
    let (digest, parts) = Parts::merge(bytes, part_bytes, values);
    Ok((digest, bytes, Some(parts)))
}

fn in_order(file: &File, bytes: u64, seen: Seen<'_>) -> io::Result<Found> {
    let mut hasher = PartHasher::new(bytes);
    pieces(file, 0..u64::MAX, &mut buffer(), |piece| {
        hasher.update(piece);
        seen(piece.len() as u64);
    })?;
    Ok(hasher.finish())
}

/// A file that several threads read.
struct Reading<'a> {
    file: &'a File,
    bytes: u64,
    part_bytes: u64,
    /// Where the next part that nobody reads begins.
    begun: AtomicU64,
    seen: Seen<'a>,
}

/// Where a part begins, and its value.
type Value = (u64, ChainingValue);

fn by_all(reading: &Reading<'_>) -> io::Result<Vec<Value>> {
    let work = || {
        let done = reading.parts();
        if done.is_err() {
            // The others need not go on.
            reading.begun.fetch_max(reading.bytes, Ordering::Relaxed);
        }
        done
    };
    let cores = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    thread::scope(|scope| {
        let others: Vec<_> = (1..cores).map(|_| scope.spawn(work)).collect();
        let mut values = work();
        for other in others {
            let more = other.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
            values = values.and_then(|mut values| {
                values.extend(more?);
                Ok(values)
            });
        }
        values
    })
}

impl Reading<'_> {
    /// Parts that nobody reads yet, until there are none.
    fn parts(&self) -> io::Result<Vec<Value>> {
        let (mut values, mut buffer) = (Vec::new(), buffer());
        loop {
            let start = self.begun.fetch_add(self.part_bytes, Ordering::Relaxed);
            let end = self.bytes.min(start.saturating_add(self.part_bytes));
            if start >= end {
                return Ok(values);
            }
            let mut hasher = blake3::Hasher::new();
            hasher.set_input_offset(start);
            pieces(self.file, start..end, &mut buffer, |piece| {
                hasher.update(piece);
                (self.seen)(piece.len() as u64);
            })?;
            if hasher.count() == end - start {
                values.push((start, hasher.finalize_non_root()));
            }
        }
    }
}

fn buffer() -> Vec<u8> {
    vec![0; PIECE_BYTES]
}

/// What the file has of that range.
fn pieces(
    file: &File,
    mut range: Range<u64>,
    buffer: &mut [u8],
    mut used: impl FnMut(&[u8]),
) -> io::Result<()> {
    while !range.is_empty() {
        let left = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let room = left.min(buffer.len());
        let n = read_at(file, &mut buffer[..room], range.start)?;
        if n == 0 {
            break;
        }
        used(&buffer[..n]);
        range.start += n as u64;
    }
    Ok(())
}

fn read_at(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    loop {
        match file.read_at(buffer, at) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Mutex};

    use super::*;
    use crate::parts::testing::noise;

    #[test]
    fn a_copy_has_the_files_bytes_and_its_digest_whatever_its_size() {
        let dir = tempfile::tempdir().unwrap();
        let (source, target) = (dir.path().join("source"), dir.path().join("target"));
        for len in [0, 1, 1 << 20, (1 << 20) + 1, 3_000_000, 4 << 20, (4 << 20) + 1] {
            let bytes = noise(len);
            fs::write(&source, &bytes).unwrap();
            let (from, to) = (File::open(&source).unwrap(), File::create(&target).unwrap());
            let (digest, count, parts) = copy(&from, &to).unwrap();
            assert_eq!((digest, count), (Digest::of(&bytes), len as u64));
            assert_eq!(fs::read(&target).unwrap(), bytes);
            assert_eq!(parts.is_some(), len > 1 << 20);
            let seen = Mutex::new(0);
            let found = hash(&from, &|n| *seen.lock().unwrap() += n).unwrap();
            assert_eq!((found, seen.into_inner().unwrap()), ((digest, count, parts), count));
        }
    }

    #[test]
    fn what_becomes_shorter_has_the_digest_of_what_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        let bytes = noise(5 << 20);
        fs::write(&source, &bytes).unwrap();
        let from = File::options().read(true).write(true).open(&source).unwrap();
        let found = hash(&from, &|_| from.set_len(3 << 20).unwrap()).unwrap();
        assert_eq!((found.0, found.1), (Digest::of(&bytes[..3 << 20]), 3 << 20));
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        fs::write(&source, noise(2 << 20)).unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        assert!(copy(&File::open(&source).unwrap(), &full).is_err());
    }
}
