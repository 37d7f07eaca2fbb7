//! Products of rows with tiles: an element of a row times a vector of columns.

use super::super::{FactorTile, LeftRows, RightTiles, SIDE, STEP, SumBlock, TileSums};
use super::{split_row, widen_pairs};
use pulp::{Simd, WithSimd};

/// Requires that `left` has the rows.
pub(in super::super) fn add_product(
    block: &mut SumBlock,
    left: LeftRows<'_>,
    right: RightTiles<'_>,
) {
    pulp::Arch::new().dispatch(TileProductTask { block, left, right });
}

struct TileProductTask<'a> {
    block: &'a mut SumBlock,
    left: LeftRows<'a>,
    right: RightTiles<'a>,
}

/// Steps for which rows are split at once.
const STEPS: usize = 4;

/// The first and the second elements of the pairs of each step.
type SplitRow = [[[f32; SIDE]; 2]; STEPS];

impl WithSimd for TileProductTask<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { block, left, right } = self;
        for (sums, row) in block.iter_mut().zip((0..left.rows).step_by(SIDE)) {
            for from in (0..right.first.len()).step_by(STEPS) {
                let steps = from..right.first.len().min(from + STEPS);
                let mut rows: [SplitRow; SIDE] = [[[[0.0; SIDE]; 2]; STEPS]; SIDE];
                for (lane, out) in rows.iter_mut().enumerate() {
                    let start = (row + lane) * left.stride + from * STEP;
                    let values = &left.values[start..][..steps.len() * STEP];
                    for (values, [firsts, seconds]) in values.chunks_exact(STEP).zip(out) {
                        split_row(simd, values, firsts, seconds);
                    }
                }
                let columns = [Some(right.first), right.second];
                for (tiles, sums) in columns.into_iter().flatten().zip(sums.iter_mut()) {
                    let tiles = &tiles[steps.clone()];
                    if S::REGISTER_COUNT >= 32 {
                        add_rows::<S, 16>(simd, &rows, tiles, sums);
                    } else {
                        add_rows::<S, 8>(simd, &rows, tiles, sums);
                    }
                }
            }
        }
    }
}

/// Adds `R` rows at once, with as many columns as a vector has lanes.
#[inline(always)]
fn add_rows<S: Simd, const R: usize>(
    simd: S,
    rows: &[SplitRow; SIDE],
    tiles: &[FactorTile],
    sums: &mut TileSums,
) {
    for (rows, sums) in rows.as_chunks::<R>().0.iter().zip(sums.0.chunks_exact_mut(R * SIDE)) {
        for vector in 0..SIDE / S::F32_LANES {
            let place = |lane: usize| lane * (SIDE / S::F32_LANES) + vector;
            let (all, _) = S::as_mut_simd_f32s(sums);
            let mut lanes: [S::f32s; R] = std::array::from_fn(|lane| all[place(lane)]);
            for (step, tile) in tiles.iter().enumerate() {
                for (pair, columns) in tile.0.as_chunks::<SIDE>().0.iter().enumerate() {
                    let columns = S::as_simd_u32s(columns).0[vector];
                    let [first, second] = widen_pairs(simd, columns);
                    for (lanes, row) in lanes.iter_mut().zip(rows) {
                        let [firsts, seconds] = &row[step];
                        *lanes = simd.mul_add_f32s(first, simd.splat_f32s(firsts[pair]), *lanes);
                        *lanes = simd.mul_add_f32s(second, simd.splat_f32s(seconds[pair]), *lanes);
                    }
                }
            }
            for (lane, lanes) in lanes.into_iter().enumerate() {
                all[place(lane)] = lanes;
            }
        }
    }
}
