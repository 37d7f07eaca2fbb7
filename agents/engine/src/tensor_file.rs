//! safetensors files: read one tensor at a time as f32 or bf16, and written in a fixed order.

use crate::ops::matrix::MappedMatrix;
use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorInfo, TensorView};
use safetensors::{Dtype, SafeTensorError};
use std::borrow::Borrow;
use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The reason why a tensor file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TensorFileError {
    #[error("could not read or write {path}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a valid safetensors file; download or copy it again (M103)")]
    Format { path: PathBuf, source: SafeTensorError },
    #[error("{path}: tensor `{name}` is {found}; f32, bf16 and f16 are supported (M105)")]
    Dtype { path: PathBuf, name: String, found: String },
    #[error("{path}: tensor `{name}` has no elements; download or copy the file again (M103)")]
    Empty { path: PathBuf, name: String },
    #[error("{path}: tensor `{name}` is missing (M106)")]
    Missing { path: PathBuf, name: String },
    #[error("{path}: tensor `{name}` has shape {found:?}, expected {expected:?} (M106)")]
    Shape { path: PathBuf, name: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("tensor operation failed on a file's content (X101)")]
    Tensor(#[from] candle_core::Error),
}

/// The largest header in bytes, as in the format's own library.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// The bytes of a file that are in memory beside the tensor they become.
const READ_BUFFER_BYTES: usize = 1 << 20;

/// An open file whose header matches its length, so that no tensor is larger than the file.
pub(crate) struct TensorFile {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    start: u64,
    mapped: OnceCell<Arc<Mmap>>,
}

impl TensorFile {
    pub(crate) fn open(path: &Path) -> Result<Self, TensorFileError> {
        let failed = |source| TensorFileError::File { path: path.into(), source };
        let damaged = |source| TensorFileError::Format { path: path.into(), source };
        let mut file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut size = [0; 8];
        if length < size.len() as u64 {
            return Err(damaged(SafeTensorError::HeaderTooSmall));
        }
        file.read_exact(&mut size).map_err(failed)?;
        let header = u64::from_le_bytes(size);
        if header > HEADER_BYTES_MAX {
            return Err(damaged(SafeTensorError::HeaderTooLarge));
        }
        let start = size.len() as u64 + header;
        if start > length {
            return Err(damaged(SafeTensorError::InvalidHeaderLength));
        }
        let mut text = vec![0; header as usize];
        file.read_exact(&mut text).map_err(failed)?;
        let metadata: Metadata = serde_json::from_slice(&text)
            .map_err(SafeTensorError::InvalidHeaderDeserialization)
            .map_err(damaged)?;
        if start.checked_add(metadata.data_len() as u64) != Some(length) {
            return Err(damaged(SafeTensorError::MetadataIncompleteBuffer));
        }
        Ok(Self { path: path.into(), file, metadata, start, mapped: OnceCell::new() })
    }

    /// Returns sorted names.
    pub(crate) fn tensor_names(&self) -> Vec<String> {
        let mut names = self.metadata.offset_keys();
        names.sort();
        names
    }

    /// Returns `None` if the tensor is missing or has another type or shape.
    pub(crate) fn map_matrix(
        &self,
        name: &str,
        shape: &[usize],
    ) -> Result<Option<MappedMatrix>, TensorFileError> {
        let Some(info) = self.metadata.info(name) else { return Ok(None) };
        if info.dtype != Dtype::BF16 || info.shape != shape {
            return Ok(None);
        }
        if self.mapped.get().is_none() {
            #[expect(unsafe_code, reason = "a map is of a file that others could change")]
            // SAFETY: the files of a model are replaced, not written to. Truncating one stops the
            // worker that maps it, and corrupts nothing.
            let file = unsafe { Mmap::map(&self.file) };
            let failed = |source| TensorFileError::File { path: self.path.clone(), source };
            let file = Arc::new(file.map_err(failed)?);
            // The file is then read in pages of 2 MiB if the file system supports it, which saves
            // address lookups. If the system refuses, reading is only slower.
            #[cfg(target_os = "linux")]
            let _ = file.advise(memmap2::Advice::HugePage);
            self.mapped.get_or_init(|| file);
        }
        let Some(file) = self.mapped.get() else { return Ok(None) };
        Ok(MappedMatrix::new(file.clone(), self.start as usize + info.data_offsets.0, shape))
    }

    /// Checks the shape, unless `shape` is `None`.
    pub(crate) fn read_tensor(
        &self,
        name: &str,
        shape: Option<&[usize]>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor, TensorFileError> {
        let (path, name) = (self.path.clone(), name.to_owned());
        let Some(info) = self.metadata.info(&name) else {
            return Err(TensorFileError::Missing { path, name });
        };
        if let Some(expected) = shape.filter(|shape| *shape != info.shape) {
            let (found, expected) = (info.shape.clone(), expected.to_vec());
            return Err(TensorFileError::Shape { path, name, found, expected });
        }
        // The product of its other dimensions may overflow.
        if info.data_offsets.0 == info.data_offsets.1 {
            return Err(TensorFileError::Empty { path, name });
        }
        let found = match dtype {
            DType::BF16 => self.read_values(info, bf16::from_f32).map(|values| {
                values.map(|values| Tensor::from_vec(values, info.shape.as_slice(), device))
            }),
            _ => self.read_values(info, |value| value).map(|values| {
                values.map(|values| Tensor::from_vec(values, info.shape.as_slice(), device))
            }),
        };
        match found.map_err(|source| TensorFileError::File { path: path.clone(), source })? {
            Some(tensor) => Ok(tensor?),
            None => {
                let found = format!("{:?}", info.dtype);
                Err(TensorFileError::Dtype { path, name, found })
            }
        }
    }

    /// Returns `None` if the type is not supported.
    fn read_values<T>(
        &self,
        info: &TensorInfo,
        make: impl Fn(f32) -> T,
    ) -> std::io::Result<Option<Vec<T>>> {
        let read = match info.dtype {
            Dtype::F32 => self.read_elements(info, |bytes| make(f32::from_le_bytes(bytes))),
            Dtype::BF16 => {
                self.read_elements(info, |bytes| make(bf16::from_le_bytes(bytes).to_f32()))
            }
            Dtype::F16 => {
                self.read_elements(info, |bytes| make(f16::from_le_bytes(bytes).to_f32()))
            }
            _ => return Ok(None),
        };
        read.map(Some)
    }

    /// Reads elements of `SIZE` bytes in blocks of `READ_BUFFER_BYTES`.
    fn read_elements<T, const SIZE: usize>(
        &self,
        info: &TensorInfo,
        make: impl Fn([u8; SIZE]) -> T,
    ) -> std::io::Result<Vec<T>> {
        let (start, end) = info.data_offsets;
        let mut file = &self.file;
        file.seek(SeekFrom::Start(self.start + start as u64))?;
        let mut elements = Vec::with_capacity((end - start) / SIZE);
        let mut buffer = vec![0; READ_BUFFER_BYTES.min(end - start)];
        let mut left = end - start;
        while left > 0 {
            let bytes = &mut buffer[..READ_BUFFER_BYTES.min(left)];
            file.read_exact(bytes)?;
            left -= bytes.len();
            elements.extend(bytes.as_chunks::<SIZE>().0.iter().map(|bytes| make(*bytes)));
        }
        Ok(elements)
    }
}

pub(crate) fn read_all(path: &Path) -> Result<BTreeMap<String, Tensor>, TensorFileError> {
    let file = TensorFile::open(path)?;
    let tensor = |name: String| {
        let tensor = file.read_tensor(&name, None, DType::F32, &Device::Cpu)?;
        Ok((name, tensor))
    };
    file.tensor_names().into_iter().map(tensor).collect()
}

/// Removes a tensor and checks its shape.
pub(crate) fn take_tensor(
    found: &mut BTreeMap<String, Tensor>,
    path: &Path,
    name: String,
    shape: &[usize],
) -> Result<Tensor, TensorFileError> {
    match found.remove(&name) {
        Some(tensor) if tensor.dims() == shape => Ok(tensor),
        Some(tensor) => {
            let (found, expected) = (tensor.dims().to_vec(), shape.to_vec());
            Err(TensorFileError::Shape { path: path.into(), name, found, expected })
        }
        None => Err(TensorFileError::Missing { path: path.into(), name }),
    }
}

/// Replaces an existing file instead of writing to it, because a process may have it mapped.
pub(crate) fn write_tensors<T: Borrow<Tensor>>(
    path: &Path,
    tensors: impl IntoIterator<Item = (String, T)>,
) -> Result<(), TensorFileError> {
    let mut bytes = BTreeMap::new();
    for (name, tensor) in tensors {
        let tensor = tensor.borrow();
        let flat = tensor.to_device(&Device::Cpu)?.flatten_all()?;
        let (dtype, data): (_, Vec<u8>) = match tensor.dtype() {
            DType::BF16 => {
                let values = flat.to_vec1::<bf16>()?;
                (Dtype::BF16, values.iter().flat_map(|value| value.to_le_bytes()).collect())
            }
            _ => {
                let values = flat.to_vec1::<f32>()?;
                (Dtype::F32, values.iter().flat_map(|value| value.to_le_bytes()).collect())
            }
        };
        bytes.insert(name, (dtype, tensor.dims().to_vec(), data));
    }
    let format = |source| TensorFileError::Format { path: path.into(), source };
    let views = bytes.iter().map(|(name, (dtype, shape, data))| {
        TensorView::new(*dtype, shape.clone(), data).map(|view| (name.as_str(), view))
    });
    let views = views.collect::<Result<Vec<_>, _>>().map_err(format)?;
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let partial = path.with_extension("safetensors.partial");
    safetensors::serialize_to_file(views, Some(metadata), &partial).map_err(format)?;
    let failed = |source| TensorFileError::File { path: path.into(), source };
    std::fs::rename(&partial, path).map_err(failed)
}
