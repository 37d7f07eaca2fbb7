//! Products `left · right`, the form of most gradients. The right factor is packed: each task packs
//! its own strip of columns.

use super::factor_tile::{FactorTile, SIDE, STEP};
use super::kernel::{LeftRows, MatmulKernel};
use super::strip_sums::StripSums;
use super::tiles;
use super::{Bf16Rows, SharedOutput};
use half::bf16;
use rayon::prelude::*;
use std::ops::Range;

/// Rows of f32, narrowed to bf16 and padded with zeros to whole tiles.
pub(crate) struct LeftFactor {
    values: Vec<bf16>,
    rows: usize,
    width: usize,
    kernel: MatmulKernel,
}

impl LeftFactor {
    /// Narrows `x`, `[rows, width]`.
    pub(crate) fn new(kernel: MatmulKernel, x: &[f32], width: usize) -> Self {
        assert!(width > 0 && x.len().is_multiple_of(width));
        let mut factors = Self::zero_factor(kernel, x.len() / width, width);
        tiles::narrow_rows(x, width, factors.padded_width(), &mut factors.values);
        factors
    }

    /// Narrows the transpose of `x`, which is `[width, rows]`.
    pub(crate) fn from_transposed(kernel: MatmulKernel, x: &[f32], rows: usize) -> Self {
        assert!(rows > 0 && x.len().is_multiple_of(rows));
        let mut factors = Self::zero_factor(kernel, rows, x.len() / rows);
        let stride = factors.padded_width();
        for (column, x) in x.chunks_exact(rows).enumerate() {
            for (out, x) in factors.values[column..].iter_mut().step_by(stride).zip(x) {
                *out = bf16::from_f32(*x);
            }
        }
        factors
    }

    fn zero_factor(kernel: MatmulKernel, rows: usize, width: usize) -> Self {
        let values = rows.next_multiple_of(SIDE) * width.next_multiple_of(STEP);
        Self { values: vec![bf16::ZERO; values], rows, width, kernel }
    }

    /// Returns the distance between the starts of two rows.
    fn padded_width(&self) -> usize {
        self.width.next_multiple_of(STEP)
    }

    /// Returns up to 32 rows, from a step of 32 elements on.
    pub(super) fn rows_from(&self, row: usize, step: usize) -> LeftRows<'_> {
        let stride = self.padded_width();
        let rows = (self.rows - row).min(2 * SIDE);
        LeftRows { values: &self.values[row * stride + step * STEP..], stride, rows }
    }
}

/// `[inner, columns]`, row by row.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RightFactor<'a> {
    Bf16(Bf16Rows<'a>),
    F32(&'a [f32]),
}

impl RightFactor<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Bf16(rows) => rows.values.len(),
            Self::F32(values) => values.len(),
        }
    }

    fn pack_tiles(
        &self,
        rows: &Range<usize>,
        width: usize,
        column: usize,
        tiles: &mut [FactorTile],
    ) {
        let values = rows.start * width..rows.end * width;
        match self {
            Self::Bf16(rows) => tiles::pack_rows(&rows.values[values], width, column, tiles),
            Self::F32(rows) => tiles::pack_rows(&rows[values], width, column, tiles),
        }
    }
}

const STRIP_COLUMNS: usize = 64;
const PACKED_ROWS: usize = 32 * STEP;
const SUMMED_ROWS: usize = 1024;

/// Computes `out = Σ left · right`, `[rows, columns]`.
pub(crate) fn multiply_packed(
    out: &mut [f32],
    columns: usize,
    terms: &[(&LeftFactor, RightFactor<'_>)],
) {
    let Some((first, _)) = terms.first() else { return };
    let (rows, kernel) = (first.rows, first.kernel);
    assert_eq!(out.len(), rows * columns);
    for (left, right) in terms {
        assert!(left.rows == rows && right.len() == left.width * columns);
    }
    if out.is_empty() {
        return;
    }
    let out = SharedOutput::new(out, columns);
    let strips = |from| Range { start: from, end: columns.min(from + STRIP_COLUMNS) };
    let strips: Vec<_> = (0..columns).step_by(STRIP_COLUMNS).map(strips).collect();
    strips.into_par_iter().with_max_len(1).for_each(|strip| {
        let _session = kernel.start_session();
        for from in (0..rows).step_by(SUMMED_ROWS) {
            multiply_strip(&out, terms, &strip, from..rows.min(from + SUMMED_ROWS));
        }
    });
}

fn multiply_strip(
    out: &SharedOutput<'_>,
    terms: &[(&LeftFactor, RightFactor<'_>)],
    strip: &Range<usize>,
    rows: Range<usize>,
) {
    let groups = strip.len().div_ceil(SIDE);
    let (mut sums, mut tiles) = (StripSums::default(), Vec::new());
    sums.reset(rows, strip.clone(), None);
    for (left, right) in terms {
        for from in (0..left.width).step_by(PACKED_ROWS) {
            let inner = from..left.width.min(from + PACKED_ROWS);
            let steps = inner.len().div_ceil(STEP);
            tiles.clear();
            tiles.resize(groups * steps, FactorTile::ZERO);
            right.pack_tiles(&inner, out.width, strip.start, &mut tiles);
            let columns: Vec<&[FactorTile]> = tiles.chunks_exact(steps).collect();
            sums.add_product(&columns, [&[]; 2], |block, row, right| {
                left.kernel.add_product(block, left.rows_from(row, from / STEP), right);
            });
        }
    }
    #[expect(unsafe_code, reason = "a strip's columns are its task's alone")]
    // SAFETY: the columns of a strip are written by its task only.
    unsafe {
        sums.write_to(out);
    }
}
