//! Rows of activations in 8 bits.

use super::super::super::run_vectorised;
use super::super::weights::WeightTile;
use super::{BIAS, BLOCK_VALUES, BLOCKS, QuantizedTile, SIDE};
use rayon::prelude::*;

/// A row's block of 32 elements.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RowBlock {
    pub(super) scale: f32,
    /// What the biased weights of a block add to the sum of products, negated.
    pub(super) correction: i32,
}

/// Rows of f32, quantised and padded with zeros to whole tiles.
pub(crate) struct QuantizedRows {
    values: Vec<i8>,
    blocks: Vec<RowBlock>,
    rows: usize,
    /// In tiles.
    steps: usize,
}

/// Some rows, from a tile on. Rows lie `stride` elements and `block_stride` blocks apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowBlocks<'a> {
    pub(super) values: &'a [i8],
    pub(super) blocks: &'a [RowBlock],
    pub(super) stride: usize,
    pub(super) block_stride: usize,
    pub(super) rows: usize,
}

impl QuantizedRows {
    /// Quantises `x`, `[rows, width]`. A row with a value that is not finite has such sums.
    pub(crate) fn quantize(x: &[f32], width: usize) -> Self {
        assert!(width > 0 && x.len().is_multiple_of(width));
        let (rows, steps) = (x.len() / width, width.div_ceil(QuantizedTile::INNER));
        let mut values = vec![0i8; rows * steps * QuantizedTile::INNER];
        let mut blocks = vec![RowBlock::default(); rows * steps * BLOCKS];
        let quantize = |((values, blocks), x): ((&mut [i8], &mut [RowBlock]), &[f32])| {
            run_vectorised(
                #[inline(always)]
                || quantize_row(x, values, blocks),
            );
        };
        let (stride, block_stride) = (steps * QuantizedTile::INNER, steps * BLOCKS);
        if rows <= 8 {
            let own = values.chunks_exact_mut(stride).zip(blocks.chunks_exact_mut(block_stride));
            own.zip(x.chunks_exact(width)).for_each(quantize);
        } else {
            let own = values.par_chunks_exact_mut(stride);
            let own = own.zip(blocks.par_chunks_exact_mut(block_stride));
            own.zip(x.par_chunks_exact(width)).with_min_len(8).for_each(quantize);
        }
        Self { values, blocks, rows, steps }
    }

    /// Returns up to 32 rows, from a tile on.
    pub(in super::super) fn rows_from(&self, row: usize, step: usize) -> RowBlocks<'_> {
        let (stride, block_stride) = (self.steps * QuantizedTile::INNER, self.steps * BLOCKS);
        RowBlocks {
            values: &self.values[row * stride + step * QuantizedTile::INNER..],
            blocks: &self.blocks[row * block_stride + step * BLOCKS..],
            stride,
            block_stride,
            rows: (self.rows - row).min(2 * SIDE),
        }
    }
}

impl RowBlocks<'_> {
    /// Panics unless there are 1 to 32 rows, each with the tiles.
    pub(super) fn check_size(&self, steps: usize) {
        assert!((1..=2 * SIDE).contains(&self.rows));
        let last = self.rows - 1;
        assert!(last * self.stride + steps * QuantizedTile::INNER <= self.values.len());
        assert!(last * self.block_stride + steps * BLOCKS <= self.blocks.len());
    }
}

#[inline(always)]
fn quantize_row(x: &[f32], values: &mut [i8], blocks: &mut [RowBlock]) {
    let values = values.as_chunks_mut::<BLOCK_VALUES>().0;
    for ((x, values), block) in x.chunks(BLOCK_VALUES).zip(values).zip(blocks) {
        let mut padded = [0f32; BLOCK_VALUES];
        padded[..x.len()].copy_from_slice(x);
        // As integers, infinities and NaN are greater than all numbers.
        let largest = padded.iter().map(|value| value.to_bits() & 0x7fff_ffff).max();
        let largest = f32::from_bits(largest.unwrap_or_default());
        block.scale = largest / 127.0;
        let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
        for (value, x) in values.iter_mut().zip(padded) {
            *value = (x * inverse).round_ties_even() as i8;
        }
        let sum: i32 = values.iter().map(|value| i32::from(*value)).sum();
        block.correction = -i32::from(BIAS) * sum;
    }
}
