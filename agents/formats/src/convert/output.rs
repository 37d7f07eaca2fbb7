//! A file that is there whole or not at all.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::ConvertError;

/// Written under a name of its own beside the final one; [`Output::finish`] gives it that.
#[derive(Debug)]
pub(super) struct Output {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
}

impl Output {
    pub(super) fn create(path: &Path) -> Result<Self, ConvertError> {
        let parent = parent(path);
        let file = tempfile::Builder::new()
            .prefix(".convert-")
            .suffix(".partial")
            .permissions(fs::Permissions::from_mode(0o666))
            .tempfile_in(parent)
            .map_err(|source| ConvertError::Write { path: path.into(), source })?;
        Ok(Self { path: path.into(), file: BufWriter::with_capacity(1 << 20, file) })
    }

    /// On disk, then under its name.
    pub(super) fn finish(self) -> Result<(), ConvertError> {
        let path = self.path;
        let finish = |file: BufWriter<NamedTempFile>| {
            let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            fs::File::open(parent(&path))?.sync_all()
        };
        finish(self.file).map_err(|source| ConvertError::Write { path: path.clone(), source })
    }

    pub(super) fn failed(path: &Path) -> impl Fn(io::Error) -> ConvertError {
        move |source| ConvertError::Write { path: path.into(), source }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}
