//! The gradients of attention. Probabilities are recomputed twice, once by queries and once by keys
//! and values, so that both passes split over rows and share no sum.

use super::super::{for_sized_blocks, host_f32, math};
use super::forward::{TileQuery, query_tiles, score_keys, softmax_tile};
use super::tile::{BLOCK, TILE, TileBuffer, TransposedBlocks};
use super::{AttentionBackward, AttentionGradients, HeadShape, TASK_ROWS, split_by_sequence};
use candle_core::{Result, Tensor};
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Two values of a row and head: the log of the softmax's sum, and the dot product of gradient and
/// output.
type SoftmaxStatistics = [f32; 2];

impl AttentionBackward<'_> {
    pub(super) fn run_kernels(&self) -> Result<AttentionGradients> {
        let (query, statistics) = self.query_gradient()?;
        let (key, value) = self.key_value_gradients(&statistics)?;
        Ok(AttentionGradients { query, key, value })
    }

    fn transpose_sequences(&self, x: &Tensor, heads: usize) -> Result<Vec<TransposedBlocks>> {
        let (x, width) = (host_f32(x)?, heads * self.heads.dim);
        let of = |rows: &Range<usize>| &x[rows.start * width..rows.end * width];
        Ok(self
            .sequences
            .iter()
            .map(|rows| TransposedBlocks::new(of(rows), heads, self.heads.dim))
            .collect())
    }

    /// Returns the gradient and the statistics of each row and head.
    fn query_gradient(&self) -> Result<(Tensor, Vec<SoftmaxStatistics>)> {
        let heads = self.heads;
        let (width, kv_width) = (heads.query_width(), heads.kv_width());
        let (key_blocks, value_blocks) = (
            self.transpose_sequences(self.key, heads.kv_count)?,
            self.transpose_sequences(self.value, heads.kv_count)?,
        );
        let (queries, keys) = (host_f32(self.query)?, host_f32(self.key)?);
        let (outs, grads) = (host_f32(self.out)?, host_f32(self.grad)?);
        let rows = self.query.dim(0)?;
        // A row is its gradient followed by its statistics.
        let wide = width + 2 * heads.count;
        let mut both = vec![0f32; rows * wide];
        for_sized_blocks(TASK_ROWS, &mut both, wide, |first, out| {
            let mut numbers = TileScores::default();
            for (sequence, run) in
                split_by_sequence(self.sequences, first..first + out.len() / wide)
            {
                let Range { start, .. } = self.sequences[sequence];
                pulp::Arch::new().dispatch(QueryGradientTask {
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

    fn key_value_gradients(&self, statistics: &[SoftmaxStatistics]) -> Result<(Tensor, Tensor)> {
        let heads = self.heads;
        let (width, kv_width) = (heads.query_width(), heads.kv_width());
        let (query_blocks, grad_blocks) = (
            self.transpose_sequences(self.query, heads.count)?,
            self.transpose_sequences(self.grad, heads.count)?,
        );
        let (queries, keys, values) =
            (host_f32(self.query)?, host_f32(self.key)?, host_f32(self.value)?);
        let grads = host_f32(self.grad)?;
        let rows = self.key.dim(0)?;
        // A row is the gradient of its key, then of its value.
        let wide = 2 * kv_width;
        let mut both = vec![0f32; rows * wide];
        for_sized_blocks(TASK_ROWS, &mut both, wide, |first, out| {
            let mut weights = TileScores::default();
            for (sequence, run) in
                split_by_sequence(self.sequences, first..first + out.len() / wide)
            {
                let Range { start, end } = self.sequences[sequence];
                pulp::Arch::new().dispatch(KeyValueGradientTask {
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

/// The kernel for consecutive rows of a sequence.
struct QueryGradientTask<'a> {
    heads: &'a HeadShape,
    key_blocks: &'a TransposedBlocks,
    keys: &'a [f32],
    value_blocks: &'a TransposedBlocks,
    seen: usize,
    queries: &'a [f32],
    outs: &'a [f32],
    grads: &'a [f32],
    both: &'a mut [f32],
    numbers: &'a mut TileScores,
}

impl WithSimd for QueryGradientTask<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let HeadShape { count, kv_count, dim } = *self.heads;
        let (width, kv_width) = (self.heads.query_width(), self.heads.kv_width());
        let wide = width + 2 * count;
        let numbers = self.numbers;
        for kv_head in 0..kv_count {
            for units in query_tiles(self.heads, kv_head, self.queries.len() / width) {
                let of = |TileQuery { row, head }: TileQuery| {
                    let start = row * width + head * dim;
                    start..start + dim
                };
                let queries = units.map(|unit| &self.queries[of(unit)]);
                let grads = units.map(|unit| &self.grads[of(unit)]);
                let along = units
                    .map(|unit| math::dot_product(&self.grads[of(unit)], &self.outs[of(unit)]));
                let seen = units.map(|unit| self.seen + unit.row);
                let most = *seen.iter().max().unwrap_or(&0);
                score_keys(
                    simd,
                    self.heads,
                    queries,
                    self.key_blocks,
                    kv_head,
                    most,
                    &mut numbers.scores,
                );
                let totals = softmax_tile(&mut numbers.scores, seen);
                numbers.grads.resize_blocks(most.div_ceil(BLOCK));
                for block in 0..most.div_ceil(BLOCK) {
                    let values = self.value_blocks.head_block(block, kv_head, kv_count, dim);
                    numbers.grads.write_dot_products(simd, block, grads, values, 1.0);
                }
                for unit in 0..TILE {
                    let factor = self.heads.score_scale() / totals[unit].1;
                    let grads = numbers.grads.vector_numbers(unit);
                    for (score, grad) in
                        numbers.scores.vector_numbers_mut(unit).iter_mut().zip(grads)
                    {
                        *score = *score * factor * (grad - along[unit]);
                    }
                }
                let keys = &self.keys[kv_head * dim..];
                numbers.scores.sum_weighted_rows(
                    simd,
                    keys,
                    (kv_width, dim, most),
                    |unit, from, sums| {
                        let TileQuery { row, head } = units[unit];
                        self.both[row * wide + head * dim + from..][..sums.len()]
                            .copy_from_slice(sums);
                    },
                );
                for (TileQuery { row, head }, ((most, total), along)) in
                    units.into_iter().zip(totals.into_iter().zip(along))
                {
                    let statistics = [most + total.ln(), along];
                    self.both[row * wide + width + 2 * head..][..2].copy_from_slice(&statistics);
                }
            }
        }
    }
}

#[derive(Default)]
struct TileScores {
    scores: TileBuffer,
    grads: TileBuffer,
}

/// The kernel for consecutive keys and values of a sequence, over all its queries.
struct KeyValueGradientTask<'a> {
    heads: &'a HeadShape,
    query_blocks: &'a TransposedBlocks,
    grad_blocks: &'a TransposedBlocks,
    queries: &'a [f32],
    grads: &'a [f32],
    statistics: &'a [SoftmaxStatistics],
    /// The position of the first key in its sequence.
    first: usize,
    keys: &'a [f32],
    values: &'a [f32],
    both: &'a mut [f32],
    weights: &'a mut TileScores,
}

impl WithSimd for KeyValueGradientTask<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let HeadShape { count, dim, .. } = *self.heads;
        let (width, kv_width) = (self.heads.query_width(), self.heads.kv_width());
        let (rows, later) = (self.keys.len() / kv_width, self.queries.len() / width);
        for tile in (0..rows).step_by(TILE) {
            let places: [usize; TILE] = std::array::from_fn(|lane| (tile + lane).min(rows - 1));
            // Queries before the tile's first key do not see any of its keys.
            let from = (self.first + tile) / BLOCK;
            for head in 0..count {
                let kv_head = self.heads.kv_head_of(head);
                let of = |place: usize| {
                    place * kv_width + kv_head * dim..place * kv_width + (kv_head + 1) * dim
                };
                let keys = places.map(|place| &self.keys[of(place)]);
                let values = places.map(|place| &self.values[of(place)]);
                let TileScores { scores, grads } = &mut *self.weights;
                let blocks = later.div_ceil(BLOCK) - from;
                scores.resize_blocks(blocks);
                grads.resize_blocks(blocks);
                for block in 0..blocks {
                    let queries = self.query_blocks.head_block(from + block, head, count, dim);
                    scores.write_dot_products(simd, block, keys, queries, self.heads.score_scale());
                    let others = self.grad_blocks.head_block(from + block, head, count, dim);
                    grads.write_dot_products(simd, block, values, others, 1.0);
                }
                let start = from * BLOCK;
                for (unit, place) in places.into_iter().enumerate() {
                    // The first query that sees the key.
                    let first = self.first + place - start;
                    let (scores, grads) =
                        (scores.vector_numbers_mut(unit), grads.vector_numbers_mut(unit));
                    scores[..first].fill(0.0);
                    grads[..first].fill(0.0);
                    let statistics = self.statistics[start * count..].chunks_exact(count);
                    let both = scores.iter_mut().zip(grads).zip(statistics).skip(first);
                    for ((score, grad), statistics) in both {
                        let [log_sum, along] = statistics[head];
                        *score = math::fast_exp(*score - log_sum);
                        *grad = *score * (*grad - along) * self.heads.score_scale();
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
                grads.sum_weighted_rows(simd, queries, shape, |unit, from, sums| {
                    add(0, unit, from, sums);
                });
                let others = &self.grads[start * width + head * dim..];
                scores.sum_weighted_rows(simd, others, shape, |unit, from, sums| {
                    add(1, unit, from, sums);
                });
            }
        }
    }
}
