//! Reads a GGUF file as a model: the configuration, tensors and tokenizer that a Hugging Face
//! directory would have. It reads plain and 8-bit tensors; for other quantisations use llama.cpp.

mod config;
mod tokenizer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::ModelConfig;
use crate::convert::{self, TensorMapping};
use crate::gguf::{GgmlType, GgufError, GgufFile, GgufValue, q8_0};
use crate::{FloatDtype, ModelConfigError};

/// The reason why a GGUF file cannot be used as a model.
#[derive(Debug, thiserror::Error)]
pub enum GgufModelError {
    #[error("could not use the GGUF file")]
    File(#[from] GgufError),
    #[error("could not use the GGUF file's settings")]
    Config(#[from] ModelConfigError),
    #[error("{path}: field `{field}` {what} (M104)")]
    Field { path: PathBuf, field: &'static str, what: String },
    #[error("{path}: tensor `{name}` is missing; convert the model again (M106)")]
    Missing { path: PathBuf, name: String },
    #[error("{path}: tensor `{name}` has shape {found:?}, expected {expected:?} (M106)")]
    Shape { path: PathBuf, name: String, found: Vec<u64>, expected: Vec<u64> },
    #[error(
        "{path}: tensor `{name}` is {kind}; f32, f16, bf16 and q8_0 are supported here, others by llama.cpp (--engine llama.cpp) (M105)"
    )]
    Kind { path: PathBuf, name: String, kind: &'static str },
}

/// An open GGUF file with a complete model of a supported architecture.
#[derive(Debug)]
pub struct GgufModel {
    file: GgufFile,
    config: ModelConfig,
    /// By Hugging Face name.
    mappings: BTreeMap<String, TensorMapping>,
}

/// Returns true if the path is a file with the extension `gguf`.
pub fn is_gguf(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|extension| extension == "gguf")
}

impl GgufModel {
    /// Opens a file and checks that it has every tensor of its architecture in the expected shape,
    /// of any type.
    pub fn open(path: &Path) -> Result<Self, GgufModelError> {
        let file = GgufFile::open(path)?;
        let config = config::read_config(&file)?;
        let steps = convert::map_tensors(&config);
        let steps: BTreeMap<String, TensorMapping> =
            steps.into_iter().map(|step| (step.name.clone(), step)).collect();
        let model = Self { file, config, mappings: steps };
        for step in model.mappings.values() {
            model.check_tensor(step)?;
        }
        Ok(model)
    }

    /// Returns the model's configuration.
    pub fn model_config(&self) -> &ModelConfig {
        &self.config
    }

    fn check_tensor(&self, step: &TensorMapping) -> Result<(), GgufModelError> {
        let path = || self.file.file_path().to_owned();
        let Some(tensor) = self.file.find_tensor(&step.gguf_name) else {
            return Err(GgufModelError::Missing { path: path(), name: step.gguf_name.clone() });
        };
        let name = tensor.name.clone();
        if tensor.shape != step.shape {
            let (found, expected) = (tensor.shape.clone(), step.shape.clone());
            return Err(GgufModelError::Shape { path: path(), name, found, expected });
        }
        Ok(())
    }

    /// Reads a tensor by its Hugging Face name, with its rows in Hugging Face's order.
    pub fn read_values(&self, name: &str) -> Result<Vec<f32>, GgufModelError> {
        let missing =
            || GgufModelError::Missing { path: self.file.file_path().into(), name: name.into() };
        let step = self.mappings.get(name).ok_or_else(missing)?;
        let tensor = self.file.find_tensor(&step.gguf_name).ok_or_else(missing)?;
        let known = [GgmlType::F32, GgmlType::F16, GgmlType::BF16, GgmlType::Q8_0];
        if !known.contains(&tensor.kind) {
            let (path, name) = (self.file.file_path().to_owned(), tensor.name.clone());
            return Err(GgufModelError::Kind { path, name, kind: tensor.kind.name });
        }
        let size = tensor.range.end - tensor.range.start;
        let mut values = Vec::with_capacity(step.shape.iter().product::<u64>() as usize);
        let (mut bytes, mut piece) = (Vec::new(), Vec::new());
        let mut at = 0;
        while at < size {
            bytes.resize(PIECE_BYTES.min(size - at) as usize, 0);
            self.file.read(tensor, at, &mut bytes)?;
            decode_values(tensor.kind, &bytes, &mut piece);
            values.append(&mut piece);
            at += bytes.len() as u64;
        }
        let columns = step.shape.get(1).map_or(1, |columns| *columns as usize);
        Ok(match step.head {
            Some(head) => convert::deinterleave_rows(&values, columns, head),
            None => values,
        })
    }

    /// Builds the `tokenizer.json` of a byte-level BPE. GGUF files contain no normalizer, so text
    /// that is not in NFC is tokenized as llama.cpp does it.
    pub fn tokenizer_json(&self) -> Result<String, GgufModelError> {
        tokenizer::build_tokenizer(&self.file, &self.config).map(|json| json.to_string())
    }

    /// Returns the chat template, if the file has one.
    pub fn chat_template(&self) -> Option<&str> {
        self.file.find_field("tokenizer.chat_template").and_then(GgufValue::as_str)
    }

    /// Returns the texts of the special tokens by the names that chat templates use, such as
    /// `bos_token`.
    pub fn special_tokens(&self) -> BTreeMap<String, String> {
        tokenizer::special_tokens(&self.file)
    }
}

/// Read at a time: a multiple of the block size of every supported type.
const PIECE_BYTES: u64 = 34 << 16;

fn decode_values(kind: GgmlType, bytes: &[u8], values: &mut Vec<f32>) {
    match kind {
        GgmlType::F16 => FloatDtype::F16.decode_floats(bytes, values),
        GgmlType::BF16 => FloatDtype::Bf16.decode_floats(bytes, values),
        GgmlType::Q8_0 => q8_0::decode_blocks(bytes, values),
        _ => FloatDtype::F32.decode_floats(bytes, values),
    }
}
