//! A GGUF file as a model: the configuration, tensors and tokenizer a Hugging Face directory would
//! have. Plain and 8-bit tensors are read; other quantisations are llama.cpp's alone.

mod config;
mod tokenizer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::Config;
use crate::convert::{self, Step};
use crate::gguf::{File, GgufError, TensorKind, q8_0};
use crate::{ConfigError, Element};

#[derive(Debug, thiserror::Error)]
pub enum GgufModelError {
    #[error("could not use the GGUF file")]
    File(#[from] GgufError),
    #[error("could not use the GGUF file's settings")]
    Config(#[from] ConfigError),
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

/// An open file that holds a whole model of a supported architecture.
#[derive(Debug)]
pub struct GgufModel {
    file: File,
    config: Config,
    /// By their Hugging Face names.
    steps: BTreeMap<String, Step>,
}

/// Whether a path is a GGUF file's.
pub fn is_gguf(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|extension| extension == "gguf")
}

impl GgufModel {
    /// Names and shapes are those of its architecture; its tensors may be of any kind.
    pub fn open(path: &Path) -> Result<Self, GgufModelError> {
        let file = File::open(path)?;
        let config = config::config(&file)?;
        let steps = convert::steps(&config);
        let steps: BTreeMap<String, Step> =
            steps.into_iter().map(|step| (step.name.clone(), step)).collect();
        let model = Self { file, config, steps };
        for step in model.steps.values() {
            model.check(step)?;
        }
        Ok(model)
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    fn check(&self, step: &Step) -> Result<(), GgufModelError> {
        let path = || self.file.path().to_owned();
        let Some(tensor) = self.file.tensor(&step.gguf) else {
            return Err(GgufModelError::Missing { path: path(), name: step.gguf.clone() });
        };
        let name = tensor.name.clone();
        if tensor.shape != step.shape {
            let (found, expected) = (tensor.shape.clone(), step.shape.clone());
            return Err(GgufModelError::Shape { path: path(), name, found, expected });
        }
        Ok(())
    }

    /// The values of a tensor by its Hugging Face name, in Hugging Face's order.
    pub fn values(&self, name: &str) -> Result<Vec<f32>, GgufModelError> {
        let missing =
            || GgufModelError::Missing { path: self.file.path().into(), name: name.into() };
        let step = self.steps.get(name).ok_or_else(missing)?;
        let tensor = self.file.tensor(&step.gguf).ok_or_else(missing)?;
        let known = [TensorKind::F32, TensorKind::F16, TensorKind::BF16, TensorKind::Q8_0];
        if !known.contains(&tensor.kind) {
            let (path, name) = (self.file.path().to_owned(), tensor.name.clone());
            return Err(GgufModelError::Kind { path, name, kind: tensor.kind.name });
        }
        let size = tensor.range.end - tensor.range.start;
        let mut values = Vec::with_capacity(step.shape.iter().product::<u64>() as usize);
        let (mut bytes, mut piece) = (Vec::new(), Vec::new());
        let mut at = 0;
        while at < size {
            bytes.resize(PIECE_BYTES.min(size - at) as usize, 0);
            self.file.read(tensor, at, &mut bytes)?;
            decode(tensor.kind, &bytes, &mut piece);
            values.append(&mut piece);
            at += bytes.len() as u64;
        }
        let columns = step.shape.get(1).map_or(1, |columns| *columns as usize);
        Ok(match step.head {
            Some(head) => convert::deinterleave(&values, columns, head),
            None => values,
        })
    }

    /// What `tokenizer.json` would say. llama.cpp's files keep no normalizer: text that is not in
    /// NFC is read as llama.cpp reads it.
    pub fn tokenizer_json(&self) -> Result<String, GgufModelError> {
        tokenizer::json(&self.file, &self.config).map(|json| json.to_string())
    }
}

/// Read at once: whole blocks of every kind.
const PIECE_BYTES: u64 = 34 << 16;

fn decode(kind: TensorKind, bytes: &[u8], values: &mut Vec<f32>) {
    match kind {
        TensorKind::F16 => Element::F16.decode(bytes, values),
        TensorKind::BF16 => Element::Bf16.decode(bytes, values),
        TensorKind::Q8_0 => q8_0::decode(bytes, values),
        _ => Element::F32.decode(bytes, values),
    }
}
