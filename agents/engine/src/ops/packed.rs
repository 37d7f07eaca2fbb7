//! Matrix products of bf16 or 8-bit factors with f32 sums. One factor is used as it lies in memory, the
//! other is packed into the tiles that the processor's instructions take: for each product, or
//! once, if a model's weights are used for long. The sum of an element has
//! one order, that of the inner dimension in its phase: it depends neither on other rows and
//! columns nor on threads.

mod factor_tile;
mod kernel;
mod left_right;
mod projection;
mod quantized;
mod strip_sums;
mod tiles;
mod weights;

use factor_tile::SIDE;
use half::bf16;
pub(crate) use kernel::MatmulKernel;
use kernel::TileSums;
pub(crate) use left_right::{LeftFactor, RightFactor, multiply_packed};
pub(crate) use projection::{PackedProjection, ProjectionInputs, ProjectionWeight, project_packed};
pub(crate) use quantized::QuantizedMatrix;
use std::marker::PhantomData;
pub(crate) use weights::PackedMatrix;

/// The kind of rows of activations. Sequences have many rows and single tokens few; the fastest
/// method differs, so each phase has its own order of sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MatmulPhase {
    /// Whole sequences, also in training and scoring.
    Prefill,
    /// One token of each sequence.
    Decode,
}

/// A bf16 matrix in main memory, row by row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bf16Rows<'a> {
    values: &'a [bf16],
    width: usize,
}

impl<'a> Bf16Rows<'a> {
    /// Panics unless `values` are whole rows.
    pub(crate) fn new(values: &'a [bf16], width: usize) -> Self {
        assert!(width > 0 && values.len().is_multiple_of(width));
        Self { values, width }
    }

    fn row_count(&self) -> usize {
        self.values.len() / self.width
    }

    fn row_values(&self, index: usize) -> &'a [bf16] {
        &self.values[index * self.width..][..self.width]
    }
}

/// A result that several tasks write, each its own rows or columns.
struct SharedOutput<'a> {
    start: *mut f32,
    rows: usize,
    width: usize,
    borrowed: PhantomData<&'a mut [f32]>,
}

#[expect(unsafe_code, reason = "tasks write parts of the same rows, which slices cannot say")]
// SAFETY: shared access only writes, by `SharedOutput::write_row` and `SharedOutput::write_tile`,
// whose callers write disjoint parts.
unsafe impl Sync for SharedOutput<'_> {}

impl<'a> SharedOutput<'a> {
    fn new(out: &'a mut [f32], width: usize) -> Self {
        assert!(width > 0 && out.len().is_multiple_of(width));
        let rows = out.len() / width;
        Self { start: out.as_mut_ptr(), rows, width, borrowed: PhantomData }
    }

    /// Writes the columns of one row from `column` on.
    ///
    /// # Safety
    /// No other task may write there at the same time.
    #[expect(unsafe_code, reason = "as above")]
    unsafe fn write_row(&self, sums: &[f32], row: usize, column: usize) {
        assert!(row < self.rows && column + sums.len() <= self.width);
        // SAFETY: within `rows` rows of `width` elements, which were borrowed.
        let out = unsafe {
            let start = self.start.add(row * self.width + column);
            std::slice::from_raw_parts_mut(start, sums.len())
        };
        out.copy_from_slice(sums);
    }

    /// Writes the part of a tile that lies within the result and before column `end`.
    ///
    /// # Safety
    /// No other task may write there at the same time.
    #[expect(unsafe_code, reason = "as above")]
    unsafe fn write_tile(&self, sums: &TileSums, row: usize, column: usize, end: usize) {
        let width = end.min(self.width).saturating_sub(column).min(SIDE);
        for (lane, sums) in sums.0.chunks_exact(SIDE).enumerate() {
            if row + lane < self.rows {
                // SAFETY: within `rows` rows of `width` elements, which were borrowed.
                let out = unsafe {
                    let start = self.start.add((row + lane) * self.width + column);
                    std::slice::from_raw_parts_mut(start, width)
                };
                match (out.first_chunk_mut::<SIDE>(), sums.first_chunk()) {
                    (Some(out), Some(sums)) => *out = *sums,
                    _ => out.copy_from_slice(&sums[..width]),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
