//! The two products of attention for a few vectors at a time: with blocks of 16 others, and of
//! weights with those. Sums go over the others in their order, and no vector sees its neighbours.

use pulp::Simd;
use rayon::prelude::*;

/// Vectors that are computed at once.
pub(super) const TILE: usize = 8;
/// Others in a block.
pub(crate) const BLOCK: usize = 16;

/// Rows of `heads * dim`, by blocks of 16 and heads, transposed: `[block][head][dim][16]`. What
/// lacks in the last block is 0.
#[derive(Debug, Clone, Default)]
pub(crate) struct Blocks {
    values: Vec<f32>,
    rows: usize,
}

impl Blocks {
    pub(super) fn new(rows: &[f32], heads: usize, dim: usize) -> Self {
        let width = heads * dim;
        let count = rows.len() / width;
        let mut values = vec![0f32; count.div_ceil(BLOCK) * BLOCK * width];
        let blocks = values.par_chunks_exact_mut(BLOCK * width);
        blocks.zip(rows.par_chunks(BLOCK * width)).for_each(|(block, rows)| {
            for (lane, row) in rows.chunks_exact(width).enumerate() {
                put(block, lane, row);
            }
        });
        Self { values, rows: count }
    }

    /// One row more.
    pub(crate) fn push(&mut self, row: &[f32]) {
        let (lane, size) = (self.rows % BLOCK, BLOCK * row.len());
        if lane == 0 {
            self.values.resize(self.values.len() + size, 0.0);
        }
        let last = self.values.len() - size;
        put(&mut self.values[last..], lane, row);
        self.rows += 1;
    }

    /// `[dim][16]` of one head.
    #[inline(always)]
    pub(super) fn block(
        &self,
        block: usize,
        head: usize,
        heads: usize,
        dim: usize,
    ) -> &[[f32; BLOCK]] {
        let start = (block * heads + head) * dim * BLOCK;
        self.values[start..start + dim * BLOCK].as_chunks().0
    }
}

fn put(block: &mut [f32], lane: usize, row: &[f32]) {
    for (out, value) in block[lane..].iter_mut().step_by(BLOCK).zip(row) {
        *out = *value;
    }
}

/// A number for each vector of a tile and each other, those of a vector side by side.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    values: Vec<f32>,
    blocks: usize,
}

impl Numbers {
    /// For so many blocks of others.
    pub(super) fn make_room(&mut self, blocks: usize) {
        self.blocks = blocks;
        self.values.resize(TILE * blocks * BLOCK, 0.0);
    }

    #[inline(always)]
    pub(super) fn of(&self, vector: usize) -> &[f32] {
        let width = self.blocks * BLOCK;
        &self.values[vector * width..(vector + 1) * width]
    }

    #[inline(always)]
    pub(super) fn of_mut(&mut self, vector: usize) -> &mut [f32] {
        let width = self.blocks * BLOCK;
        &mut self.values[vector * width..(vector + 1) * width]
    }

    /// Dot products of the vectors with all of a block, by a factor.
    #[inline(always)]
    pub(super) fn put_dots<S: Simd>(
        &mut self,
        simd: S,
        block: usize,
        vectors: [&[f32]; TILE],
        others: &[[f32; BLOCK]],
        factor: f32,
    ) {
        let sums = products(simd, vectors, others.len(), |place| &others[place]);
        for (vector, sums) in sums.iter().enumerate() {
            let out = &mut self.of_mut(vector)[block * BLOCK..][..BLOCK];
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = sum * factor;
            }
        }
    }

    /// Sums of rows, `stride` apart, `dim` elements each: for every vector its own numbers times the
    /// first `count` rows. `out` hears for each vector 16 elements at a time: where they are, and
    /// them.
    #[inline(always)]
    pub(super) fn weigh<S: Simd>(
        &self,
        simd: S,
        rows: &[f32],
        (stride, dim, count): (usize, usize, usize),
        mut out: impl FnMut(usize, usize, &[f32]),
    ) {
        let vectors = std::array::from_fn(|vector| self.of(vector));
        for from in (0..dim).step_by(BLOCK) {
            let width = BLOCK.min(dim - from);
            let sums = if width == BLOCK {
                products(simd, vectors, count, |row| {
                    rows[row * stride + from..].first_chunk().unwrap_or(&[0.0; BLOCK])
                })
            } else {
                let rest = |row: usize| {
                    let mut rest = [0.0; BLOCK];
                    rest[..width].copy_from_slice(&rows[row * stride + from..][..width]);
                    rest
                };
                let rests: Vec<[f32; BLOCK]> = (0..count).map(rest).collect();
                products(simd, vectors, count, |row| &rests[row])
            };
            for (vector, sums) in sums.iter().enumerate() {
                out(vector, from, &sums[..width]);
            }
        }
    }
}

/// For each vector the sum of `others(place)`, each times the vector's element of that place.
#[inline(always)]
fn products<'a, S: Simd>(
    simd: S,
    vectors: [&[f32]; TILE],
    count: usize,
    others: impl Fn(usize) -> &'a [f32; BLOCK],
) -> [[f32; BLOCK]; TILE] {
    let vectors = vectors.map(|vector| &vector[..count]);
    let mut all = [[0f32; BLOCK]; TILE];
    for part in (0..BLOCK).step_by(S::F32_LANES) {
        let mut sums = [simd.splat_f32s(0.0); TILE];
        for place in 0..count {
            let (others, _) = S::as_simd_f32s(&others(place)[part..]);
            for (sums, vector) in sums.iter_mut().zip(vectors) {
                *sums = simd.mul_add_f32s(simd.splat_f32s(vector[place]), others[0], *sums);
            }
        }
        for (all, sums) in all.iter_mut().zip(sums) {
            let (out, _) = S::as_mut_simd_f32s(&mut all[part..]);
            out[0] = sums;
        }
    }
    all
}
