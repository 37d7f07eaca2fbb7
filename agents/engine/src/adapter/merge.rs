//! Merges adapters that were trained apart from the same start (DiLoCo, arXiv:2311.08105), as PEFT
//! directories of any model. Sums are in f64 and in a fixed order, so that every box gets the same
//! bytes.

use super::AdapterError;
use crate::tensor_file::{self, TensorFileError};
use candle_core::{Device, Tensor};
use formats::peft::{CONFIG_FILE, TENSOR_FILE};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The name of the file with the outer optimizer's velocity in its directory.
const VELOCITY_FILE: &str = "velocity.safetensors";

type NamedTensors = BTreeMap<String, Tensor>;

/// The outer optimizer: SGD with Nesterov's momentum, as in PyTorch. With a rate of 1 and no
/// momentum, the merged weights are the mean.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OuterOptimizer {
    pub rate: f64,
    pub momentum: f64,
}

/// The adapters of a merge, as directories.
#[derive(Debug, Clone)]
pub struct AdapterMerge {
    /// The adapter from which all others were trained.
    pub start: PathBuf,
    /// The velocity of the outer optimizer; `None` for 0.
    pub velocity: Option<PathBuf>,
    /// Each trained adapter with its weight in the mean.
    pub trained: Vec<(PathBuf, u64)>,
    pub outer: OuterOptimizer,
}

impl AdapterMerge {
    /// Writes the merged adapter, and the new velocity if there is momentum. Returns the drift: the
    /// Frobenius norm of mean(BA) - mean(B) mean(A) over all modules, divided by that of mean(BA).
    ///
    /// # Errors
    /// When a file cannot be read or written, or an adapter has other tensors than the start.
    pub fn write_merged(&self, adapter: &Path, velocity: &Path) -> Result<f64, AdapterError> {
        let start = tensor_file::read_all(&self.start.join(TENSOR_FILE))?;
        let before = self.velocity.as_ref().map(|dir| dir.join(VELOCITY_FILE));
        let before = before.map(|path| read_like(&path, &start)).transpose()?;
        let mut trained = Vec::new();
        for (dir, weight) in &self.trained {
            #[expect(clippy::cast_precision_loss, reason = "a count of tokens")]
            let weight = *weight as f64;
            trained.push((read_like(&dir.join(TENSOR_FILE), &start)?, weight));
        }
        let step = |(name, from): (&String, &Tensor)| {
            let velocity = before.as_ref().map(|tensors| &tensors[name]);
            let values = self.outer.step_tensor(name, from, velocity, &trained)?;
            Ok::<_, candle_core::Error>((name.clone(), values))
        };
        let stepped = start.par_iter().map(step).collect::<Result<Vec<_>, _>>()?;
        let (mut merged, mut moved) = (NamedTensors::new(), NamedTensors::new());
        for (name, [value, velocity]) in stepped {
            merged.insert(name.clone(), value);
            moved.insert(name, velocity);
        }
        write_directory(adapter, TENSOR_FILE, merged)?;
        let config = adapter.join(CONFIG_FILE);
        std::fs::copy(self.start.join(CONFIG_FILE), &config)
            .map_err(|source| AdapterError::File { path: config, source })?;
        if self.outer.momentum > 0.0 {
            write_directory(velocity, VELOCITY_FILE, moved)?;
        }
        Ok(measure_drift(&trained)?)
    }
}

impl OuterOptimizer {
    /// Returns the new values of a tensor and its new velocity.
    fn step_tensor(
        self,
        name: &str,
        start: &Tensor,
        velocity: Option<&Tensor>,
        trained: &[(NamedTensors, f64)],
    ) -> candle_core::Result<[Tensor; 2]> {
        let values = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
        let mut mean = vec![0f64; start.elem_count()];
        let total: f64 = trained.iter().map(|(_, weight)| weight).sum();
        for (tensors, weight) in trained {
            for (sum, value) in mean.iter_mut().zip(values(&tensors[name])?) {
                *sum += weight * f64::from(value);
            }
        }
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

/// Reads a file that must have tensors of the same names and shapes.
fn read_like(path: &Path, wanted: &NamedTensors) -> Result<NamedTensors, AdapterError> {
    let mut found = tensor_file::read_all(path)?;
    let mut taken = NamedTensors::new();
    for (name, tensor) in wanted {
        let value = tensor_file::take_tensor(&mut found, path, name.clone(), tensor.dims())?;
        taken.insert(name.clone(), value);
    }
    match found.into_keys().next() {
        Some(name) => Err(AdapterError::UnknownTensor { path: path.into(), name }),
        None => Ok(taken),
    }
}

fn write_directory(dir: &Path, name: &str, tensors: NamedTensors) -> Result<(), AdapterError> {
    std::fs::create_dir_all(dir)
        .map_err(|source| AdapterError::File { path: dir.into(), source })?;
    Ok(tensor_file::write_tensors(&dir.join(name), tensors)?)
}

/// Returns the drift over all modules; 0 if nothing was trained.
fn measure_drift(trained: &[(NamedTensors, f64)]) -> Result<f64, TensorFileError> {
    let Some((first, _)) = trained.first() else { return Ok(0.0) };
    let modules: Vec<&str> =
        first.keys().filter_map(|name| name.strip_suffix("lora_A.weight")).collect();
    let squares = modules
        .par_iter()
        .map(|module| module_drift(module, trained))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let sum = |index: usize| squares.iter().map(|square| square[index]).sum::<f64>();
    let (error, whole) = (sum(0).max(0.0), sum(1));
    Ok(if whole > 0.0 { (error / whole).sqrt() } else { 0.0 })
}

/// Returns the squared Frobenius norms of mean(BA) - mean(B) mean(A) and of mean(BA) of a module.
/// Both are sums over pairs of ranks: |sum_i b_i a_i|^2 = sum_ij (b_i . b_j)(a_i . a_j).
fn module_drift(module: &str, trained: &[(NamedTensors, f64)]) -> candle_core::Result<[f64; 2]> {
    let total: f64 = trained.iter().map(|(_, weight)| weight).sum();
    // Rows of A, columns of B, and the factor of their product.
    let mut ranks: Vec<(Vec<f64>, Vec<f64>, f64)> = Vec::new();
    let mut means: Vec<(Vec<f64>, Vec<f64>, f64)> = Vec::new();
    for (tensors, weight) in trained {
        let share = weight / total;
        let rows = |name: &str| -> candle_core::Result<Option<Vec<Vec<f32>>>> {
            let tensor = tensors.get(&format!("{module}{name}"));
            let flip = name.starts_with("lora_B");
            let rows = tensor.map(|it| if flip { it.t()?.to_vec2() } else { it.to_vec2() });
            rows.transpose()
        };
        let (Some(a), Some(b)) = (rows("lora_A.weight")?, rows("lora_B.weight")?) else {
            return Ok([0.0, 0.0]);
        };
        let widen = |row: &[f32]| row.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
        for (rank, (a, b)) in a.iter().zip(&b).enumerate() {
            let (a, b) = (widen(a), widen(b));
            if means.len() <= rank {
                means.push((vec![0.0; a.len()], vec![0.0; b.len()], -1.0));
            }
            let (mean_a, mean_b, _) = &mut means[rank];
            mean_a.iter_mut().zip(&a).for_each(|(sum, value)| *sum += share * value);
            mean_b.iter_mut().zip(&b).for_each(|(sum, value)| *sum += share * value);
            ranks.push((a, b, share));
        }
    }
    let whole = ranks.len();
    ranks.extend(means);
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    let mut squares = [0.0, 0.0];
    for (i, (a, b, factor)) in ranks.iter().enumerate() {
        for (j, (other_a, other_b, other)) in ranks.iter().enumerate().take(i + 1) {
            let twice = if i == j { 1.0 } else { 2.0 };
            let term = twice * factor * other * dot(a, other_a) * dot(b, other_b);
            squares[0] += term;
            if i < whole {
                squares[1] += term;
            }
        }
    }
    Ok(squares)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::random;

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
            outer: OuterOptimizer { rate: 1.0, momentum: 0.0 },
        };
        let (out, velocity) = (dir.path().join("out"), dir.path().join("velocity"));
        let drift = merge.write_merged(&out, &velocity).unwrap();
        assert!(drift < 1e-7, "{drift}");
        let read = |dir: &Path| std::fs::read(dir.join(TENSOR_FILE)).unwrap();
        assert_eq!(read(&out), read(&dir.path().join("one")), "the same bytes");
        assert!(!velocity.exists());
    }

    #[test]
    fn weights_move_as_with_torch_s_sgd_and_the_drift_is_that_of_the_products() {
        let dir = tempfile::tempdir().unwrap();
        let start = write(dir.path(), "start", adapter(1));
        let trained: Vec<_> = [(2, 100), (3, 300)]
            .map(|(seed, tokens)| (write(dir.path(), &format!("t{seed}"), adapter(seed)), tokens))
            .into();
        let outer = OuterOptimizer { rate: 0.7, momentum: 0.9 };
        let mut merge = AdapterMerge { start, velocity: None, trained, outer };
        let (out, velocity) = (dir.path().join("out"), dir.path().join("velocity"));
        let drift = merge.write_merged(&out, &velocity).unwrap();
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
            outer: OuterOptimizer { rate: 1.0, momentum: 0.0 },
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
