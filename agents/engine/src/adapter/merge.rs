//! Merges adapters that were trained apart from the same start, as PEFT directories of any model.
//! Sums are in f64 and in a fixed order, so that every box gets the same bytes.

mod drift;
mod stack;

use super::AdapterError;
use super::named_tensors::{NamedTensors, read_like, values, write_directory};
use super::weight_change::{CHANGE_FILE, read_changed};
use crate::tensor_file;
use candle_core::{Device, Tensor};
use formats::peft::{CONFIG_FILE, TENSOR_FILE};
use rayon::prelude::*;
use std::path::{Path, PathBuf};

/// The name of the file with the outer optimizer's velocity in its directory.
const VELOCITY_FILE: &str = "velocity.safetensors";

/// The outer optimizer: SGD with Nesterov's momentum, as in PyTorch (DiLoCo, arXiv:2311.08105). With
/// a rate of 1 and no momentum, the merged weights are the mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OuterOptimizer {
    pub rate: f64,
    pub momentum: f64,
}

/// The way in which adapters are merged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MergeRule {
    /// A and B apart, each by a step of the outer optimizer.
    Step(OuterOptimizer),
    /// The mean of the products BA: A and B are stacked (FLoRA, arXiv:2409.05976), and reduced to
    /// their rank by a singular value decomposition.
    Stack,
}

/// The adapters of a merge, as directories.
#[derive(Debug, Clone)]
pub struct AdapterMerge {
    /// The adapter from which all others were trained.
    pub start: PathBuf,
    /// The velocity of the outer optimizer; `None` for 0.
    pub velocity: Option<PathBuf>,
    /// Each trained adapter, or its change from the start, with its weight in the mean.
    pub trained: Vec<(PathBuf, u64)>,
    pub rule: MergeRule,
}

/// The errors of a merge, as Frobenius norms over all modules, divided by that of mean(BA).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MergeErrors {
    /// The error of merging A and B apart: mean(BA) - mean(B) mean(A).
    pub drift: f64,
    /// The error of reducing stacked adapters to their rank; 0 for other merges.
    pub residual: f64,
}

/// Adapters in memory, each with its weight in the mean.
type TrainedAdapters = [(NamedTensors, f64)];

impl AdapterMerge {
    /// Writes the merged adapter, and the new velocity if there is momentum.
    ///
    /// # Errors
    /// When a file cannot be read or written, or an adapter has other tensors than the start.
    pub fn write_merged(
        &self,
        adapter: &Path,
        velocity: &Path,
    ) -> Result<MergeErrors, AdapterError> {
        let start = tensor_file::read_all(&self.start.join(TENSOR_FILE))?;
        let trained = self.read_trained(&start)?;
        let drift = drift::measure_drift(&trained)?;
        let (merged, residual) = match self.rule {
            MergeRule::Step(outer) => {
                let before = self.velocity.as_ref().map(|dir| dir.join(VELOCITY_FILE));
                let before = before.map(|path| read_like(&path, &start)).transpose()?;
                let (merged, moved) = outer.step_tensors(&start, before.as_ref(), &trained)?;
                if outer.momentum > 0.0 {
                    write_directory(velocity, VELOCITY_FILE, moved)?;
                }
                (merged, 0.0)
            }
            MergeRule::Stack => stack::stack_adapters(&start, &trained)?,
        };
        write_directory(adapter, TENSOR_FILE, merged)?;
        let config = adapter.join(CONFIG_FILE);
        std::fs::copy(self.start.join(CONFIG_FILE), &config)
            .map_err(|source| AdapterError::File { path: config, source })?;
        Ok(MergeErrors { drift, residual })
    }

    fn read_trained(&self, start: &NamedTensors) -> Result<Vec<(NamedTensors, f64)>, AdapterError> {
        let read = |(dir, weight): &(PathBuf, u64)| {
            let change = dir.join(CHANGE_FILE);
            let tensors = match change.exists() {
                true => read_changed(&change, start)?,
                false => read_like(&dir.join(TENSOR_FILE), start)?,
            };
            #[expect(clippy::cast_precision_loss, reason = "a count of tokens")]
            let weight = *weight as f64;
            Ok((tensors, weight))
        };
        self.trained.iter().map(read).collect()
    }
}

impl OuterOptimizer {
    /// Returns the new tensors and their new velocities.
    fn step_tensors(
        self,
        start: &NamedTensors,
        velocity: Option<&NamedTensors>,
        trained: &TrainedAdapters,
    ) -> candle_core::Result<(NamedTensors, NamedTensors)> {
        let step = |(name, from): (&String, &Tensor)| {
            let velocity = velocity.map(|tensors| &tensors[name]);
            let [value, moved] = self.step_tensor(name, from, velocity, trained)?;
            Ok::<_, candle_core::Error>(((name.clone(), value), (name.clone(), moved)))
        };
        let stepped = start.par_iter().map(step).collect::<candle_core::Result<Vec<_>>>()?;
        Ok(stepped.into_iter().unzip())
    }

    /// Returns the new values of a tensor and its new velocity.
    fn step_tensor(
        self,
        name: &str,
        start: &Tensor,
        velocity: Option<&Tensor>,
        trained: &TrainedAdapters,
    ) -> candle_core::Result<[Tensor; 2]> {
        let (mean, total) = sum_weighted(name, start, trained)?;
        let mut moved = match velocity {
            Some(velocity) => values(velocity)?,
            None => vec![0f32; start.elem_count()],
        };
        let mut merged = vec![0f32; start.elem_count()];
        let Self { rate, momentum } = self;
        let all = merged.iter_mut().zip(&mut moved).zip(&mean).zip(values(start)?);
        for (((merged, moved), sum), start) in all {
            if trained.is_empty() {
                *merged = start;
                continue;
            }
            let mean = sum / total;
            let gradient = f64::from(start) - mean;
            *moved = (momentum * f64::from(*moved) + gradient) as f32;
            // start - rate * (gradient + momentum * velocity), exact where that is the mean.
            let rest = (1.0 - rate) * gradient - rate * momentum * f64::from(*moved);
            *merged = (mean + rest) as f32;
        }
        let shape = start.shape();
        Ok([
            Tensor::from_vec(merged, shape, &Device::Cpu)?,
            Tensor::from_vec(moved, shape, &Device::Cpu)?,
        ])
    }
}

/// Returns the sum of a tensor's values, each times the weight of its adapter, and the sum of the
/// weights.
fn sum_weighted(
    name: &str,
    start: &Tensor,
    trained: &TrainedAdapters,
) -> candle_core::Result<(Vec<f64>, f64)> {
    let mut sums = vec![0f64; start.elem_count()];
    for (tensors, weight) in trained {
        for (sum, value) in sums.iter_mut().zip(values(&tensors[name])?) {
            *sum += weight * f64::from(value);
        }
    }
    Ok((sums, trained.iter().map(|(_, weight)| weight).sum()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::random;

    const MEAN: MergeRule = MergeRule::Step(OuterOptimizer { rate: 1.0, momentum: 0.0 });
    const MODULE: &str = "model.layers.0.mlp.up_proj.";

    fn adapter(seed: u64) -> NamedTensors {
        [("lora_A.weight", [2, 5], seed), ("lora_B.weight", [4, 2], seed + 100)]
            .map(|(part, shape, seed)| (format!("{MODULE}{part}"), random(&shape, seed)))
            .into()
    }

    fn write(dir: &Path, name: &str, tensors: NamedTensors) -> PathBuf {
        let dir = dir.join(name);
        write_directory(&dir, TENSOR_FILE, tensors).unwrap();
        std::fs::write(dir.join(CONFIG_FILE), "{}").unwrap();
        dir
    }

    fn flat(tensor: &Tensor) -> Vec<f32> {
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn one_adapter_alone_is_its_own_mean() {
        let dir = tempfile::tempdir().unwrap();
        let merge = AdapterMerge {
            start: write(dir.path(), "start", adapter(1)),
            velocity: None,
            trained: vec![(write(dir.path(), "one", adapter(2)), 12_345)],
            rule: MEAN,
        };
        let (out, velocity) = (dir.path().join("out"), dir.path().join("velocity"));
        let MergeErrors { drift, .. } = merge.write_merged(&out, &velocity).unwrap();
        assert!(drift < 1e-7, "{drift}");
        let read = |dir: &Path| std::fs::read(dir.join(TENSOR_FILE)).unwrap();
        assert_eq!(read(&out), read(&dir.path().join("one")), "the same bytes");
        assert!(!velocity.exists());
    }

    #[test]
    fn with_a_frozen_a_the_mean_of_b_is_exact() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["lora_A.weight", "lora_B.weight"].map(|part| format!("{MODULE}{part}"));
        // All have the A of the start; their B are multiples of one, so that their mean has no error.
        let with_b = |factor: f64| {
            let mut tensors = adapter(1);
            let scaled = (&tensors[&b] * factor).unwrap();
            tensors.insert(b.clone(), scaled);
            tensors
        };
        let start = write(dir.path(), "start", adapter(1));
        let trained = |factors: [f64; 2]| {
            let write_one =
                |factor: f64| (write(dir.path(), &format!("b-{factor}"), with_b(factor)), 100);
            factors.map(write_one).to_vec()
        };
        let merge_of = |factors: [f64; 2]| {
            let merge = AdapterMerge {
                start: start.clone(),
                velocity: None,
                trained: trained(factors),
                rule: MEAN,
            };
            let out = dir.path().join("out");
            let errors = merge.write_merged(&out, &dir.path().join("velocity")).unwrap();
            (tensor_file::read_all(&out.join(TENSOR_FILE)).unwrap(), errors.drift)
        };
        for (factors, mean) in [([2.0, 4.0], 3.0), ([2.0, 2.0], 2.0)] {
            let (merged, drift) = merge_of(factors);
            assert_eq!(flat(&merged[&a]), flat(&adapter(1)[&a]), "A is unchanged");
            let expected = flat(&adapter(1)[&b]).into_iter().map(|value| value * mean);
            for (merged, expected) in flat(&merged[&b]).into_iter().zip(expected) {
                assert!((merged - expected).abs() <= f32::EPSILON * expected.abs(), "{merged}");
            }
            assert!(drift < 1e-7, "no term is lost: {drift}");
        }
    }

    #[test]
    fn weights_move_as_with_torch_s_sgd_and_the_drift_is_that_of_the_products() {
        let dir = tempfile::tempdir().unwrap();
        let start = write(dir.path(), "start", adapter(1));
        let trained: Vec<_> = [(2, 100), (3, 300)]
            .map(|(seed, tokens)| (write(dir.path(), &format!("t{seed}"), adapter(seed)), tokens))
            .into();
        let rule = MergeRule::Step(OuterOptimizer { rate: 0.7, momentum: 0.9 });
        let mut merge = AdapterMerge { start, velocity: None, trained, rule };
        let (out, velocity) = (dir.path().join("out"), dir.path().join("velocity"));
        let MergeErrors { drift, .. } = merge.write_merged(&out, &velocity).unwrap();
        let again = (dir.path().join("again"), dir.path().join("velocity-2"));
        merge.velocity = Some(velocity);
        merge.write_merged(&again.0, &again.1).unwrap();
        let name = format!("{MODULE}lora_A.weight");
        let of = |dir: &Path| flat(&tensor_file::read_all(&dir.join(TENSOR_FILE)).unwrap()[&name]);
        let [start, x, y] = [1, 2, 3].map(|seed| flat(&adapter(seed)[&name]));
        for index in 0..start.len() {
            let at = |values: &[f32]| f64::from(values[index]);
            let gradient = at(&start) - (0.25 * at(&x) + 0.75 * at(&y));
            let second = 0.9 * gradient + gradient;
            let first = at(&start) - 0.7 * (gradient + 0.9 * gradient);
            let next = at(&start) - 0.7 * (gradient + 0.9 * second);
            assert!((at(&of(&out)) - first).abs() < 1e-6);
            assert!((at(&of(&again.0)) - next).abs() < 1e-6);
        }
        let product = |seeds: &[(u64, f64)], part: &str| {
            let name = format!("{MODULE}{part}");
            let scaled =
                seeds.iter().map(|(seed, share)| (&adapter(*seed)[&name] * *share).unwrap());
            scaled.reduce(|a, b| (a + b).unwrap()).unwrap()
        };
        let shares = [(2, 0.25), (3, 0.75)];
        let mean_b = product(&shares, "lora_B.weight");
        let apart = mean_b.matmul(&product(&shares, "lora_A.weight")).unwrap();
        let each = shares.map(|(seed, share)| {
            let b = product(&[(seed, share)], "lora_B.weight");
            b.matmul(&product(&[(seed, 1.0)], "lora_A.weight")).unwrap()
        });
        let whole = (&each[0] + &each[1]).unwrap();
        let norm = |it: &Tensor| flat(it).iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let expected = norm(&(&whole - &apart).unwrap()) / norm(&whole);
        assert!((drift - expected).abs() < 1e-5, "{drift} {expected}");
    }

    #[test]
    fn an_adapter_with_other_tensors_is_refused_by_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let mut other = adapter(2);
        let (_, tensor) = other.pop_last().unwrap();
        other.insert("model.other".into(), tensor);
        let mut merge = AdapterMerge {
            start: write(dir.path(), "start", adapter(1)),
            velocity: None,
            trained: vec![(write(dir.path(), "other", other), 1)],
            rule: MEAN,
        };
        let merged = |merge: &AdapterMerge| {
            merge.write_merged(&dir.path().join("out"), &dir.path().join("velocity"))
        };
        let error = merged(&merge).unwrap_err();
        let text = format!("{error}: {:?}", std::error::Error::source(&error));
        assert!(text.contains("lora_B.weight"), "{text}");
        let mut more = adapter(2);
        more.insert("model.more".into(), random(&[2], 5));
        merge.trained = vec![(write(dir.path(), "more", more), 1)];
        assert!(merged(&merge).unwrap_err().to_string().contains("model.more"));
    }
}
