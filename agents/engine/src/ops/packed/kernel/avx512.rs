//! AVX-512 with its dot product of bf16 pairs: AMD from Zen 4 on, Intel from Cooper Lake on.

#![expect(unsafe_code, reason = "instructions that not every processor has, on raw pointers")]

mod few_rows;

use super::{FactorTile, LeftRows, RightTiles, SIDE, SumBlock, TileSums};
use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_set1_epi32, _mm512_setzero_ps, _mm512_shuffle_i32x4, _mm512_storeu_ps,
    _mm512_storeu_si512, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64,
};

pub(super) use few_rows::{FEW_ROWS, add_dot_products};

pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512bf16")
}

/// Returns true if a dot product takes no longer than the two multiplications that it replaces.
/// This is not so on Intel processors: two cycles for it, half a cycle for each multiplication.
pub(super) fn is_fast() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() != b"GenuineIntel"
}

/// The number of rows summed at once with two columns of tiles; with one column, all rows of a tile
/// are.
const HALF_SIDE: usize = SIDE / 2;

/// Requires the instructions, and that `left` has the rows.
pub(super) fn add_product(block: &mut SumBlock, left: LeftRows<'_>, right: RightTiles<'_>) {
    for (tiles, row) in block.iter_mut().zip((0..left.rows).step_by(SIDE)) {
        // SAFETY: checked by the caller.
        unsafe {
            match right.second {
                None => add_tile_rows::<SIDE, 1>([&mut tiles[0]], 0, &left, row, [right.first]),
                Some(second) => {
                    let [first_sums, second_sums] = tiles;
                    for part in [0, HALF_SIDE] {
                        let sums = [&mut *first_sums, &mut *second_sums];
                        add_tile_rows::<HALF_SIDE, 2>(
                            sums,
                            part,
                            &left,
                            row,
                            [right.first, second],
                        );
                    }
                }
            }
        }
    }
}

/// Adds the products for the rows of `left` from `row + part` on.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_tile_rows<const ROWS: usize, const COLUMNS: usize>(
    sums: [&mut TileSums; COLUMNS],
    part: usize,
    left: &LeftRows<'_>,
    row: usize,
    right: [&[FactorTile]; COLUMNS],
) {
    // SAFETY: `left` has these rows, with as many pairs as are read; a tile has 16 × 16 elements.
    unsafe {
        let start = left.values.as_ptr().add((row + part) * left.stride);
        let rows: [*const i32; ROWS] =
            std::array::from_fn(|lane| start.add(lane * left.stride).cast());
        let mut lanes = [[_mm512_setzero_ps(); COLUMNS]; ROWS];
        for (lane, lanes) in lanes.iter_mut().enumerate() {
            for (column, lanes) in lanes.iter_mut().enumerate() {
                *lanes = _mm512_loadu_ps(sums[column].0.as_ptr().add((part + lane) * SIDE));
            }
        }
        for step in 0..right[0].len() {
            for pair in 0..SIDE {
                let right: [__m512bh; COLUMNS] =
                    std::array::from_fn(|column| load_pair_row(&right[column][step], pair));
                for (lanes, row) in lanes.iter_mut().zip(rows) {
                    let left = broadcast_pair(row.add(step * SIDE + pair));
                    for (lanes, right) in lanes.iter_mut().zip(right) {
                        *lanes = _mm512_dpbf16_ps(*lanes, left, right);
                    }
                }
            }
        }
        for (lane, lanes) in lanes.iter().enumerate() {
            for (column, lanes) in lanes.iter().enumerate() {
                let lanes: __m512 = *lanes;
                _mm512_storeu_ps(sums[column].0.as_mut_ptr().add((part + lane) * SIDE), lanes);
            }
        }
    }
}

/// Loads a row of a tile: one pair of each of 16 columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn load_pair_row(tile: &FactorTile, pair: usize) -> __m512bh {
    // SAFETY: a tile has 16 rows of 16; the types have one size and accept any bits.
    unsafe { std::mem::transmute(_mm512_loadu_si512(tile.0.as_ptr().add(pair * SIDE).cast())) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn broadcast_pair(pair: *const i32) -> __m512bh {
    // SAFETY: the caller may read there; the types have one size and accept any bits.
    unsafe { std::mem::transmute(_mm512_set1_epi32(pair.read_unaligned())) }
}

/// Requires the instructions.
pub(super) fn transpose_tile(rows: &[u32; SIDE * SIDE]) -> [u32; SIDE * SIDE] {
    let mut out = [0; SIDE * SIDE];
    // SAFETY: checked by the caller; both have 16 rows of 16.
    unsafe {
        let rows = load_rows(rows.as_ptr());
        for (row, turned) in transpose_registers(rows).into_iter().enumerate() {
            _mm512_storeu_si512(out.as_mut_ptr().add(row * SIDE).cast(), turned);
        }
    }
    out
}

#[target_feature(enable = "avx512f")]
unsafe fn load_rows(from: *const u32) -> [__m512i; SIDE] {
    // SAFETY: the caller's pointer is to 16 rows of 16.
    std::array::from_fn(|row| unsafe { _mm512_loadu_si512(from.add(row * SIDE).cast()) })
}

/// Transposes 16 registers of 16 lanes: first groups of four rows, then groups of those.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_registers(a: [__m512i; SIDE]) -> [__m512i; SIDE] {
    // Within rows 4 r to 4 r + 3, the quarter q of fours[r][c] has column 4 q + c.
    let four = |a, b, c, d| {
        let low = [_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d)];
        let high = [_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d)];
        [
            _mm512_unpacklo_epi64(low[0], low[1]),
            _mm512_unpackhi_epi64(low[0], low[1]),
            _mm512_unpacklo_epi64(high[0], high[1]),
            _mm512_unpackhi_epi64(high[0], high[1]),
        ]
    };
    let fours = [
        four(a[0], a[1], a[2], a[3]),
        four(a[4], a[5], a[6], a[7]),
        four(a[8], a[9], a[10], a[11]),
        four(a[12], a[13], a[14], a[15]),
    ];
    let mut out = a;
    for c in 0..4 {
        let [r0, r1, r2, r3] = [fours[0][c], fours[1][c], fours[2][c], fours[3][c]];
        let even = [_mm512_shuffle_i32x4::<0x88>(r0, r1), _mm512_shuffle_i32x4::<0x88>(r2, r3)];
        let odd = [_mm512_shuffle_i32x4::<0xdd>(r0, r1), _mm512_shuffle_i32x4::<0xdd>(r2, r3)];
        out[c] = _mm512_shuffle_i32x4::<0x88>(even[0], even[1]);
        out[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]);
        out[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even[0], even[1]);
        out[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd[0], odd[1]);
    }
    out
}
