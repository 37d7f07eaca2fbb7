//! Products with few rows of activations. 16 pairs of each 16 rows of weights are transposed, so
//! that a register has one pair of each row; every row of activations multiplies it. Reading the
//! weights takes longer than this. The order of the sums is that of tiles, pair by pair.

use super::super::{RowTerm, STEP};
use super::{SIDE, transpose_registers};
use half::bf16;
use std::arch::x86_64::{
    __m512bh, _MM_HINT_T1, _mm_prefetch, _mm512_dpbf16_ps, _mm512_loadu_ps,
    _mm512_maskz_loadu_epi16, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_storeu_ps,
};
use std::ops::Range;

/// The rows of activations at once; their sums fit in registers beside the transposed weights.
pub(in super::super) const FEW_ROWS: usize = 8;

/// In groups of 16 rows of weights.
const PREFETCH_GROUPS: usize = 2;

/// Prefetches into the core's second cache. Lines are requested in their order in memory: sixteen
/// rows side by side are too many streams for the hardware's prefetcher, which halves the
/// bandwidth.
#[inline(always)]
fn prefetch_weights(place: *const bf16) {
    // SAFETY: it reads nothing that the program can observe, and cannot fail.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(place.cast()) }
}

/// Requires the instructions, and that the terms have the rows.
pub(in super::super) fn add_dot_products(
    terms: &[RowTerm<'_>],
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [f32],
) {
    // SAFETY: checked by the caller.
    unsafe {
        match rows.len() {
            1 => add_row_products::<1>(terms, rows, columns, out),
            2 => add_row_products::<2>(terms, rows, columns, out),
            3 => add_row_products::<3>(terms, rows, columns, out),
            4 => add_row_products::<4>(terms, rows, columns, out),
            5 => add_row_products::<5>(terms, rows, columns, out),
            6 => add_row_products::<6>(terms, rows, columns, out),
            7 => add_row_products::<7>(terms, rows, columns, out),
            _ => add_row_products::<FEW_ROWS>(terms, rows, columns, out),
        }
    }
}

/// Adds the products of `R` rows of activations.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn add_row_products<const R: usize>(
    terms: &[RowTerm<'_>],
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [f32],
) {
    let stride = columns.len();
    for from in columns.clone().step_by(SIDE) {
        let (place, found) = (from - columns.start, SIDE.min(columns.end - from));
        let mut sums = [[0f32; SIDE]; R];
        for (sums, out) in sums.iter_mut().zip(out.chunks_exact(stride)) {
            sums[..found].copy_from_slice(&out[place..place + found]);
        }
        let mut lanes = [_mm512_setzero_ps(); R];
        for row in 0..R {
            // SAFETY: there are 16 elements.
            lanes[row] = unsafe { _mm512_loadu_ps(sums[row].as_ptr()) };
        }
        for RowTerm { x, weight } in terms {
            let width = x.width;
            let weights = weight.values[from * width..].as_ptr();
            let ahead = weights.wrapping_add(PREFETCH_GROUPS * SIDE * width);
            let x = &x.values[rows.start * width..rows.end * width];
            for at in (0..width).step_by(STEP) {
                let here = STEP.min(width - at);
                let mask = u32::MAX >> (STEP - here);
                let mut pairs = [_mm512_setzero_si512(); SIDE];
                for (row, pairs) in pairs.iter_mut().enumerate() {
                    // The last row stands in for rows beyond it; the sums of the copies are not
                    // used.
                    let place = weights.wrapping_add(row.min(found - 1) * width + at);
                    prefetch_weights(ahead.wrapping_add((at / STEP * SIDE + row) * STEP));
                    // SAFETY: within the row; masked elements are not read.
                    *pairs = unsafe { _mm512_maskz_loadu_epi16(mask, place.cast()) };
                }
                let mut last = [[bf16::ZERO; STEP]; R];
                let mut x_pairs = [std::ptr::null::<i32>(); R];
                for row in 0..R {
                    let place = row * width + at;
                    // SAFETY: within the `R` rows.
                    x_pairs[row] = unsafe { x.as_ptr().add(place).cast() };
                    if here < STEP {
                        last[row][..here].copy_from_slice(&x[place..place + here]);
                        x_pairs[row] = last[row].as_ptr().cast();
                    }
                }
                for (pair, weights) in transpose_registers(pairs).into_iter().enumerate() {
                    // SAFETY: a step has 16 pairs; the types have one size and accept any bits.
                    unsafe {
                        let weights: __m512bh = std::mem::transmute(weights);
                        for row in 0..R {
                            let x = _mm512_set1_epi32(x_pairs[row].add(pair).read_unaligned());
                            let x: __m512bh = std::mem::transmute(x);
                            lanes[row] = _mm512_dpbf16_ps(lanes[row], weights, x);
                        }
                    }
                }
            }
        }
        for (row, out) in out.chunks_exact_mut(stride).enumerate() {
            // SAFETY: there is room for 16 elements.
            unsafe { _mm512_storeu_ps(sums[row].as_mut_ptr(), lanes[row]) };
            out[place..place + found].copy_from_slice(&sums[row][..found]);
        }
    }
}
