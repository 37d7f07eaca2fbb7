//! The two products of attention for a tile of vectors: dot products with blocks of 16 rows, and
//! weighted sums of rows. Sums run over the rows in their order, and no vector depends on its
//! neighbours in the tile.

use pulp::Simd;
use rayon::prelude::*;

/// The number of vectors that are computed at once.
pub(super) const TILE: usize = 8;
/// The number of rows of a block.
pub(crate) const BLOCK: usize = 16;

/// Rows of `heads * dim` elements in blocks of 16, transposed: `[block][head][dim][16]`. Missing
/// rows of the last block are 0.
#[derive(Debug, Clone, Default)]
pub(crate) struct TransposedBlocks {
    values: Vec<f32>,
    rows: usize,
}

impl TransposedBlocks {
    pub(super) fn new(rows: &[f32], heads: usize, dim: usize) -> Self {
        let width = heads * dim;
        let count = rows.len() / width;
        let mut values = vec![0f32; count.div_ceil(BLOCK) * BLOCK * width];
        let blocks = values.par_chunks_exact_mut(BLOCK * width);
        blocks.zip(rows.par_chunks(BLOCK * width)).for_each(|(block, rows)| {
            for (lane, row) in rows.chunks_exact(width).enumerate() {
                write_lane(block, lane, row);
            }
        });
        Self { values, rows: count }
    }

    pub(crate) fn push(&mut self, row: &[f32]) {
        let (lane, size) = (self.rows % BLOCK, BLOCK * row.len());
        if lane == 0 {
            self.values.resize(self.values.len() + size, 0.0);
        }
        let last = self.values.len() - size;
        write_lane(&mut self.values[last..], lane, row);
        self.rows += 1;
    }

    /// Returns one head of a block, `[dim][16]`.
    #[inline(always)]
    pub(super) fn head_block(
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

fn write_lane(block: &mut [f32], lane: usize, row: &[f32]) {
    for (out, value) in block[lane..].iter_mut().step_by(BLOCK).zip(row) {
        *out = *value;
    }
}

/// One number for each pair of a tile's vector and a row; the numbers of a vector are contiguous.
#[derive(Debug, Default)]
pub(crate) struct TileBuffer {
    values: Vec<f32>,
    blocks: usize,
}

impl TileBuffer {
    pub(super) fn resize_blocks(&mut self, blocks: usize) {
        self.blocks = blocks;
        self.values.resize(TILE * blocks * BLOCK, 0.0);
    }

    #[inline(always)]
    pub(super) fn vector_numbers(&self, vector: usize) -> &[f32] {
        let width = self.blocks * BLOCK;
        &self.values[vector * width..(vector + 1) * width]
    }

    #[inline(always)]
    pub(super) fn vector_numbers_mut(&mut self, vector: usize) -> &mut [f32] {
        let width = self.blocks * BLOCK;
        &mut self.values[vector * width..(vector + 1) * width]
    }

    #[inline(always)]
    pub(super) fn write_dot_products<S: Simd>(
        &mut self,
        simd: S,
        block: usize,
        vectors: [&[f32]; TILE],
        others: &[[f32; BLOCK]],
        factor: f32,
    ) {
        let sums = multiply_tile(simd, vectors, others.len(), |place| &others[place]);
        for (vector, sums) in sums.iter().enumerate() {
            let out = &mut self.vector_numbers_mut(vector)[block * BLOCK..][..BLOCK];
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = sum * factor;
            }
        }
    }

    /// Computes for each vector the sum of the first `count` rows weighted by the vector's numbers.
    /// Rows are `stride` apart and have `dim` elements. Calls `out(vector, first element, sums)`
    /// with at most 16 elements at a time.
    #[inline(always)]
    pub(super) fn sum_weighted_rows<S: Simd>(
        &self,
        simd: S,
        rows: &[f32],
        (stride, dim, count): (usize, usize, usize),
        mut out: impl FnMut(usize, usize, &[f32]),
    ) {
        let vectors = std::array::from_fn(|vector| self.vector_numbers(vector));
        for from in (0..dim).step_by(BLOCK) {
            let width = BLOCK.min(dim - from);
            let sums = if width == BLOCK {
                multiply_tile(simd, vectors, count, |row| {
                    rows[row * stride + from..].first_chunk().unwrap_or(&[0.0; BLOCK])
                })
            } else {
                let rest = |row: usize| {
                    let mut rest = [0.0; BLOCK];
                    rest[..width].copy_from_slice(&rows[row * stride + from..][..width]);
                    rest
                };
                let rests: Vec<[f32; BLOCK]> = (0..count).map(rest).collect();
                multiply_tile(simd, vectors, count, |row| &rests[row])
            };
            for (vector, sums) in sums.iter().enumerate() {
                out(vector, from, &sums[..width]);
            }
        }
    }
}

/// Computes for each vector the sum over `place` of `others(place)` times the vector's element at
/// `place`.
#[inline(always)]
fn multiply_tile<'a, S: Simd>(
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
