//! The attention kernel: queries over the keys and values that they may see.

use super::super::math;
use super::HeadShape;
use super::tile::{BLOCK, TILE, TileBuffer, TransposedBlocks};
use pulp::{Simd, WithSimd};

/// The keys and values that the rows of one sequence attend to. Packed and cached attention share
/// this code and give the same bits.
#[derive(Clone, Copy)]
pub(crate) struct AttentionContext<'a> {
    pub(crate) keys: &'a TransposedBlocks,
    /// `[seen, kv_width]`
    pub(crate) values: &'a [f32],
}

/// The kernel for consecutive rows of a sequence. The first row sees `seen` keys, each further row
/// one more.
pub(crate) struct AttentionTask<'a> {
    pub(crate) heads: &'a HeadShape,
    pub(crate) context: AttentionContext<'a>,
    pub(crate) seen: usize,
    /// `[rows, width]`; `out` has the same shape.
    pub(crate) queries: &'a [f32],
    pub(crate) out: &'a mut [f32],
    pub(crate) scores: &'a mut TileBuffer,
}

/// A query of a tile: its row in the task, and its head.
#[derive(Clone, Copy)]
pub(super) struct TileQuery {
    pub(super) row: usize,
    pub(super) head: usize,
}

impl WithSimd for AttentionTask<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let HeadShape { kv_count, dim, .. } = *self.heads;
        let (width, kv_width) = (self.heads.query_width(), self.heads.kv_width());
        for kv_head in 0..kv_count {
            for units in query_tiles(self.heads, kv_head, self.queries.len() / width) {
                let queries =
                    units.map(|unit| &self.queries[unit.row * width + unit.head * dim..][..dim]);
                let seen = units.map(|unit| self.seen + unit.row);
                let most = *seen.iter().max().unwrap_or(&0);
                score_keys(
                    simd,
                    self.heads,
                    queries,
                    self.context.keys,
                    kv_head,
                    most,
                    self.scores,
                );
                let totals = softmax_tile(self.scores, seen).map(|(_, total)| total);
                let values = &self.context.values[kv_head * dim..];
                self.scores.sum_weighted_rows(
                    simd,
                    values,
                    (kv_width, dim, most),
                    |unit, from, sums| {
                        let TileQuery { row, head } = units[unit];
                        let out = &mut self.out[row * width + head * dim + from..];
                        for (out, sum) in out.iter_mut().zip(sums) {
                            *out = sum / totals[unit];
                        }
                    },
                );
            }
        }
    }
}

/// Yields the queries of a key head in tiles; an incomplete one repeats its last query.
#[inline(always)]
pub(super) fn query_tiles(
    heads: &HeadShape,
    kv_head: usize,
    rows: usize,
) -> impl Iterator<Item = [TileQuery; TILE]> {
    let group = heads.group_size();
    let count = rows * group;
    (0..count).step_by(TILE).map(move |from| {
        std::array::from_fn(|place| {
            let unit = (from + place).min(count - 1);
            TileQuery { row: unit / group, head: kv_head * group + unit % group }
        })
    })
}

/// Includes the rest of the last key's block.
#[inline(always)]
pub(super) fn score_keys<S: Simd>(
    simd: S,
    heads: &HeadShape,
    queries: [&[f32]; TILE],
    keys: &TransposedBlocks,
    kv_head: usize,
    most: usize,
    scores: &mut TileBuffer,
) {
    let HeadShape { kv_count, dim, .. } = *heads;
    scores.resize_blocks(most.div_ceil(BLOCK));
    for block in 0..most.div_ceil(BLOCK) {
        let others = keys.head_block(block, kv_head, kv_count, dim);
        scores.write_dot_products(simd, block, queries, others, heads.score_scale());
    }
}

/// Replaces scores by unnormalised probabilities, and by 0 for keys that are not seen. Returns the
/// largest score and the sum for each query.
#[inline(always)]
pub(super) fn softmax_tile(scores: &mut TileBuffer, seen: [usize; TILE]) -> [(f32, f32); TILE] {
    let mut found = [(0.0, 0.0); TILE];
    for (unit, found) in found.iter_mut().enumerate() {
        let (scores, hidden) = scores.vector_numbers_mut(unit).split_at_mut(seen[unit]);
        hidden.fill(0.0);
        let most = math::max_value(scores);
        for score in &mut *scores {
            *score = math::fast_exp(*score - most);
        }
        *found = (most, math::sum_values(scores));
    }
    found
}
