//! Products of rows with rows: each sum has a register of its own, whose lanes take pairs in turn
//! and are added up at the end.

#![expect(unsafe_code, reason = "bounds are checked for a row, not for each of its vectors")]

use super::super::{Term, clamped, prefetch};
use super::{LANES_MAX, halves, pairs, split};
use half::bf16;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Of activations, at once.
pub(in super::super) const ROWS: usize = 4;

/// Adds to `out`. The caller has checked that the terms have the rows.
pub(in super::super) fn dots(
    terms: &[Term<'_>],
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [f32],
    room: &mut Vec<f32>,
) {
    pulp::Arch::new().dispatch(Dots { terms, rows, columns, out, room });
}

struct Dots<'a> {
    terms: &'a [Term<'a>],
    rows: Range<usize>,
    columns: Range<usize>,
    out: &'a mut [f32],
    /// For activations, split.
    room: &'a mut Vec<f32>,
}

impl WithSimd for Dots<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.rows.len() {
            1 => self.strip::<S, 1, 8>(simd),
            2 => self.strip::<S, 2, 4>(simd),
            _ if S::REGISTER_COUNT >= 32 => self.strip::<S, 4, 4>(simd),
            _ => self.strip::<S, 4, 2>(simd),
        }
    }
}

/// Pairs of a row, in whole registers.
fn padded(width: usize) -> usize {
    width.div_ceil(2).next_multiple_of(LANES_MAX)
}

impl Dots<'_> {
    #[inline(always)]
    fn strip<S: Simd, const R: usize, const C: usize>(self, simd: S) {
        let Self { terms, rows, columns, out, room } = self;
        room.resize(terms.iter().map(|term| 2 * R * padded(term.x.width)).sum(), 0.0);
        let mut left = &mut room[..];
        for term in terms {
            for row in clamped::<R>(&term.x, &rows, rows.start) {
                let (firsts, rest) = left.split_at_mut(padded(term.x.width));
                let (seconds, rest) = rest.split_at_mut(padded(term.x.width));
                split(simd, row, firsts, seconds);
                left = rest;
            }
        }
        let stride = columns.len();
        for from in columns.clone().step_by(C) {
            let mut lanes = [[simd.splat_f32s(0.0); C]; R];
            let mut x = &room[..];
            for term in terms {
                let (own, rest) = x.split_at(2 * R * padded(term.x.width));
                add_dots(simd, &mut lanes, own, clamped::<C>(&term.weight, &columns, from));
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

/// `x` is `R` rows, split.
#[inline(always)]
fn add_dots<S: Simd, const R: usize, const C: usize>(
    simd: S,
    sums: &mut [[S::f32s; C]; R],
    x: &[f32],
    weight: [&[bf16]; C],
) {
    let (width, lanes) = (weight[0].len(), 2 * S::U32_LANES);
    let (whole, rest) = (width / lanes, width % lanes);
    let (x, _) = S::as_simd_f32s(x);
    assert!(x.len() == 2 * R * (padded(width) / S::F32_LANES) && x.len() >= 2 * R * whole);
    assert!(weight.iter().all(|row| row.len() == width));
    let (row_len, x) = (x.len() / R, x.as_ptr());
    let mut now = *sums;
    let mut split = [[simd.splat_f32s(0.0); 2]; C];
    for step in 0..whole {
        for (out, row) in split.iter_mut().zip(weight) {
            // SAFETY: `whole` times as many elements as a vector has are in a row.
            let pairs =
                unsafe { row.as_ptr().add(step * lanes).cast::<S::u32s>().read_unaligned() };
            *out = halves(simd, pairs);
            prefetch(row.as_ptr().wrapping_add(step * lanes + C * width));
        }
        // SAFETY: `x` was found to have as many steps, of which each row has two halves.
        unsafe { add_step(simd, &mut now, x.add(step), row_len, &split) };
    }
    if rest > 0 {
        for (out, row) in split.iter_mut().zip(weight) {
            let mut last = [bf16::ZERO; 2 * LANES_MAX];
            last[..rest].copy_from_slice(&row[whole * lanes..]);
            *out = halves(simd, pairs::<S>(&last, 0));
        }
        // SAFETY: with the rest there is one step more.
        unsafe { add_step(simd, &mut now, x.add(whole), row_len, &split) };
    }
    *sums = now;
}

/// # Safety
/// `x` and what lies half a row beyond it can be read, of each of the `R` rows.
#[inline(always)]
unsafe fn add_step<S: Simd, const R: usize, const C: usize>(
    simd: S,
    sums: &mut [[S::f32s; C]; R],
    x: *const S::f32s,
    row_len: usize,
    weights: &[[S::f32s; 2]; C],
) {
    for (row, sums) in sums.iter_mut().enumerate() {
        // SAFETY: the caller's.
        let (first_x, second_x) =
            unsafe { (*x.add(row * row_len), *x.add(row * row_len + row_len / 2)) };
        for (sum, [first, second]) in sums.iter_mut().zip(weights) {
            *sum = simd.mul_add_f32s(*first, first_x, *sum);
            *sum = simd.mul_add_f32s(*second, second_x, *sum);
        }
    }
}
