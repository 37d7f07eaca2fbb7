//! Queries over the keys and values that they may see.

use super::super::math;
use super::Heads;
use super::tile::{BLOCK, Blocks, Numbers, TILE};
use pulp::{Simd, WithSimd};

/// What rows of one sequence attend to. The same code serves packed and cached attention, so both
/// give the same bits.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) keys: &'a Blocks,
    /// `[seen, kv_width]`
    pub(crate) values: &'a [f32],
}

/// Consecutive rows of a sequence: the first sees `seen` keys, each further one more.
pub(crate) struct Attend<'a> {
    pub(crate) heads: &'a Heads,
    pub(crate) context: Context<'a>,
    pub(crate) seen: usize,
    /// `[rows, width]`, as `out`.
    pub(crate) queries: &'a [f32],
    pub(crate) out: &'a mut [f32],
    pub(crate) scores: &'a mut Numbers,
}

/// A tile's query: its row among those at hand, and its head.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    pub(super) row: usize,
    pub(super) head: usize,
}

impl WithSimd for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Heads { kv_count, dim, .. } = *self.heads;
        let (width, kv_width) = (self.heads.width(), self.heads.kv_width());
        for kv_head in 0..kv_count {
            for units in tiles(self.heads, kv_head, self.queries.len() / width) {
                let queries =
                    units.map(|unit| &self.queries[unit.row * width + unit.head * dim..][..dim]);
                let seen = units.map(|unit| self.seen + unit.row);
                let most = *seen.iter().max().unwrap_or(&0);
                score(simd, self.heads, queries, self.context.keys, kv_head, most, self.scores);
                let totals = softmax(self.scores, seen).map(|(_, total)| total);
                let values = &self.context.values[kv_head * dim..];
                self.scores.weigh(simd, values, (kv_width, dim, most), |unit, from, sums| {
                    let Unit { row, head } = units[unit];
                    let out = &mut self.out[row * width + head * dim + from..];
                    for (out, sum) in out.iter_mut().zip(sums) {
                        *out = sum / totals[unit];
                    }
                });
            }
        }
    }
}

/// The queries of a key's head, by tiles; a last one that is not full says its last again.
#[inline(always)]
pub(super) fn tiles(
    heads: &Heads,
    kv_head: usize,
    rows: usize,
) -> impl Iterator<Item = [Unit; TILE]> {
    let group = heads.group();
    let count = rows * group;
    (0..count).step_by(TILE).map(move |from| {
        std::array::from_fn(|place| {
            let unit = (from + place).min(count - 1);
            Unit { row: unit / group, head: kv_head * group + unit % group }
        })
    })
}

/// Scaled dot products with the first `most` keys, and the rest of their last block.
#[inline(always)]
pub(super) fn score<S: Simd>(
    simd: S,
    heads: &Heads,
    queries: [&[f32]; TILE],
    keys: &Blocks,
    kv_head: usize,
    most: usize,
    scores: &mut Numbers,
) {
    let Heads { kv_count, dim, .. } = *heads;
    scores.make_room(most.div_ceil(BLOCK));
    for block in 0..most.div_ceil(BLOCK) {
        let others = keys.block(block, kv_head, kv_count, dim);
        scores.put_dots(simd, block, queries, others, heads.scale());
    }
}

/// Leaves unnormalised probabilities, and 0 for what is not seen; returns for each query its
/// largest score and their sum.
#[inline(always)]
pub(super) fn softmax(scores: &mut Numbers, seen: [usize; TILE]) -> [(f32, f32); TILE] {
    let mut found = [(0.0, 0.0); TILE];
    for (unit, found) in found.iter_mut().enumerate() {
        let (scores, hidden) = scores.of_mut(unit).split_at_mut(seen[unit]);
        hidden.fill(0.0);
        let most = math::max(scores);
        for score in &mut *scores {
            *score = math::exp(*score - most);
        }
        *found = (most, math::sum(scores));
    }
    found
}
