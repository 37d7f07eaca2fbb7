//! Listings of directories and looks into their files. Blocking, and bounded.

use std::{
    fs::{self, File, Metadata},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::{
    files,
    readiness::{
        Listing, Peek, Peeks, Stat, TRAINER_STATE, ZIP_END_BYTES, matters, step_of, to_peek,
    },
    safetensors::{LENGTH_BYTES, header_bytes},
};

/// Files of one checkpoint.
const FILES_MAX: usize = 10_000;

/// Of a file that is read whole.
const TEXT_BYTES_MAX: u64 = 64 << 20;

/// A zip's last record and the longest comment behind it.
const TAIL_BYTES: u64 = ZIP_END_BYTES as u64 + 65_535;

impl Stat {
    fn of(metadata: &Metadata) -> Self {
        if metadata.is_dir() {
            // What goes on in there is not looked at.
            return Self { bytes: 0, modified_ns: 0, inode: metadata.ino(), is_dir: true };
        }
        let nanoseconds = metadata.mtime().saturating_mul(1_000_000_000);
        Self {
            bytes: metadata.len(),
            modified_ns: nanoseconds.saturating_add(metadata.mtime_nsec()),
            inode: metadata.ino(),
            is_dir: false,
        }
    }
}

/// The checkpoints of a directory, by step.
pub(crate) fn checkpoints(directory: &Path) -> io::Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if let Some(step) = entry.file_name().to_str().and_then(step_of)
            && entry.path().is_dir()
        {
            found.push((step, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

/// The files of a directory that matter and what the file system says of them. A file that goes while it
/// is looked at is not there.
pub(crate) fn list(directory: &Path) -> io::Result<Listing> {
    let mut listing = Listing::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let Some(name) = entry.file_name().to_str().filter(|name| matters(name)).map(str::to_owned)
        else {
            continue;
        };
        match fs::metadata(entry.path()) {
            Ok(metadata) => drop(listing.insert(name, Stat::of(&metadata))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        if listing.len() > FILES_MAX {
            let message = format!("it holds more than {FILES_MAX} files");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
    }
    Ok(listing)
}

pub(crate) fn stat(path: &Path) -> io::Result<Stat> {
    fs::metadata(path).map(|metadata| Stat::of(&metadata))
}

/// Looks into each file a verdict needs. What goes meanwhile has no look.
pub(crate) fn peeks(directory: &Path, listing: &Listing) -> Peeks {
    let look = |name: String| {
        let peek = match peek(&directory.join(&name), &name) {
            Ok(peek) => peek,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => Peek::Unreadable(error.to_string()),
        };
        Some((name, peek))
    };
    to_peek(listing).into_iter().filter_map(look).collect()
}

fn peek(path: &Path, name: &str) -> io::Result<Peek> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    if files::is_torch(name) {
        return ends(&mut file, bytes);
    }
    if files::is_weights(name) {
        return header(&mut file);
    }
    if bytes > TEXT_BYTES_MAX {
        return Ok(Peek::Unreadable(format!(
            "it has {bytes} bytes, the limit is {TEXT_BYTES_MAX}"
        )));
    }
    if name == TRAINER_STATE || files::is_settings(name) {
        let mut text = Vec::new();
        file.take(TEXT_BYTES_MAX).read_to_end(&mut text)?;
        return Ok(Peek::Text(text));
    }
    let reader = io::BufReader::new(file.take(TEXT_BYTES_MAX));
    let parses = serde_json::from_reader::<_, serde::de::IgnoredAny>(reader).is_ok();
    Ok(Peek::Parses(parses))
}

fn header(file: &mut File) -> io::Result<Peek> {
    let mut bytes = Vec::new();
    file.by_ref().take(LENGTH_BYTES as u64).read_to_end(&mut bytes)?;
    let length = <[u8; LENGTH_BYTES]>::try_from(bytes.as_slice()).ok().and_then(header_bytes);
    if let Some(length) = length {
        file.take(length).read_to_end(&mut bytes)?;
    }
    Ok(Peek::Header(bytes))
}

fn ends(file: &mut File, bytes: u64) -> io::Result<Peek> {
    let mut head = Vec::new();
    file.by_ref().take(4).read_to_end(&mut head)?;
    file.seek(SeekFrom::Start(bytes.saturating_sub(TAIL_BYTES)))?;
    let mut tail = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut tail)?;
    head.resize(4, 0);
    Ok(Peek::Ends([head[0], head[1], head[2], head[3]], tail))
}
