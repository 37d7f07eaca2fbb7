//! Reading a file of this machine once from start to end, to hash it and optionally copy it.
//! Blocking.
//!
//! A large file that is only hashed is read by several threads, each taking one part at a time. For
//! a copy, one thread reads and hashes while another writes, which take about the same time. More
//! threads would only wait for each other, because a file is written by one at a time.

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

use crate::parts::{PartHasher, PartHashes};

/// The largest number of threads that hash one file; more would wait for memory.
const THREADS_MAX: usize = 4;
/// Small enough to stay in a core's cache until it is hashed and written.
const PIECE_BYTES: usize = 256 << 10;
const PIECES: usize = 8;

/// A callback that receives the number of bytes as they are hashed.
pub type ByteProgress<'a> = &'a (dyn Fn(u64) + Send + Sync);

/// The digest, the size in bytes, and the part hashes if the file has parts.
pub(crate) type FileHashes = (Digest, u64, Option<PartHashes>);

/// Copies a file into an empty one. Shares the blocks where the file system can.
pub(crate) fn copy_and_hash(from: &File, mut to: &File) -> io::Result<FileHashes> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return hash_open_file(to, &|_| ());
    }
    let (filled, to_write) = mpsc::sync_channel(PIECES);
    // Written buffers return to the reader.
    let (written, free) = mpsc::sync_channel(PIECES);
    (0..PIECES).try_for_each(|_| written.send(Vec::new())).map_err(io::Error::other)?;
    thread::scope(|scope| {
        let reading = scope.spawn(move || read_ahead(from, &filled, free));
        let wrote = to_write.into_iter().try_for_each(move |piece| {
            to.write_all(&piece)?;
            // The reader may have finished.
            let _ = written.send(piece);
            Ok(())
        });
        let found = reading.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
        wrote.and(found)
    })
}

/// Ends early when the writer has stopped.
fn read_ahead(
    file: &File,
    filled: &mpsc::SyncSender<Vec<u8>>,
    free: mpsc::Receiver<Vec<u8>>,
) -> io::Result<FileHashes> {
    let (mut hasher, mut at) = (PartHasher::new(file.metadata()?.len()), 0);
    for mut piece in free {
        piece.resize(PIECE_BYTES, 0);
        let n = read_at_offset(file, &mut piece, at)?;
        piece.truncate(n);
        hasher.update(&piece);
        at += n as u64;
        if n == 0 || filled.send(piece).is_err() {
            break;
        }
    }
    Ok(hasher.finish())
}

/// Hashes a file, with several threads if it is large.
pub(crate) fn hash_open_file(file: &File, seen: ByteProgress<'_>) -> io::Result<FileHashes> {
    let bytes = file.metadata()?.len();
    let Some(part_bytes) = PartHashes::part_size(bytes) else {
        return hash_in_order(file, bytes, seen);
    };
    let mut values = hash_with_threads(&ParallelReading {
        file,
        bytes,
        part_bytes,
        next_start: AtomicU64::new(0),
        progress: seen,
    })?;
    if values.len() as u64 != bytes.div_ceil(part_bytes) {
        // The file became shorter.
        return hash_in_order(file, bytes, seen);
    }
    values.sort_unstable_by_key(|(start, _)| *start);
    let values = values.into_iter().map(|(_, value)| value).collect();
    let (digest, parts) = PartHashes::from_values(bytes, part_bytes, values);
    Ok((digest, bytes, Some(parts)))
}

fn hash_in_order(file: &File, bytes: u64, seen: ByteProgress<'_>) -> io::Result<FileHashes> {
    let mut hasher = PartHasher::new(bytes);
    read_pieces(file, 0..u64::MAX, &mut new_buffer(), |piece| {
        hasher.update(piece);
        seen(piece.len() as u64);
    })?;
    Ok(hasher.finish())
}

struct ParallelReading<'a> {
    file: &'a File,
    bytes: u64,
    part_bytes: u64,
    /// Start of the next part that no thread has taken.
    next_start: AtomicU64,
    progress: ByteProgress<'a>,
}

type PartValue = (u64, ChainingValue);

fn hash_with_threads(reading: &ParallelReading<'_>) -> io::Result<Vec<PartValue>> {
    let work = || {
        let done = reading.hash_parts();
        if done.is_err() {
            // The other threads stop.
            reading.next_start.fetch_max(reading.bytes, Ordering::Relaxed);
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

impl ParallelReading<'_> {
    fn hash_parts(&self) -> io::Result<Vec<PartValue>> {
        let (mut values, mut buffer) = (Vec::new(), new_buffer());
        loop {
            let start = self.next_start.fetch_add(self.part_bytes, Ordering::Relaxed);
            let end = self.bytes.min(start.saturating_add(self.part_bytes));
            if start >= end {
                return Ok(values);
            }
            let mut hasher = blake3::Hasher::new();
            hasher.set_input_offset(start);
            read_pieces(self.file, start..end, &mut buffer, |piece| {
                hasher.update(piece);
                (self.progress)(piece.len() as u64);
            })?;
            if hasher.count() == end - start {
                values.push((start, hasher.finalize_non_root()));
            }
        }
    }
}

fn new_buffer() -> Vec<u8> {
    vec![0; PIECE_BYTES]
}

fn read_pieces(
    file: &File,
    mut range: Range<u64>,
    buffer: &mut [u8],
    mut used: impl FnMut(&[u8]),
) -> io::Result<()> {
    while !range.is_empty() {
        let left = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let room = left.min(buffer.len());
        let n = read_at_offset(file, &mut buffer[..room], range.start)?;
        if n == 0 {
            break;
        }
        used(&buffer[..n]);
        range.start += n as u64;
    }
    Ok(())
}

fn read_at_offset(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
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
            let (digest, count, parts) = copy_and_hash(&from, &to).unwrap();
            assert_eq!((digest, count), (Digest::hash_bytes(&bytes), len as u64));
            assert_eq!(fs::read(&target).unwrap(), bytes);
            assert_eq!(parts.is_some(), len > 1 << 20);
            let seen = Mutex::new(0);
            let found = hash_open_file(&from, &|n| *seen.lock().unwrap() += n).unwrap();
            assert_eq!((found, seen.into_inner().unwrap()), ((digest, count, parts), count));
        }
    }

    #[test]
    fn a_file_that_becomes_shorter_has_the_digest_of_its_rest() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        let bytes = noise(5 << 20);
        fs::write(&source, &bytes).unwrap();
        let from = File::options().read(true).write(true).open(&source).unwrap();
        let found = hash_open_file(&from, &|_| from.set_len(3 << 20).unwrap()).unwrap();
        assert_eq!((found.0, found.1), (Digest::hash_bytes(&bytes[..3 << 20]), 3 << 20));
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        fs::write(&source, noise(2 << 20)).unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        assert!(copy_and_hash(&File::open(&source).unwrap(), &full).is_err());
    }
}
