//! safetensors files: read as f32, written as f32 in a fixed order.

use candle_core::{DType, Device, Tensor, safetensors::Load};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum TensorFileError {
    #[error("could not read or write {path}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a valid safetensors file; download or copy it again")]
    Format { path: PathBuf, source: safetensors::SafeTensorError },
    #[error("{path}: tensor `{name}` is {found}; f32, bf16 and f16 are supported")]
    Dtype { path: PathBuf, name: String, found: String },
    #[error("{path}: tensor `{name}` has no elements; download or copy the file again")]
    Empty { path: PathBuf, name: String },
    #[error("{path}: tensor `{name}` is missing")]
    Missing { path: PathBuf, name: String },
    #[error("{path}: tensor `{name}` has shape {found:?}, expected {expected:?}")]
    Shape { path: PathBuf, name: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("tensor operation failed on a file's content")]
    Tensor(#[from] candle_core::Error),
}

/// All tensors of one file, on the CPU.
pub(crate) fn read(path: &Path) -> Result<BTreeMap<String, Tensor>, TensorFileError> {
    let bytes = std::fs::read(path)
        .map_err(|source| TensorFileError::File { path: path.into(), source })?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|source| TensorFileError::Format { path: path.into(), source })?;
    let mut tensors = BTreeMap::new();
    for (name, view) in file.iter() {
        if !matches!(view.dtype(), Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            let found = format!("{:?}", view.dtype());
            return Err(TensorFileError::Dtype { path: path.into(), name: name.into(), found });
        }
        // Its other dimensions may be beyond what can be multiplied.
        if view.data().is_empty() {
            return Err(TensorFileError::Empty { path: path.into(), name: name.into() });
        }
        let tensor = view.load(&Device::Cpu)?.to_dtype(DType::F32)?;
        tensors.insert(name.to_owned(), tensor);
    }
    Ok(tensors)
}

/// Takes one of the tensors that were read, if it has that shape.
pub(crate) fn take(
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

pub(crate) fn write<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (String, &'a Tensor)>,
) -> Result<(), TensorFileError> {
    let mut bytes = BTreeMap::new();
    for (name, tensor) in tensors {
        let values = tensor.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        bytes.insert(name, (tensor.dims().to_vec(), data));
    }
    let format = |source| TensorFileError::Format { path: path.into(), source };
    let views = bytes.iter().map(|(name, (shape, data))| {
        TensorView::new(Dtype::F32, shape.clone(), data).map(|view| (name.as_str(), view))
    });
    let views = views.collect::<Result<Vec<_>, _>>().map_err(format)?;
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(views, Some(metadata), path).map_err(format)
}
