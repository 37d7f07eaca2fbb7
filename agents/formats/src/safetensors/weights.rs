//! The tensors of a model, in one or several files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{LocatedTensor, SafetensorsError, SafetensorsFile};

/// The open weight files of a model.
#[derive(Debug)]
pub struct ModelWeights {
    dir: PathBuf,
    files: Vec<SafetensorsFile>,
    file_indexes: BTreeMap<String, usize>,
}

impl ModelWeights {
    /// Opens the files of a model, in which no tensor may be twice. Errors name `dir`.
    pub fn open(dir: &Path, paths: &[PathBuf]) -> Result<Self, SafetensorsError> {
        let files =
            paths.iter().map(|path| SafetensorsFile::open(path)).collect::<Result<Vec<_>, _>>()?;
        let mut places = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            for name in file.tensor_entries().keys() {
                if places.insert(name.clone(), index).is_some() {
                    return Err(SafetensorsError::Twice { dir: dir.into(), name: name.clone() });
                }
            }
        }
        Ok(Self { dir: dir.into(), files, file_indexes: places })
    }

    /// Returns the names of all tensors, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.file_indexes.keys().map(String::as_str)
    }

    /// Returns the open files.
    pub(crate) fn open_files(&self) -> &[SafetensorsFile] {
        &self.files
    }

    /// Finds a tensor by its name.
    pub fn find_tensor(&self, name: &str) -> Option<LocatedTensor<'_>> {
        self.file_indexes.get(name).and_then(|index| self.files[*index].get(name))
    }

    /// Returns a tensor by its name; fails if no file contains it.
    pub fn get(&self, name: &str) -> Result<LocatedTensor<'_>, SafetensorsError> {
        let missing = || SafetensorsError::Missing { dir: self.dir.clone(), name: name.into() };
        self.find_tensor(name).ok_or_else(missing)
    }
}
