//! A blob that is being downloaded. It continues where an earlier download of the same blob ended,
//! and gets its name in the cache once its size and digest are right.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use data_encoding::HEXLOWER;
use ring::digest::{Context, SHA256};

use crate::{error::RequestError, hub_http::FileMetadata, repo_cache::BlobLock};

const READ_BYTES: usize = 1 << 20;

/// All its functions block. A write that nobody waits for any more still has the lock.
pub(crate) struct PartialBlob {
    file: File,
    blob: PathBuf,
    bytes: u64,
    size: u64,
    hasher: Context,
    /// The expected SHA-256, if the hub declared it.
    sha256: Option<String>,
    _lock: BlobLock,
}

impl PartialBlob {
    /// Opens `<blob>.incomplete`.
    pub(crate) fn open(lock: BlobLock, blob: &Path, metadata: &FileMetadata) -> io::Result<Self> {
        let path = partial_path(blob);
        fs::create_dir_all(blob.parent().unwrap_or(blob))?;
        let mut opened = Self {
            file: File::options().read(true).append(true).create(true).open(path)?,
            blob: blob.to_owned(),
            bytes: 0,
            size: metadata.size,
            hasher: Context::new(&SHA256),
            sha256: metadata.sha256.clone(),
            _lock: lock,
        };
        opened.read_present_bytes()?;
        if opened.bytes > opened.size { opened.restart() } else { Ok(opened) }
    }

    fn read_present_bytes(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let count = self.file.read(&mut buffer)?;
            if count == 0 {
                return Ok(());
            }
            self.hasher.update(&buffer[..count]);
            self.bytes += count as u64;
        }
    }

    /// Discards the bytes so far.
    pub(crate) fn restart(mut self) -> io::Result<Self> {
        self.file.set_len(0)?;
        self.bytes = 0;
        self.hasher = Context::new(&SHA256);
        Ok(self)
    }

    pub(crate) fn byte_count(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.bytes == self.size
    }

    pub(crate) fn append(mut self, chunk: &[u8]) -> Result<Self, RequestError> {
        let size = self.size;
        if chunk.len() as u64 > size - self.bytes {
            self.restart()?;
            return Err(format!("it has more than the {size} bytes that the hub declares").into());
        }
        self.file.write_all(chunk)?;
        self.hasher.update(chunk);
        self.bytes += chunk.len() as u64;
        Ok(self)
    }

    /// Checks the blob and gives it its name. Keeps what is incomplete, and discards what is wrong.
    pub(crate) fn commit(self) -> Result<(), RequestError> {
        let Self { bytes, size, .. } = self;
        if !self.is_complete() {
            return Err(format!("the connection ended after {bytes} of {size} bytes").into());
        }
        let found = HEXLOWER.encode(self.hasher.clone().finish().as_ref());
        if let Some(sha256) = self.sha256.clone().filter(|sha256| *sha256 != found) {
            self.restart()?;
            return Err(format!("its SHA-256 is {found}, the hub declares {sha256}").into());
        }
        // A crash must not leave a complete name for incomplete bytes.
        self.file.sync_data()?;
        Ok(fs::rename(partial_path(&self.blob), &self.blob)?)
    }
}

fn partial_path(blob: &Path) -> PathBuf {
    blob.with_added_extension("incomplete")
}
