//! The saved state of a training. Beside the weights, it has the optimizer's moments, the step, and
//! the parameters that identify the training, so that a resumed training gives the same bytes as an
//! uninterrupted one. The order of the data follows from the seed and the step.

use super::ModelTrainer;
use super::optimizer::AdamMoments;
use crate::tensor_file::{self, TensorFileError};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The version of the state, raised when the meaning of a step changes. States of another version
/// are rejected.
const FORMAT: u32 = 2;

const STATE_FILE: &str = "state.json";
const MOMENTS_FILE: &str = "moments.safetensors";

/// The largest size of `state.json` in bytes; it has some 20 short fields.
const STATE_BYTES_MAX: u64 = 64 * 1024;

/// Bytes of the header of `moments.safetensors` for each of its tensors.
const HEADER_BYTES_MAX: u64 = 1024;

/// The reason why a state cannot be saved or resumed.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    #[error("could not read or write {path}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{path} is not the state of a training; start the training over (R116)")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error(
        "{path}: field `{field}` is {found}, expected {expected}; a training resumes only from its \
         own state (R116)"
    )]
    Field { path: PathBuf, field: String, found: String, expected: String },
    #[error("{path} has {bytes} bytes, more than the {most} such a state can have (R116)")]
    TooLarge { path: PathBuf, bytes: u64, most: u64 },
    #[error("could not use the optimizer's moments")]
    Moments(#[from] TensorFileError),
}

impl ModelTrainer {
    /// Writes the state into a directory. Together with the weights that `save_directory` writes
    /// now, another trainer can continue from it.
    pub fn save_state(&self, dir: &Path) -> Result<(), ResumeError> {
        let file = |path: &Path| {
            let path = path.to_owned();
            move |source| ResumeError::File { path, source }
        };
        std::fs::create_dir_all(dir).map_err(file(dir))?;
        tensor_file::write_tensors(&dir.join(MOMENTS_FILE), self.optimizer.named_moments())?;
        let mut state = self.training_identity();
        state.insert("step".into(), json!(self.step));
        state.insert("updates".into(), json!(self.optimizer.update_count()));
        let path = dir.join(STATE_FILE);
        std::fs::write(&path, format!("{:#}\n", Value::Object(state))).map_err(file(&path))
    }

    /// Continues after a step. This trainer must have been created with the weights saved with the
    /// state. The rest of the training gives the same bytes as without the interruption.
    pub fn resume_from(&mut self, dir: &Path, step: usize) -> Result<(), ResumeError> {
        let state = self.read_own_state(&dir.join(STATE_FILE))?;
        let found = state.get("step");
        let wrong = |expected| wrong_field(&dir.join(STATE_FILE), "step", found, expected);
        if found != Some(&json!(step)) {
            return Err(wrong(step.to_string()));
        }
        if step > self.schedule.steps {
            return Err(wrong(format!("at most {}", self.schedule.steps)));
        }
        self.restore_optimizer(dir, step)?;
        self.step = step;
        Ok(())
    }

    /// Continues after a step with weights that others have trained as well. The optimizer's state
    /// is that of an earlier step of the same training; with `None` it is new.
    pub fn start_slice(&mut self, dir: Option<&Path>, step: usize) -> Result<(), ResumeError> {
        self.optimizer.restore_state(0, BTreeMap::new());
        self.slice_schedule = None;
        if let Some(dir) = dir {
            let path = dir.join(STATE_FILE);
            let state = self.read_own_state(&path)?;
            let found = state.get("updates");
            let updates = found.and_then(Value::as_u64).and_then(|it| usize::try_from(it).ok());
            let missing = || wrong_field(&path, "updates", found, "a number".into());
            self.restore_optimizer(dir, updates.ok_or_else(missing)?)?;
        }
        self.step = step.min(self.schedule.steps);
        Ok(())
    }

    fn restore_optimizer(&mut self, dir: &Path, updates: usize) -> Result<(), ResumeError> {
        let moments = self.read_moments(&dir.join(MOMENTS_FILE))?;
        self.optimizer.restore_state(updates, moments);
        Ok(())
    }

    /// Reads a state and checks that it is of this training.
    fn read_own_state(&self, path: &Path) -> Result<Map<String, Value>, ResumeError> {
        let state = read_state(path)?;
        for (field, expected) in self.training_identity() {
            let found = state.get(&field);
            if found != Some(&expected) {
                return Err(wrong_field(path, &field, found, expected.to_string()));
            }
        }
        Ok(state)
    }

    /// Checks the size of the file first.
    fn read_moments(&self, path: &Path) -> Result<BTreeMap<String, AdamMoments>, ResumeError> {
        let parameters = self.trained_parameters().map_err(TensorFileError::from)?;
        let moments = 2 * parameters.len() as u64;
        let elements: usize = parameters.iter().map(|(_, tensor)| tensor.elem_count()).sum();
        check_size(path, 2 * 4 * elements as u64 + moments * HEADER_BYTES_MAX)?;
        let mut found = tensor_file::read_all(path)?;
        let mut read = BTreeMap::new();
        for (name, parameter) in parameters {
            let moments = AdamMoments::build(&name, |name| {
                let tensor = tensor_file::take_tensor(&mut found, path, name, parameter.dims())?;
                Ok::<_, TensorFileError>(tensor.to_device(&self.model.device)?)
            })?;
            read.insert(name, moments);
        }
        Ok(read)
    }

    /// Returns everything, except the weights, that the rest of the training depends on.
    fn training_identity(&self) -> Map<String, Value> {
        let spec = &self.spec;
        let fields = [
            ("format", json!(FORMAT)),
            ("engine", json!(self.model.engine_name())),
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
        // States from before the setting existed lack it.
        let freezes_a = spec.freezes_a.then_some(("freezes_a", json!(true)));
        let fields = fields.into_iter().chain(freezes_a);
        fields.map(|(field, value)| (field.to_owned(), value)).collect()
    }
}

fn wrong_field(path: &Path, field: &str, found: Option<&Value>, expected: String) -> ResumeError {
    ResumeError::Field {
        path: path.into(),
        field: field.into(),
        found: found.map_or("absent".into(), Value::to_string),
        expected,
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
