//! Merges an adapter into its base. The result is a model directory like that of the base, in the
//! base's number format. A model with images keeps its vision tensors.

mod directory;

use std::io::Write;
use std::path::Path;

use directory::{AtomicDirectory, WeightShard};

use super::atomic_file::AtomicFile;
use super::pairs::{self, LoraPair};
use super::tensor_mapping;
use super::{ConvertError, ConvertProgress, rows};
use crate::peft::AdapterSettings;
use crate::safetensors::{LocatedTensor, ModelWeights, PlannedSafetensorsTensor, write_header};
use crate::{ModelConfig, list_weight_files};

/// Merges a PEFT LoRA adapter into the model directory on which it was trained, as a new directory.
pub fn merge_adapter(
    base: &Path,
    adapter: &Path,
    out: &Path,
    progress: &mut ConvertProgress<'_>,
) -> Result<(), ConvertError> {
    let config = ModelConfig::from_dir(base)?;
    let settings = AdapterSettings::from_dir(adapter)?;
    let pairs = pairs::read_pairs(base, adapter, &config, &settings)?;
    let weights = ModelWeights::open(base, &list_weight_files(base)?)?;
    let steps = tensor_mapping::map_tensors(&config);
    tensor_mapping::check_complete(base, &config, &weights, &steps)?;
    // Each tensor of the base, with the name of its matrix in GGUF files, which pairs know.
    let names = steps.iter().flat_map(|step| {
        step.source_names().into_iter().map(move |name| (name, step.gguf_name.as_str()))
    });
    let (names, mut targets): (Vec<String>, Vec<&str>) = names.unzip();
    let located = names.iter().map(|name| weights.get(name));
    let mut tensors = located.collect::<Result<Vec<_>, _>>()?;
    tensors.extend(weights.vision_tensors());
    // No pair changes those.
    targets.resize(tensors.len(), "");
    let total = tensors.iter().map(tensor_bytes).sum();
    let mut done = 0;
    let mut progress = |bytes| {
        done += bytes;
        progress(done, total);
    };
    let directory = AtomicDirectory::create_at(out)?;
    let shards = directory::plan_shards(&tensors);
    for shard in &shards {
        let directory = directory.temporary_path();
        write_shard(directory, shard, &tensors, &targets, &pairs, &mut progress)?;
    }
    directory.write_index(&shards, &tensors)?;
    directory.copy_side_files(base)?;
    directory.commit_directory()
}

fn tensor_bytes(tensor: &LocatedTensor<'_>) -> u64 {
    tensor.entry.range.end - tensor.entry.range.start
}

fn write_shard(
    dir: &Path,
    shard: &WeightShard,
    tensors: &[LocatedTensor<'_>],
    targets: &[&str],
    pairs: &[LoraPair],
    progress: &mut dyn FnMut(u64),
) -> Result<(), ConvertError> {
    let path = dir.join(&shard.name);
    let failed = AtomicFile::write_error(&path);
    let mut planned = Vec::with_capacity(shard.tensors.len());
    for tensor in &tensors[shard.tensors.clone()] {
        let (name, shape) = (tensor.name, tensor.entry.shape.as_slice());
        planned.push(PlannedSafetensorsTensor {
            name,
            element: tensor.float_dtype()?,
            shape,
            bytes: tensor_bytes(tensor),
        });
    }
    let mut out = AtomicFile::create_at(&path)?;
    write_header(&mut out, &planned).map_err(&failed)?;
    for index in shard.tensors.clone() {
        let pair = pairs.iter().find(|pair| pair.place.gguf_name == targets[index]);
        let delta = pair.map(LowRankDelta::from_pair);
        write_merged(tensors[index], delta.as_ref(), |bytes| {
            progress(bytes.len() as u64);
            out.write_all(bytes).map_err(&failed)
        })?;
    }
    out.commit_file()
}

fn write_merged(
    tensor: LocatedTensor<'_>,
    delta: Option<&LowRankDelta>,
    mut write: impl FnMut(&[u8]) -> Result<(), ConvertError>,
) -> Result<(), ConvertError> {
    let element = tensor.float_dtype()?;
    let (mut values, mut merged) = (Vec::new(), Vec::new());
    rows::read_rows(tensor, element, 1, |first, bytes| {
        let Some(delta) = delta else { return write(bytes) };
        element.decode_floats(bytes, &mut values);
        delta.add_to_rows(first, &mut values);
        merged.clear();
        element.encode_floats(&values, &mut merged);
        write(&merged)
    })
}

/// A weight changes by `scale * left right`; `left` is `[rows, rank]`, `right` `[rank, columns]`.
struct LowRankDelta {
    left: Vec<f32>,
    right: Vec<f32>,
    rank: usize,
    columns: usize,
    scale: f32,
}

impl LowRankDelta {
    fn from_pair(pair: &LoraPair) -> Self {
        let (rank, scale) = (pair.rank, pair.scale as f32);
        if pair.place.is_embedding() {
            // The pair of an embedding is stored transposed.
            let left = rows::transpose_rows(&pair.a, pair.inputs);
            let right = rows::transpose_rows(&pair.b, rank);
            return Self { left, right, rank, columns: pair.outputs, scale };
        }
        let (left, right) = (pair.b.clone(), pair.a.clone());
        Self { left, right, rank, columns: pair.inputs, scale }
    }

    /// `first` is the index of the first row in `values`.
    fn add_to_rows(&self, first: usize, values: &mut [f32]) {
        let mut gain = vec![0.0; self.columns];
        for (row, values) in values.chunks_exact_mut(self.columns).enumerate() {
            gain.fill(0.0);
            let left = &self.left[(first + row) * self.rank..][..self.rank];
            for (factor, right) in left.iter().zip(self.right.chunks_exact(self.columns)) {
                gain.iter_mut().zip(right).for_each(|(gain, right)| *gain += factor * right);
            }
            values.iter_mut().zip(&gain).for_each(|(value, gain)| *value += gain * self.scale);
        }
    }
}
