//! Few rows of activations: of every 16 rows of weights, 16 pairs are turned, so that a register has
//! one pair of each, and every row of activations multiplies them. Reading the weights takes
//! longer. The sums are those of tiles, pair by pair.

use super::super::{STEP, Term};
use super::{SIDE, turned};
use half::bf16;
use std::arch::x86_64::{
    __m512bh, _MM_HINT_T1, _mm_prefetch, _mm512_dpbf16_ps, _mm512_loadu_ps,
    _mm512_maskz_loadu_epi16, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_storeu_ps,
};
use std::ops::Range;

/// Rows of activations at once: their sums stay in registers beside what was turned.
pub(in super::super) const FEW: usize = 8;

/// How many times 16 rows ahead memory is asked for weights.
const AHEAD: usize = 2;

/// Has a line brought to the core's second cache. Lines are asked for in the order in which they
/// lie: sixteen rows side by side are too many streams for the hardware to foresee, and memory then
/// gives half of what it has.
#[inline(always)]
fn ask(place: *const bf16) {
    // SAFETY: it reads nothing that the program would see, and cannot fail.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(place.cast()) }
}

/// Adds to `out`. The caller has checked that the processor can, and that the terms have the rows.
pub(in super::super) fn dots(
    terms: &[Term<'_>],
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [f32],
) {
    // SAFETY: as the caller has checked.
    unsafe {
        match rows.len() {
            1 => add::<1>(terms, rows, columns, out),
            2 => add::<2>(terms, rows, columns, out),
            3 => add::<3>(terms, rows, columns, out),
            4 => add::<4>(terms, rows, columns, out),
            5 => add::<5>(terms, rows, columns, out),
            6 => add::<6>(terms, rows, columns, out),
            7 => add::<7>(terms, rows, columns, out),
            _ => add::<FEW>(terms, rows, columns, out),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn add<const R: usize>(
    terms: &[Term<'_>],
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
            // SAFETY: there are 16.
            lanes[row] = unsafe { _mm512_loadu_ps(sums[row].as_ptr()) };
        }
        for Term { x, weight } in terms {
            let width = x.width;
            let weights = weight.values[from * width..].as_ptr();
            let ahead = weights.wrapping_add(AHEAD * SIDE * width);
            let x = &x.values[rows.start * width..rows.end * width];
            for at in (0..width).step_by(STEP) {
                let here = STEP.min(width - at);
                let mask = u32::MAX >> (STEP - here);
                let mut pairs = [_mm512_setzero_si512(); SIDE];
                for (row, pairs) in pairs.iter_mut().enumerate() {
                    // Beyond the last its stand-in is read, whose sums nobody takes.
                    let place = weights.wrapping_add(row.min(found - 1) * width + at);
                    ask(ahead.wrapping_add((at / STEP * SIDE + row) * STEP));
                    // SAFETY: within the row: what the mask leaves out is not read.
                    *pairs = unsafe { _mm512_maskz_loadu_epi16(mask, place.cast()) };
                }
                let mut last = [[bf16::ZERO; STEP]; R];
                let mut x_pairs = [std::ptr::null::<i32>(); R];
                for row in 0..R {
                    let place = row * width + at;
                    // SAFETY: within the rows, of which there are so many.
                    x_pairs[row] = unsafe { x.as_ptr().add(place).cast() };
                    if here < STEP {
                        last[row][..here].copy_from_slice(&x[place..place + here]);
                        x_pairs[row] = last[row].as_ptr().cast();
                    }
                }
                for (pair, weights) in turned(pairs).into_iter().enumerate() {
                    // SAFETY: a step has 16 pairs; the types are of one size and take any bits.
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
            // SAFETY: there is room for 16.
            unsafe { _mm512_storeu_ps(sums[row].as_mut_ptr(), lanes[row]) };
            out[place..place + found].copy_from_slice(&sums[row][..found]);
        }
    }
}
