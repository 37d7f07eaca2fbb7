//! Reads safetensors files: the header is read and checked on opening, data only on request.

mod header;
mod header_fields;
mod header_writer;
mod weights;

pub use header::TensorEntry;
pub use header_fields::{DeclaredTensors, LENGTH_BYTES, parse_header_length};
pub(crate) use header_writer::{PlannedSafetensorsTensor, write_header};
pub use weights::ModelWeights;
pub(crate) use weights::text_part_name;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::FloatDtype;

/// The reason why a safetensors file or one of its tensors cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SafetensorsError {
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

/// An open file whose header is valid.
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: fs::File,
    /// In the file.
    data_start: u64,
    entries: BTreeMap<String, TensorEntry>,
    /// From `__metadata__`.
    metadata: BTreeMap<String, String>,
}

impl SafetensorsFile {
    /// Opens a file and checks its header.
    pub fn open(path: &Path) -> Result<Self, SafetensorsError> {
        let failed = |source| SafetensorsError::File { path: path.into(), source };
        let mut file = fs::File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let wrong = |what| SafetensorsError::Format { path: path.into(), what };
        let size = header::read_header_size(&mut file, length).map_err(failed)?.map_err(wrong)?;
        let mut text = Vec::new();
        (&mut file).take(size).read_to_end(&mut text).map_err(failed)?;
        let data = 8 + size;
        let (entries, metadata) = header::parse_header(&text, length - data).map_err(wrong)?;
        Ok(Self { path: path.into(), file, data_start: data, entries, metadata })
    }

    /// Returns the path of the file.
    pub fn file_path(&self) -> &Path {
        &self.path
    }

    /// Returns the entries of `__metadata__`.
    pub fn file_metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Returns the tensors by name.
    pub fn tensor_entries(&self) -> &BTreeMap<String, TensorEntry> {
        &self.entries
    }

    /// Returns a tensor by its name.
    pub fn get(&self, name: &str) -> Option<LocatedTensor<'_>> {
        self.entries.get_key_value(name).map(|(name, entry)| LocatedTensor {
            file: self,
            name,
            entry,
        })
    }
}

/// A tensor and the file that contains it.
#[derive(Debug, Clone, Copy)]
pub struct LocatedTensor<'a> {
    pub file: &'a SafetensorsFile,
    pub name: &'a str,
    pub entry: &'a TensorEntry,
}

impl LocatedTensor<'_> {
    /// Returns the number format; fails if it cannot be converted.
    pub fn float_dtype(&self) -> Result<FloatDtype, SafetensorsError> {
        FloatDtype::from_safetensors(&self.entry.dtype).ok_or_else(|| SafetensorsError::Dtype {
            path: self.file.path.clone(),
            name: self.name.into(),
            found: self.entry.dtype.clone(),
        })
    }

    /// Fails if the shape differs from `expected`.
    pub(crate) fn expect_shape(&self, expected: &[u64]) -> Result<(), SafetensorsError> {
        if self.entry.shape == expected {
            return Ok(());
        }
        Err(SafetensorsError::Shape {
            path: self.file.path.clone(),
            name: self.name.into(),
            found: self.entry.shape.clone(),
            expected: expected.into(),
        })
    }

    /// Fills `buffer` with the tensor's bytes from `offset` on.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SafetensorsError> {
        let start = self.file.data_start + self.entry.range.start + offset;
        let read = self.file.file.read_exact_at(buffer, start);
        read.map_err(|source| SafetensorsError::File { path: self.file.path.clone(), source })
    }

    /// Reads all values into memory; meant for small tensors, such as those of an adapter.
    pub fn read_values(&self) -> Result<Vec<f32>, SafetensorsError> {
        let element = self.float_dtype()?;
        let range = &self.entry.range;
        let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)];
        self.read(0, &mut bytes)?;
        let mut values = Vec::new();
        element.decode_floats(&bytes, &mut values);
        Ok(values)
    }
}
