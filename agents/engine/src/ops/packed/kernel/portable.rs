//! The kernel for processors without fast bf16 instructions: pairs are split into two f32, which
//! are multiplied and added with the available vectors.

mod dots;
mod registers;
mod tiles;

use super::SIDE;
pub(super) use dots::{DOT_ROWS, add_dot_products};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use pulp::{Simd, bytemuck};
pub(super) use registers::multiply_registers;
pub(super) use tiles::add_product;

/// The lanes of the widest vectors.
const LANES_MAX: usize = 16;

/// Loads one vector of pairs, from any alignment.
#[inline(always)]
fn load_pairs<S: Simd>(row: &[bf16], vector: usize) -> S::u32s {
    let lanes = 2 * S::U32_LANES;
    let bits: &[u16] = row[vector * lanes..][..lanes].reinterpret_cast();
    bytemuck::pod_read_unaligned(bytemuck::cast_slice(bits))
}

/// Returns the first and the second elements as f32.
#[inline(always)]
fn widen_pairs<S: Simd>(simd: S, pairs: S::u32s) -> [S::f32s; 2] {
    let first = simd.wrapping_dyn_shl_u32s(pairs, simd.splat_u32s(16));
    let second = simd.and_u32s(pairs, simd.splat_u32s(0xffff_0000));
    [simd.transmute_f32s_u32s(first), simd.transmute_f32s_u32s(second)]
}

/// Splits a row into first and second elements; missing elements are 0.
#[inline(always)]
fn split_row<S: Simd>(simd: S, row: &[bf16], firsts: &mut [f32], seconds: &mut [f32]) {
    let whole = row.len() / (2 * S::U32_LANES);
    let (first_lanes, _) = S::as_mut_simd_f32s(firsts);
    let (second_lanes, _) = S::as_mut_simd_f32s(seconds);
    for (vector, (first, second)) in first_lanes.iter_mut().zip(second_lanes).enumerate() {
        if vector < whole {
            [*first, *second] = widen_pairs(simd, load_pairs::<S>(row, vector));
        }
    }
    let done = whole * S::F32_LANES;
    let widened = |value: &bf16| f32::from_bits(u32::from(value.to_bits()) << 16);
    let mut rest = row[2 * done..].chunks(2);
    for (first, second) in firsts[done..].iter_mut().zip(&mut seconds[done..]) {
        let pair = rest.next().unwrap_or_default();
        *first = pair.first().map_or(0.0, widened);
        *second = pair.get(1).map_or(0.0, widened);
    }
}

pub(super) fn transpose_tile(rows: &mut [[u32; SIDE]]) {
    for row in 0..SIDE {
        let (above, below) = rows.split_at_mut(row + 1);
        for (lane, other) in (row + 1..).zip(below) {
            std::mem::swap(&mut above[row][lane], &mut other[row]);
        }
    }
}
