//! The sums of a strip of columns, in blocks of 32 rows and 32 columns that a task keeps in its
//! cache.

use super::SharedOutput;
use super::factor_tile::SIDE;
use super::kernel::{RightTiles, SumBlock, TileSums};
use std::ops::Range;

#[derive(Default)]
pub(super) struct StripSums {
    blocks: Vec<SumBlock>,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl StripSums {
    /// Starts new sums, from 0 or from the bias of each column.
    pub(super) fn reset(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
        bias: Option<&[f32]>,
    ) {
        let pairs = columns.len().div_ceil(2 * SIDE);
        self.blocks.clear();
        self.blocks.resize(rows.len().div_ceil(2 * SIDE) * pairs, [[TileSums::ZERO; 2]; 2]);
        (self.rows, self.columns) = (rows, columns);
        let Some(bias) = bias else { return };
        for blocks in self.blocks.chunks_exact_mut(pairs) {
            for (block, bias) in blocks.iter_mut().zip(bias.chunks(2 * SIDE)) {
                for tiles in block {
                    for (sums, bias) in tiles.iter_mut().zip(bias.chunks(SIDE)) {
                        let rows = sums.0.chunks_exact_mut(SIDE);
                        rows.for_each(|row| row[..bias.len()].copy_from_slice(bias));
                    }
                }
            }
        }
    }

    /// Adds the products of the left factor's rows with tiles of each 16 columns of the strip:
    /// `multiply` adds those of up to 32 rows, from a row on, to a block. `next` are tiles that
    /// will be used next.
    pub(super) fn add_product<T>(
        &mut self,
        tiles: &[&[T]],
        next: [&[T]; 2],
        multiply: impl Fn(&mut SumBlock, usize, RightTiles<'_, T>),
    ) {
        let pairs = tiles.len().div_ceil(2);
        let rows = self.rows.clone().step_by(2 * SIDE);
        for (blocks, row) in self.blocks.chunks_exact_mut(pairs).zip(rows) {
            for (block, pair) in blocks.iter_mut().zip(tiles.chunks(2)) {
                let right = RightTiles { first: pair[0], second: pair.get(1).copied(), next };
                multiply(block, row, right);
            }
        }
    }

    /// Writes the sums.
    ///
    /// # Safety
    /// No other task may write to these columns at the same time.
    #[expect(unsafe_code, reason = "the caller says that the columns are the task's alone")]
    pub(super) unsafe fn write_to(&self, out: &SharedOutput<'_>) {
        let pairs = self.columns.len().div_ceil(2 * SIDE);
        let rows = self.rows.clone().step_by(2 * SIDE);
        for (blocks, row) in self.blocks.chunks_exact(pairs).zip(rows) {
            for (block, column) in blocks.iter().zip(self.columns.clone().step_by(2 * SIDE)) {
                for (tiles, row) in block.iter().zip([row, row + SIDE]) {
                    for (sums, column) in tiles.iter().zip([column, column + SIDE]) {
                        // SAFETY: guaranteed by the caller.
                        unsafe { out.write_tile(sums, row, column, self.columns.end) }
                    }
                }
            }
        }
    }
}
