//! The product for processors without 8-bit dot products. The numbers of a block are small enough
//! for f32 to represent every sum of their products.

use super::super::super::run_vectorised;
use super::super::kernel::{RightTiles, SumBlock};
use super::{BIAS, BLOCK_VALUES, BLOCKS, QUAD, QuantizedTile, RowBlocks, SIDE};
use half::f16;

/// Requires that `left` has the rows.
pub(super) fn add_product(
    block: &mut SumBlock,
    left: RowBlocks<'_>,
    right: RightTiles<'_, QuantizedTile>,
) {
    run_vectorised(
        #[inline(always)]
        || {
            let columns = [Some(right.first), right.second].into_iter().flatten();
            for (column, tiles) in columns.enumerate() {
                for (step, tile) in tiles.iter().enumerate() {
                    for half in 0..BLOCKS {
                        add_block(block, column, left, step * BLOCKS + half, tile, half);
                    }
                }
            }
        },
    );
}

/// Adds the products of one block of each row.
#[inline(always)]
fn add_block(
    block: &mut SumBlock,
    column: usize,
    left: RowBlocks<'_>,
    index: usize,
    tile: &QuantizedTile,
    half: usize,
) {
    let mut weights = [[0f32; SIDE]; BLOCK_VALUES];
    for (weights, quads) in weights.as_chunks_mut::<QUAD>().0.iter_mut().zip(&tile.quads[half]) {
        for (lane, quad) in quads.iter().enumerate() {
            for (weights, stored) in weights.iter_mut().zip(quad) {
                weights[lane] = f32::from((stored ^ BIAS).cast_signed());
            }
        }
    }
    let scales = tile.scales[half].map(|scale| f16::from_bits(scale).to_f32());
    for row in 0..left.rows {
        let values = &left.values[row * left.stride + index * BLOCK_VALUES..][..BLOCK_VALUES];
        let mut dots = [0f32; SIDE];
        for (value, weights) in values.iter().zip(&weights) {
            let value = f32::from(*value);
            for (dot, weight) in dots.iter_mut().zip(weights) {
                *dot += value * weight;
            }
        }
        let scale = left.blocks[row * left.block_stride + index].scale;
        let sums = &mut block[row / SIDE][column].0[row % SIDE * SIDE..][..SIDE];
        for ((sum, dot), own) in sums.iter_mut().zip(dots).zip(scales) {
            *sum = dot.mul_add(own * scale, *sum);
        }
    }
}
