//! What is in a file or directory: settings and tensors, without their data.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value as Json, json};

use super::ConvertError;
use crate::gguf::{self, Array, Value};
use crate::peft::{CONFIG_FILE, TENSOR_FILE};
use crate::safetensors::{File, Weights};
use crate::weight_files;

/// Elements of a list that are shown.
const FIRST: usize = 5;
/// Of a configuration.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

pub struct Listing {
    /// `gguf`, `safetensors`, `model` or `adapter`.
    pub format: &'static str,
    /// Long lists are `{"count", "first"}`.
    pub fields: Vec<(String, Json)>,
    pub tensors: Vec<Listed>,
}

/// A tensor.
pub struct Listed {
    pub name: String,
    pub kind: String,
    /// As torch has it.
    pub shape: Vec<u64>,
    pub bytes: u64,
}

/// Lists a GGUF file, a safetensors file, or the directory of a model or a PEFT adapter.
///
/// # Errors
/// When it is none of these, or cannot be read.
pub fn show(path: &Path) -> Result<Listing, ConvertError> {
    if path.is_dir() {
        return directory(path);
    }
    let read = |source| ConvertError::Read { path: path.into(), source };
    let mut magic = [0; 4];
    let mut file = fs::File::open(path).map_err(read)?;
    match std::io::Read::read_exact(&mut file, &mut magic) {
        Ok(()) if &magic == b"GGUF" => gguf(path),
        _ if path.extension().is_some_and(|end| end == "safetensors") => {
            let file = File::open(path)?;
            let fields =
                file.metadata().iter().map(|(name, text)| (name.clone(), json!(text))).collect();
            Ok(Listing { format: "safetensors", fields, tensors: listed(&file) })
        }
        _ => Err(ConvertError::Unknown { path: path.into() }),
    }
}

fn directory(dir: &Path) -> Result<Listing, ConvertError> {
    if dir.join(CONFIG_FILE).exists() {
        let tensors = listed(&File::open(&dir.join(TENSOR_FILE))?);
        let fields = settings(&dir.join(CONFIG_FILE))?;
        return Ok(Listing { format: "adapter", fields, tensors });
    }
    if !dir.join("config.json").exists() {
        return Err(ConvertError::Unknown { path: dir.into() });
    }
    let weights = Weights::open(dir, &weight_files(dir)?)?;
    let tensors = weights.files().iter().flat_map(listed).collect();
    Ok(Listing { format: "model", fields: settings(&dir.join("config.json"))?, tensors })
}

fn settings(path: &Path) -> Result<Vec<(String, Json)>, ConvertError> {
    use std::io::Read;
    let mut text = String::new();
    fs::File::open(path)
        .and_then(|file| file.take(CONFIG_BYTES_MAX).read_to_string(&mut text))
        .map_err(|source| ConvertError::Read { path: path.into(), source })?;
    let map: Map<String, Json> = serde_json::from_str(&text)
        .map_err(|source| ConvertError::Json { path: path.into(), source })?;
    Ok(map.into_iter().filter(|(_, value)| !value.is_null()).collect())
}

fn listed(file: &File) -> Vec<Listed> {
    let mut tensors: Vec<_> = file.entries().iter().collect();
    tensors.sort_by_key(|(_, entry)| entry.range.start);
    let tensors = tensors.into_iter().map(|(name, entry)| Listed {
        name: name.clone(),
        kind: entry.dtype.clone(),
        shape: entry.shape.clone(),
        bytes: entry.range.end - entry.range.start,
    });
    tensors.collect()
}

fn gguf(path: &Path) -> Result<Listing, ConvertError> {
    let file = gguf::File::open(path)?;
    let mut fields = vec![("version".to_owned(), json!(file.version))];
    fields.extend(file.fields.iter().map(|(name, value)| (name.clone(), shown(value))));
    let tensors = file.tensors.iter().map(|tensor| Listed {
        name: tensor.name.clone(),
        kind: tensor.kind.name.into(),
        shape: tensor.shape.clone(),
        bytes: tensor.range.end - tensor.range.start,
    });
    Ok(Listing { format: "gguf", fields, tensors: tensors.collect() })
}

fn shown(value: &Value) -> Json {
    match value {
        Value::Bool(value) => json!(value),
        Value::String(text) => json!(text),
        Value::Array(array) => list(array),
        Value::I8(value) => json!(value),
        Value::I16(value) => json!(value),
        Value::I32(value) => json!(value),
        Value::I64(value) => json!(value),
        Value::U8(value) => json!(value),
        Value::U16(value) => json!(value),
        Value::U32(value) => json!(value),
        Value::U64(value) => json!(value),
        Value::F32(value) => short(*value),
        Value::F64(value) => json!(value),
    }
}

/// In the digits that say which f32 it is: 0.1, not 0.10000000149011612.
fn short(value: f32) -> Json {
    json!(value.to_string().parse::<f64>().unwrap_or_else(|_| value.into()))
}

fn list(array: &Array) -> Json {
    let first: Vec<Json> = match array {
        Array::Plain { values, .. } => values.iter().take(FIRST).map(shown).collect(),
        Array::Strings(texts) => texts.iter().take(FIRST).map(|text| json!(text)).collect(),
        Array::I32(values) => values.iter().take(FIRST).map(|value| json!(value)).collect(),
        Array::F32(values) => values.iter().take(FIRST).map(|value| short(*value)).collect(),
    };
    if array.len() > FIRST { json!({"count": array.len(), "first": first}) } else { json!(first) }
}
