//! Measures how training changed the weights, from the files before and after.

use std::path::{Path, PathBuf};

use formats::{
    list_weight_files,
    peft::TENSOR_FILE,
    safetensors::{LocatedTensor, ModelWeights as Files, SafetensorsError},
};

use crate::messages::TrainRequest;

/// The elements of a tensor that are read at a time.
const PIECE_ELEMENTS: u64 = 1 << 16;

/// The weights with which a training began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum InitialWeights {
    Files(PathBuf),
    /// A is random, B is zero.
    NewAdapter,
    /// Random weights, which are in no file.
    Scratch,
}

impl InitialWeights {
    pub(crate) fn from_request(call: &TrainRequest) -> Self {
        match &call.adapter {
            Some(adapter) => Self::Files(adapter.clone()),
            None if call.training.lora.is_some() => Self::NewAdapter,
            None if call.random_init => Self::Scratch,
            None => Self::Files(call.base.clone()),
        }
    }
}

#[derive(Debug, PartialEq)]
pub(crate) struct WeightDelta {
    /// The L2 norm of the change divided by that of the initial weights; for a new adapter, the
    /// norm of B divided by that of A. `None` if there are no initial weights, or none with the
    /// same name and shape.
    pub change: Option<f64>,
    /// The first value that is not finite, with the name of its tensor.
    pub non_finite: Option<(String, f32)>,
}

/// Compares a saved checkpoint with the initial weights. Reads every tensor once, in pieces.
/// Initial weights that cannot be read only leave the change unknown.
pub(crate) fn compare_weights(saved: &Path, start: &InitialWeights) -> anyhow::Result<WeightDelta> {
    let after = open_weights(saved)?;
    let before = match start {
        // Initial weights in another format cannot be compared.
        InitialWeights::Files(directory) => open_weights(directory).ok(),
        InitialWeights::NewAdapter | InitialWeights::Scratch => None,
    };
    let mut sums = SquareSums::default();
    let mut broken = None;
    for name in after.tensor_names() {
        let tensor = after.get(name)?;
        let Ok(element) = tensor.float_dtype() else { continue };
        let same = |other: &LocatedTensor<'_>| {
            other.entry.shape == tensor.entry.shape && other.float_dtype().is_ok()
        };
        let other = before.as_ref().and_then(|files| files.find_tensor(name)).filter(same);
        let range = &tensor.entry.range;
        let count = (range.end - range.start) / element.byte_size() as u64;
        for first in (0..count).step_by(PIECE_ELEMENTS as usize) {
            let values = read_piece(&tensor, first, count)?;
            if broken.is_none() {
                let wrong = values.iter().find(|value| !value.is_finite());
                broken = wrong.map(|value| (name.to_owned(), *value));
            }
            match other {
                Some(other) => sums.add_change(&read_piece(&other, first, count)?, &values),
                None if *start == InitialWeights::NewAdapter => sums.add_new_half(name, &values),
                None => {}
            }
        }
    }
    let change = (sums.before > 0.0).then(|| (sums.added / sums.before).sqrt());
    Ok(WeightDelta { change, non_finite: broken })
}

fn open_weights(directory: &Path) -> anyhow::Result<Files> {
    let adapter = directory.join(TENSOR_FILE);
    let paths = match adapter.exists() {
        true => vec![adapter],
        false => list_weight_files(directory)?,
    };
    Ok(Files::open(directory, &paths)?)
}

/// Reads at most [`PIECE_ELEMENTS`] values of a tensor from index `first` on. `count` is the number
/// of values of the tensor.
fn read_piece(
    tensor: &LocatedTensor<'_>,
    first: u64,
    count: u64,
) -> Result<Vec<f32>, SafetensorsError> {
    let element = tensor.float_dtype()?;
    let size = element.byte_size() as u64;
    let elements = PIECE_ELEMENTS.min(count - first);
    let mut bytes = vec![0; usize::try_from(elements * size).unwrap_or(usize::MAX)];
    tensor.read(first * size, &mut bytes)?;
    let mut values = Vec::new();
    element.decode_floats(&bytes, &mut values);
    Ok(values)
}

/// Sums of squares over all weights.
#[derive(Default)]
struct SquareSums {
    added: f64,
    before: f64,
}

impl SquareSums {
    fn add_change(&mut self, before: &[f32], after: &[f32]) {
        let square = |x: f64| x * x;
        for (before, after) in before.iter().zip(after) {
            let (before, after) = (f64::from(*before), f64::from(*after));
            self.added += square(after - before);
            self.before += square(before);
        }
    }

    /// Adds a piece of a new adapter: B counts as the change, any other tensor as the initial
    /// weights.
    fn add_new_half(&mut self, name: &str, values: &[f32]) {
        let sum: f64 = values.iter().map(|value| f64::from(*value) * f64::from(*value)).sum();
        if name.contains(".lora_B.") {
            self.added += sum;
        } else {
            self.before += sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::{Device, LanguageModel, ScratchShape, write_scratch_model};
    use formats::SINGLE_WEIGHTS_FILE;

    fn written(name: &str, a: &[f32], b: &[f32]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let mut end = 0;
        let mut entry = |values: &[f32]| {
            let start = end;
            end += 4 * values.len();
            serde_json::json!({
                "dtype": "F32", "shape": [values.len()], "data_offsets": [start, end],
            })
        };
        let header =
            serde_json::json!({ "q.lora_A.weight": entry(a), "q.lora_B.weight": entry(b) });
        let header = header.to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.into_bytes());
        bytes.extend(a.iter().chain(b).flat_map(|value| value.to_le_bytes()));
        std::fs::write(directory.path().join(name), bytes).unwrap();
        directory
    }

    fn compared(after: &tempfile::TempDir, start: &InitialWeights) -> WeightDelta {
        compare_weights(after.path(), start).unwrap()
    }

    #[test]
    fn the_change_is_relative_to_the_initial_weights() {
        let before = written(TENSOR_FILE, &[3.0, 0.0], &[0.0, 4.0]);
        let after = written(TENSOR_FILE, &[3.0, 0.5], &[0.0, 4.0]);
        let start = InitialWeights::Files(before.path().into());
        assert_eq!(compared(&after, &start).change, Some(0.1));
        assert_eq!(compared(&before, &start).change, Some(0.0));
        assert_eq!(
            compared(&after, &InitialWeights::Scratch),
            WeightDelta { change: None, non_finite: None }
        );
    }

    #[test]
    fn a_new_adapter_s_change_is_its_b_by_its_a() {
        let new =
            compared(&written(TENSOR_FILE, &[3.0, 4.0], &[0.0, 0.5]), &InitialWeights::NewAdapter);
        assert_eq!(new.change, Some(0.1));
        let idle =
            compared(&written(TENSOR_FILE, &[3.0, 4.0], &[0.0, 0.0]), &InitialWeights::NewAdapter);
        assert_eq!(idle.change, Some(0.0));
    }

    #[test]
    fn a_number_that_is_none_is_found_wherever_it_is() {
        let mut long = vec![0.1; PIECE_ELEMENTS as usize + 7];
        long[PIECE_ELEMENTS as usize + 3] = f32::NEG_INFINITY;
        let after = written(SINGLE_WEIGHTS_FILE, &[1.0], &long);
        let found = compared(&after, &InitialWeights::Scratch).non_finite;
        assert_eq!(found, Some(("q.lora_B.weight".into(), f32::NEG_INFINITY)));
    }

    #[test]
    fn tensors_of_another_shape_or_start_are_not_compared() {
        let before = written(TENSOR_FILE, &[3.0, 0.0], &[0.0]);
        let after = written(TENSOR_FILE, &[3.0], &[0.5, 1.0]);
        assert_eq!(compared(&after, &InitialWeights::Files(before.path().into())).change, None);
        let nothing = tempfile::tempdir().unwrap();
        assert_eq!(compared(&after, &InitialWeights::Files(nothing.path().into())).change, None);
        assert!(compare_weights(nothing.path(), &InitialWeights::Scratch).is_err());
    }

    #[test]
    fn initial_weights_are_derived_from_the_call() {
        let start = |adapter: Option<&str>, lora: bool, random_init| {
            let lora = lora.then(wire::v1::Lora::default);
            InitialWeights::from_request(&TrainRequest {
                base: "base".into(),
                base_name: String::new(),
                random_init,
                adapter: adapter.map(PathBuf::from),
                dataset: PathBuf::new(),
                training: wire::v1::Training { lora, ..Default::default() },
                seed: 1,
                out: PathBuf::new(),
                resume: None,
                slice: None,
                canary: String::new(),
                policy: crate::messages::TrainHostSettings::default(),
            })
        };
        assert_eq!(start(Some("adapter"), true, false), InitialWeights::Files("adapter".into()));
        assert_eq!(start(None, true, false), InitialWeights::NewAdapter, "in whichever cycle");
        assert_eq!(start(None, false, false), InitialWeights::Files("base".into()));
        assert_eq!(start(None, false, true), InitialWeights::Scratch);
    }

    #[test]
    fn whole_models_are_compared_as_well() {
        let directories = [1, 1, 2].map(|seed| {
            let directory = tempfile::tempdir().unwrap();
            let config = write_scratch_model(directory.path(), &ScratchShape::default()).unwrap();
            LanguageModel::init_random(config, seed, &Device::Cpu)
                .unwrap()
                .save_directory(directory.path())
                .unwrap();
            directory
        });
        let start = InitialWeights::Files(directories[0].path().into());
        assert_eq!(compared(&directories[1], &start).change, Some(0.0));
        let other = compared(&directories[2], &start).change.unwrap();
        assert!((1.0..2.0).contains(&other), "two independent draws: {other}");
    }
}
