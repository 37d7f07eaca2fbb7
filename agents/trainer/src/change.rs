//! What training made of its weights, by the files before and after.

use std::path::{Path, PathBuf};

use formats::{
    peft::TENSOR_FILE,
    safetensors::{Located, TensorError, Weights as Files},
    weight_files,
};

use crate::calls::Train;

/// Of a tensor, how much is looked at in one go.
const ELEMENTS: u64 = 1 << 16;

/// What a training began with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Start {
    /// A model or an adapter.
    Files(PathBuf),
    /// A drawn at random, B zero.
    NewAdapter,
    /// Random weights, which are nowhere.
    Scratch,
}

impl Start {
    pub(crate) fn of(call: &Train) -> Self {
        match &call.adapter {
            Some(adapter) => Self::Files(adapter.clone()),
            None if call.training.lora.is_some() => Self::NewAdapter,
            None if call.random_init => Self::Scratch,
            None => Self::Files(call.base.clone()),
        }
    }
}

#[derive(Debug, PartialEq)]
pub(crate) struct Weights {
    /// L2 norm of what was added by that of what was there; of a new adapter, of B by A's.
    /// `None` where nothing was there, or nothing of the same name and shape.
    pub change: Option<f64>,
    /// The first number that is none, and the tensor it is in.
    pub broken: Option<(String, f32)>,
}

pub(crate) fn compare(saved: &Path, start: &Start) -> anyhow::Result<Weights> {
    let after = open(saved)?;
    let before = match start {
        // What began from other formats cannot be compared.
        Start::Files(directory) => open(directory).ok(),
        Start::NewAdapter | Start::Scratch => None,
    };
    let mut sums = Sums::default();
    let mut broken = None;
    for name in after.names() {
        let tensor = after.get(name)?;
        let Ok(element) = tensor.element() else { continue };
        let same = |other: &Located<'_>| {
            other.entry.shape == tensor.entry.shape && other.element().is_ok()
        };
        let other = before.as_ref().and_then(|files| files.find(name)).filter(same);
        let range = &tensor.entry.range;
        let count = (range.end - range.start) / element.bytes() as u64;
        for first in (0..count).step_by(ELEMENTS as usize) {
            let values = read(&tensor, first, count)?;
            if broken.is_none() {
                let wrong = values.iter().find(|value| !value.is_finite());
                broken = wrong.map(|value| (name.to_owned(), *value));
            }
            match other {
                Some(other) => sums.changed(&read(&other, first, count)?, &values),
                None if *start == Start::NewAdapter => sums.new_half(name, &values),
                None => {}
            }
        }
    }
    let change = (sums.before > 0.0).then(|| (sums.added / sums.before).sqrt());
    Ok(Weights { change, broken })
}

fn open(directory: &Path) -> anyhow::Result<Files> {
    let adapter = directory.join(TENSOR_FILE);
    let paths = match adapter.exists() {
        true => vec![adapter],
        false => weight_files(directory)?,
    };
    Ok(Files::open(directory, &paths)?)
}

/// The tensor's numbers from one on.
fn read(tensor: &Located<'_>, first: u64, count: u64) -> Result<Vec<f32>, TensorError> {
    let element = tensor.element()?;
    let size = element.bytes() as u64;
    let elements = ELEMENTS.min(count - first);
    let mut bytes = vec![0; usize::try_from(elements * size).unwrap_or(usize::MAX)];
    tensor.read(first * size, &mut bytes)?;
    let mut values = Vec::new();
    element.decode(&bytes, &mut values);
    Ok(values)
}

/// Squares.
#[derive(Default)]
struct Sums {
    added: f64,
    before: f64,
}

impl Sums {
    fn changed(&mut self, before: &[f32], after: &[f32]) {
        let square = |x: f64| x * x;
        for (before, after) in before.iter().zip(after) {
            let (before, after) = (f64::from(*before), f64::from(*after));
            self.added += square(after - before);
            self.before += square(before);
        }
    }

    fn new_half(&mut self, name: &str, values: &[f32]) {
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
    use engine::{Device, Model, Shape, write_scratch};
    use formats::SINGLE_FILE;

    /// A directory with one file of two tensors of f32.
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

    fn compared(after: &tempfile::TempDir, start: &Start) -> Weights {
        compare(after.path(), start).unwrap()
    }

    #[test]
    fn the_change_is_relative_to_what_was_there() {
        let before = written(TENSOR_FILE, &[3.0, 0.0], &[0.0, 4.0]);
        let after = written(TENSOR_FILE, &[3.0, 0.5], &[0.0, 4.0]);
        let start = Start::Files(before.path().into());
        assert_eq!(compared(&after, &start).change, Some(0.1));
        assert_eq!(compared(&before, &start).change, Some(0.0));
        assert_eq!(compared(&after, &Start::Scratch), Weights { change: None, broken: None });
    }

    #[test]
    fn a_new_adapter_s_change_is_its_b_by_its_a() {
        let new = compared(&written(TENSOR_FILE, &[3.0, 4.0], &[0.0, 0.5]), &Start::NewAdapter);
        assert_eq!(new.change, Some(0.1));
        let idle = compared(&written(TENSOR_FILE, &[3.0, 4.0], &[0.0, 0.0]), &Start::NewAdapter);
        assert_eq!(idle.change, Some(0.0));
    }

    #[test]
    fn a_number_that_is_none_is_found_wherever_it_is() {
        let mut long = vec![0.1; ELEMENTS as usize + 7];
        long[ELEMENTS as usize + 3] = f32::NEG_INFINITY;
        let after = written(SINGLE_FILE, &[1.0], &long);
        let found = compared(&after, &Start::Scratch).broken;
        assert_eq!(found, Some(("q.lora_B.weight".into(), f32::NEG_INFINITY)));
    }

    #[test]
    fn tensors_of_another_shape_or_start_are_not_compared() {
        let before = written(TENSOR_FILE, &[3.0, 0.0], &[0.0]);
        let after = written(TENSOR_FILE, &[3.0], &[0.5, 1.0]);
        assert_eq!(compared(&after, &Start::Files(before.path().into())).change, None);
        let nothing = tempfile::tempdir().unwrap();
        assert_eq!(compared(&after, &Start::Files(nothing.path().into())).change, None);
        assert!(compare(nothing.path(), &Start::Scratch).is_err());
    }

    #[test]
    fn what_a_training_began_with_follows_from_its_call() {
        let start = |adapter: Option<&str>, lora: bool, random_init| {
            let lora = lora.then(wire::v1::Lora::default);
            Start::of(&Train {
                base: "base".into(),
                base_name: String::new(),
                random_init,
                adapter: adapter.map(PathBuf::from),
                dataset: PathBuf::new(),
                training: wire::v1::Training { lora, ..Default::default() },
                seed: 1,
                out: PathBuf::new(),
                resume: None,
                canary: String::new(),
                policy: crate::calls::Policy::default(),
            })
        };
        assert_eq!(start(Some("adapter"), true, false), Start::Files("adapter".into()));
        assert_eq!(start(None, true, false), Start::NewAdapter, "in whichever cycle");
        assert_eq!(start(None, false, false), Start::Files("base".into()));
        assert_eq!(start(None, false, true), Start::Scratch);
    }

    #[test]
    fn whole_models_are_compared_as_well() {
        let directories = [1, 1, 2].map(|seed| {
            let directory = tempfile::tempdir().unwrap();
            let config = write_scratch(directory.path(), &Shape::default()).unwrap();
            Model::init(config, seed, &Device::Cpu).unwrap().save(directory.path()).unwrap();
            directory
        });
        let start = Start::Files(directories[0].path().into());
        assert_eq!(compared(&directories[1], &start).change, Some(0.0));
        let other = compared(&directories[2], &start).change.unwrap();
        assert!((1.0..2.0).contains(&other), "two independent draws: {other}");
    }
}
