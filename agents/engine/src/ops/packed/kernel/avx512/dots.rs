//! Products of rows with rows, 16 sums at once. Each has a register of its own, whose 16 lanes take
//! every 16th pair and are added up at the end.

use super::super::{Term, clamped, prefetch};
use half::bf16;
use std::arch::x86_64::{
    __m512, __m512bh, _mm512_add_ps, _mm512_castpd_ps, _mm512_castps_pd, _mm512_dpbf16_ps,
    _mm512_loadu_si512, _mm512_maskz_loadu_epi16, _mm512_setzero_ps, _mm512_shuffle_f32x4,
    _mm512_storeu_ps, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd,
    _mm512_unpacklo_ps,
};
use std::ops::Range;

const SUMS: usize = 16;
/// Elements of a register.
const STEP: usize = 32;

/// The caller has checked that the processor can, and that the terms have the rows.
pub(in super::super) fn dots(
    terms: &[Term<'_>],
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [f32],
) {
    // SAFETY: as the caller has checked.
    unsafe {
        match rows.len() {
            1 => strip::<1, 16>(terms, rows, columns, out),
            2 => strip::<2, 8>(terms, rows, columns, out),
            _ => strip::<4, 4>(terms, rows, columns, out),
        }
    }
}

/// `R · C` is 16.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn strip<const R: usize, const C: usize>(
    terms: &[Term<'_>],
    rows: Range<usize>,
    columns: Range<usize>,
    out: &mut [f32],
) {
    let stride = columns.len();
    for from in columns.clone().step_by(C) {
        let mut lanes = [[_mm512_setzero_ps(); C]; R];
        for Term { x, weight } in terms {
            let x_rows: [_; R] = clamped(x, &rows, rows.start);
            let weight_rows: [_; C] = clamped(weight, &columns, from);
            let (whole, rest) = (x.width / STEP, x.width % STEP);
            for step in 0..whole {
                // SAFETY: within the rows, which are of this width.
                let load = |row: &[bf16]| unsafe {
                    std::mem::transmute::<_, __m512bh>(_mm512_loadu_si512(
                        row.as_ptr().add(step * STEP).cast(),
                    ))
                };
                for row in weight_rows {
                    prefetch(row.as_ptr().wrapping_add(step * STEP + C * weight.width));
                }
                add(&mut lanes, x_rows.map(load), weight_rows.map(load));
            }
            if rest > 0 {
                let mask = (1u32 << rest) - 1;
                // SAFETY: what the mask leaves out, which is beyond the rows, is not read.
                let load = |row: &[bf16]| unsafe {
                    let start = row.as_ptr().add(whole * STEP).cast();
                    std::mem::transmute::<_, __m512bh>(_mm512_maskz_loadu_epi16(mask, start))
                };
                add(&mut lanes, x_rows.map(load), weight_rows.map(load));
            }
        }
        let mut sums = [0f32; SUMS];
        let lanes = std::array::from_fn(|index| lanes[index / C][index % C]);
        // SAFETY: there is room for 16.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), sums_of(lanes)) };
        let found = C.min(columns.end - from);
        let outs = out.chunks_exact_mut(stride).zip(sums.chunks_exact(C));
        for (out, sums) in outs {
            out[from - columns.start..][..found].copy_from_slice(&sums[..found]);
        }
    }
}

/// A step of every row with every other.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn add<const R: usize, const C: usize>(
    lanes: &mut [[__m512; C]; R],
    x: [__m512bh; R],
    weights: [__m512bh; C],
) {
    for (lanes, x) in lanes.iter_mut().zip(x) {
        for (lanes, weight) in lanes.iter_mut().zip(weights) {
            *lanes = _mm512_dpbf16_ps(*lanes, x, weight);
        }
    }
}

/// Of the lanes of each, in the same order for each.
#[inline]
#[target_feature(enable = "avx512f")]
fn sums_of(a: [__m512; SUMS]) -> __m512 {
    let pairs = |a, b| _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let fours = |a, b| {
        let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
        let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
        _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
    };
    // Of each four, the quarters of a register have what is left to be added.
    let quarters: [__m512; 4] = std::array::from_fn(|index| {
        let [a, b, c, d] = [a[4 * index], a[4 * index + 1], a[4 * index + 2], a[4 * index + 3]];
        fours(pairs(a, b), pairs(c, d))
    });
    let halves = |a, b| {
        let (low, high) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
        _mm512_add_ps(low, high)
    };
    let [a, b, c, d] = quarters;
    let (ab, cd) = (halves(a, b), halves(c, d));
    let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
    _mm512_add_ps(even, odd)
}
