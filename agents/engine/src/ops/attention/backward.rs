//! The gradients of attention. Probabilities are computed anew: once by queries, and once by keys
//! and values, so that both split over rows without sharing a sum.

use super::super::{for_blocks_of, host, math};
use super::forward::{Unit, score, softmax, tiles};
use super::tile::{BLOCK, Blocks, Numbers, TILE};
use super::{Heads, TASK_ROWS, composed, runs};
use candle_core::{Result, Tensor};
use pulp::{Simd, WithSimd};
use std::ops::Range;

pub(crate) struct Gradients {
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
}

/// The inputs and output of [`super::causal_attention`], and the gradient of the output.
pub(crate) struct Backward<'a> {
    pub(crate) heads: &'a Heads,
    pub(crate) query: &'a Tensor,
    pub(crate) key: &'a Tensor,
    pub(crate) value: &'a Tensor,
    pub(crate) out: &'a Tensor,
    pub(crate) grad: &'a Tensor,
    pub(crate) sequences: &'a [Range<usize>],
}

/// Of a row and head: log of the softmax's sum, and grad · out.
type Statistics = [f32; 2];

impl Backward<'_> {
    pub(crate) fn run(&self) -> Result<Gradients> {
        if !self.query.device().is_cpu() {
            return composed::backward(self);
        }
        let (query, statistics) = self.query_gradient()?;
        let (key, value) = self.key_value_gradients(&statistics)?;
        Ok(Gradients { query, key, value })
    }

    fn blocks(&self, x: &Tensor, heads: usize) -> Result<Vec<Blocks>> {
        let (x, width) = (host(x)?, heads * self.heads.dim);
        let of = |rows: &Range<usize>| &x[rows.start * width..rows.end * width];
        Ok(self.sequences.iter().map(|rows| Blocks::new(of(rows), heads, self.heads.dim)).collect())
    }

    fn query_gradient(&self) -> Result<(Tensor, Vec<Statistics>)> {
        let heads = self.heads;
        let (width, kv_width) = (heads.width(), heads.kv_width());
        let (key_blocks, value_blocks) =
            (self.blocks(self.key, heads.kv_count)?, self.blocks(self.value, heads.kv_count)?);
        let (queries, keys) = (host(self.query)?, host(self.key)?);
        let (outs, grads) = (host(self.out)?, host(self.grad)?);
        let rows = self.query.dim(0)?;
        // A row is its gradient followed by its statistics.
        let wide = width + 2 * heads.count;
        let mut both = vec![0f32; rows * wide];
        for_blocks_of(TASK_ROWS, &mut both, wide, |first, out| {
            let mut numbers = Weights::default();
            for (sequence, run) in runs(self.sequences, first..first + out.len() / wide) {
                let Range { start, .. } = self.sequences[sequence];
                pulp::Arch::new().dispatch(QueryGradient {
                    heads,
                    key_blocks: &key_blocks[sequence],
                    keys: &keys[start * kv_width..],
                    value_blocks: &value_blocks[sequence],
                    seen: run.start - start + 1,
                    queries: &queries[run.start * width..run.end * width],
                    outs: &outs[run.start * width..run.end * width],
                    grads: &grads[run.start * width..run.end * width],
                    both: &mut out[(run.start - first) * wide..(run.end - first) * wide],
                    numbers: &mut numbers,
                });
            }
        });
        let mut gradient = Vec::with_capacity(rows * width);
        let mut statistics = Vec::with_capacity(rows * heads.count);
        for row in both.chunks_exact(wide) {
            gradient.extend_from_slice(&row[..width]);
            statistics.extend_from_slice(row[width..].as_chunks().0);
        }
        Ok((Tensor::from_vec(gradient, self.query.shape(), self.query.device())?, statistics))
    }

    fn key_value_gradients(&self, statistics: &[Statistics]) -> Result<(Tensor, Tensor)> {
        let heads = self.heads;
        let (width, kv_width) = (heads.width(), heads.kv_width());
        let (query_blocks, grad_blocks) =
            (self.blocks(self.query, heads.count)?, self.blocks(self.grad, heads.count)?);
        let (queries, keys, values) = (host(self.query)?, host(self.key)?, host(self.value)?);
        let grads = host(self.grad)?;
        let rows = self.key.dim(0)?;
        // A row is the gradient of its key, then of its value.
        let wide = 2 * kv_width;
        let mut both = vec![0f32; rows * wide];
        for_blocks_of(TASK_ROWS, &mut both, wide, |first, out| {
            let mut weights = Weights::default();
            for (sequence, run) in runs(self.sequences, first..first + out.len() / wide) {
                let Range { start, end } = self.sequences[sequence];
                pulp::Arch::new().dispatch(KeyValueGradient {
                    heads,
                    query_blocks: &query_blocks[sequence],
                    grad_blocks: &grad_blocks[sequence],
                    queries: &queries[start * width..end * width],
                    grads: &grads[start * width..end * width],
                    statistics: &statistics[start * heads.count..end * heads.count],
                    first: run.start - start,
                    keys: &keys[run.start * kv_width..run.end * kv_width],
                    values: &values[run.start * kv_width..run.end * kv_width],
                    both: &mut out[(run.start - first) * wide..(run.end - first) * wide],
                    weights: &mut weights,
                });
            }
        });
        let both = Tensor::from_vec(both, (rows, wide), self.key.device())?;
        let part = |at| both.narrow(1, at, kv_width)?.contiguous();
        Ok((part(0)?, part(kv_width)?))
    }
}

/// Consecutive rows of a sequence.
struct QueryGradient<'a> {
    heads: &'a Heads,
    key_blocks: &'a Blocks,
    keys: &'a [f32],
    value_blocks: &'a Blocks,
    seen: usize,
    queries: &'a [f32],
    outs: &'a [f32],
    grads: &'a [f32],
    both: &'a mut [f32],
    numbers: &'a mut Weights,
}

impl WithSimd for QueryGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Heads { count, kv_count, dim } = *self.heads;
        let (width, kv_width) = (self.heads.width(), self.heads.kv_width());
        let wide = width + 2 * count;
        let numbers = self.numbers;
        for kv_head in 0..kv_count {
            for units in tiles(self.heads, kv_head, self.queries.len() / width) {
                let of = |Unit { row, head }: Unit| {
                    let start = row * width + head * dim;
                    start..start + dim
                };
                let queries = units.map(|unit| &self.queries[of(unit)]);
                let grads = units.map(|unit| &self.grads[of(unit)]);
                let along =
                    units.map(|unit| math::dot(&self.grads[of(unit)], &self.outs[of(unit)]));
                let seen = units.map(|unit| self.seen + unit.row);
                let most = *seen.iter().max().unwrap_or(&0);
                score(
                    simd,
                    self.heads,
                    queries,
                    self.key_blocks,
                    kv_head,
                    most,
                    &mut numbers.scores,
                );
                let totals = softmax(&mut numbers.scores, seen);
                numbers.grads.make_room(most.div_ceil(BLOCK));
                for block in 0..most.div_ceil(BLOCK) {
                    let values = self.value_blocks.block(block, kv_head, kv_count, dim);
                    numbers.grads.put_dots(simd, block, grads, values, 1.0);
                }
                for unit in 0..TILE {
                    let factor = self.heads.scale() / totals[unit].1;
                    let grads = numbers.grads.of(unit);
                    for (score, grad) in numbers.scores.of_mut(unit).iter_mut().zip(grads) {
                        *score = *score * factor * (grad - along[unit]);
                    }
                }
                let keys = &self.keys[kv_head * dim..];
                numbers.scores.weigh(simd, keys, (kv_width, dim, most), |unit, from, sums| {
                    let Unit { row, head } = units[unit];
                    self.both[row * wide + head * dim + from..][..sums.len()].copy_from_slice(sums);
                });
                for (Unit { row, head }, ((most, total), along)) in
                    units.into_iter().zip(totals.into_iter().zip(along))
                {
                    let statistics = [most + total.ln(), along];
                    self.both[row * wide + width + 2 * head..][..2].copy_from_slice(&statistics);
                }
            }
        }
    }
}

/// For a tile: scores or probabilities, and gradients.
#[derive(Default)]
struct Weights {
    scores: Numbers,
    grads: Numbers,
}

/// Consecutive keys of a sequence, of which the first is at `first`, over all its queries.
struct KeyValueGradient<'a> {
    heads: &'a Heads,
    query_blocks: &'a Blocks,
    grad_blocks: &'a Blocks,
    queries: &'a [f32],
    grads: &'a [f32],
    statistics: &'a [Statistics],
    first: usize,
    keys: &'a [f32],
    values: &'a [f32],
    both: &'a mut [f32],
    weights: &'a mut Weights,
}

impl WithSimd for KeyValueGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Heads { count, dim, .. } = *self.heads;
        let (width, kv_width) = (self.heads.width(), self.heads.kv_width());
        let (rows, later) = (self.keys.len() / kv_width, self.queries.len() / width);
        for tile in (0..rows).step_by(TILE) {
            let places: [usize; TILE] = std::array::from_fn(|lane| (tile + lane).min(rows - 1));
            // Queries before the tile's first key see none of it.
            let from = (self.first + tile) / BLOCK;
            for head in 0..count {
                let kv_head = self.heads.kv_of(head);
                let of = |place: usize| {
                    place * kv_width + kv_head * dim..place * kv_width + (kv_head + 1) * dim
                };
                let keys = places.map(|place| &self.keys[of(place)]);
                let values = places.map(|place| &self.values[of(place)]);
                let Weights { scores, grads } = &mut *self.weights;
                let blocks = later.div_ceil(BLOCK) - from;
                scores.make_room(blocks);
                grads.make_room(blocks);
                for block in 0..blocks {
                    let queries = self.query_blocks.block(from + block, head, count, dim);
                    scores.put_dots(simd, block, keys, queries, self.heads.scale());
                    let others = self.grad_blocks.block(from + block, head, count, dim);
                    grads.put_dots(simd, block, values, others, 1.0);
                }
                let start = from * BLOCK;
                for (unit, place) in places.into_iter().enumerate() {
                    // The first query that sees the key.
                    let first = self.first + place - start;
                    let (scores, grads) = (scores.of_mut(unit), grads.of_mut(unit));
                    scores[..first].fill(0.0);
                    grads[..first].fill(0.0);
                    let statistics = self.statistics[start * count..].chunks_exact(count);
                    let both = scores.iter_mut().zip(grads).zip(statistics).skip(first);
                    for ((score, grad), statistics) in both {
                        let [log_sum, along] = statistics[head];
                        *score = math::exp(*score - log_sum);
                        *grad = *score * (*grad - along) * self.heads.scale();
                    }
                }
                let shape = (width, dim, later - start);
                let queries = &self.queries[start * width + head * dim..];
                let mut add = |at: usize, unit: usize, from: usize, sums: &[f32]| {
                    let place = tile + unit;
                    if place < rows {
                        let out =
                            &mut self.both[(2 * place + at) * kv_width + kv_head * dim + from..];
                        for (out, sum) in out.iter_mut().zip(sums) {
                            *out += sum;
                        }
                    }
                };
                grads.weigh(simd, queries, shape, |unit, from, sums| add(0, unit, from, sums));
                let others = &self.grads[start * width + head * dim..];
                scores.weigh(simd, others, shape, |unit, from, sums| add(1, unit, from, sums));
            }
        }
    }
}
