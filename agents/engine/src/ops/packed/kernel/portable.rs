//! For processors without bf16 instructions: widened to f32, and vectorised by the compiler.

use super::super::tiles::Tile;
use super::{Block, Left, SIDE, Tiles};
use half::bf16;

pub(super) fn multiply(block: &mut Block, left: Left<'_>, right: Tiles<'_>) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        #[expect(unsafe_code, reason = "instructions that not every processor has")]
        // SAFETY: this one was just asked.
        return unsafe { with_avx2(block, left, right) };
    }
    multiply_with::<{ cfg!(target_arch = "aarch64") }>(block, left, right);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2(block: &mut Block, left: Left<'_>, right: Tiles<'_>) {
    multiply_with::<true>(block, left, right);
}

/// Rows that are summed up at once.
const ROWS: usize = 4;

/// `FUSED`: the processor adds a product in one instruction.
#[inline(always)]
fn multiply_with<const FUSED: bool>(block: &mut Block, left: Left<'_>, right: Tiles<'_>) {
    for (tiles, row) in block.iter_mut().zip((0..left.rows).step_by(SIDE)) {
        for (column, sums) in [Some(right.first), right.second].into_iter().zip(tiles) {
            let Some(column) = column else { continue };
            let parts = sums.0.as_chunks_mut::<{ ROWS * SIDE }>().0.iter_mut();
            for (sums, row) in parts.zip((row..).step_by(ROWS)) {
                let rows = std::array::from_fn(|lane| &left.values[(row + lane) * left.stride..]);
                add_rows::<FUSED>(rows, column, sums);
            }
        }
    }
}

#[inline(always)]
fn add_rows<const FUSED: bool>(
    left: [&[bf16]; ROWS],
    tiles: &[Tile],
    sums: &mut [f32; ROWS * SIDE],
) {
    let left = left.map(|row| &row.as_chunks::<2>().0[..tiles.len() * SIDE]);
    let mut lanes = *sums;
    let add = |sum: &mut f32, a: f32, b: f32| {
        *sum = if FUSED { a.mul_add(b, *sum) } else { *sum + a * b };
    };
    for (step, tile) in tiles.iter().enumerate() {
        for (pair, right) in tile.0.as_chunks::<SIDE>().0.iter().enumerate() {
            let even = right.map(|both| f32::from_bits(both << 16));
            let odd = right.map(|both| f32::from_bits(both & 0xffff_0000));
            for row in 0..ROWS {
                let [first, second] = left[row][step * SIDE + pair].map(bf16::to_f32);
                for lane in 0..SIDE {
                    add(&mut lanes[row * SIDE + lane], first, even[lane]);
                }
                for lane in 0..SIDE {
                    add(&mut lanes[row * SIDE + lane], second, odd[lane]);
                }
            }
        }
    }
    *sums = lanes;
}

pub(super) fn transpose(rows: &[u32; SIDE * SIDE]) -> [u32; SIDE * SIDE] {
    std::array::from_fn(|at| rows[at % SIDE * SIDE + at / SIDE])
}
