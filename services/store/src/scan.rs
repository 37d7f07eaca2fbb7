//! What is in a directory that is to be published: names, sizes, digests. Blocking.

use std::{
    fs::{self, File},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
};

use wire::Digest;

use crate::{
    error::PutError,
    manifest::{MANIFEST, MAX_FILES, Manifest, ManifestError, SUMS, TreeFile},
    parts::PARTS,
    path::RelativePath,
};

/// Large enough that a system call costs little beside hashing.
const BUFFER: usize = 1 << 20;
/// Of a copy, between the disk and the hashing: small enough to be in a core's cache still.
const BUFFERS: usize = 8;
const COPY_BUFFER: usize = 256 << 10;

/// All regular files below `dir`, hashed. Links to files are followed (as in the Hugging Face
/// cache); links to directories are refused, for they may be loops.
pub(crate) fn scan(dir: &Path) -> Result<Vec<TreeFile>, PutError> {
    let mut files = Vec::new();
    walk(dir, None, &mut files)?;
    if files.is_empty() {
        return Err(PutError::Empty { path: dir.to_owned() });
    }
    files
        .into_iter()
        .map(|(path, disk)| {
            let hashed = hash_file(&disk).map_err(|source| PutError::Read { path: disk, source });
            let (digest, bytes) = hashed?;
            Ok(TreeFile { path, bytes, digest })
        })
        .collect()
}

type Found = Vec<(RelativePath, PathBuf)>;

fn walk(dir: &Path, below: Option<&RelativePath>, found: &mut Found) -> Result<(), PutError> {
    let unread = |source| PutError::Read { path: dir.to_owned(), source };
    for entry in fs::read_dir(dir).map_err(unread)? {
        let disk = entry.map_err(unread)?.path();
        let path =
            name_of(&disk, below).map_err(|(path, source)| PutError::Path { path, source })?;
        if below.is_none() && is_ours(&disk, path.as_str())? {
            continue;
        }
        let unread = |source| PutError::Read { path: disk.clone(), source };
        let target = fs::metadata(&disk).map_err(unread)?;
        if target.is_file() {
            found.push((path, disk));
        } else if fs::symlink_metadata(&disk).map_err(unread)?.is_dir() {
            walk(&disk, Some(&path), found)?;
        } else {
            return Err(PutError::Kind { path: disk });
        }
        if found.len() > MAX_FILES {
            let source = ManifestError::TooManyFiles(found.len());
            return Err(PutError::Manifest { path: dir.to_owned(), source });
        }
    }
    Ok(())
}

fn name_of(
    disk: &Path,
    below: Option<&RelativePath>,
) -> Result<RelativePath, (PathBuf, crate::path::PathError)> {
    // A name that is not UTF-8 keeps U+FFFD here and then fails to open: it is never renamed.
    let name = disk.file_name().unwrap_or_default().to_string_lossy();
    let joined = match below {
        Some(below) => RelativePath::new(format!("{below}/{name}")),
        None => RelativePath::new(name),
    };
    joined.map_err(|source| (disk.to_owned(), source))
}

/// A fetched tree may be published again: its manifest and sums are written anew. A stranger's
/// `manifest.json` is not silently dropped.
fn is_ours(disk: &Path, name: &str) -> Result<bool, PutError> {
    if name == SUMS || name == PARTS {
        return Ok(true);
    }
    if name != MANIFEST {
        return Ok(false);
    }
    let bytes =
        fs::read(disk).map_err(|source| PutError::Read { path: disk.to_owned(), source })?;
    match Manifest::parse(&bytes) {
        Ok(_) => Ok(true),
        Err(source) => Err(PutError::Manifest { path: disk.to_owned(), source }),
    }
}

pub(crate) fn hash_file(path: &Path) -> io::Result<(Digest, u64)> {
    hash_reader(&mut File::open(path)?)
}

pub(crate) fn hash_reader(reader: &mut impl Read) -> io::Result<(Digest, u64)> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; BUFFER];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok((hasher.finalize().into(), hasher.count())),
            Ok(n) => {
                hasher.update(&buffer[..n]);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Copies a file into an empty one, sharing its blocks where the file system can; `see` has every
/// byte of the copy, in order.
pub(crate) fn copy(
    from: &File,
    to: &mut File,
    mut see: impl FnMut(&[u8]) + Send,
) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(&*to, from).is_ok() {
        let mut buffer = vec![0; BUFFER];
        while let n @ 1.. = read_some(to, &mut buffer)? {
            see(&buffer[..n]);
        }
        return to.rewind();
    }
    // Seen on another thread while the next ones are copied; buffers go round.
    let (filled, to_see) = mpsc::sync_channel::<(Vec<u8>, usize)>(BUFFERS);
    let (seen, free) = mpsc::sync_channel::<Vec<u8>>(BUFFERS);
    thread::scope(|scope| {
        let seeing = scope.spawn(move || {
            for (buffer, n) in to_see {
                see(&buffer[..n]);
                // The copying may be over.
                let _ = seen.send(buffer);
            }
        });
        let mut made = 0;
        let copied = loop {
            let buffer = if made < BUFFERS { None } else { free.recv().ok() };
            let mut buffer = buffer.unwrap_or_else(|| vec![0; COPY_BUFFER]);
            made += 1;
            let n = match read_some(from, &mut buffer) {
                Ok(0) => break Ok(()),
                Ok(n) => n,
                Err(error) => break Err(error),
            };
            if let Err(error) = (&*to).write_all(&buffer[..n]) {
                break Err(error);
            }
            if filled.send((buffer, n)).is_err() {
                break Ok(());
            }
        };
        drop(filled);
        match seeing.join() {
            Ok(()) => copied,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn read_some(mut from: &File, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match from.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}
