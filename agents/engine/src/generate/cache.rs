//! Keys and values of one sequence, all layers, and attention of new rows over them.

use crate::ops::attention::{Attend, Blocks, Context, Heads, Numbers, composed_sequence};
use crate::ops::{for_row_blocks, host};
use candle_core::{Result, Tensor};

/// Cloning copies: the samples of a prompt start from clones of its cache.
#[derive(Clone)]
pub(super) struct Cache {
    layers: Vec<LayerCache>,
}

/// Rows of `kv_width`. In main memory as attention reads them, elsewhere tensors.
#[derive(Clone, Default)]
struct LayerCache {
    keys: Blocks,
    values: Vec<f32>,
    on_device: Option<(Tensor, Tensor)>,
}

/// Which cache a row belongs to, and its position there.
#[derive(Clone, Copy)]
pub(super) struct Owner {
    pub(super) cache: usize,
    pub(super) position: usize,
}

impl Cache {
    pub(super) fn new(layers: usize) -> Self {
        Self { layers: vec![LayerCache::default(); layers] }
    }
}

/// Appends the new rows to their caches and attends. Rows of one cache come in position order.
pub(super) fn attend(
    heads: &Heads,
    layer: usize,
    [query, key, value]: [&Tensor; 3],
    owners: &[Owner],
    caches: &mut [&mut Cache],
) -> Result<Tensor> {
    if !query.device().is_cpu() {
        return attend_on_device(heads, layer, [query, key, value], owners, caches);
    }
    let (width, kv_width) = (heads.width(), heads.kv_width());
    let (queries, keys, values) = (host(query)?, host(key)?, host(value)?);
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
        let mut scores = Numbers::default();
        let rows = first..first + out.len() / width;
        let mut done = first;
        for run in owners[rows].chunk_by(|a, b| a.cache == b.cache) {
            let cached = &caches[run[0].cache].layers[layer];
            let end = done + run.len();
            pulp::Arch::new().dispatch(Attend {
                heads,
                context: Context { keys: &cached.keys, values: &cached.values },
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
    heads: &Heads,
    layer: usize,
    [query, key, value]: [&Tensor; 3],
    owners: &[Owner],
    caches: &mut [&mut Cache],
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
        parts.push(composed_sequence(heads, &part(query)?, &both.0, &both.1)?);
        *cached = Some(both);
        start += group.len();
    }
    Tensor::cat(&parts, 0)
}
