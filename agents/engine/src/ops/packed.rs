//! Matrix products of bf16 factors with f32 sums. One factor is used as it lies in memory, the
//! other is packed into the tiles that the processor's instructions take. An element's sum has one
//! order, that of the inner dimension in its phase: it depends neither on what other rows and
//! columns there are nor on threads.

mod kernel;
mod mix;
mod project;
mod tiles;

use half::bf16;
pub(crate) use kernel::Kernel;
use kernel::{SIDE, Sums};
pub(crate) use mix::{Factors, Right, mix};
pub(crate) use project::{Inputs, Projection, project};
use std::marker::PhantomData;

/// What rows of activations are of. There are many of sequences and few of single tokens, and what
/// is fastest for the one is not for the other: each has an order of sums of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Whole sequences, also in training and in scoring.
    Prefill,
    /// One token of each sequence.
    Decode,
}

/// A matrix of bf16 in main memory, row by row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    values: &'a [bf16],
    width: usize,
}

impl<'a> Rows<'a> {
    /// `values` are whole rows.
    pub(crate) fn new(values: &'a [bf16], width: usize) -> Self {
        assert!(width > 0 && values.len().is_multiple_of(width));
        Self { values, width }
    }

    fn count(&self) -> usize {
        self.values.len() / self.width
    }

    fn row(&self, index: usize) -> &'a [bf16] {
        &self.values[index * self.width..][..self.width]
    }
}

/// A result that several tasks write, each its own rows or columns.
struct Parts<'a> {
    start: *mut f32,
    rows: usize,
    width: usize,
    borrowed: PhantomData<&'a mut [f32]>,
}

#[expect(unsafe_code, reason = "tasks write parts of the same rows, which slices cannot say")]
// SAFETY: what is shared is only written, by `Parts::write`, whose callers write disjoint parts.
unsafe impl Sync for Parts<'_> {}

impl<'a> Parts<'a> {
    fn new(out: &'a mut [f32], width: usize) -> Self {
        assert!(width > 0 && out.len().is_multiple_of(width));
        let rows = out.len() / width;
        Self { start: out.as_mut_ptr(), rows, width, borrowed: PhantomData }
    }

    /// One row's columns from `column` on.
    ///
    /// # Safety
    /// Nobody else writes there at the same time.
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

    /// What of the tile lies within the result and its columns up to `end`.
    ///
    /// # Safety
    /// Nobody else writes there at the same time.
    #[expect(unsafe_code, reason = "as above")]
    unsafe fn write(&self, sums: &Sums, row: usize, column: usize, end: usize) {
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
