//! A file that appears complete or not at all.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::ConvertError;

/// A file under a temporary name beside the final one until [`AtomicFile::commit_file`].
#[derive(Debug)]
pub(super) struct AtomicFile {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
}

impl AtomicFile {
    pub(super) fn create_at(path: &Path) -> Result<Self, ConvertError> {
        let parent = parent_directory(path);
        let file = tempfile::Builder::new()
            .prefix(".convert-")
            .suffix(".partial")
            .permissions(fs::Permissions::from_mode(0o666))
            .tempfile_in(parent)
            .map_err(|source| ConvertError::Write { path: path.into(), source })?;
        Ok(Self { path: path.into(), file: BufWriter::with_capacity(1 << 20, file) })
    }

    /// Syncs the file to disk, renames it and syncs the directory.
    pub(super) fn commit_file(self) -> Result<(), ConvertError> {
        let path = self.path;
        let finish = |file: BufWriter<NamedTempFile>| {
            let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            fs::File::open(parent_directory(&path))?.sync_all()
        };
        finish(self.file).map_err(|source| ConvertError::Write { path: path.clone(), source })
    }

    pub(super) fn write_error(path: &Path) -> impl Fn(io::Error) -> ConvertError {
        move |source| ConvertError::Write { path: path.into(), source }
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Returns `.` if the path has no directory.
pub(super) fn parent_directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}
