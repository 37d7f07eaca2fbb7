//! Lists the content of a file or directory: settings and tensors, without their data.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value as Json, json};

use super::ConvertError;
use crate::gguf::{self, GgufArray, GgufValue};
use crate::list_weight_files;
use crate::peft::{CONFIG_FILE, TENSOR_FILE};
use crate::safetensors::{ModelWeights, SafetensorsFile};

const LIST_ITEMS_MAX: usize = 5;
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// The content of a file or directory.
pub struct FileListing {
    /// `gguf`, `safetensors`, `model` or `adapter`.
    pub format: &'static str,
    /// The settings. A long list is an object with `count` and the `first` elements.
    pub fields: Vec<(String, Json)>,
    pub tensors: Vec<ListedTensor>,
}

pub struct ListedTensor {
    pub name: String,
    /// The name of the type in the format of the file.
    pub kind: String,
    /// In torch's order.
    pub shape: Vec<u64>,
    pub bytes: u64,
}

/// Lists the content of a GGUF file, a safetensors file, a model directory or a PEFT adapter
/// directory.
pub fn list_contents(path: &Path) -> Result<FileListing, ConvertError> {
    if path.is_dir() {
        return list_directory(path);
    }
    let read = |source| ConvertError::Read { path: path.into(), source };
    let mut magic = [0; 4];
    let mut file = fs::File::open(path).map_err(read)?;
    match std::io::Read::read_exact(&mut file, &mut magic) {
        Ok(()) if &magic == b"GGUF" => list_gguf(path),
        _ if path.extension().is_some_and(|end| end == "safetensors") => {
            let file = SafetensorsFile::open(path)?;
            let fields = file
                .file_metadata()
                .iter()
                .map(|(name, text)| (name.clone(), json!(text)))
                .collect();
            Ok(FileListing { format: "safetensors", fields, tensors: list_safetensors(&file) })
        }
        _ => Err(ConvertError::Unknown { path: path.into() }),
    }
}

fn list_directory(dir: &Path) -> Result<FileListing, ConvertError> {
    if dir.join(CONFIG_FILE).exists() {
        let tensors = list_safetensors(&SafetensorsFile::open(&dir.join(TENSOR_FILE))?);
        let fields = read_settings(&dir.join(CONFIG_FILE))?;
        return Ok(FileListing { format: "adapter", fields, tensors });
    }
    if !dir.join("config.json").exists() {
        return Err(ConvertError::Unknown { path: dir.into() });
    }
    let weights = ModelWeights::open(dir, &list_weight_files(dir)?)?;
    let tensors = weights.open_files().iter().flat_map(list_safetensors).collect();
    Ok(FileListing { format: "model", fields: read_settings(&dir.join("config.json"))?, tensors })
}

/// Skips null fields.
fn read_settings(path: &Path) -> Result<Vec<(String, Json)>, ConvertError> {
    use std::io::Read;
    let mut text = String::new();
    fs::File::open(path)
        .and_then(|file| file.take(CONFIG_BYTES_MAX).read_to_string(&mut text))
        .map_err(|source| ConvertError::Read { path: path.into(), source })?;
    let map: Map<String, Json> = serde_json::from_str(&text)
        .map_err(|source| ConvertError::Json { path: path.into(), source })?;
    Ok(map.into_iter().filter(|(_, value)| !value.is_null()).collect())
}

fn list_safetensors(file: &SafetensorsFile) -> Vec<ListedTensor> {
    let mut tensors: Vec<_> = file.tensor_entries().iter().collect();
    tensors.sort_by_key(|(_, entry)| entry.range.start);
    let tensors = tensors.into_iter().map(|(name, entry)| ListedTensor {
        name: name.clone(),
        kind: entry.dtype.clone(),
        shape: entry.shape.clone(),
        bytes: entry.range.end - entry.range.start,
    });
    tensors.collect()
}

fn list_gguf(path: &Path) -> Result<FileListing, ConvertError> {
    let file = gguf::GgufFile::open(path)?;
    let mut fields = vec![("version".to_owned(), json!(file.version))];
    fields.extend(file.fields.iter().map(|(name, value)| (name.clone(), value_to_json(value))));
    let tensors = file.tensors.iter().map(|tensor| ListedTensor {
        name: tensor.name.clone(),
        kind: tensor.kind.name.into(),
        shape: tensor.shape.clone(),
        bytes: tensor.range.end - tensor.range.start,
    });
    Ok(FileListing { format: "gguf", fields, tensors: tensors.collect() })
}

fn value_to_json(value: &GgufValue) -> Json {
    match value {
        GgufValue::Bool(value) => json!(value),
        GgufValue::String(text) => json!(text),
        GgufValue::Array(array) => array_to_json(array),
        GgufValue::I8(value) => json!(value),
        GgufValue::I16(value) => json!(value),
        GgufValue::I32(value) => json!(value),
        GgufValue::I64(value) => json!(value),
        GgufValue::U8(value) => json!(value),
        GgufValue::U16(value) => json!(value),
        GgufValue::U32(value) => json!(value),
        GgufValue::U64(value) => json!(value),
        GgufValue::F32(value) => float_to_json(*value),
        GgufValue::F64(value) => json!(value),
    }
}

/// Converts an `f32` to the shortest decimal that identifies it: 0.1, not 0.10000000149011612.
fn float_to_json(value: f32) -> Json {
    json!(value.to_string().parse::<f64>().unwrap_or_else(|_| value.into()))
}

/// Shortens an array of more than [`LIST_ITEMS_MAX`] elements to its count and its first elements.
fn array_to_json(array: &GgufArray) -> Json {
    let first: Vec<Json> = match array {
        GgufArray::Plain { values, .. } => {
            values.iter().take(LIST_ITEMS_MAX).map(value_to_json).collect()
        }
        GgufArray::Strings(texts) => {
            texts.iter().take(LIST_ITEMS_MAX).map(|text| json!(text)).collect()
        }
        GgufArray::I32(values) => {
            values.iter().take(LIST_ITEMS_MAX).map(|value| json!(value)).collect()
        }
        GgufArray::F32(values) => {
            values.iter().take(LIST_ITEMS_MAX).map(|value| float_to_json(*value)).collect()
        }
    };
    if array.len() > LIST_ITEMS_MAX {
        json!({"count": array.len(), "first": first})
    } else {
        json!(first)
    }
}
