//! Lists directories and probes their files. Blocking, with bounded memory.

use std::{
    fs::{self, File, Metadata},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use formats::safetensors::{LENGTH_BYTES, parse_header_length};

use crate::{
    checkpoint_files,
    readiness::{
        DirectoryListing, FileProbe, FileProbes, FileStat, TRAINER_STATE, ZIP_END_BYTES,
        files_to_probe, is_relevant, parse_step,
    },
};

/// In one checkpoint.
const FILES_MAX: usize = 10_000;

/// Larger files are not read whole.
const TEXT_BYTES_MAX: u64 = 64 << 20;

/// A zip file's end record with the longest comment.
const TAIL_BYTES: u64 = ZIP_END_BYTES as u64 + 65_535;

impl FileStat {
    fn from_metadata(metadata: &Metadata) -> Self {
        if metadata.is_dir() {
            // The contents of subdirectories are not checked.
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

/// Sorts by step.
pub(crate) fn list_checkpoints(directory: &Path) -> io::Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if let Some(step) = entry.file_name().to_str().and_then(parse_step)
            && entry.path().is_dir()
        {
            found.push((step, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

/// Lists the relevant files. A file that is removed meanwhile is omitted; more than 10 000 files
/// are an error.
pub(crate) fn list_files(directory: &Path) -> io::Result<DirectoryListing> {
    let mut listing = DirectoryListing::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let Some(name) =
            entry.file_name().to_str().filter(|name| is_relevant(name)).map(str::to_owned)
        else {
            continue;
        };
        match fs::metadata(entry.path()) {
            Ok(metadata) => drop(listing.insert(name, FileStat::from_metadata(&metadata))),
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

pub(crate) fn read_stat(path: &Path) -> io::Result<FileStat> {
    fs::metadata(path).map(|metadata| FileStat::from_metadata(&metadata))
}

/// Omits a file that is removed meanwhile.
pub(crate) fn probe_files(directory: &Path, listing: &DirectoryListing) -> FileProbes {
    let look = |name: String| {
        let probe = match probe_file(&directory.join(&name), &name) {
            Ok(probe) => probe,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => FileProbe::Unreadable(error.to_string()),
        };
        Some((name, probe))
    };
    files_to_probe(listing).into_iter().filter_map(look).collect()
}

/// Reads the ends, the header, the whole text or only the JSON syntax, by name.
fn probe_file(path: &Path, name: &str) -> io::Result<FileProbe> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    if checkpoint_files::is_torch(name) {
        return read_ends(&mut file, bytes);
    }
    if checkpoint_files::is_weights(name) {
        return read_header(&mut file);
    }
    if bytes > TEXT_BYTES_MAX {
        return Ok(FileProbe::Unreadable(format!(
            "it has {bytes} bytes, the limit is {TEXT_BYTES_MAX}"
        )));
    }
    if name == TRAINER_STATE || checkpoint_files::is_settings(name) {
        let mut text = Vec::new();
        file.take(TEXT_BYTES_MAX).read_to_end(&mut text)?;
        return Ok(FileProbe::Text(text));
    }
    let reader = io::BufReader::new(file.take(TEXT_BYTES_MAX));
    let parses = serde_json::from_reader::<_, serde::de::IgnoredAny>(reader).is_ok();
    Ok(FileProbe::Parses(parses))
}

fn read_header(file: &mut File) -> io::Result<FileProbe> {
    let mut bytes = Vec::new();
    file.by_ref().take(LENGTH_BYTES as u64).read_to_end(&mut bytes)?;
    let length = <[u8; LENGTH_BYTES]>::try_from(bytes.as_slice()).ok().map(parse_header_length);
    if let Some(Ok(length)) = length {
        file.take(length).read_to_end(&mut bytes)?;
    }
    Ok(FileProbe::Header(bytes))
}

fn read_ends(file: &mut File, bytes: u64) -> io::Result<FileProbe> {
    let mut head = Vec::new();
    file.by_ref().take(4).read_to_end(&mut head)?;
    file.seek(SeekFrom::Start(bytes.saturating_sub(TAIL_BYTES)))?;
    let mut tail = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut tail)?;
    head.resize(4, 0);
    Ok(FileProbe::Ends([head[0], head[1], head[2], head[3]], tail))
}
