//! An adapter merged into its base: a model directory like the base's, in the base's dtype.

mod directory;

use std::io::Write;
use std::path::Path;

use directory::{Directory, Shard};

use super::output::Output;
use super::pairs::{self, Pair, Place};
use super::plan::{self, Step};
use super::{ConvertError, Progress, rows};
use crate::peft::Settings;
use crate::safetensors::{Located, Planned, Weights, write_header};
use crate::{Config, weight_files};

/// Merges a PEFT LoRA adapter into the model directory it was trained on, as a new directory.
///
/// # Errors
/// When the adapter is of a kind that is not supported, does not fit the base, `out` is there
/// already, or a file cannot be read or written.
pub fn merge(
    base: &Path,
    adapter: &Path,
    out: &Path,
    progress: &mut Progress<'_>,
) -> Result<(), ConvertError> {
    let config = Config::load(base)?;
    let settings = Settings::load(adapter)?;
    let pairs = pairs::read(base, adapter, &config, &settings)?;
    let weights = Weights::open(base, &weight_files(base)?)?;
    let steps = plan::steps(&config);
    plan::check_complete(base, &config, &weights, &steps)?;
    let located = steps.iter().map(|step| weights.get(&step.name));
    let tensors = located.collect::<Result<Vec<_>, _>>()?;
    let total = tensors.iter().map(size).sum();
    let mut done = 0;
    let mut progress = |bytes| {
        done += bytes;
        progress(done, total);
    };
    let directory = Directory::create(out)?;
    let shards = directory::shards(&tensors);
    for shard in &shards {
        write_shard(directory.path(), shard, &tensors, &steps, &pairs, &mut progress)?;
    }
    directory.write_index(&shards, &tensors)?;
    directory.copy_side_files(base)?;
    directory.finish()
}

fn size(tensor: &Located<'_>) -> u64 {
    tensor.entry.range.end - tensor.entry.range.start
}

fn write_shard(
    dir: &Path,
    shard: &Shard,
    tensors: &[Located<'_>],
    steps: &[Step],
    pairs: &[Pair],
    progress: &mut dyn FnMut(u64),
) -> Result<(), ConvertError> {
    let path = dir.join(&shard.name);
    let failed = Output::failed(&path);
    let mut planned = Vec::with_capacity(shard.tensors.len());
    for tensor in &tensors[shard.tensors.clone()] {
        let (name, shape) = (tensor.name, tensor.entry.shape.as_slice());
        planned.push(Planned { name, element: tensor.element()?, shape, bytes: size(tensor) });
    }
    let mut out = Output::create(&path)?;
    write_header(&mut out, &planned).map_err(&failed)?;
    for index in shard.tensors.clone() {
        let pair = pairs.iter().find(|pair| pair.place.gguf() == steps[index].gguf);
        let delta = pair.map(Delta::of);
        write_merged(tensors[index], delta.as_ref(), |bytes| {
            progress(bytes.len() as u64);
            out.write_all(bytes).map_err(&failed)
        })?;
    }
    out.finish()
}

fn write_merged(
    tensor: Located<'_>,
    delta: Option<&Delta>,
    mut write: impl FnMut(&[u8]) -> Result<(), ConvertError>,
) -> Result<(), ConvertError> {
    let element = tensor.element()?;
    let (mut values, mut merged) = (Vec::new(), Vec::new());
    rows::read(tensor, element, 1, |first, bytes| {
        let Some(delta) = delta else { return write(bytes) };
        element.decode(bytes, &mut values);
        delta.add(first, &mut values);
        merged.clear();
        element.encode(&values, &mut merged);
        write(&merged)
    })
}

/// What a weight gains: `scale * left right`, `left` of `[rows, rank]`, `right` of
/// `[rank, columns]`.
struct Delta {
    left: Vec<f32>,
    right: Vec<f32>,
    rank: usize,
    columns: usize,
    scale: f32,
}

impl Delta {
    fn of(pair: &Pair) -> Self {
        let (rank, scale) = (pair.rank, pair.scale as f32);
        match pair.place {
            // An embedding is stored the other way around.
            Place::Embedding => {
                let left = rows::transposed(&pair.a, pair.inputs);
                let right = rows::transposed(&pair.b, rank);
                Self { left, right, rank, columns: pair.outputs, scale }
            }
            Place::Layer(..) | Place::Output => {
                let (left, right) = (pair.b.clone(), pair.a.clone());
                Self { left, right, rank, columns: pair.inputs, scale }
            }
        }
    }

    /// To whole rows of the weight, of which the first has that number.
    fn add(&self, first: usize, values: &mut [f32]) {
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
