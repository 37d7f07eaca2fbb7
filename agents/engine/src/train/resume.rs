//! What a training must remember beside its weights to go on as if it had never stopped: the
//! optimizer's moments, the step, and what training they belong to. The order of the data follows
//! from the seed and the step.

use super::optimizer::Moments;
use super::{Trainer, parameters};
use crate::tensors::{self, TensorFileError};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// With it changes what a step is; older states are not gone on from.
const FORMAT: u32 = 2;

const STATE_FILE: &str = "state.json";
const MOMENTS_FILE: &str = "moments.safetensors";

/// Of `state.json`, which has some 20 short fields.
const STATE_BYTES_MAX: u64 = 64 * 1024;

/// Of the header of `moments.safetensors`, for each of its tensors.
const HEADER_BYTES_MAX: u64 = 1024;

#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    #[error("could not read or write {path}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{path} is not the state of a training; start it from its beginning (R116)")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error(
        "{path}: field `{field}` is {found}, expected {expected}; a training goes on only from its own state (R116)"
    )]
    Field { path: PathBuf, field: String, found: String, expected: String },
    #[error("{path} has {bytes} bytes, more than the {most} such a state can have (R116)")]
    TooLarge { path: PathBuf, bytes: u64, most: u64 },
    #[error("could not use the optimizer's moments")]
    Moments(#[from] TensorFileError),
}

impl Trainer {
    /// Writes into a directory what another trainer needs, beside the weights as
    /// [`Trainer::save`] writes them now, to go on from here.
    pub fn save_state(&self, dir: &Path) -> Result<(), ResumeError> {
        let file = |path: &Path| {
            let path = path.to_owned();
            move |source| ResumeError::File { path, source }
        };
        std::fs::create_dir_all(dir).map_err(file(dir))?;
        tensors::write(&dir.join(MOMENTS_FILE), self.optimizer.named())?;
        let mut state = self.identity();
        state.insert("step".into(), json!(self.step));
        let path = dir.join(STATE_FILE);
        std::fs::write(&path, format!("{:#}\n", Value::Object(state))).map_err(file(&path))
    }

    /// Goes on behind a step, this trainer having been given the weights that were saved with the
    /// state. All that follows is the same to the last bit as without the break.
    pub fn resume(&mut self, dir: &Path, step: usize) -> Result<(), ResumeError> {
        self.check_state(&dir.join(STATE_FILE), step)?;
        let moments = self.read_moments(&dir.join(MOMENTS_FILE))?;
        self.optimizer.restore(step, moments);
        self.step = step;
        Ok(())
    }

    fn check_state(&self, path: &Path, step: usize) -> Result<(), ResumeError> {
        let wrong = |field: &str, found: Option<&Value>, expected: String| ResumeError::Field {
            path: path.into(),
            field: field.into(),
            found: found.map_or("absent".into(), Value::to_string),
            expected,
        };
        let state = read_state(path)?;
        for (field, expected) in self.identity() {
            let found = state.get(&field);
            if found != Some(&expected) {
                return Err(wrong(&field, found, expected.to_string()));
            }
        }
        let found = state.get("step");
        if found != Some(&json!(step)) {
            return Err(wrong("step", found, step.to_string()));
        }
        if step > self.schedule.steps {
            return Err(wrong("step", found, format!("at most {}", self.schedule.steps)));
        }
        Ok(())
    }

    fn read_moments(&self, path: &Path) -> Result<BTreeMap<String, Moments>, ResumeError> {
        let parameters = parameters(&self.model, self.adapter.as_ref());
        let parameters = parameters.map_err(TensorFileError::from)?;
        let moments = 2 * parameters.len() as u64;
        let elements: usize = parameters.iter().map(|(_, tensor)| tensor.elem_count()).sum();
        check_size(path, 2 * 4 * elements as u64 + moments * HEADER_BYTES_MAX)?;
        let mut found = tensors::read(path)?;
        let mut read = BTreeMap::new();
        for (name, parameter) in parameters {
            let moments = Moments::build(&name, |name| {
                let tensor = tensors::take(&mut found, path, name, parameter.dims())?;
                Ok::<_, TensorFileError>(tensor.to_device(&self.model.device)?)
            })?;
            read.insert(name, moments);
        }
        Ok(read)
    }

    /// Everything but the weights that what follows depends on.
    fn identity(&self) -> Map<String, Value> {
        let spec = &self.spec;
        let fields = [
            ("format", json!(FORMAT)),
            ("engine", json!(self.model.engine())),
            ("method", json!(if self.adapter.is_some() { "lora" } else { "full" })),
            ("examples", json!(self.sequences.len())),
            ("steps", json!(self.schedule.steps)),
            ("seed", json!(spec.seed)),
            ("learning_rate", json!(spec.learning_rate)),
            ("warmup_ratio", json!(spec.warmup_ratio)),
            ("decay", json!(format!("{:?}", spec.decay).to_lowercase())),
            ("final_ratio", json!(spec.final_ratio)),
            ("betas", json!(spec.betas)),
            ("epsilon", json!(spec.epsilon)),
            ("weight_decay", json!(spec.weight_decay)),
            ("dropout", json!(spec.dropout)),
            ("clip_norm", json!(spec.clip_norm)),
            ("batch_size", json!(spec.batch_size)),
            ("micro_batch_tokens", json!(spec.micro_batch_tokens)),
            ("max_tokens", json!(spec.max_tokens)),
        ];
        fields.map(|(field, value)| (field.to_owned(), value)).into_iter().collect()
    }
}

fn read_state(path: &Path) -> Result<Map<String, Value>, ResumeError> {
    let failed = |source| ResumeError::File { path: path.into(), source };
    check_size(path, STATE_BYTES_MAX)?;
    let mut text = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(STATE_BYTES_MAX).read_to_end(&mut text).map_err(failed)?;
    serde_json::from_slice(&text).map_err(|source| ResumeError::Json { path: path.into(), source })
}

fn check_size(path: &Path, most: u64) -> Result<(), ResumeError> {
    let metadata = std::fs::metadata(path);
    let bytes = metadata.map_err(|source| ResumeError::File { path: path.into(), source })?.len();
    if bytes > most {
        return Err(ResumeError::TooLarge { path: path.into(), bytes, most });
    }
    Ok(())
}
