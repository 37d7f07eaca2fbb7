//! AVX-512 with its dot product of bf16 pairs: AMD from Zen 4 on, Intel from Cooper Lake on.

#![expect(unsafe_code, reason = "instructions that not every processor has, on raw pointers")]

mod few_rows;

use super::{FactorTile, LeftRows, RightTiles, SIDE, SumBlock, TileSums};
use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _MM_HINT_T1, _mm_prefetch, _mm512_dpbf16_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_shuffle_i32x4, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
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
    let passes = left.rows.div_ceil(HALF_SIDE);
    for ([first_sums, second_sums], row) in block.iter_mut().zip((0..left.rows).step_by(SIDE)) {
        let count = SIDE.min(left.rows - row);
        // SAFETY: checked by the caller.
        unsafe {
            if right.second.is_none() && count == SIDE {
                let ahead = Prefetch { next: right.next, pass: 0, passes: 0 };
                let left = RowStart { left: &left, row, part: 0 };
                add_tile_rows::<SIDE, 1>([first_sums], left, [right.first], ahead);
                continue;
            }
            for part in (0..count).step_by(HALF_SIDE) {
                let pass = (row + part) / HALF_SIDE;
                let ahead = Prefetch { next: right.next, pass, passes };
                let rows = HALF_SIDE.min(count - part);
                let left = RowStart { left: &left, row, part };
                match right.second {
                    None => add_some_rows([&mut *first_sums], rows, left, [right.first], ahead),
                    Some(second) => {
                        let sums = [&mut *first_sums, &mut *second_sums];
                        add_some_rows(sums, rows, left, [right.first, second], ahead);
                    }
                }
            }
        }
    }
}

/// Sums that a round adds to, enough to hide the latency of an instruction.
const REGISTER_SUMS: usize = 12;

/// Requires the instructions. See [`super::MatmulKernel::multiply_registers`].
pub(super) fn multiply_registers(rounds: usize) -> usize {
    // SAFETY: checked by the caller.
    unsafe { multiply_in_registers(rounds) };
    rounds * REGISTER_SUMS * 2 * SIDE
}

#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn multiply_in_registers(rounds: usize) {
    // SAFETY: the types have the same size, and any bits are valid.
    let pair = unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(0x3f80_3f80)) };
    let mut sums = [_mm512_setzero_ps(); REGISTER_SUMS];
    for _ in 0..rounds {
        let pair = std::hint::black_box(pair);
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, pair, pair);
        }
    }
    std::hint::black_box(sums);
}

/// The rows of `left` from `row + part` on, whose sums begin at row `part` of their tiles.
#[derive(Clone, Copy)]
struct RowStart<'a> {
    left: &'a LeftRows<'a>,
    row: usize,
    part: usize,
}

/// Requests the next tiles evenly during the passes over the present ones. The hardware's own
/// prefetching would leave memory idle while the present ones come from the cache.
#[derive(Clone, Copy)]
struct Prefetch<'a> {
    next: [&'a [FactorTile]; 2],
    pass: usize,
    passes: usize,
}

impl Prefetch<'_> {
    /// Returns the tile to request during a step of this pass, if any. A single pass waits for
    /// memory anyway.
    #[inline(always)]
    fn tile_at(&self, step: usize, steps: usize) -> Option<&FactorTile> {
        let slot = 2 * (self.pass * steps + step);
        if self.passes < 2 || slot % self.passes > 1 {
            return None;
        }
        let tile = slot / self.passes;
        let [first, second] = self.next;
        first.get(tile).or_else(|| second.get(tile - first.len()))
    }
}

/// Adds the products for at most 8 rows.
#[inline(always)]
unsafe fn add_some_rows<const COLUMNS: usize>(
    sums: [&mut TileSums; COLUMNS],
    rows: usize,
    left: RowStart<'_>,
    right: [&[FactorTile]; COLUMNS],
    ahead: Prefetch<'_>,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match rows {
            1 => add_tile_rows::<1, COLUMNS>(sums, left, right, ahead),
            2 => add_tile_rows::<2, COLUMNS>(sums, left, right, ahead),
            3 => add_tile_rows::<3, COLUMNS>(sums, left, right, ahead),
            4 => add_tile_rows::<4, COLUMNS>(sums, left, right, ahead),
            5 => add_tile_rows::<5, COLUMNS>(sums, left, right, ahead),
            6 => add_tile_rows::<6, COLUMNS>(sums, left, right, ahead),
            7 => add_tile_rows::<7, COLUMNS>(sums, left, right, ahead),
            _ => add_tile_rows::<HALF_SIDE, COLUMNS>(sums, left, right, ahead),
        }
    }
}

/// Adds the products of `ROWS` rows.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn add_tile_rows<const ROWS: usize, const COLUMNS: usize>(
    sums: [&mut TileSums; COLUMNS],
    RowStart { left, row, part }: RowStart<'_>,
    right: [&[FactorTile]; COLUMNS],
    ahead: Prefetch<'_>,
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
        let steps = right[0].len();
        for step in 0..steps {
            let ahead = ahead.tile_at(step, steps);
            for pair in 0..SIDE {
                if let Some(tile) = ahead {
                    _mm_prefetch::<_MM_HINT_T1>(tile.0.as_ptr().add(pair * SIDE).cast());
                }
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

/// Requires the instructions and 16 rows.
#[inline(always)]
pub(super) fn transpose_tile(rows: &mut [[u32; SIDE]]) {
    // SAFETY: checked by the caller.
    unsafe { transpose_rows(rows) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_rows(rows: &mut [[u32; SIDE]]) {
    let mut registers = [_mm512_setzero_si512(); SIDE];
    for (register, row) in registers.iter_mut().zip(&*rows) {
        // SAFETY: a row has 16 lanes.
        *register = unsafe { _mm512_loadu_si512(row.as_ptr().cast()) };
    }
    for (row, register) in rows.iter_mut().zip(transpose_registers(registers)) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_si512(row.as_mut_ptr().cast(), register) };
    }
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
