//! The keys and values of one sequence in all layers, and the attention of new rows to them.

use crate::ops::attention::{
    AttentionContext, AttentionTask, HeadShape, TileBuffer, TransposedBlocks, attend_sequence,
};
use crate::ops::{for_row_blocks, host_f32};
use candle_core::{Result, Tensor};

/// The keys and values of a sequence. A clone is a copy, with which a prompt's samples start.
#[derive(Clone)]
pub(super) struct KvCache {
    layers: Vec<LayerKvCache>,
}

/// The rows of one layer, each `kv_width` wide. In main memory they have the layout that the
/// kernels read; on other devices they are tensors.
#[derive(Clone, Default)]
struct LayerKvCache {
    keys: TransposedBlocks,
    values: Vec<f32>,
    /// Only on a device other than the CPU.
    on_device: Option<(Tensor, Tensor)>,
}

/// The sequence of a row, and the row's position in it.
#[derive(Clone, Copy)]
pub(super) struct RowOwner {
    pub(super) cache: usize,
    pub(super) position: usize,
}

impl KvCache {
    pub(super) fn new(layers: usize) -> Self {
        Self { layers: vec![LayerKvCache::default(); layers] }
    }
}

/// Appends rows to their caches and attends. Rows of one cache are in order of position.
pub(super) fn attend_cached(
    heads: &HeadShape,
    layer: usize,
    [query, key, value]: [&Tensor; 3],
    owners: &[RowOwner],
    caches: &mut [&mut KvCache],
) -> Result<Tensor> {
    if !query.device().is_cpu() {
        return attend_on_device(heads, layer, [query, key, value], owners, caches);
    }
    let (width, kv_width) = (heads.query_width(), heads.kv_width());
    let (queries, keys, values) = (host_f32(query)?, host_f32(key)?, host_f32(value)?);
    let rows = keys.chunks_exact(kv_width).zip(values.chunks_exact(kv_width));
    for (owner, (key, value)) in owners.iter().zip(rows) {
        let cached = &mut caches[owner.cache].layers[layer];
        cached.keys.push(key);
        cached.values.extend_from_slice(value);
    }
    let longest = owners.iter().map(|owner| owner.position + 1).max().unwrap_or(0);
    let caches = &*caches;
    let mut out = vec![0f32; queries.len()];
    for_row_blocks(&mut out, width, longest, |first, out| {
        let mut scores = TileBuffer::default();
        let rows = first..first + out.len() / width;
        let mut done = first;
        for run in owners[rows].chunk_by(|a, b| a.cache == b.cache) {
            let cached = &caches[run[0].cache].layers[layer];
            let end = done + run.len();
            pulp::Arch::new().dispatch(AttentionTask {
                heads,
                context: AttentionContext { keys: &cached.keys, values: &cached.values },
                seen: run[0].position + 1,
                queries: &queries[done * width..end * width],
                out: &mut out[(done - first) * width..(end - first) * width],
                scores: &mut scores,
            });
            done = end;
        }
    });
    Tensor::from_vec(out, query.shape(), query.device())
}

fn attend_on_device(
    heads: &HeadShape,
    layer: usize,
    [query, key, value]: [&Tensor; 3],
    owners: &[RowOwner],
    caches: &mut [&mut KvCache],
) -> Result<Tensor> {
    let mut parts = Vec::new();
    let mut start = 0;
    for group in owners.chunk_by(|a, b| a.cache == b.cache) {
        let part = |x: &Tensor| x.narrow(0, start, group.len());
        let cached = &mut caches[group[0].cache].layers[layer].on_device;
        let both = match cached.take() {
            Some((keys, values)) => {
                (Tensor::cat(&[keys, part(key)?], 0)?, Tensor::cat(&[values, part(value)?], 0)?)
            }
            None => (part(key)?, part(value)?),
        };
        parts.push(attend_sequence(heads, &part(query)?, &both.0, &both.1)?);
        *cached = Some(both);
        start += group.len();
    }
    Tensor::cat(&parts, 0)
}
