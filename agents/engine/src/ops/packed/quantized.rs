//! Matrices in 8 bits: 32 elements share a scale, as in ggml's `Q8_0`. Rows of activations are
//! quantised for each product. The sum over 32 elements is exact, and their order is fixed, so the
//! bits of a result depend neither on the processor nor on other rows.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
mod rows;

use super::super::run_vectorised;
use super::factor_tile::SIDE;
use super::kernel::{RightTiles, SumBlock};
use super::weights::{TiledMatrix, WeightTile};
use formats::q8_0::{BLOCK_VALUES, quantize_block};
use half::{bf16, f16};
use rayon::prelude::*;
pub(crate) use rows::QuantizedRows;
pub(super) use rows::RowBlocks;

/// The blocks of a tile's columns.
const BLOCKS: usize = 2;
/// The elements of the inner dimension that an instruction multiplies for each column.
const QUAD: usize = 4;
const BLOCK_QUADS: usize = BLOCK_VALUES / QUAD;

/// 16 columns by 64 elements of the inner dimension.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct QuantizedTile {
    /// For every four elements, those of each column. They are stored as unsigned numbers, 128
    /// more than their values, because the instruction multiplies unsigned by signed ones.
    quads: [[[[u8; QUAD]; SIDE]; BLOCK_QUADS]; BLOCKS],
    /// The scale of each column, f16.
    scales: [[u16; SIDE]; BLOCKS],
}

#[expect(unsafe_code, reason = "bytes of mapped memory are read as tiles")]
// SAFETY: any bits are elements, and 1024 + 64 bytes leave no room.
unsafe impl pulp::bytemuck::Zeroable for QuantizedTile {}
#[expect(unsafe_code, reason = "as above")]
// SAFETY: as above.
unsafe impl pulp::bytemuck::Pod for QuantizedTile {}

impl WeightTile for QuantizedTile {
    const INNER: usize = BLOCKS * BLOCK_VALUES;
}

/// What is added to a stored element.
const BIAS: u8 = 128;

/// A matrix in 8 bits.
pub(crate) type QuantizedMatrix = TiledMatrix<QuantizedTile>;

pub(crate) trait WideElement: Copy + Sync {
    fn widen(self) -> f32;
}

impl WideElement for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl WideElement for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl QuantizedMatrix {
    /// Quantises rows of weights. Rows of values that a `Q8_0` file represents keep their blocks.
    /// Returns an error if the system refuses the memory.
    pub(crate) fn quantize<T: WideElement>(values: &[T], width: usize) -> std::io::Result<Self> {
        assert!(width > 0 && values.len().is_multiple_of(width));
        let shape = (values.len() / width, width);
        let mut all = Self::build_all(&[shape], |_, tiles| {
            let groups = tiles.par_chunks_exact_mut(width.div_ceil(QuantizedTile::INNER));
            groups.zip(values.par_chunks(SIDE * width)).for_each(|(tiles, rows)| {
                run_vectorised(
                    #[inline(always)]
                    || quantize_group(rows, width, tiles),
                );
            });
        })?;
        all.pop().ok_or_else(|| std::io::Error::other("one matrix"))
    }

    /// Writes the values of a column's elements; fails if there is no such column.
    pub(crate) fn copy_column(&self, column: usize, out: &mut [f32]) -> Option<()> {
        let (columns, width) = self.shape();
        if column >= columns || out.len() != width {
            return None;
        }
        let lane = column % SIDE;
        let tiles = self.group_tiles(column / SIDE, &(0..self.step_count()));
        let blocks = tiles.iter().flat_map(|tile| tile.quads.iter().zip(&tile.scales));
        for (out, (quads, scales)) in out.chunks_mut(BLOCK_VALUES).zip(blocks) {
            let scale = f16::from_bits(scales[lane]).to_f32();
            for (out, stored) in out.iter_mut().zip(quads.iter().flat_map(|quad| quad[lane])) {
                *out = f32::from((stored ^ BIAS).cast_signed()) * scale;
            }
        }
        Some(())
    }
}

/// Quantises at most 16 rows into tiles of zeros. Missing elements count as 0, because their
/// scales or the activations beside them are 0.
#[inline(always)]
fn quantize_group<T: WideElement>(rows: &[T], width: usize, tiles: &mut [QuantizedTile]) {
    for (lane, row) in rows.chunks_exact(width).enumerate() {
        let blocks = tiles.iter_mut().flat_map(|tile| tile.quads.iter_mut().zip(&mut tile.scales));
        for (values, (quads, scales)) in row.chunks(BLOCK_VALUES).zip(blocks) {
            let mut block = [0f32; BLOCK_VALUES];
            for (block, value) in block.iter_mut().zip(values) {
                *block = value.widen();
            }
            let (scale, quantized) = quantize_block(&block);
            scales[lane] = scale.to_bits();
            for (quad, values) in quads.iter_mut().zip(quantized.as_chunks::<QUAD>().0) {
                quad[lane] = values.map(|value| value.cast_unsigned() ^ BIAS);
            }
        }
    }
}

/// Adds the products of up to 32 rows with tiles to a block of sums.
pub(super) fn add_quantized_product(
    block: &mut SumBlock,
    left: RowBlocks<'_>,
    right: RightTiles<'_, QuantizedTile>,
) {
    let steps = right.first.len();
    left.check_size(steps);
    assert!(right.second.is_none_or(|second| second.len() == steps));
    #[cfg(target_arch = "x86_64")]
    if avx512::is_available() {
        return avx512::add_product(block, left, right);
    }
    portable::add_product(block, left, right);
}

#[cfg(test)]
mod tests;
