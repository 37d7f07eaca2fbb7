//! The tensors of adapters by their names in files.

use super::AdapterError;
use crate::tensor_file;
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::path::Path;

pub(super) type NamedTensors = BTreeMap<String, Tensor>;

pub(super) fn values(tensor: &Tensor) -> candle_core::Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

/// Reads a file that must have tensors of the same names and shapes.
pub(super) fn read_like(path: &Path, wanted: &NamedTensors) -> Result<NamedTensors, AdapterError> {
    let mut found = tensor_file::read_all(path)?;
    let mut taken = NamedTensors::new();
    for (name, tensor) in wanted {
        let value = tensor_file::take_tensor(&mut found, path, name.clone(), tensor.dims())?;
        taken.insert(name.clone(), value);
    }
    match found.into_keys().next() {
        Some(name) => Err(AdapterError::UnknownTensor { path: path.into(), name }),
        None => Ok(taken),
    }
}

pub(super) fn write_directory(
    dir: &Path,
    name: &str,
    tensors: NamedTensors,
) -> Result<(), AdapterError> {
    std::fs::create_dir_all(dir)
        .map_err(|source| AdapterError::File { path: dir.into(), source })?;
    Ok(tensor_file::write_tensors(&dir.join(name), tensors)?)
}
