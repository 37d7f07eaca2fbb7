//! The tensors of a model, in one or several files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{LocatedTensor, SafetensorsError, SafetensorsFile};

/// The open weight files of a model. The tensors of a model with images are those of its text part,
/// under the names of a model without images; the others are only listed as vision tensors.
#[derive(Debug)]
pub struct ModelWeights {
    dir: PathBuf,
    files: Vec<SafetensorsFile>,
    places: BTreeMap<String, TensorPlace>,
}

#[derive(Debug)]
struct TensorPlace {
    file_index: usize,
    /// The name in the file.
    name: String,
    is_vision: bool,
}

impl ModelWeights {
    /// Opens the files of a model, in which no tensor may be twice. Errors name `dir`.
    pub fn open(dir: &Path, paths: &[PathBuf]) -> Result<Self, SafetensorsError> {
        let files =
            paths.iter().map(|path| SafetensorsFile::open(path)).collect::<Result<Vec<_>, _>>()?;
        let mut names = files.iter().flat_map(|file| file.tensor_entries().keys());
        let has_images = names.any(|name| text_part_name(name).is_some());
        let mut places = BTreeMap::new();
        for (file_index, file) in files.iter().enumerate() {
            for name in file.tensor_entries().keys() {
                let is_vision = has_images && is_vision_name(name);
                let place = TensorPlace { file_index, name: name.clone(), is_vision };
                let own = text_part_name(name).unwrap_or_else(|| name.clone());
                if places.insert(own, place).is_some() {
                    return Err(SafetensorsError::Twice { dir: dir.into(), name: name.clone() });
                }
            }
        }
        Ok(Self { dir: dir.into(), files, places })
    }

    /// Returns the names of all tensors but the vision tensors, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        let of_text = self.places.iter().filter(|(_, place)| !place.is_vision);
        of_text.map(|(name, _)| name.as_str())
    }

    /// Returns the tensors of a model with images that its text part lacks, sorted by name.
    pub(crate) fn vision_tensors(&self) -> impl Iterator<Item = LocatedTensor<'_>> {
        let of_vision = self.places.values().filter(|place| place.is_vision);
        of_vision.filter_map(move |place| self.tensor_at(place))
    }

    /// Returns the open files.
    pub(crate) fn open_files(&self) -> &[SafetensorsFile] {
        &self.files
    }

    /// Finds a tensor by its name.
    pub fn find_tensor(&self, name: &str) -> Option<LocatedTensor<'_>> {
        self.places.get(name).and_then(|place| self.tensor_at(place))
    }

    /// Returns a tensor by its name; fails if no file contains it.
    pub fn get(&self, name: &str) -> Result<LocatedTensor<'_>, SafetensorsError> {
        let missing = || SafetensorsError::Missing { dir: self.dir.clone(), name: name.into() };
        self.find_tensor(name).ok_or_else(missing)
    }

    fn tensor_at(&self, place: &TensorPlace) -> Option<LocatedTensor<'_>> {
        self.files[place.file_index].get(&place.name)
    }
}

/// Returns the name that a tensor or module of a text part has in a model without images; `None`
/// for other names. Those of published files begin with `language_model`, those of modules in
/// transformers with `model.language_model`.
pub(crate) fn text_part_name(name: &str) -> Option<String> {
    match name.strip_prefix("model.language_model.") {
        Some(rest) => Some(format!("model.{rest}")),
        None => name.strip_prefix("language_model.").map(str::to_owned),
    }
}

/// Returns true for tensors of the vision tower and of its projector.
fn is_vision_name(name: &str) -> bool {
    let name = name.strip_prefix("model.").unwrap_or(name);
    ["vision_tower.", "multi_modal_projector."].iter().any(|part| name.starts_with(part))
}
