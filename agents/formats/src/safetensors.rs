//! safetensors files: the header is read and checked, data is read where it is wanted.

mod header;
mod weights;
mod write;

pub use header::Entry;
pub use weights::Weights;
pub(crate) use write::{Planned, write_header};

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::Element;

#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    #[error("could not read {path}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a valid safetensors file: {what}; download or copy it again (M103)")]
    Format { path: PathBuf, what: String },
    #[error("{path}: tensor `{name}` is {found}; f32, bf16 and f16 are supported (M105)")]
    Dtype { path: PathBuf, name: String, found: String },
    #[error("{path}: tensor `{name}` has shape {found:?}, expected {expected:?} (M106)")]
    Shape { path: PathBuf, name: String, found: Vec<u64>, expected: Vec<u64> },
    #[error("{dir}: tensor `{name}` is missing; download or copy the model again (M106)")]
    Missing { dir: PathBuf, name: String },
    #[error(
        "{dir}: tensor `{name}` is in two of the files; download or copy the model again (M106)"
    )]
    Twice { dir: PathBuf, name: String },
}

/// An open file whose header made sense.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    file: fs::File,
    /// Where data begins.
    data: u64,
    entries: BTreeMap<String, Entry>,
    /// What `__metadata__` says.
    metadata: BTreeMap<String, String>,
}

impl File {
    pub fn open(path: &Path) -> Result<Self, TensorError> {
        let failed = |source| TensorError::File { path: path.into(), source };
        let mut file = fs::File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let wrong = |what| TensorError::Format { path: path.into(), what };
        let size = header::size(&mut file, length).map_err(failed)?.map_err(wrong)?;
        let mut text = Vec::new();
        (&mut file).take(size).read_to_end(&mut text).map_err(failed)?;
        let data = 8 + size;
        let (entries, metadata) = header::parse(&text, length - data).map_err(wrong)?;
        Ok(Self { path: path.into(), file, data, entries, metadata })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    pub fn get(&self, name: &str) -> Option<Located<'_>> {
        self.entries.get_key_value(name).map(|(name, entry)| Located { file: self, name, entry })
    }
}

/// A tensor and the file it is in.
#[derive(Debug, Clone, Copy)]
pub struct Located<'a> {
    pub file: &'a File,
    pub name: &'a str,
    pub entry: &'a Entry,
}

impl Located<'_> {
    /// Of a kind that can be converted.
    pub fn element(&self) -> Result<Element, TensorError> {
        Element::from_safetensors(&self.entry.dtype).ok_or_else(|| TensorError::Dtype {
            path: self.file.path.clone(),
            name: self.name.into(),
            found: self.entry.dtype.clone(),
        })
    }

    pub fn expect_shape(&self, expected: &[u64]) -> Result<(), TensorError> {
        if self.entry.shape == expected {
            return Ok(());
        }
        Err(TensorError::Shape {
            path: self.file.path.clone(),
            name: self.name.into(),
            found: self.entry.shape.clone(),
            expected: expected.into(),
        })
    }

    /// Fills `buffer` with the tensor's bytes from `offset` on.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), TensorError> {
        let start = self.file.data + self.entry.range.start + offset;
        let read = self.file.file.read_exact_at(buffer, start);
        read.map_err(|source| TensorError::File { path: self.file.path.clone(), source })
    }

    /// All of it: only for tensors that are small, as an adapter's are.
    pub fn values(&self) -> Result<Vec<f32>, TensorError> {
        let element = self.element()?;
        let range = &self.entry.range;
        let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)];
        self.read(0, &mut bytes)?;
        let mut values = Vec::new();
        element.decode(&bytes, &mut values);
        Ok(values)
    }
}
