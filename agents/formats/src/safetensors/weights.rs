//! A model's tensors, in however many files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{File, Located, TensorError};

#[derive(Debug)]
pub struct Weights {
    dir: PathBuf,
    files: Vec<File>,
    /// Which file has a tensor.
    places: BTreeMap<String, usize>,
}

impl Weights {
    /// `paths` are the files of `dir`.
    pub fn open(dir: &Path, paths: &[PathBuf]) -> Result<Self, TensorError> {
        let files = paths.iter().map(|path| File::open(path)).collect::<Result<Vec<_>, _>>()?;
        let mut places = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            for name in file.entries().keys() {
                if places.insert(name.clone(), index).is_some() {
                    return Err(TensorError::Twice { dir: dir.into(), name: name.clone() });
                }
            }
        }
        Ok(Self { dir: dir.into(), files, places })
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    pub fn files(&self) -> &[File] {
        &self.files
    }

    pub fn find(&self, name: &str) -> Option<Located<'_>> {
        self.places.get(name).and_then(|index| self.files[*index].get(name))
    }

    pub fn get(&self, name: &str) -> Result<Located<'_>, TensorError> {
        let missing = || TensorError::Missing { dir: self.dir.clone(), name: name.into() };
        self.find(name).ok_or_else(missing)
    }
}
