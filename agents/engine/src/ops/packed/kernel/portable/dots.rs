//! Products of rows with rows: each sum has a register, whose lanes take pairs in turn and are
//! added up at the end.

#![expect(unsafe_code, reason = "bounds are checked for a row, not for each of its vectors")]

use super::super::{RowTerm, clamped_rows, prefetch_line};
use super::{LANES_MAX, load_pairs, split_row, widen_pairs};
use half::bf16;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Rows of activations at once.
pub(in super::super) const DOT_ROWS: usize = 4;

/// Requires that the terms have the rows.
pub(in super::super) fn add_dot_products(
    terms: &[RowTerm<'_>],
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [f32],
    room: &mut Vec<f32>,
) {
    pulp::Arch::new().dispatch(DotProductTask { terms, rows, columns, out, room });
}

/// The kernel for up to `DOT_ROWS` rows of activations and a range of rows of weights.
struct DotProductTask<'a> {
    terms: &'a [RowTerm<'a>],
    rows: Range<usize>,
    columns: Range<usize>,
    out: &'a mut [f32],
    /// Split rows of activations.
    room: &'a mut Vec<f32>,
}

impl WithSimd for DotProductTask<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.rows.len() {
            1 => self.multiply_strips::<S, 1, 8>(simd),
            2 => self.multiply_strips::<S, 2, 4>(simd),
            _ if S::REGISTER_COUNT >= 32 => self.multiply_strips::<S, 4, 4>(simd),
            _ => self.multiply_strips::<S, 4, 2>(simd),
        }
    }
}

/// Rounds up to whole registers.
fn padded_pairs(width: usize) -> usize {
    width.div_ceil(2).next_multiple_of(LANES_MAX)
}

impl DotProductTask<'_> {
    /// Multiplies `R` rows of activations with `C` rows of weights at a time.
    #[inline(always)]
    fn multiply_strips<S: Simd, const R: usize, const C: usize>(self, simd: S) {
        let Self { terms, rows, columns, out, room } = self;
        room.resize(terms.iter().map(|term| 2 * R * padded_pairs(term.x.width)).sum(), 0.0);
        let mut left = &mut room[..];
        for term in terms {
            for row in clamped_rows::<R>(&term.x, &rows, rows.start) {
                let (firsts, rest) = left.split_at_mut(padded_pairs(term.x.width));
                let (seconds, rest) = rest.split_at_mut(padded_pairs(term.x.width));
                split_row(simd, row, firsts, seconds);
                left = rest;
            }
        }
        let stride = columns.len();
        for from in columns.clone().step_by(C) {
            let mut lanes = [[simd.splat_f32s(0.0); C]; R];
            let mut x = &room[..];
            for term in terms {
                let (own, rest) = x.split_at(2 * R * padded_pairs(term.x.width));
                add_row_products(
                    simd,
                    &mut lanes,
                    own,
                    clamped_rows::<C>(&term.weight, &columns, from),
                );
                x = rest;
            }
            for (out, lanes) in out.chunks_exact_mut(stride).zip(lanes) {
                for (out, lanes) in out[from - columns.start..].iter_mut().zip(lanes) {
                    *out += simd.reduce_sum_f32s(lanes);
                }
            }
        }
    }
}

/// Adds one term; `x` has `R` rows, split.
#[inline(always)]
fn add_row_products<S: Simd, const R: usize, const C: usize>(
    simd: S,
    sums: &mut [[S::f32s; C]; R],
    x: &[f32],
    weight: [&[bf16]; C],
) {
    let (width, lanes) = (weight[0].len(), 2 * S::U32_LANES);
    let (whole, rest) = (width / lanes, width % lanes);
    let (x, _) = S::as_simd_f32s(x);
    assert!(x.len() == 2 * R * (padded_pairs(width) / S::F32_LANES) && x.len() >= 2 * R * whole);
    assert!(weight.iter().all(|row| row.len() == width));
    let (row_len, x) = (x.len() / R, x.as_ptr());
    let mut now = *sums;
    let mut split = [[simd.splat_f32s(0.0); 2]; C];
    for step in 0..whole {
        for (out, row) in split.iter_mut().zip(weight) {
            // SAFETY: a row has at least `whole` vectors of pairs.
            let pairs =
                unsafe { row.as_ptr().add(step * lanes).cast::<S::u32s>().read_unaligned() };
            *out = widen_pairs(simd, pairs);
            prefetch_line(row.as_ptr().wrapping_add(step * lanes + C * width));
        }
        // SAFETY: `x` was checked to have as many steps; each of its rows has two halves.
        unsafe { add_step(simd, &mut now, x.add(step), row_len, &split) };
    }
    if rest > 0 {
        for (out, row) in split.iter_mut().zip(weight) {
            let mut last = [bf16::ZERO; 2 * LANES_MAX];
            last[..rest].copy_from_slice(&row[whole * lanes..]);
            *out = widen_pairs(simd, load_pairs::<S>(&last, 0));
        }
        // SAFETY: the rest adds one step.
        unsafe { add_step(simd, &mut now, x.add(whole), row_len, &split) };
    }
    *sums = now;
}

/// Adds the products of one vector of pairs.
///
/// # Safety
/// In each of the `R` rows, `x` and the vector half a row after it must be readable.
#[inline(always)]
unsafe fn add_step<S: Simd, const R: usize, const C: usize>(
    simd: S,
    sums: &mut [[S::f32s; C]; R],
    x: *const S::f32s,
    row_len: usize,
    weights: &[[S::f32s; 2]; C],
) {
    for (row, sums) in sums.iter_mut().enumerate() {
        // SAFETY: guaranteed by the caller.
        let (first_x, second_x) =
            unsafe { (*x.add(row * row_len), *x.add(row * row_len + row_len / 2)) };
        for (sum, [first, second]) in sums.iter_mut().zip(weights) {
            *sum = simd.mul_add_f32s(*first, first_x, *sum);
            *sum = simd.mul_add_f32s(*second, second_x, *sum);
        }
    }
}
